"""Single operations: a kernel where ATen's own is slow, ATen where it is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autodiff.derive import cleanup, decompose
from tests.autodiff.training_graphs import training_graph
from tests.fusion.helpers import check, forward_graph, supports
from trainfuse.fusion.grouping import plan_fusion

randn, randint = torch.randn, torch.randint

# (function, its inputs, whether the one operation is a kernel of ours)
CASES: dict[str, tuple[Callable[..., Tensor], Callable[[], list[Tensor]], bool]] = {
    "equal layouts": (lambda x, y: x * y, lambda: [randn(64, 96), randn(64, 96)], False),
    "a number": (lambda x: x * 3, lambda: [randn(64, 96)], False),
    "a scalar tensor": (lambda x, y: x * y, lambda: [randn(64, 96), randn(())], False),
    "a row": (lambda x, b: x + b, lambda: [randn(64, 96), randn(96)], True),
    "a column": (lambda x, b: x + b, lambda: [randn(64, 96), randn(64, 1)], True),
    "dims of one element": (lambda x, y: x * y, lambda: [randn(1, 4096), randn(4096)], False),
    "permuted": (lambda x, y: x + y.t(), lambda: [randn(64, 96), randn(96, 64)], True),
    "a permuted copy": (lambda x: x.t().contiguous(), lambda: [randn(64, 96)], True),
    "all of them permuted": (lambda x: x.t() * 2, lambda: [randn(64, 96)], False),
    "small": (lambda x, b: x + b, lambda: [randn(8, 96), randn(96)], False),
    "sum over rows": (lambda x: x.sum(0), lambda: [randn(64, 96)], True),
    "sum over rows, kept": (lambda x: x.sum((0, 1), True), lambda: [randn(8, 8, 96)], True),
    "sum over columns": (lambda x: x.sum(-1), lambda: [randn(64, 96)], False),
    "sum over both ends": (lambda x: x.sum((0, 2)), lambda: [randn(8, 16, 96)], False),
    "sum over a permuted row": (lambda x: x.t().sum(-1), lambda: [randn(64, 96)], True),
    "sum of all": (lambda x: x.sum(), lambda: [randn(64, 96)], False),
    "rows of a table": (F.embedding, lambda: [randint(50, (9, 7)), randn(50, 96)], True),
    "selected rows": (lambda i, x: x[i], lambda: [randint(50, (30,)), randn(50, 96)], True),
    "selected columns": (lambda i, x: x[:, i], lambda: [randint(50, (30,)), randn(96, 50)], False),
    "selected elements": (
        lambda i, x: x[i, i],
        lambda: [randint(50, (3000,)), randn(50, 50)],
        False,
    ),
    "largest of rows": (lambda x: x.amax(0), lambda: [randn(64, 96)], True),
}


@pytest.mark.parametrize("name", CASES)
def test_one_operation(name: str) -> None:
    fn, make, expected = CASES[name]
    tg = cleanup(forward_graph(fn, make()))
    plan = plan_fusion(tg, supports=supports)
    check(tg, plan)
    assert len(plan.groups) == expected
    if not expected:
        assert any("alone" in refusal.reason for refusal in plan.refusals)


def test_a_bias_gradient_is_a_kernel() -> None:
    def step(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, w, b)

    tg = cleanup(decompose(training_graph(step, [randn(64, 32), randn(96, 32), randn(96)], [1, 2])))
    plan = plan_fusion(tg, supports=supports)
    check(tg, plan)
    assert [(g.phase, g.domain.kind) for g in plan.groups] == [("backward", "column")]
