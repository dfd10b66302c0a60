"""The command line, as a user runs it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from autodiff.graph import Refusal
from trainfuse.debug import environment
from trainfuse.debug.explain import (
    Explanation,
    GroupRow,
    MemoryRow,
    NodeRow,
    SavedRow,
    SubgraphRow,
    human_bytes,
    line_summary,
    op_summary,
)
from trainfuse.debug.timing import interleave
from trainfuse.integrations import demo, gpt
from trainfuse.integrations.cli import UsageError, app, load_target
from trainfuse.settings import settings

ROOT = Path(__file__).parents[2]
FIELDS = [
    "device", "backend", "capture", "steps", "loss_first", "loss_last", "grad_error_ratio",
    "groups_forward", "groups_backward", "groups_update", "aten_nodes", "eager_ms",
    "torch_compile_ms", "trainfuse_ms", "compile_s", "gate",
]  # fmt: skip


def trainfuse(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trainfuse", *arguments],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, **variables}, timeout=900,
    )  # fmt: skip


@pytest.fixture
def explanation() -> Explanation:
    nodes = (
        NodeRow("mul", "aten.mul.Tensor", "forward", "model.py:3"),
        NodeRow("mul_1", "aten.mul.Tensor", "forward", "model.py:4"),
        NodeRow("keep", "trainfuse.keep_mask.default", "forward"),
    )
    return Explanation(
        capture="regions",
        capture_reason="parameter hooks <b>",
        backend="inductor",
        graph_count=2,
        graph_break_count=1,
        break_reasons=("print at model.py:9",),
        subgraphs=(SubgraphRow("subgraph_0", ("mul",), ("forward_0",), (), 2048, ("mul",)),),
        groups=(GroupRow("forward_0", "forward", nodes, "row", 1536, "abcdef0123456789"),),
        refusals=(Refusal("slicing", "unknown operator", "lstm: aten.lstm", "model.py:7"),) * 2,
        cuda_graph="no: there is no GPU",
        aten_nodes=(NodeRow("mm", "aten.mm.default", "backward", "model.py:5"),),
        saved=(
            SavedRow(True, "aten.mm.default", "float32[8x8]", 2, 512, ("model.py:6",), "dear"),
            SavedRow(False, "aten.sin.default", "float32[8x9]", 3, 768, (), "cheap"),
        ),
        memory=MemoryRow(5 << 20, "backward_3", 3 << 20, 1 << 20, 4 << 20, 9 << 20),
    )


def test_explanation_prints_every_part(explanation: Explanation) -> None:
    text = str(explanation)
    for part in (
        "regions (parameter hooks <b>)", "breaks: 1", "print at model.py:9", "inductor",
        "no: there is no GPU", "1, saving 2.0 KiB, recomputing 1 nodes",
        "forward_0", "row", "mul x2", "1.5 KiB", "abcdef01", "compiles each phase",
        "aten.mm", "model.py:5", "unknown operator", "lstm", "model.py:7",
        "peak 5.0 MiB", "3.0 MiB kept", "9.0 MiB with", "4.0 MiB allowed",
        "kept for the backward", "float32[8x8]", "model.py:6", "dear",
        "computed again in the backward", "float32[8x9]", "cheap",
    ):  # fmt: skip
        assert part in text, part


def test_explanation_says_how_many_rows_it_left_out(explanation: Explanation) -> None:
    console = Console(width=120)
    with console.capture() as capture:
        explanation.print(console, groups=0)
    assert "and 1 more" in capture.get()


def test_explanation_is_json_and_html(explanation: Explanation, tmp_path: Path) -> None:
    data = json.loads(json.dumps(explanation.to_dict()))
    assert data["groups"][0]["nodes"][0]["where"] == "model.py:3"
    assert set(data) >= {
        "capture", "graph_count", "graph_break_count", "break_reasons", "subgraphs", "groups",
        "refusals", "cuda_graph", "aten_nodes",
    }  # fmt: skip
    page = explanation.to_html(tmp_path / "new" / "step.html").read_text()
    assert "parameter hooks &lt;b&gt;" in page
    assert "aten.mm.default" in page
    assert "unknown operator" in page
    assert "the least that was found is over memory_budget" in page
    assert "float32[8x9]" in page


def test_summaries() -> None:
    nodes = [NodeRow(str(i), f"aten.op{i}.default", "forward", f"m.py:{i}") for i in range(10)]
    assert op_summary(nodes, most=2) == "op0, op1, +8"
    assert line_summary(nodes, most=1) == "m.py:0, +9"
    assert [human_bytes(n) for n in (0, 1023, 1024, 3 << 30)] == [
        "0 B", "1023 B", "1.0 KiB", "3.0 GiB",
    ]  # fmt: skip


def test_doctor_names_the_machine_and_what_would_be_used() -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    assert torch.__version__ in result.output
    assert environment.default_backend() in result.output


def test_doctor_offers_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "cxx", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = {finding.name: finding for finding in environment.examine()}
    assert found["C++ compiler"].ok is False
    assert "g++" in found["C++ compiler"].fix
    assert found["backend"].value == "eager"
    with settings.patch(enabled=False):
        assert {f.name: f for f in environment.examine()}["fusion"].value == "off"


def test_settings_command(monkeypatch: pytest.MonkeyPatch) -> None:
    with settings.patch(max_plans=3):
        assert "max_plans = 3  [patch]" in CliRunner().invoke(app, ["settings"]).output
    assert "memory_budget" in CliRunner().invoke(app, ["settings", "--all"]).output


def test_cache_command_counts_and_clears(tmp_path: Path) -> None:
    entry = tmp_path / "kernels" / "abc"
    entry.mkdir(parents=True)
    (entry / "kernel.py").write_text("x" * 2048)
    with settings.patch(cache_dir=tmp_path):
        shown = CliRunner().invoke(app, ["cache"]).output
        assert "1 kernels, 2.0 KiB" in shown.replace("\n", "")
        assert "cleared" in CliRunner().invoke(app, ["cache", "--clear"]).output
    assert not (tmp_path / "kernels").exists()
    assert tmp_path.exists()


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("nofile", "FILE:FUNCTION"),
        ("missing.py:f", "FILE:FUNCTION"),
        ("{file}:g", "use one of: f"),
        ("{file}:f", "no example_inputs()"),
    ],
)
def test_explain_of_a_wrong_target(target: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "one.py"
    path.write_text("def f(x):\n    return x\n")
    with pytest.raises(UsageError, match=words.replace("(", r"\(").replace(")", r"\)")):
        load_target(target.format(file=path))


def test_explain_takes_one_input_or_a_tuple(tmp_path: Path) -> None:
    path = tmp_path / "two.py"
    path.write_text("def f(x):\n    return x\ndef example_inputs():\n    return 3\n")
    function, inputs = load_target(f"{path}:f")
    assert function(*inputs) == 3


def test_a_mistake_is_a_message_and_not_a_traceback() -> None:
    done = trainfuse("bench", "nonsense")
    assert done.returncode == 2
    assert "there is no benchmark suite 'nonsense'" in done.stderr
    assert "steps" in done.stderr
    assert "Traceback" not in done.stderr
    done = trainfuse("settings", TRAINFUSE_DISABLE="fusion")
    assert done.returncode == 2
    assert "TRAINFUSE_DISABLE: 'fusion' is not a token" in done.stderr
    assert "Traceback" not in done.stderr


def test_explain_example() -> None:
    done = trainfuse("explain", "examples/mlp.py:train_step", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["capture"] == "whole_step"
    assert (found["graph_count"], found["graph_break_count"]) == (1, 0)
    assert {group["phase"] for group in found["groups"]} >= {"forward", "backward"}
    assert any(node["where"] for group in found["groups"] for node in group["nodes"])
    assert "mlp.py" in done.stderr


def test_interleave_takes_turns() -> None:
    order: list[str] = []
    times = interleave(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")},
        torch.device("cpu"), rounds=3, steps=2, warmup=1,
    )  # fmt: skip
    assert order == ["a", "b"] + ["a", "a", "b", "b"] * 3
    assert all(timing.ms > 0 for timing in times.values())


def test_the_text_and_its_windows() -> None:
    codes = gpt.text()
    assert len(codes) > 300_000
    assert codes.max() < gpt.GPTConfig().vocabulary
    config = gpt.GPTConfig(context=16, batch=3)
    x, y = next(gpt.batches(codes, config, torch.device("cpu")))
    assert x.shape == y.shape == (3, 16)
    assert torch.equal(x[:, 1:], y[:, :-1])


def test_the_demo_ends_with_one_json_line(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = gpt.GPTConfig(layers=1, heads=2, width=32, context=16, batch=4)
    monkeypatch.setattr(demo, "ON_CPU", tiny)
    monkeypatch.setattr(demo, "ON_GPU", tiny)
    result = CliRunner().invoke(app, ["demo", "--steps", "12", "--json"])
    assert result.exit_code == 0, result.output
    lines = result.stdout.strip().splitlines()
    assert len(lines) == 1
    found = json.loads(lines[0])
    assert list(found) == FIELDS
    assert found["steps"] == 12
    assert found["capture"] == "whole_step"
    assert found["loss_last"] < found["loss_first"]
    assert found["grad_error_ratio"] <= 2
    assert found["gate"] == "pass"
    assert min(found[name] for name in ("eager_ms", "torch_compile_ms", "trainfuse_ms")) > 0
    assert min(found["groups_forward"], found["groups_backward"]) > 0


def test_a_folder_of_that_name_does_not_hide_the_package(tmp_path: Path) -> None:
    """A script beside a clone: an editable install must not be found after the clone's folder."""
    try:
        importlib.metadata.distribution("trainfuse")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("trainfuse is not installed here")
    (tmp_path / "trainfuse").mkdir()
    code = "import importlib.util as u; print(u.find_spec('trainfuse').origin)"
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=variables
    )
    assert found.stdout.strip().endswith("__init__.py"), found.stdout + found.stderr


def test_a_figure_that_could_not_be_had_is_null() -> None:
    values = dict.fromkeys(FIELDS, 1.0) | {"grad_error_ratio": float("nan"), "gate": "pass"}
    assert json.loads(demo.DemoResult(**values).to_json())["grad_error_ratio"] is None
