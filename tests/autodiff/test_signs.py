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

from autodiff.recompute import plan_recompute
from autodiff.reference import run_graph
from autodiff.signs import save_less_of_signs
from autodiff.verify import verify

VALUES = torch.tensor([-1.0, -0.0, 0.0, 2.0, torch.nan, torch.inf, -torch.inf, 1e-30])


PASSING: dict[str, Callable[[Tensor], Tensor]] = {
    "copied in another order": lambda x: F.relu(x.sin() + x.cos()).t().contiguous(),
    "scaled": lambda x: F.relu(x.sin() + x.cos()) * 3.0,
    "a view of it": lambda x: F.relu((x.sin() + x.cos()).view(-1)).view(4, 2, 4) * 3.0,
    "threshold": lambda x: F.threshold(x.sin(), 0.1, 7.0) * 3.0,
}
WRITTEN: dict[str, Callable[[Tensor], Tensor]] = {
    "an output": lambda x: F.relu(x.sin() + x.cos()),
    "an operand of a product": lambda x: F.relu(x.sin() + x.cos()) @ x.new_ones(8, 3),
}


def inputs() -> Tensor:
    x = torch.randn(4, 8)
    x[1] = VALUES
    return x


WHOLE, IN_TWO = None, get_decompositions([torch.ops.aten.threshold_backward])


@pytest.mark.parametrize("table", [WHOLE, IN_TWO], ids=["whole", "decomposed"])
@pytest.mark.parametrize("name", PASSING)
def test_the_answer_is_kept(name: str, table: Any) -> None:
    x = inputs()
    tg = training_graph(PASSING[name], [x], [0], table=table)
    smaller = save_less_of_signs(tg)
    assert smaller is not tg
    verify(smaller)
    planned, report = plan_recompute(smaller)
    verify(planned)
    saved = {n.meta["val"].dtype for n in planned.nodes() if n.name in report.saved}
    assert saved <= {torch.bool}
    before = plan_recompute(tg)[1]
    assert report.saved_bytes <= before.saved_bytes
    values = [x, torch.randn_like(PASSING[name](x))]
    for mine, theirs in zip(run_graph(planned, values), run_graph(tg, values), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
        assert mine.stride() == theirs.stride()


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_anyway_is_read(name: str) -> None:
    tg = training_graph(WRITTEN[name], [inputs()], [0])
    assert save_less_of_signs(tg) is tg


def test_gradients_of_another_layout() -> None:
    """where's result lies as the comparison does, which is as threshold_backward's does."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        return F.relu(x.sin().t() + y).t().contiguous()

    x, y = inputs(), torch.randn(8, 4)
    tg = training_graph(fn, [x, y], [0, 1])
    values = [x, y, torch.randn(4, 8)]
    smaller = save_less_of_signs(tg)
    for mine, theirs in zip(run_graph(smaller, values), run_graph(tg, values), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
        assert mine.stride() == theirs.stride()
