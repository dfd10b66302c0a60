"""Every differentiable operator of op_db through our own code generator: see tests/gradients/op_db.

In CI a few small samples of each, in fp32, and training steps of some; with `-m nightly` steps of
all, every sample, and the other types. A failure ends with the command that runs its operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.gradients.op_db import coverage, suite
from tests.gradients.op_db.calls import Call, permuted, scattered
from tests.gradients.op_db.exclusions import LAID_OUT_OTHERWISE, ROWS_ONLY, excluded
from tests.gradients.op_db.extremal import extremal
from tests.gradients.op_db.runs import differentiate_twice
from tests.gradients.op_db.samples import EVERY, OPERATORS, POINTWISE, choose

EXCLUDED = excluded()
COMPARED = tuple(name for name in OPERATORS if name not in EXCLUDED)
BATCH = 8  # samples in one plan of the nightly run

# op_db's samples make torch warn of everything that it has to warn of
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.covers("B op_db")
@pytest.mark.parametrize("name", COMPARED)
def test_operator(name):
    """By itself, with extremal values and gaps in memory; and as documented."""
    calls = suite.calls_of(OPERATORS[name])
    assert calls, "torch itself can differentiate none of the samples"
    explanation = suite.check_all(calls, suite.check_alone)
    version, lines = coverage.recorded()
    if version == coverage.version():
        row = str(coverage.row_of(name, explanation))
        assert lines.get(name) == row, f"out of date: run `{coverage.COMMAND}` and review the diff"


def some(names: Sequence[str], share: int) -> list[Any]:
    """One name in so many for every run, the others for the nightly one."""
    nightly = pytest.mark.nightly
    return [n if not i % share else pytest.param(n, marks=nightly) for i, n in enumerate(names)]


@pytest.mark.parametrize("name", some(COMPARED, 4))
def test_step(name):
    """Amid a training step, fused as by default."""
    suite.check_all(suite.calls_of(OPERATORS[name])[:1], suite.check_step)


TWICE = tuple(name for name in COMPARED if OPERATORS[name].info.supports_gradgrad)


@pytest.mark.parametrize("name", some(TWICE, 16))
def test_second_derivative(name):
    calls = choose(OPERATORS[name].samples(torch.float32), 2)
    calls = [c for c in calls if suite.eager_error(c, differentiate_twice) is None]
    if not calls:
        pytest.skip("torch itself can differentiate none of the samples twice")
    suite.check_all(calls, suite.check_twice)


def test_table_has_every_operator():
    version, lines = coverage.recorded()
    if version != coverage.version():
        pytest.skip(f"the table is of torch {version}")
    assert lines.keys() == OPERATORS.keys()
    for name, reason in EXCLUDED.items():
        assert reason in lines[name]


@pytest.mark.parametrize("name", EXCLUDED)
def test_excluded_operator_can_t_be_compared(name):
    """Torch raises on its fp32 samples, or another entry of op_db is the same operator."""
    operator = OPERATORS[name]
    twins = [op for op in COMPARED if OPERATORS[op].info.name == operator.info.name]
    try:
        calls = list(operator.samples(torch.float32))
    except Exception:
        return
    assert twins or all(suite.eager_error(call) for call in calls)


def _batches(calls: list[Call]) -> list[list[Call]]:
    return [calls[i : i + BATCH] for i in range(0, len(calls), BATCH)]


@pytest.mark.covers("B op_db")
@pytest.mark.nightly
@pytest.mark.parametrize("check", [suite.check_alone, suite.check_step])
@pytest.mark.parametrize("name", COMPARED)
def test_all_samples(name, check):
    """Every sample, as it is and with gaps, and one of each kind on extremal values."""
    operator = OPERATORS[name]
    calls = [c for c in operator.samples(torch.float32) if c.elements <= EVERY]
    apart = [other for call in calls if (other := scattered(call)) is not None]
    odd = [extremal(call, name in POINTWISE) for call in choose(calls, 8)]
    for batch in _batches(suite.able([*calls, *apart, *odd], check)):
        suite.check_all(batch, check)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in COMPARED if name not in ROWS_ONLY])
def test_permuted_operands(name):
    """Dense, not in rows: results and gradients are laid out as eager's, but for a known few."""
    calls = (permuted(call) for call in choose(OPERATORS[name].samples(torch.float32), 12))
    turned = suite.able([call for call in calls if call is not None][:2], suite.check_alone)
    if not turned:
        pytest.skip("no sample has a matrix")
    found = [p for _, problems in suite.blame(turned, suite.check_alone) for p in problems]
    if name in LAID_OUT_OTHERWISE:
        found = [problem for problem in found if " has strides " not in problem]
    assert not found


OTHER_TYPES = (torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.covers("B op_db")
@pytest.mark.nightly
@pytest.mark.parametrize("dtype", OTHER_TYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("name", OPERATORS)
def test_other_types(name, dtype):
    operator = OPERATORS[name]
    if not operator.takes(dtype):
        pytest.skip(excluded(dtype)[name])
    calls = suite.calls_of(operator, dtype)
    if not calls:
        pytest.skip("torch itself can differentiate none of the samples")
    suite.check_all(calls, suite.check_alone)
    suite.check_all(calls[:1], suite.check_step)
