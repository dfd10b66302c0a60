"""The gate and the fallback boundary: wrong or broken kernels become ATen, once, with a repro."""

from __future__ import annotations

import importlib.metadata
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autodiff.mismatch import mismatch
from autodiff.reference import run_graph
from tests.runtime.graphs import cloned, flat_kernel, group_of, plan_of, randn, run_alone, trace
from trainfuse.codegen.ir import GroupKernel
from trainfuse.codegen.lower import lower
from trainfuse.codegen.targets import SIMULATED
from trainfuse.errors import FusionError
from trainfuse.runtime import repro
from trainfuse.runtime.cache import KernelCache
from trainfuse.runtime.fallback import Boundary
from trainfuse.runtime.gate import Gate
from trainfuse.runtime.plan import Plan
from trainfuse.runtime.program import RuntimeOptions

GOOD = ["t0 = tl.exp(in0) + in1"]
FAULTS = {
    "wrong operation": ["t0 = tl.exp(in0) - in1"],
    "wrong scale": ["t0 = tl.exp(in0) * 1.001 + in1"],
    "one wrong element": ["t0 = tl.where(i == 999, 0.0, tl.exp(in0) + in1)"],
    "half precision inside": ["t0 = tl.exp(in0.to(tl.float16).to(tl.float32)) + in1"],
    "nan": ["t0 = tl.where(i == 7, float('nan'), tl.exp(in0) + in1)"],
    "does not compile": ["t0 = no_such_name(in0)"],
}


def options(tmp_path: Path, **kwargs: object) -> RuntimeOptions:
    return RuntimeOptions(
        "triton", cache=KernelCache(None), gate=Gate(), repro_folder=tmp_path, **kwargs
    )


def case(statements: list[str], mutates: tuple[int, ...] = ()):
    args = [randn(40, 50), randn(40, 50)]
    tg = trace(lambda x, y: torch.exp(x) + y, args, mutates=mutates)
    group = group_of(tg, "forward_0", tg.nodes())
    return args, (tg, plan_of(tg, group), {"forward_0": flat_kernel(group, statements)}, {})


def test_a_good_kernel_passes_and_is_gated_once(tmp_path: Path) -> None:
    args, parts = case(GOOD)
    chosen = options(tmp_path)
    plan = Plan(*parts, chosen)
    for _ in range(2):
        torch.testing.assert_close(plan(cloned(args)), run_graph(parts[0], args))
    assert chosen.gate is not None
    assert len(chosen.gate.passed) == 1
    assert not plan.failures
    assert "forward_0(" in plan.source


