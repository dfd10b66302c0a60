"""Gradient equivalence of the models that people train, each tiny; see the zoo.

As the steps of `test_steps`: three steps from equal state, every gradient, output and buffer within
twice eager's own error against fp64. Plain SGD, whose steps are as exact as the gradients: Adam
turns the rounding of a small gradient into a whole step, and what comes after compares luck.
"""

from __future__ import annotations

import pytest

from tests.gradients.compilers import BACKENDS, MASKS
from tests.gradients.zoo import NESTED, NESTED_WHOLE, ZOO
from trainfuse.testing import gradient_report

# Whole steps through our kernels are CI's, and a few of the other ways; the rest is nightly.
SAMPLED = {
    ("regions", "triton"): ("bert", "convnext", "unet", "experts_routed", "recommender", "gan"),
    ("whole", "inductor"): ("llama", "convnext", "experts"),
    ("regions", "inductor"): ("recommender", "unet"),
    ("whole", "eager"): ("bert", "unet"),
    ("regions", "eager"): ("t5", "experts_routed"),
}


def _marks(case: str, capture: str, backend: str) -> list[pytest.MarkDecorator]:
    sampled = SAMPLED.get((capture, backend))
    return [] if sampled is None or case in sampled else [pytest.mark.nightly]


@pytest.mark.parametrize(
    ("case", "capture", "backend"),
    [
        pytest.param(case, capture, backend, marks=_marks(case, capture, backend))
        for case in ZOO
        for capture in ("whole", "regions")
        for backend in BACKENDS
    ],
)
def test_gradients(case, capture, backend, compiler):
    compile_fn = compiler(capture, backend)
    gradient_report(lambda: ZOO[case]("cpu"), compile_fn, rng=MASKS[backend]).check()
    if case not in NESTED or NESTED_WHOLE:
        compile_fn.check()
