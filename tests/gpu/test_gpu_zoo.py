"""The models that people train, natively: whole steps as CUDA graphs, regions, bf16 autocast."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from autodiff.compare import pooled
from tests.gradients.cases import mixed_precision
from tests.gradients.compilers import MASKS, Compiler
from tests.gradients.zoo import DATA_DEPENDENT, NESTED, NESTED_WHOLE, ZOO
from trainfuse.testing import Training, gradient_report

SEEDS = 4
"""Runs through bf16 that are judged as one: see `autodiff.compare.pooled`."""


@pytest.fixture
def compile_fn(request: pytest.FixtureRequest) -> Iterator[Compiler]:
    """A Compiler, closed at the end."""
    made = Compiler(*request.param)
    yield made
    made.close()


def _mixed(case: str) -> Training:
    with mixed_precision():
        return ZOO[case]("cuda")


def _some(*sampled: str) -> list[Any]:
    """The zoo, all but these nightly."""
    return [
        case if case in sampled else pytest.param(case, marks=pytest.mark.nightly) for case in ZOO
    ]


@pytest.mark.parametrize("compile_fn", [("whole", "triton")], indirect=True, ids=["whole"])
@pytest.mark.parametrize("case", ZOO)
def test_whole_step_replayed(case, compile_fn):
    """Six steps: the first is checked, the second captures, the rest are replays.

    A tensor is judged by all of them: of hundreds of small ones in a step, one exceeds by chance.
    """
    pooled([gradient_report(lambda: ZOO[case]("cuda"), compile_fn, steps=6)]).check()
    if case in NESTED and not NESTED_WHOLE:
        return
    compile_fn.check()
    (step,) = compile_fn.steps
    graphs = 0 if case in DATA_DEPENDENT else 1
    assert step.stats()["cuda_graphs"] == graphs, step.explain().cuda_graph


@pytest.mark.parametrize("compile_fn", [("whole", "triton")], indirect=True, ids=["whole"])
@pytest.mark.parametrize("case", _some("llama", "bert", "convnext", "unet", "experts"))
def test_bf16_autocast(case, compile_fn):
    if case in NESTED:
        pytest.skip("it has no autocast: its steps are its own")
    pooled(
        [gradient_report(lambda: _mixed(case), compile_fn, steps=4, seed=i) for i in range(SEEDS)]
    ).check()
    compile_fn.check()


@pytest.mark.parametrize("compile_fn", [("regions", "triton")], indirect=True, ids=["regions"])
@pytest.mark.parametrize("case", _some("t5", "vit", "unet", "experts_routed", "gan"))
def test_regions(case, compile_fn):
    gradient_report(lambda: ZOO[case]("cuda"), compile_fn).check()
    compile_fn.check()


@pytest.mark.parametrize(
    "compile_fn", [("whole", "inductor"), ("whole", "eager")], indirect=True, ids=lambda p: p[1]
)
@pytest.mark.parametrize("case", _some("llama", "unet", "pinn"))
def test_other_backends(case, compile_fn):
    rng = MASKS[compile_fn.backend]
    gradient_report(lambda: ZOO[case]("cuda"), compile_fn, rng=rng).check()
    if case not in NESTED or NESTED_WHOLE:
        compile_fn.check()