@pytest.mark.covers("T6")
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("mutates", [(), (1,)], ids=["output", "in place"])
def test_a_faulty_kernel_is_quarantined_with_eagers_result(
    fault: str, mutates: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args, parts = case(FAULTS[fault], mutates)
    plan = Plan(*parts, options(tmp_path))
    for _ in range(3):
        given = cloned(args)
        buffer = given[1]
        results = plan(given) or [buffer]
        torch.testing.assert_close(results, run_graph(parts[0], args), rtol=0, atol=0)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "forward_0 (exp, add) at model.py:1 runs as ATen" in warnings[0]
    assert "forward_0(" not in plan.source
    assert "aten.exp.default" in plan.source


def test_a_wrong_kernel_raises_when_fallback_is_off_and_nothing_has_changed(
    tmp_path: Path,
) -> None:
    args, parts = case(FAULTS["wrong operation"], mutates=(1,))
    plan = Plan(*parts, options(tmp_path, boundary=Boundary(allowed=False)))
    given = cloned(args)
    with pytest.raises(
        FusionError, match=r"forward_0 failed in gate(.|\n)*exp, add(.|\n)*model.py:1"
    ):
        plan(given)
    torch.testing.assert_close(given, args, rtol=0, atol=0)


def test_a_failure_is_remembered_across_plans(tmp_path: Path) -> None:
    _, parts = case(FAULTS["wrong operation"])
    chosen = options(tmp_path)
    args, _ = case(GOOD)
    Plan(*parts, chosen)(cloned(args))
    assert "forward_0(" not in Plan(*parts, chosen).source


@pytest.mark.parametrize("mutates", [(), (1,)], ids=["output", "in place"])
@pytest.mark.parametrize("right", [False, True])
def test_the_repro_shows_the_fault_without_trainfuse(
    mutates: tuple[int, ...], right: bool, tmp_path: Path, tmp_path_factory: Any
) -> None:
    scale = "1.0" if right else "1.001"
    args, parts = case([f"t0 = libdevice.exp(in0) * {scale} + lib.maximum(in1, in1)"], mutates)
    tg, fusion, kernels, handles = parts
    library = "from trainfuse.codegen import triton_lib as lib\n"
    library += "from trainfuse.codegen.triton_lib import libdevice\n"
    kernel = kernels["forward_0"]
    kernels = {"forward_0": replace(kernel, source=library + kernel.source)}
    chosen = options(tmp_path)
    if right:  # a fault that isn't there
        chosen = replace(chosen, gate=Gate(factor=0.0))
        Gate.compare, own = lambda *_: "planted", Gate.compare
    try:
        plan = Plan(tg, fusion, kernels, handles, chosen)
        plan(cloned(args))
    finally:
        if right:
            Gate.compare = own
    (failure,) = plan.failures.values()
    assert failure.stage == "gate"
    assert Path(failure.repro).with_suffix(".pt").exists()
    done = run_alone(failure.repro, tmp_path_factory.mktemp("elsewhere"))
    assert done.returncode == (0 if right else 1), done.stderr
    assert ("no fault here" if right else "the fault is here") in done.stdout


def test_a_source_tree_without_an_installation_makes_repros(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(distribution: str) -> str:
        raise importlib.metadata.PackageNotFoundError(distribution)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    text = repro.head("forward_0", "wrong", torch.device("cpu"))
    assert "trainfuse from source" in text


def test_the_repro_of_a_dropout_holds_its_masks(tmp_path: Path, tmp_path_factory: Any) -> None:
    """The mask is made from a seed that is an input, by operators that a reader hasn't got."""
    seed = torch.tensor([1234567890123])
    args = [randn(40, 50), seed]
    tg = trace(lambda x, s: torch.exp(x) * torch.ops.trainfuse.keep_mask(s, 3, 0.4, [40, 50]), args)
    group = group_of(tg, "forward_0", tg.nodes())
    kernel = lower(group, SIMULATED)
    assert isinstance(kernel, GroupKernel)
    wrong = replace(kernel, source=kernel.source.replace(", 3, ", ", 4, "))
    plan = Plan(tg, plan_of(tg, group), {"forward_0": wrong}, {}, options(tmp_path))
    plan(cloned(args))
    (failure,) = plan.failures.values()
    done = run_alone(failure.repro, tmp_path_factory.mktemp("elsewhere"))
    assert done.returncode == 1, done.stderr
    assert "the fault is here" in done.stdout


def test_strides_reach_the_repro_and_halves_their_reference(
    tmp_path: Path, tmp_path_factory: Any
) -> None:
    x = torch.randn(6, 10).t().bfloat16()
    bias = torch.randn(6).bfloat16().expand(10, 6)
    tg = trace(lambda x, b: ((x + b).sum(0, dtype=torch.float32), x.float() * 2), [x, bias])
    group = group_of(tg, "forward_0", tg.nodes())
    kernel = lower(group, SIMULATED)
    assert isinstance(kernel, GroupKernel)
    wrong = replace(kernel, source=kernel.source.replace("* 2.0", "* 2.05"))
    assert wrong != kernel
    plan = Plan(tg, plan_of(tg, group), {"forward_0": wrong}, {}, options(tmp_path))
    plan([x, bias])
    (failure,) = plan.failures.values()
    assert failure.stage == "gate"
    saved = torch.load(Path(failure.repro).with_suffix(".pt"), weights_only=True)
    assert [t.stride() for t in saved] == [x.stride(), bias.stride()]
    done = run_alone(failure.repro, tmp_path_factory.mktemp("elsewhere"))
    assert done.returncode == 1, done.stderr


def test_a_repro_that_can_t_be_written_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    args, parts = case(FAULTS["wrong operation"])
    plan = Plan(*parts, replace(options(tmp_path), repro_folder=tmp_path / "file"))
    torch.testing.assert_close(plan(cloned(args)), run_graph(parts[0], args), rtol=0, atol=0)
    (failure,) = plan.failures.values()
    assert "Error" in failure.repro
    monkeypatch.setattr(repro, "LARGEST_BYTES", 100)
    plan = Plan(*parts, options(tmp_path / "small"))
    plan(cloned(args))
    (failure,) = plan.failures.values()
    assert "were not saved" in Path(failure.repro).read_text()
    assert not Path(failure.repro).with_suffix(".pt").exists()


def test_a_kernel_that_passed_is_compared_again_only_where_it_is_suspected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verdicts are paid for once a process: calls that are checked again don't pay again."""
    compared: list[int] = []
    own = Gate.compare
    monkeypatch.setattr(Gate, "compare", lambda *a: (compared.append(1), own(*a))[1])
    args, parts = case(GOOD)
    plan = Plan(*parts, options(tmp_path))
    plan(cloned(args))
    assert len(compared) == 1
    plan.verify_next()
    plan(cloned(args))
    assert len(compared) == 1
    plan.verify_next()
    with plan.suspecting():
        plan(cloned(args))
    assert len(compared) == 2
    plan(cloned(args))
    assert len(compared) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_no_mismatch(dtype: torch.dtype) -> None:
    exact = torch.randn(1000, dtype=torch.float64)
    native = exact.to(dtype)
    ours = (exact * (1 + torch.finfo(dtype).eps / 2)).to(dtype)
    assert mismatch(ours, native, exact, 2.0) is None


def test_large_results_are_compared_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autodiff.mismatch._PIECE", 100)
    exact = torch.randn(30, 31, dtype=torch.float64).t()
    native = exact.float()
    ours = native.clone()
    assert mismatch(ours, native, exact, 2.0) is None
    ours[17, 11] += 0.1
    assert "largest error" in str(mismatch(ours, native, exact, 2.0))
    ours[17, 11] = float("nan")
    assert "NaN" in str(mismatch(ours, native, exact, 2.0))


def test_running_out_of_memory_blames_no_kernel(tmp_path: Path) -> None:
    def full() -> None:
        raise torch.OutOfMemoryError("planted")

    with pytest.raises(torch.OutOfMemoryError):
        Boundary().attempt(full, "launch")
    assert Boundary().attempt(full, "cuda_graph") == "out of memory"


def test_small_values_beside_an_outlier_are_seen() -> None:
    exact = torch.randn(1000, dtype=torch.float64)
    exact[0] = 1e7
    native = exact.float()
    ours = native.clone()
    ours[1:] *= 1.5
    assert mismatch(ours, native, exact, 2.0) is not None


def test_overflow_that_eager_shares_is_no_mismatch() -> None:
    exact = torch.tensor([1e6, 1.0], dtype=torch.float64)
    native = exact.half()
    assert native[0].isinf()
    assert mismatch(native.clone(), native, exact, 2.0) is None
    assert mismatch(torch.tensor([1.0, 1.0]).half(), native, exact, 2.0) is None
    assert mismatch(torch.tensor([1.0, float("inf")]).half(), native, exact, 2.0) is not None


def test_masks_may_differ_only_where_fp64_decides_otherwise() -> None:
    exact = torch.rand(1000) > 0.5
    wrong = exact.clone()
    wrong[:50] = ~wrong[:50]
    assert mismatch(exact.clone(), exact, exact, 2.0) is None
    assert mismatch(wrong, exact, exact, 2.0) is not None


@pytest.mark.parametrize("rows", [7, 300])
@pytest.mark.parametrize("width", [1, 5, 40, 2000])
def test_another_order_of_summation_is_no_mismatch(width: int, rows: int) -> None:
    """A sum that nearly cancels has a large relative error, and few elements have luck."""
    for seed in range(60):
        torch.manual_seed(seed)
        x = torch.randn(rows, width)
        x[:, 0] -= x[:, 0].mean() - 0.01 / rows
        ours = sum(x[torch.randperm(rows)], torch.zeros(width))
        assert mismatch(ours, x.sum(0), x.double().sum(0), 2.0) is None


@pytest.mark.parametrize("width", [1, 5, 40])
def test_a_slightly_wrong_sum_of_few_elements_is_a_mismatch(width: int) -> None:
    x = torch.rand(300, width)
    assert mismatch(1.001 * x.sum(0), x.sum(0), x.double().sum(0), 2.0) is not None
