"""The benchmark's code paths, tiny, on the CPU; and the report's tables against the README."""

from __future__ import annotations

import json
import os
import sys
import types

import pytest
import torch

import trainfuse
from benchmarks import gate, memory, report, steps
from benchmarks.cases import full_cases, tiny_cases
from benchmarks.contenders import build, check_gradients
from benchmarks.environment import describe, results_name

FIELDS = [
    "case",
    "contender",
    "phase",
    "ms",
    "ms_spread",
    "host_ms",
    "peak_gib",
    "compile_s",
    "grad_error_ratio",
    "roof_fraction",
    "note",
]


@pytest.fixture(autouse=True)
def ours_without_a_compiler(monkeypatch):
    """trainfuse on ATen: what is tested is the benchmark."""
    for variable in steps.CACHES:  # steps.py sets them: monkeypatch puts them back
        monkeypatch.setenv(variable, os.environ.get(variable, ""))
        if not os.environ[variable]:
            monkeypatch.delenv(variable)
    with trainfuse.settings.patch(backend="eager"):
        yield
    monkeypatch.undo()
    trainfuse.settings.reload_env()


@pytest.mark.parametrize("case", ["mlp", "block"])
def test_rows_have_every_field_and_a_note_for_each_gap(case):
    effort = steps.Effort(rounds=3, burst_s=0.002)
    rows = steps.run_case(tiny_cases()[case], ("eager", "trainfuse"), "cpu", effort)
    assert [row["contender"] for row in rows] == ["eager", "trainfuse"]
    for row in rows:
        assert list(row) == FIELDS
        assert row["case"] == case
        assert row["ms"] > 0
        assert row["host_ms"] > 0
        assert row["ms_spread"] >= 0
        assert row["grad_error_ratio"] <= 2
        assert "no peak memory" in row["note"]
        assert "roof" in row["note"]
    assert rows[0]["compile_s"] is None
    assert rows[1]["compile_s"] is not None


@pytest.mark.parametrize("name", sorted(tiny_cases()))
def test_every_case_trains(name):
    contender = build("eager", tiny_cases()[name], "cpu")
    before = [p.detach().clone() for p in contender.model.parameters()]
    loss = contender.run()
    assert torch.isfinite(loss)
    moved = [
        not torch.equal(p, q) for p, q in zip(contender.model.parameters(), before, strict=True)
    ]
    # bf16 weights of 1.0 (llama's norms) don't resolve a step of 1e-4
    assert sum(moved) > 0.6 * len(moved)


def test_a_wrong_contender_is_noted(monkeypatch):
    """The check before timing is real: a contender that trains on other data is found out."""
    real = trainfuse.compile

    def other_input(step, **options):
        compiled = real(step, **options)

        def run(x, y):
            return compiled(x * 1.01, y)

        return run

    monkeypatch.setattr(trainfuse, "compile", other_input)
    ratio, note = steps.check("trainfuse", tiny_cases()["mlp"], "cpu")
    assert ratio > 2
    assert "beyond 2.0 x eager" in note


def test_masks_that_cannot_be_matched_are_not_compared():
    ratio, why = check_gradients("compile", tiny_cases()["block"], "cpu")
    assert ratio is None
    assert "masks" in why


def test_memory_races_the_budgets(tmp_path, monkeypatch, capsys):
    """One case through the whole benchmark, in this process; figures of memory need a GPU."""

    def here(case, options):
        effort = steps.Effort(options.rounds, options.burst)
        return steps.run_case(tiny_cases()[case], tuple(options.contenders), "cpu", effort)

    monkeypatch.setattr(steps, "in_own_process", here)
    options = ["--cpu", "--cases", "gpt-small", "--rounds", "2", "--burst", "0.002"]
    names = ["trainfuse", "trainfuse-0.25"]
    path = memory.main([*options, "--contenders", *names, "--out", str(tmp_path)])
    rows = json.loads(path.read_text())["rows"]
    assert [row["contender"] for row in rows] == names
    assert all(list(row) == FIELDS for row in rows)
    assert all(row["grad_error_ratio"] <= 2 for row in rows)
    assert "trainfuse-0.25 | n/a | n/a" in capsys.readouterr().out


def test_plans_of_ours_share_no_process_where_memory_is_measured():
    """They would share a pool, and the second one's peak be what it adds."""
    names = ["eager", "compile", "trainfuse", "trainfuse-0.5", "trainfuse-0.25"]
    first, *more = memory.races(names)
    assert first == ["eager", "compile", "trainfuse"]
    assert more == [["compile", "trainfuse-0.5"], ["compile", "trainfuse-0.25"]]
    assert memory.races(["compile"]) == [["compile"]]


