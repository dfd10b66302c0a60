"""Gradient equivalence of training steps: eight models, two captures, three code generators.

At least three steps each, from equal state and generator, with weights that move; every gradient,
output and running statistic within twice eager's own error against fp64.
"""

from __future__ import annotations

import pytest

from tests.gradients.cases import CASES
from tests.gradients.compilers import BACKENDS, MASKS
from trainfuse.testing import gradient_report


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("capture", ["whole", "regions"])
@pytest.mark.parametrize("case", CASES)
def test_gradients(case, capture, backend, compiler):
    compile_fn = compiler(capture, backend)
    gradient_report(lambda: CASES[case]("cpu"), compile_fn, rng=MASKS[backend]).check()
    compile_fn.check()


@pytest.mark.parametrize("backend", ["triton", "inductor"])
def test_more_steps_than_batches(backend, compiler):
    """Batches come round again and the momentum is old: no state is stale."""
    compile_fn = compiler("whole", backend)
    gradient_report(lambda: CASES["mlp"]("cpu"), compile_fn, steps=8).check()
    assert compile_fn.steps[0].stats()["plans"] == 1
