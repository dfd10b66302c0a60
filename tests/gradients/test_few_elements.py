"""The rule for tensors of few elements, whose errors are chance: no equal program fails by it."""

from __future__ import annotations

import math

import pytest
import torch

from autodiff.compare import GradientReport, TensorError, limit, pooled
from tests.gradients.ratios import row


def error(ratio: float, elements: int = 6, step: int = 0) -> TensorError:
    return TensorError("bias", step, ratio, 1.0, ratio, elements=elements)


def report(*errors: TensorError, moved: float | None = 0.1) -> GradientReport:
    return GradientReport(errors, 2.0, moved)


@pytest.mark.parametrize("count", [1, 2, 3, 6, 9])
def test_equally_good_errors_are_within_the_limit(count: int) -> None:
    """Once in 1e5 they aren't: the limit is no wider than that takes, either."""
    generator = torch.Generator().manual_seed(count)
    draws = torch.randn(1_000_000, count, generator=generator).square().mean(1).sqrt()
    beyond = int((draws > limit(2.0, count)).sum())
    assert beyond < 30
    assert int((draws > 0.8 * limit(2.0, count)).sum()) > 30


def test_the_limit_is_k_of_more_elements() -> None:
    assert limit(2.0, 1) < 5
    assert limit(2.0, 12) == limit(2.0, 1000) == 2.0
    assert limit(3.0, 6) == 3.0
    limits = [limit(2.0, n) for n in range(1, 20)]
    assert limits == sorted(limits, reverse=True)


def test_a_report_fails_beyond_the_limit_of_each_tensor() -> None:
    assert report(error(2.3), error(1.9, 5000)).ok
    assert report(error(2.5)).failures
    assert report(error(2.1, 12)).failures
    assert report(error(4.0, 1)).ok
    assert report(error(math.nan, 1)).failures


def test_runs_are_pooled_by_tensor() -> None:
    lucky = [report(error(r), error(0.5, step=1)) for r in (3.4, 1.0, 0.7, 1.2)]
    assert lucky[0].failures
    assert pooled(lucky).check().ratio < 2
    worse = [report(error(2.6), error(2.4, step=1)) for _ in range(4)]
    assert len(pooled(worse).failures) == 1
    assert "of 8, at worst 2.60" in pooled(worse).failures[0].note
    # a fault of one step alone
    assert pooled([report(*[error(0.7, step=i) for i in range(15)], error(20.0))]).failures
    for broken in (math.inf, math.nan):
        assert pooled([report(error(broken)), report(error(0.1))]).failures
    assert not pooled([report(error(1.0), moved=0.0), report(error(1.0))]).ok


def test_many_seeds_tell_luck_from_a_fault() -> None:
    """The table of `python -m tests.gradients.ratios`: equal errors have a mean of 1."""
    generator = torch.Generator().manual_seed(0)

    def made(factor: float):
        draws = torch.randn(8, 4, 2, generator=generator).abs().tolist()
        return row(
            [
                [TensorError("b", 0, factor * a, b, factor * a / b, elements=6) for a, b in steps]
                for steps in draws
            ]
        )

    assert abs(made(1.0).away) < 3
    worse = made(4.0)
    assert worse.mean > 2
    assert worse.away > 4