def test_memory_is_compared_with_torch_compile():
    rows = [
        {"case": "vit", "contender": name, "peak_gib": peak, "ms": ms}
        for name, peak, ms in (("compile", 8.0, 10.0), ("trainfuse-0.5", 2.0, 12.0))
    ]
    assert (
        report.memory_table(rows).splitlines()[-1] == "vit | trainfuse-0.5 | 2 | 0.25 | 12 | 1.20"
    )


def test_a_comparison_of_the_gate_is_measured_and_shown(capsys):
    gate.main(["--row", "blocks", "--cpu", "--rounds", "2", "--parts"])
    printed = capsys.readouterr()
    row = json.loads(printed.out.splitlines()[-1])
    difference = row["compared_ms"] - row["step_ms"]
    assert row["comparison"] == pytest.approx(difference / row["eager_ms"], abs=2e-3)
    assert "dropout 0.1" in row["note"]
    parts = [f"{owner.__name__}.{name}" for owner, names in gate.PARTS for name in names]
    missing = [name for name in parts if name not in printed.err]
    assert set(missing) <= {"StepGate.settle"}  # called where rounding explains too little
    result = {"environment": describe("cpu"), "rows": [row]}
    line = report.section("gate", result).splitlines()[-3]
    assert line.startswith("blocks | ")
    assert f" | {row['comparison']:.4g} | " in line
    assert line.endswith("n/a | n/a")


def test_the_headline_cases_are_as_published():
    cases = full_cases()
    assert "784-512-512-10, batch 128" in cases["mlp"].note
    assert "d768 h12 ff3072" in cases["block"].note
    assert "8x512" in cases["block"].note
    assert "6 layers d384" in cases["gpt-small"].note
    assert "64x256" in cases["gpt-small"].note


def _result() -> dict:
    gap = {"host_ms": 0.5, "peak_gib": None, "grad_error_ratio": 1.0, "roof_fraction": None}
    rows = [
        {"case": "mlp", "contender": name, "phase": "step", "ms": ms, "ms_spread": 0.01,
         "compile_s": 2.0, **gap, "note": "MLP; no peak"}
        for name, ms in (("eager", 1.0), ("trainfuse", 0.25))
    ]  # fmt: skip
    return {"environment": describe("cpu"), "rows": rows}


def test_report_writes_checks_and_plots(tmp_path, capsys):
    results, readme = tmp_path / "results", tmp_path / "README.md"
    results.mkdir()
    path = results / results_name("steps", _result()["environment"])
    path.write_text(json.dumps(_result()))
    readme.write_text("# x\n<!-- results:steps -->\nold\n<!-- /results:steps -->\nend\n")
    common = ["--results", str(results), "--readme", str(readme)]
    assert report.main([*common, "--check"]) == 1
    assert "differs" in capsys.readouterr().err
    assert report.main([*common, "--write"]) == 0
    assert report.main([*common, "--check"]) == 0
    text = readme.read_text()
    assert text.startswith("# x\n")
    assert text.endswith("end\n")
    assert "4.00x" in text
    readme.write_text(text.replace("4.00x", "5.00x"))
    assert report.main([*common, "--check"]) == 1


@pytest.mark.parametrize("installed", [True, False])
def test_plot(installed, tmp_path, monkeypatch, capsys):
    """With matplotlib a picture, without it one line that says what to install."""
    drawn = []

    class Axes:
        def __getattr__(self, name):
            return lambda *args, **kwargs: drawn.append((name, args))

    class Figure(Axes):
        def savefig(self, path, **kwargs):
            path.write_text("<svg/>")

    pyplot = types.SimpleNamespace(
        subplots=lambda **kwargs: (Figure(), Axes()), close=lambda figure: None
    )
    package = types.SimpleNamespace(pyplot=pyplot) if installed else None
    monkeypatch.setitem(sys.modules, "matplotlib", package)
    results = tmp_path / "results"
    results.mkdir()
    (results / "steps-CPU-torch2.json").write_text(json.dumps(_result()))
    target = tmp_path / "plots" / "steps.svg"
    status = report.main(["--results", str(results), "--plot", str(target)])
    if not installed:
        assert status == 2
        assert "trainfuse[bench]" in capsys.readouterr().err
        return
    assert status == 0
    assert target.read_text() == "<svg/>"
    heights = [args[1] for name, args in drawn if name == "bar"]
    assert heights == [[1.0], [4.0]], "bars are speeds relative to eager"


def test_the_readme_shows_the_committed_results():
    if (report.ROOT / "README.md").exists() and report.load():
        assert report.main(["--check"]) == 0


def test_results_file_name():
    environment = {"gpu": "NVIDIA H200", "torch": "2.11.0+cu130"}
    assert results_name("steps", environment) == "steps-H200-torch2.11.0.json"


def test_the_report_prints_every_suite_that_was_measured(capsys):
    """No action: the tables of all result files in the repository."""
    assert report.main([]) == 0
    printed = capsys.readouterr().out
    for suite in report.load():
        assert suite in printed
