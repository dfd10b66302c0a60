"""The gate and comparisons that rounding decides: either answer passes, a wrong one does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.runtime.graphs import group_of, trace
from trainfuse.runtime import ties
from trainfuse.runtime.gate import Gate

ROWS, COLUMNS = 60, 50
NEAR, FAR = (7, 3), (11, 4)


def masked(x: Tensor, w: Tensor, b: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """A gradient behind a ReLU whose argument is made again, and its sums over rows."""
    passed = torch.where(torch.relu(x * w + b) <= 0, 0.0, g)
    return passed, passed.sum(0)


def arguments() -> list[Tensor]:
    """x * w + b is 1e-9 at NEAR, where it is exact, and 0.5 at FAR; elsewhere it is rounded."""
    x, w, b, g = (torch.randn(ROWS, COLUMNS) for _ in range(4))
    x[NEAR], w[NEAR], b[NEAR], g[NEAR] = 1e-9, 1.0, 0.0, 2.0
    x[FAR], w[FAR], b[FAR], g[FAR] = 0.5, 1.0, 0.0, 2.0
    return [x, w, b, g]


def verdict(fn: Any, args: list[Tensor], results: list[Tensor]) -> str | None:
    """What the gate says of these results."""
    tg = trace(fn, args)
    nodes = tg.nodes()
    group = group_of(tg, "forward_0", nodes)
    env = dict(zip(tg.graph.find_nodes(op="placeholder"), args, strict=True))
    refs = Gate().references(nodes, {n: env[n] for n in group.inputs}, group.outputs)
    assert refs is not None
    return Gate().compare(results, refs)


@pytest.mark.parametrize(("place", "passes"), [(NEAR, True), (FAR, False)], ids=["near", "far"])
def test_either_answer_of_a_near_comparison_passes(place: tuple[int, int], passes: bool) -> None:
    torch.manual_seed(0)
    args = arguments()
    passed, sums = masked(*args)
    assert verdict(masked, args, [passed, sums]) is None
    passed[place] = 0.0
    wrong = verdict(masked, args, [passed, passed.sum(0)])
    assert (wrong is None) == passes, wrong
    if passes:  # the elements beside it are held to the rule as ever
        passed[FAR] *= 1.01
        assert verdict(masked, args, [passed, passed.sum(0)]) is not None


def test_an_answer_that_is_a_result() -> None:
    """A forward that keeps a comparison for the backward returns it, beside what it decides."""

    def fn(x: Tensor, w: Tensor, b: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        below = torch.relu(x * w + b) <= 0
        return below, torch.where(below, 0.0, g)

    torch.manual_seed(0)
    args = arguments()
    below, passed = fn(*args)
    assert verdict(fn, args, [below, passed]) is None
    below[NEAR] = True
    assert verdict(fn, args, [below, passed]) is None
    assert verdict(fn, args, [~below, passed]) is not None


def test_only_rounded_values_tie() -> None:
    """What compares inputs, or constants, has one right answer."""

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.where(x <= 0, 0.0, y), torch.where(y > x, x, y), torch.where(x * y > 1, x, y)

    nodes = trace(fn, [torch.randn(4, 5), torch.randn(4, 5)]).nodes()
    [decision] = ties.decisions(nodes)
    assert decision.right == 1
    assert str(decision.left.target) == "aten.mul.Tensor"
