"""What ReLU keeps for its backward: a byte where its result is written for nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._decomp import get_decompositions
from training_graphs import training_graph

from autodiff.derive import cleanup
from autodiff.recompute import choose
from autodiff.reference import run_graph
from autodiff.signs import save_less_of_signs
from autodiff.verify import verify

VALUES = torch.tensor([-1.0, -0.0, 0.0, 2.0, torch.nan, torch.inf, -torch.inf, 1e-30])


PASSING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "copied in another order": lambda x, y: F.relu(x + y).t().contiguous(),
    "scaled": lambda x, y: F.relu(x + y) * 3.0,
    "a view of it": lambda x, y: F.relu((x + y).view(-1)).view(4, 2, 4) * 3.0,
    "threshold": lambda x, y: F.threshold(x + y, 0.1, 7.0) * 3.0,
}
OTHERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "an output": lambda x, y: F.relu(x + y),
    "an operand of a product": lambda x, y: F.relu(x + y) @ x.new_ones(8, 3),
    "made again of what is saved": lambda x, y: F.relu(x) * 3.0 + y,
}


def inputs() -> list[Tensor]:
    """Sums that are VALUES in one row."""
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    x[1], y[1] = VALUES, 0.0
    return [x, y]


WHOLE, IN_TWO = None, get_decompositions([torch.ops.aten.threshold_backward])


@pytest.mark.parametrize("table", [WHOLE, IN_TWO], ids=["whole", "decomposed"])
@pytest.mark.parametrize("name", PASSING)
def test_the_answer_is_kept(name: str, table: Any) -> None:
    args = inputs()
    tg = cleanup(training_graph(PASSING[name], args, [0, 1], table=table))
    smaller = save_less_of_signs(tg, ())
    assert smaller is not tg
    verify(smaller)
    kept, before = (choose(graph, static_inputs=()) for graph in (smaller, tg))
    assert {node.meta["val"].dtype for node in kept.saved} == {torch.bool}
    assert kept.report.saved_bytes < before.report.saved_bytes
    values = [*args, torch.randn_like(PASSING[name](*args))]
    for mine, theirs in zip(run_graph(smaller, values), run_graph(tg, values), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
        assert mine.stride() == theirs.stride()


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_in_memory_anyway_is_read(name: str) -> None:
    tg = cleanup(training_graph(OTHERS[name], inputs(), [0, 1]))
    assert save_less_of_signs(tg, ()) is tg


def test_gradients_of_another_layout() -> None:
    """where's result lies as the comparison does, which is as threshold_backward's does."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        return F.relu(x.t() + y).t().contiguous()

    x, y = inputs()[0], torch.randn(8, 4)
    tg = cleanup(training_graph(fn, [x, y], [0, 1]))
    values = [x, y, torch.randn(4, 8)]
    smaller = save_less_of_signs(tg, ())
    for mine, theirs in zip(run_graph(smaller, values), run_graph(tg, values), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
        assert mine.stride() == theirs.stride()
