"""Loss kernels: reviewed as code, compiled for a GPU that is not here, moving what they must."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.autodiff.training_graphs import step_graph
from tests.codegen.loss_kernels import CASES, head_kernels, kernels
from trainfuse.capture.compat import capture_decompositions
from trainfuse.codegen.targets import H200
from trainfuse.fields import Settings
from trainfuse.fusion.flow import value_bytes
from trainfuse.pipeline import Facts, run_passes

ROOT = Path(__file__).parent.parent.parent
GOLDEN = ["cross_entropy_4096", "cross_entropy_32000", "smoothing_50257"]
# ptxas takes seconds for each: the rest at night.
QUICK = ["cross_entropy_32000", "cross_entropy_128256", "smoothing_50257"]


@pytest.mark.parametrize("name", GOLDEN)
def test_source(name: str, golden: Callable[[str, str], None]) -> None:
    texts = []
    for group, kernel in kernels(name):
        if group.domain.kind == "row":
            texts += [
                f"# {x.function}: grid {x.grid}, {x.num_warps} warps" for x in kernel.launches
            ]
            texts.append(kernel.source)
    golden(f"kernels/{name}.txt", "\n".join(texts))


@pytest.mark.parametrize("name", CASES)
def test_logits_are_read_by_one_kernel(name: str) -> None:
    """Its floor: the logits (and what else is as large) once, the gradient once, a few numbers."""
    _, rows, classes, dtype = CASES[name]
    wide = [
        group
        for group, _ in kernels(name)
        if any(n.meta["val"].numel() == rows * classes for n in group.inputs)
    ]
    if name.startswith("class_weights"):
        # the lookup of a row's weight draws one of its sums into another kernel
        assert len(wide) == 2
        return
    (group,) = wide
    read = [n for n in group.inputs if n.meta["val"].numel() == rows * classes]
    floor = sum(map(value_bytes, read)) + rows * classes * dtype.itemsize
    moved = sum(map(value_bytes, (*group.inputs, *group.outputs)))
    assert moved <= 1.01 * floor


def compiled(*names: str) -> list[dict[str, int]]:
    """In a process of its own: with TRITON_INTERPRET set, triton compiles nothing."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "tests.codegen.loss_kernels", *names],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def no_spills(uses: list[dict[str, int]]) -> None:
    assert [(use["name"], use["function"]) for use in uses if use["stack"]] == []
    rows = [use for use in uses if use["function"] == "row_kernel"]
    assert {use["vector"] for use in rows} == {16}


def test_no_spills() -> None:
    no_spills(compiled(*QUICK))


def test_a_head_in_chunks() -> None:
    """Four chunks, few kernels: each may write the gradient over the logits, and none spills."""
    found = head_kernels()
    chunks = [
        (group, kernel)
        for group, kernel in found
        if any(n.meta["val"].shape == (2048, 128256) for n in group.inputs)
    ]
    assert len(chunks) == 4
    # the first one's constants stand elsewhere
    assert len({kernel.key for _, kernel in chunks}) <= 2
    for group, kernel in chunks:
        (logits,) = (i for i, n in enumerate(group.inputs) if n.meta["val"].dim() == 2 and
                     n.meta["val"].shape[1] == 128256)  # fmt: skip
        written = [i for i, n in enumerate(group.outputs) if n.meta["val"].shape[1] == 128256]
        assert {(i, logits) for i in written} <= kernel.in_place
    no_spills(compiled("head"))


@pytest.mark.nightly
def test_no_spills_in_any() -> None:
    uses = compiled(*CASES)
    assert {use["name"] for use in uses} == set(CASES)
    no_spills([use for use in uses if use["name"] != "cross_entropy_int64"])
    assert all(use["stack"] == 0 for use in uses)


def half_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Log-probabilities in the type of the logits."""
    return functional.cross_entropy(logits, target)


def rounded_loss(logits: Tensor, target: Tensor) -> Tensor:
    """The program's own cast."""
    lost = logits.log_softmax(-1, torch.float32).to(torch.bfloat16).float()
    return functional.nll_loss(lost, target)


@pytest.mark.parametrize("loss", [half_loss, rounded_loss])
def test_what_an_operator_gives_is_not_rounded_in_registers(loss: Callable[..., Tensor]) -> None:
    """In the pieces of an operator as in operators of one piece; a cast in the program rounds."""
    shapes = [((64, 32000), torch.bfloat16), ((64,), torch.int64)]
    graph = step_graph(loss, shapes, [0], capture_decompositions())
    state = run_passes(graph, Facts(Settings(autotune="off"), H200, "triton", "whole_step"))
    assert state.fusion is not None
    (group,) = (group for group in state.fusion.groups if group.domain.kind == "row")
    source = state.kernels[group.name].source
    rounds = [line for line in source.splitlines() if ".to(tl.bfloat16).to(tl.float32)" in line]
    assert bool(rounds) == (loss is rounded_loss)
    assert ") * libdevice.exp(-t" in source  # of log-probabilities that aren't rounded, either way
