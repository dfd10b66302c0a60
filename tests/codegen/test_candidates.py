"""Choices of a schedule: all of them compute the same, and the cost model's comes first."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from codegen_support import error, reference, run_case, trace
from torch import Tensor
from torch._decomp import get_decompositions
from torch.nn import functional as F

from autodiff.graph import Refusal
from trainfuse.codegen.choices import MODEL, Choice
from trainfuse.codegen.ir import GroupKernel
from trainfuse.codegen.lower import SCHEDULES, candidates, lower, lower_nodes
from trainfuse.codegen.targets import H200, CodegenOptions, Target
from trainfuse.fusion.domains import infer
from trainfuse.fusion.plan import FusionGroup


def norm(x: Tensor, w: Tensor) -> Tensor:
    return F.softmax(x * w, -1)


def norm_sums(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = x * w
    z = y - y.mean(-1, keepdim=True)
    return z, (z * x).sum(0)


def column(x: Tensor, w: Tensor) -> Tensor:
    return (x * w).sum(0)


def total(x: Tensor, w: Tensor) -> Tensor:
    return (x * w).sum()


def pointwise(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x * w)


def nested(x: Tensor, w: Tensor) -> Tensor:
    y = (x * w).view(x.shape[0], 4, -1)
    sums = y.sum(-1, keepdim=True)
    return y - sums * sums.sum(1, keepdim=True)


TABLE = get_decompositions([torch.ops.aten._softmax])
FEW = Target("sm_90", 2)
KINDS = {
    "row": norm,
    "row_column": norm_sums,
    "column": column,
    "full": total,
    "pointwise": pointwise,
    "nested": nested,
}


def group_of(name: str, rows: int, cols: int) -> FusionGroup:
    case = trace(KINDS[name], [torch.randn(rows, cols), torch.randn(cols)], TABLE)
    domain = infer(case.nodes)
    assert not isinstance(domain, Refusal)
    assert domain.kind == name
    nodes, inputs, outputs = map(tuple, (case.nodes, case.externals, case.outputs))
    return FusionGroup(name, "forward", nodes, inputs, outputs, domain)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("size", [(64, 1024), (4096, 5120)])
def test_the_models_choice_comes_first_and_kernels_differ(name: str, size: tuple[int, int]) -> None:
    group = group_of(name, *size)
    found = candidates(group, H200, CodegenOptions(), thorough=True)
    assert found[0][0] is MODEL
    assert found[0][1] == lower(group, H200)
    keys = [kernel.key for _, kernel in found]
    assert len(set(keys)) == len(keys) > 2
    likely = candidates(group, H200, CodegenOptions(), thorough=False)
    assert [choice for choice, _ in likely] == [choice for choice, _ in found[: len(likely)]]


def norm_backward(g: Tensor, x: Tensor, w: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Two levels of row reductions, a sum over rows at each, and a mask along the row."""
    scaled = g * w
    first = scaled.mean(-1, keepdim=True)
    second = (scaled * x).mean(-1, keepdim=True)
    grad = (scaled - first - x * second) * rstd
    return grad, (g * x).sum(0), (grad * grad).sum(0)


@pytest.mark.parametrize("width", [300, 512, 2100])
@pytest.mark.parametrize("rows", [2, 7])
def test_a_wide_row_is_walked_in_segments(rows: int, width: int) -> None:
    args = [torch.randn(rows, width) for _ in range(2)] + [torch.randn(width), torch.rand(rows, 1)]
    case = trace(norm_backward, args, TABLE)
    walked = Choice(held=False, block=128)
    kernel = lower_nodes(case.nodes, case.outputs, FEW, None, "group", walked)
    assert isinstance(kernel, GroupKernel)
    assert "tl.debug_barrier()" in kernel.source
    exact, eager = (reference(case, args, dtype) for dtype in (torch.float64, None))
    for ours, theirs, right in zip(run_case(case, args, kernel), eager, exact, strict=True):
        assert error(ours, right) <= 2 * error(theirs, right) + 1e-6


def test_programs_that_share_a_multiprocessor_take_no_more_than_their_share() -> None:
    """Left alone, the compiler takes 172 registers for two of these programs, and one waits."""

    def registers(width: int, choice: Choice = MODEL) -> int | None:
        half = torch.bfloat16
        args = [torch.empty(16384, width, dtype=half) for _ in range(2)]
        args += [torch.empty(width, dtype=half), torch.empty(16384, 1)]
        case = trace(norm_backward, args, TABLE)
        kernel = lower_nodes(case.nodes, case.outputs, H200, None, "group", choice)
        assert isinstance(kernel, GroupKernel)
        assert all(launch.max_registers is None for launch in kernel.launches[1:])
        return kernel.launches[0].max_registers

    assert registers(4096) == 128
    assert registers(4096, Choice(warps=8, rows=1, per_sm=1)) is None
    # so few that the rows would spill: they take turns
    assert registers(4096, Choice(warps=8, rows=1, per_sm=4)) is None


