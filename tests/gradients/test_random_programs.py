"""Random training programs: compiled, each is as near to fp64 as eager is.

`TRAINFUSE_PROGRAMS=N TRAINFUSE_PROGRAMS_START=S pytest tests/gradients/test_random_programs.py`
runs other seeds; so does `python -m tests.gradients.programs`, in several processes.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from autodiff.jitter import Jitter
from tests.gradients.planted.table import FAULTS
from tests.gradients.programs import check as checks
from tests.gradients.programs.check import check
from tests.gradients.programs.control import Reference
from tests.gradients.programs.generate import generate
from tests.gradients.programs.render import render
from tests.gradients.programs.run import run_range, run_seed
from tests.gradients.programs.shrink import shrink
from tests.gradients.programs.tree import Compile, Leaf, Program, Statement, Update
from tests.gradients.programs.world import World
from trainfuse.codegen import lower as lowering

ROOT = Path(__file__).parents[2]
COUNT = int(os.environ.get("PROGRAMS", "500"))
START = int(os.environ.get("PROGRAMS_START", "0"))
CHUNK = 20
NIGHTLY = 20_000


@pytest.mark.parametrize("start", range(START, START + COUNT, CHUNK))
def test_programs(start):
    run_range(start, min(CHUNK, START + COUNT - start)).check()


@pytest.mark.nightly
@pytest.mark.parametrize("start", range(100_000, 100_000 + NIGHTLY, 5 * CHUNK))
def test_many_programs(start):
    run_range(start, 5 * CHUNK).check()


def test_a_seed_is_one_program():
    assert generate(7).program == generate(7).program
    assert len({render(generate(seed).program) for seed in range(8)}) == 8


def test_a_program_does_not_depend_on_where_memory_is_free():
    """What autograd has saved keeps its address to itself, after everything else of it is gone."""
    world = World(0)
    world.add(Leaf("p0", "parameter", (4, 4)))
    world.run(Statement(("v0",), "p0.sin().exp().sum()"))
    world.values.clear()
    assert len(world.saved) == 2
    assert all(storage.data_ptr() == address for address, storage in world.saved.items())


def test_a_view_that_torch_refuses_to_show_is_not_written():
    """One of several, whose base was written to: to ask for its history raises."""
    world = World(0)
    world.add(Leaf("p0", "parameter", (4, 4)))
    for targets, text in (
        (("v0",), "p0 * 2"),
        (("v1", "v2"), "v0.chunk(2)"),
        ((), "v0.mul_(2)"),
    ):
        world.run(Statement(targets, text))
    assert not world.writable("v1")


def test_a_process_for_the_gpu_stays_native(monkeypatch):
    """Programs are tried on the CPU, where nothing of ours runs: kernels stay compiled ones.

    With the variable set behind Triton's back, half of Inductor's functions are interpreted.
    """
    monkeypatch.delenv("TRITON_INTERPRET")
    program = generate(6, "cuda").program
    assert "TRITON_INTERPRET" not in os.environ
    assert "TRITON_INTERPRET" not in render(program, "cuda")
    assert "TRITON_INTERPRET" in render(program)


def test_most_attempts_are_of_use():
    """A generator that drops nearly everything tests what is left."""
    made = [generate(seed) for seed in range(60)]
    assert sum(len(one.dropped) for one in made) < 3 * len(made)


def _tanh(capture: str = "whole", scale: str = "1.0") -> Program:
    """A program whose fifth statement is a tanh, among others that are not needed."""
    lines = (
        "x0 * p0",
        "v0.sin() + p1",
        "torch.softmax(v1, 1)",
        "v2.transpose(0, 1)",
        f"torch.tanh(v3 * {scale})",
        "v4.square() + v3",
    )
    body = [Statement((f"v{i}",), text) for i, text in enumerate(lines)]
    body.append(Statement(("t0",), "v5.square().mean()"))
    leaves = (
        Leaf("x0", "input", (5, 13)),
        Leaf("p0", "parameter", (5, 13)),
        Leaf("p1", "parameter", (13,)),
    )
    how = Compile(capture, "triton", (("fallback", False), ("verify", "off")))
    return Program(
        3, leaves, tuple(body), (("t0",),), outputs=("v4",), update=Update(lr=5.0), compile=how
    )


# Kernels with a tanh store a thousandth too much: as a program of its own, a conftest.
WRONG_TANH = """
import os, re
os.environ["TRITON_INTERPRET"] = "1"
from trainfuse.codegen import lower as lowering
print_module = lowering.print_module

def print_wrong(module, target):
    text = print_module(module, target)
    if "tanh" not in text:
        return text
    return re.sub(r"tl\\.store\\((out\\d+[^,]*), (\\w+)", r"tl.store(\\1, \\2 * 1.001", text)

