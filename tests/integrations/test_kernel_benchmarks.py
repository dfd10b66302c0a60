"""The kernel benchmark's code paths, tiny, on the CPU; its table; what its report says."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import trainfuse
from benchmarks import kernel_contenders, kernel_report, kernel_timing, kernels, report
from benchmarks.environment import describe
from benchmarks.kernel_cases import NAMED, OPS, Case, full_cases, tiny_cases
from tests.integrations.test_benchmarks import FIELDS

GIB = 1 << 30


@pytest.fixture
def on_aten():
    """trainfuse without a compiler: what is tested is the benchmark."""
    with trainfuse.settings.patch(backend="eager"):
        yield


def _rows(op: str, names: tuple[str, ...] = ("eager", "trainfuse")) -> list[dict]:
    (case,) = (c for c in tiny_cases().values() if c.op.name == op)
    return kernel_timing.run_case(case, names, "cpu", roof=1e9, rounds=2)


# -- the table -----------------------------------------------------------------------------------


def test_the_table_covers_what_is_published():
    cases = full_cases()
    assert set(NAMED) <= set(cases)
    assert list(cases)[: len(NAMED)] != list(NAMED) or len(NAMED) == len(set(NAMED))
    assert {list(cases).index(name) for name in NAMED} == set(range(len(NAMED)))
    with_roof = [op for op in OPS if op.name != "linear_cross_entropy"]
    assert len(with_roof) >= 18
    for op in with_roof:
        floors = [c.floors for c in cases.values() if c.op is op]
        assert len(floors) >= 6, op.name
        largest = max(max(f.values()) for f in floors)
        assert largest >= 0.5 * GIB, op.name
        assert min(min(f.values()) for f in floors) < 1 << 20, f"{op.name}: nothing launch-bound"
        odd = [dims for dims in op.sizes if any(d % 8 for d in dims[1:])]
        assert odd, f"{op.name}: no odd width"


# by hand: 16384x4096 bf16 is 2^27 bytes
@pytest.mark.parametrize(
    ("name", "phase", "expected"),
    [
        ("softmax-16384x4096", "forward", 2 * 2**27),
        ("softmax-16384x4096", "backward", 3 * 2**27),
        ("layernorm-16384x4096", "backward", 3 * (2**27 + 2 * 4096) + 8 * 16384),
        ("swiglu-16384x4096", "backward", 5 * 2**27),
        ("dropout_add_layernorm-16384x4096", "forward", 4 * 2**27 + 4 * 4096 + 8 * 16384),
        ("cross_entropy-8192x32000", "both", 2 * 8192 * 32000 * 2 + 12 * 8192),
        ("softmax-4096x4096-fp32", "forward", 2 * 2**26),
        # 103 MB don't fit in L2: three passes and five
        ("batch_norm_relu_nhwc-64x256x56x56", "forward", 3 * 102760448 + 24 * 256),
        ("batch_norm_relu_nhwc-64x256x56x56", "backward", 5 * 102760448 + 24 * 256),
        ("embedding-16384x32000x2048", "backward", (16384 + 32000) * 4096 + 8 * 16384),
    ],
)
def test_floors(name, phase, expected):
    assert full_cases()[name].floors[phase] == expected


@pytest.mark.parametrize("op", [op for op in OPS if op.floors(4, *op.tiny)], ids=lambda op: op.name)
def test_a_floor_is_no_less_than_what_a_phase_must_write(op):
    case = Case(op, op.tiny, torch.float32)
    args = case.make("cpu")
    outputs = kernel_contenders.outputs_of(op.fn(*args))
    grads = torch.autograd.grad(
        outputs, kernel_contenders.leaves(args), kernel_contenders.cotangents(outputs)
    )
    floors = case.floors
    if "forward" in op.phases:
        assert floors["forward"] >= sum(o.nbytes for o in outputs)
    # one gradient of two inputs is written once
    written = {g.data_ptr(): g.nbytes for g in grads}
    assert floors["backward"] >= sum(written.values())


# -- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_every_op_is_checked_and_timed(op, on_aten):
    rows = _rows(op.name)
    assert [(r["phase"], r["contender"]) for r in rows] == [
        (phase, name) for phase in op.phases for name in ("eager", "trainfuse")
    ]
    for row in rows:
        assert list(row) == FIELDS
        assert row["ms"] > 0
        assert row["host_ms"] > 0
        assert row["ms_spread"] >= 0
        assert row["grad_error_ratio"] <= 2, row["note"]
        assert "no peak memory" in row["note"]
        assert row["compile_s"] is not None or "nothing to compile" in row["note"]
        if row["roof_fraction"] is None:
            assert "no roof: it is a matrix product" in row["note"]
        else:
            floor = tiny_cases()[row["case"]].floors[row["phase"]]
            assert row["roof_fraction"] == pytest.approx(floor / 1e9 / row["ms"] * 1e3, abs=1e-3)


def test_a_loss_and_its_gradients_are_one_whole_step(on_aten):
    (row,) = (r for r in _rows("cross_entropy", ("trainfuse",)) if r["phase"] == "both")
    assert "not captured whole" not in row["note"]


def test_trainfuse_is_tuned_where_that_is_asked_for(on_aten):
    rows = _rows("dropout_add_rmsnorm", ("trainfuse-max-autotune",))
    assert all(row["ms"] and row["grad_error_ratio"] <= 2 for row in rows), rows[0]["note"]


def test_a_wrong_kernel_is_noted(on_aten, monkeypatch):
    """Gradients under random cotangents: a backward that is off by 1% is found, the forward not."""

    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g * 1.01

    real = kernel_contenders.build

    def build(name, case, args, **more):
        entrant = real(name, case, args, **more)
        if name == "compile":
            entrant.call = lambda x: case.op.fn(Off.apply(x))
        return entrant

    monkeypatch.setattr(kernel_contenders, "build", build)
    forward, backward = _rows("softmax", ("compile",))
    assert forward["grad_error_ratio"] <= 2
    assert backward["grad_error_ratio"] > 2
    assert "WRONG: gradient0" in backward["note"]


def test_a_contender_that_fails_leaves_the_others(on_aten, monkeypatch):
    def broken(fn, **_):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", broken)
    rows = _rows("softmax", ("eager", "compile"))
    assert [row["ms"] is None for row in rows] == [False, True] * 2
    assert "no compiler here" in rows[1]["note"]


def test_other_masks_are_not_compared(on_aten):
    eager, ours = _rows("dropout_add_layernorm")[:2]
    assert eager["grad_error_ratio"] == 1.0
    assert ours["grad_error_ratio"] is not None
    (case,) = (c for c in tiny_cases().values() if c.op.name == "dropout_add_layernorm")
    entrant = kernel_contenders.Entrant("compile", case, case.op.fn, None, case.make("cpu"))
    refs = kernel_contenders.references(case, entrant.args)
    assert kernel_contenders.check(entrant, refs)["forward"] == (
        None,
        "gradients unchecked: other masks",
    )


def test_what_has_no_room_for_fp64_is_checked_at_fewer_rows(on_aten, monkeypatch):
    real, seen = kernel_contenders.references, []

    def references(case, args):
        seen.append(case.name)
        if len(seen) == 1:
            raise torch.OutOfMemoryError
        return real(case, args)

    monkeypatch.setattr(kernel_contenders, "references", references)
    op = next(op for op in OPS if op.name == "softmax")
    rows = kernel_timing.run_case(
        Case(op, (16, 20)), ("eager", "trainfuse"), "cpu", roof=None, rounds=2
    )
    assert seen == ["softmax-16x20", "softmax-2x20"]
    assert {row["case"] for row in rows} == {"softmax-16x20"}
    assert rows[1]["grad_error_ratio"] <= 2
    assert "gradients checked at softmax-2x20" in rows[1]["note"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's; a GPU is tested by use")
def test_the_copy_kernel_copies():
    source = torch.randn(3001)  # no multiple of the block
    target = torch.zeros(3002)
    kernel_timing.copy(source, target[:3001], 1024, 4)
    assert torch.equal(source, target[:3001])
    assert target[3001] == 0
    (size, speed), *_ = kernel_timing.measure_roof("cpu", (1 << 12,))
    assert size == 4096
    assert speed > 0


# -- the run -------------------------------------------------------------------------------------


def _options(tmp_path: Path, *more: str) -> argparse.Namespace:
    return kernels.parse(["--cpu", "--out", str(tmp_path), "--only", "softmax", "mul", *more])


def test_a_run_writes_its_results_and_goes_on(tmp_path, on_aten, capsys):
    common = [
        "--cpu",
        "--contenders",
        "eager",
        "trainfuse",
        "--rounds",
        "2",
        "--out",
        str(tmp_path),
    ]
    path = kernels.main([*common, "--only", "softmax*", "--budget", "0"])
    first = json.loads(path.read_text())
    assert {row["case"] for row in first["rows"]} == {"softmax-3x20-fp32"}, "the budget was spent"
    kernels.main([*common, "--only", "softmax*", "--resume"])
    both = json.loads(path.read_text())
    assert both["rows"][: len(first["rows"])] == first["rows"]
    assert {row["case"] for row in both["rows"]} == {
        "softmax-3x20-fp32",
        "softmax_columns-3x20-fp32",
    }
    assert both["floors"]["softmax-3x20-fp32"]["forward"] == 480
    assert "softmax_columns-3x20-fp32" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_run_says_so(tmp_path):
    with pytest.raises(SystemExit, match="--cpu"):
        kernels.main(["--out", str(tmp_path)])


def test_results_of_another_commit_are_not_added_to(tmp_path):
    run = kernels.Run(_options(tmp_path), tmp_path)
    run.result["environment"]["commit"] = "0000000"
    run.write()
    with pytest.raises(SystemExit, match="0000000"):
        kernels.Run(_options(tmp_path, "--resume"), tmp_path)


def test_cases_are_measured_again_beside_the_others(tmp_path):
    run = kernels.Run(_options(tmp_path), tmp_path)
    old = {"phase": "forward", "contender": "eager", "commit": "0000000"}
    run.result["environment"]["commit"] = "0000000"
    kept, anew = "swiglu-3x20-fp32", "softmax-3x20-fp32"
    run.result["rows"] = [{**old, "case": name} for name in (kept, anew)]
    run.write()
    again = kernels.Run(_options(tmp_path, "--again", "--only", "softmax-*"), tmp_path)
    assert [row["case"] for row in again.result["rows"]] == [kept]
    assert again.remaining() == [anew]
    again.add([{**old, "case": anew, "compile_s": None}])
    commits = {row["case"]: row["commit"] for row in again.result["rows"]}
    assert commits[kept] == "0000000" != commits[anew]
    assert "0000000 (1 rows)" in kernel_report.measured_at(again.result)


def _child(tmp_path: Path, *parts: str, status: int = 0) -> tuple[subprocess.Popen, Path]:
    """A process that writes its output in parts, as a buffer would cut it."""
    output = tmp_path / "rows"
    output.touch()
    script = (
        "import sys, time\n"
        f"for part in {list(parts)!r}:\n"
        f"    open({str(output)!r}, 'a').write(part); time.sleep(0.2)\n"
        f"sys.exit({status})"
    )
    return subprocess.Popen([sys.executable, "-c", script], text=True), output


def test_rows_are_taken_in_as_they_come_and_a_death_is_noticed(tmp_path):
    run = kernels.Run(_options(tmp_path), tmp_path)
    case = run.remaining()[0]
    rows = kernels.failed_rows(tiny_cases()[case], ["eager"], "a test")
    text = json.dumps({"copy": [[4096, 5e9]]}) + "\n" + json.dumps(rows) + "\n"
    why = run._follow(*_child(tmp_path, text[:30], text[30:], '[{"case": "half', status=3))
    assert why == "exit status 3"
    assert run.options.roof == 5e9
    commit = run.result["environment"]["commit"]
    assert run.result["rows"] == [row | {"commit": commit} for row in rows]
    assert case not in run.remaining()


def test_a_hanging_process_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "HANG_S", 0.3)
    run = kernels.Run(_options(tmp_path), tmp_path)
    child, output = _child(tmp_path, *[" "] * 100)
    assert run._follow(child, output) == "no result in 0.3 s"
    assert child.returncode is not None


def test_which_configuration_was_fastest_is_forgotten(tmp_path):
    (tmp_path / "ab").mkdir()
    for name in ("k.best_config", "tuned-large-NVIDIA-H200.json", "k.py", "k.json"):
        (tmp_path / "ab" / name).touch()
    kernels.forget_choices(tmp_path)
    assert {path.name for path in (tmp_path / "ab").iterdir()} == {"k.py", "k.json"}


# -- the report ----------------------------------------------------------------------------------


def _result(ours_ms: float = 0.07, roof: float = 0.92) -> dict:
    rows, cases = [], full_cases()
    for case in cases.values():
        for phase in case.op.phases:
            for contender, ms in (("eager", 0.3), ("compile", 0.2), ("trainfuse", ours_ms)):
                row = kernel_timing.empty_row(case, contender, phase, [])
                peak = 1.0 if contender == "trainfuse" else 10.0
                figures = {"ms": ms, "ms_spread": 0.01, "grad_error_ratio": 1.0, "peak_gib": peak}
                rows.append({**row, **figures, "roof_fraction": roof})
    floors = {name: dict(case.floors) for name, case in cases.items()}
    copy = [[1 << 20, 1e12], [GIB, 4e12]]
    kernels = {"mul-512x4096": (2, 1.0), "embedding-256x1000x64": (0, 0.1)}
    return {
        "kernels": kernels,
        "environment": {**describe("cpu"), "liger": None},
        "copy": copy,
        "rows": rows,
        "floors": floors,
    }


def test_claims_hold_and_are_missed():
    assert {c.mark for c in kernel_report.claims(_result())} == {"holds"}
    slow = {c.text: c for c in kernel_report.claims(_result(ours_ms=0.25, roof=0.5))}
    assert [c.mark for c in slow.values()].count("MISSED") >= 12
    assert slow["geometric mean over torch.compile at least 1.4x"].figure.startswith("0.80x")
    nothing = kernel_report.claims({"rows": [], "floors": {}})
    assert "holds" not in {c.mark for c in nothing}


def test_a_slow_compile_is_named():
    result = _result()
    result["kernels"]["softmax-16x768"] = (2, 5.0)
    (claim,) = (c for c in kernel_report.claims(result) if "to plan and compile" in c.text)
    assert claim.mark == "MISSED"
    assert claim.figure == "median 1.50 s, worst 2.50 s, softmax-16x768"


def test_notes_are_shown_once(capsys):
    result = _result()
    for row in result["rows"]:
        if row["case"].startswith("mul-") and row["contender"] == "trainfuse":
            row["note"] = "ATen: aten.mul.Tensor; nothing to say"
    kernel_report.print_table(result)
    out = capsys.readouterr().out
    assert out.count("ATen: aten.mul.Tensor") == 1
    assert "(mul-16x768 forward, mul-16x768 backward and 12 more)" in out
    assert "nothing to say" not in out


def test_one_wrong_case_is_named():
    result = _result()
    (row,) = (
        r
        for r in result["rows"]
        if (r["case"], r["phase"], r["contender"]) == ("mul-512x4096", "backward", "trainfuse")
    )
    row |= {"grad_error_ratio": 2.5, "ms": 0.4, "roof_fraction": 0.1}
    missed = [c for c in kernel_report.claims(result) if c.mark == "MISSED"]
    assert len(missed) == 2, "20 MiB count for speed, not for the roof"
    assert all("mul-512x4096 backward" in c.figure for c in missed)


def test_the_readme_gets_a_section(tmp_path):
    results, readme = tmp_path / "results", tmp_path / "README.md"
    results.mkdir()
    (results / "kernels-X-torch2.json").write_text(kernel_report.dumps(_result()))
    readme.write_text("<!-- results:kernels -->\nold\n<!-- /results:kernels -->\n")
    common = ["--results", str(results), "--readme", str(readme)]
    assert report.main([*common, "--write"]) == 0
    assert report.main([*common, "--check"]) == 0
    text = readme.read_text()
    assert "4.00 TB/s" in text
    assert "softmax | forward | 8 | 4.29x | 2.86x | 2.86x | 92% (92%) | 1.00" in text
    assert "holds: softmax-16384x4096 forward: at least 2.0x torch.compile: 2.86x" in text


def test_the_roofline_is_drawn(tmp_path, monkeypatch):
    drawn = []

    class Axes:
        def __getattr__(self, name):
            return lambda *args, **more: drawn.append((name, args, more))

    class Figure(Axes):
        def savefig(self, path, **_):
            path.touch()

    pyplot = types.SimpleNamespace(
        subplots=lambda *a, **_: (Figure(), [[Axes(), Axes()]]), close=lambda figure: None
    )
    monkeypatch.setitem(sys.modules, "matplotlib", types.SimpleNamespace(pyplot=pyplot))
    (tmp_path / "kernels-X-torch2.json").write_text(kernel_report.dumps(_result()))
    target = tmp_path / "kernels.svg"
    assert report.main(["--results", str(tmp_path), "--plot", str(target)]) == 0
    assert target.exists()
    assert target.with_suffix(".png").exists()
    labels = [more["label"] for name, _, more in drawn if name in ("scatter", "plot")]
    assert labels == ["eager", "compile", "trainfuse", "copy kernel"] * 2
    (line, *_) = [args for name, args, _ in drawn if name == "plot"]
    assert line == ([1.0, 1024.0], [1000.0, 4000.0])