@pytest.mark.parametrize("width", [512, 2104])
@pytest.mark.parametrize("rows", [2, 7])
def test_a_walked_row_of_halves_is_read_once(rows: int, width: int) -> None:
    half = torch.bfloat16
    args = [torch.randn(rows, width, dtype=half) for _ in range(2)]
    args += [torch.randn(width), torch.rand(rows, 1)]
    case = trace(norm_backward, args, TABLE)
    kept = Choice(held=True, block=128)
    kernel = lower_nodes(case.nodes, case.outputs, FEW, None, "group", kept)
    assert isinstance(kernel, GroupKernel)
    segments = -(-width // 128)
    rows_read = re.findall(r"= tl\.load\(in\d \+ row \* COLS", kernel.source)
    assert len(rows_read) == 2 * segments
    assert kernel.source.count("lib.widen(") == 4 * segments
    exact, eager = (reference(case, args, dtype) for dtype in (torch.float64, None))
    for ours, theirs, right in zip(run_case(case, args, kernel), eager, exact, strict=True):
        unit = 2**-8 if ours.dtype == half else 2**-24
        assert error(ours, right) <= 2 * error(theirs, right) + unit * float(right.abs().max())


def test_widths_beyond_the_registers_are_walked_by_the_model() -> None:
    args = [torch.randn(4, 16384, dtype=torch.bfloat16) for _ in range(2)]
    args += [torch.randn(16384, dtype=torch.bfloat16), torch.rand(4, 1, dtype=torch.bfloat16)]
    case = trace(norm_backward, args, TABLE)
    kernel = lower_nodes(case.nodes, case.outputs, H200)
    assert isinstance(kernel, GroupKernel)
    assert "tl.debug_barrier()" in kernel.source
    for choice in (Choice(warps=4, rows=1, per_sm=2), Choice(warps=2, rows=1, per_sm=8)):
        assert isinstance(lower_nodes(case.nodes, case.outputs, H200, choice=choice), Refusal)


@pytest.mark.parametrize("name", KINDS)
def test_every_choice_computes_the_same(name: str) -> None:
    """A few of each schedule's, on sizes at which their tiles end within the tensors."""
    args = [torch.randn(70, 300), torch.randn(300)]
    case = trace(KINDS[name], args, TABLE)
    exact = reference(case, args, torch.float64)
    eager = reference(case, args, None)
    schedule = SCHEDULES[name]  # type: ignore[index]  # a kind
    for choice in (*schedule.LIKELY, *schedule.OTHERS[::7]):
        kernel = lower_nodes(case.nodes, case.outputs, FEW, None, "group", choice)
        if isinstance(kernel, Refusal):
            assert kernel.reason == "nothing that it makes can be kept", choice
            continue
        for ours, theirs, right in zip(run_case(case, args, kernel), eager, exact, strict=True):
            assert error(ours, right) <= 2 * error(theirs, right) + 1e-6, choice


def test_rows_in_pairs() -> None:
    """Many rows of 1024 elements, two at a time by twice the warps; not few, nor others."""

    def first(total: int, width: int) -> tuple[int, int, bool]:
        half = torch.bfloat16
        args = [torch.empty(total, width, dtype=half) for _ in range(2)]
        args += [torch.empty(width, dtype=half), torch.empty(total, 1)]
        kernel = kernel_of(norm_backward, args)
        launch = kernel.launches[0]
        return launch.num_warps, launch.grid[0], "row_following = row + " in kernel.source

    assert first(16384, 1024) == (4, 4 * 132, True)
    assert first(512, 1024) == (2, 512, False)
    assert first(16384, 768) == (2, 1024, False)


def test_sums_of_several_operands_have_two_loads_of_each_on_their_way() -> None:
    def tile(fn: Callable[..., Tensor], total: int) -> str:
        args = [torch.empty(total, 1024, dtype=torch.bfloat16) for _ in range(2)]
        return re.findall(r"tl.full\(\((\d+, \d+)\)", kernel_of(fn, args).source)[0]

    assert tile(lambda x, y: (x * y).sum(0), 16384) == "64, 64"
    assert tile(lambda x, y: (x * y).sum(0), 2048) == "32, 64"  # too few programs else
    assert tile(lambda x, _: (x * x).sum(0), 16384) == "32, 64"


def kernel_of(fn: Callable[..., object], args: list[Tensor]) -> GroupKernel:
    case = trace(fn, args, TABLE)
    kernel = lower_nodes(case.nodes, case.outputs, H200)
    assert isinstance(kernel, GroupKernel)
    return kernel