lowering.print_module = print_wrong
"""


@pytest.fixture
def wrong_tanh(monkeypatch):
    """Kernels with a tanh store a thousandth too much."""
    monkeypatch.setattr(lowering, "print_module", lowering.print_module)  # put back afterwards
    exec(WRONG_TANH, {})


@pytest.mark.parametrize("capture", ["whole", "model", "step", "function"])
def test_a_wrong_kernel_is_caught(capture, wrong_tanh):
    verdict = check(_tanh(capture))
    assert verdict.kind == "wrong", verdict.trace
    assert verdict.capture == ("whole_step" if capture == "whole" else "regions")


# The first seed, of those that run without the gate, whose program shows the fault.
CAUGHT = {
    "factor": 3,
    "forward factor": 3,
    "wrong element": 3,
    "bad tail mask": 13,
    "lost second cotangent": 9,
    "mean not divided": 3,
    "gradient lost": 14,
    "mutation lost": 14,
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", CAUGHT)
def test_a_planted_fault_is_caught(name, monkeypatch):
    """By one small program; after a change of the vocabulary, look for the seed again."""
    program = generate(CAUGHT[name]).program
    assert check(program).kind == "right"
    (fault,) = [fault for fault in FAULTS if fault.name == name]
    hits = []
    fault.plant(monkeypatch, hits)
    assert check(program).kind == "wrong"
    assert hits


def test_a_failure_is_shrunk(wrong_tanh):
    small = shrink(_tanh(), lambda program: check(program).kind == "wrong")
    assert small.statements <= 3, render(small)
    assert "tanh" in render(small)
    assert len(small.leaves) == 1
    assert small.leaves[0].shape <= (1, 2)
    assert small.steps == 1
    assert not small.outputs


def test_a_crash_is_reported_with_a_file_that_runs_alone(monkeypatch, tmp_path):
    """And that file, run where nothing is wrong, passes."""

    def broken(*_):
        raise LookupError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(lowering, "print_module", broken)
        seed = next(s for s in range(50) if generate(s).program.compile.backend == "triton")
        outcome = run_seed(seed, shrink_s=20.0)
    assert outcome.verdict.kind == "crash"
    assert "planted" in outcome.report
    assert f"--start {seed}" in outcome.report
    assert "tests." not in outcome.text
    done = _alone(tmp_path, outcome.text)
    assert done.returncode == 0, done.stdout


def test_the_file_of_a_wrong_program_fails_alone(wrong_tanh, tmp_path):
    """In a process of its own, under pytest, with the same fault."""
    done = _alone(tmp_path, render(_tanh()), WRONG_TANH)
    assert done.returncode == 1, done.stdout
    assert "further from fp64" in done.stdout


def _alone(folder: Path, text: str, conftest: str = "") -> subprocess.CompletedProcess[str]:
    """Run a rendered program in a folder where nothing else is."""
    (folder / "test_alone.py").write_text(text)
    (folder / "conftest.py").write_text(conftest)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_alone.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def test_an_ill_conditioned_program_is_not_fair():
    """What is left of a cancellation is rounding alone: eager, rounded otherwise, fails too."""
    fair = _tanh()
    assert Reference(fair).fair()
    body = list(fair.body)
    body[3] = Statement(("v3",), "(v2.sum(1, keepdim=True).t() - 1.0) * 1e5")
    short = (*body[:5], Statement(("t0",), "v4.mean()"))
    unfair = dataclasses.replace(fair, body=short, outputs=())
    assert not Reference(unfair).fair()


@pytest.mark.parametrize(
    ("ratio", "failing", "lucky"), [(2.1, 9, True), (2.1, 5, False), (4.1, 9, False)]
)
def test_a_failure_is_luck_where_no_other_draw_of_the_data_shows_it(ratio, failing, lucky):
    draws = []

    def passes(program, _):
        draws.append(program.seed)
        return len(draws) < failing

    runs = SimpleNamespace(k=2.0, explains=lambda _: False)
    program = generate(3).program
    with (
        mock.patch.object(checks, "reference", return_value=runs),
        mock.patch.object(checks, "_passes", passes),
    ):
        assert checks._explained(program, f"step 0 p0: ratio {ratio}", "cpu") == lucky
    assert program.seed not in draws
    assert len(set(draws)) == len(draws) == (0 if ratio > 4 else min(failing, 8))


def test_eager_s_other_roundings_differ_from_eager():
    runs = Reference(_tanh())
    errors = runs.strayed(Jitter(0)).errors
    assert any(e.ours != e.eager for e in errors)
    assert 0 < max(e.ours for e in errors) < 1e-5
