"""What pooling keeps for its backward: a byte an output, and no input; gradients stay the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pooling import CALLS, blank_operand_gradients
from torch import Tensor
from training_graphs import training_graph

from autodiff.pools import SHAPE_ALONE, save_less_of_pools
from autodiff.recompute import plan_recompute
from autodiff.reference import run_graph
from autodiff.verify import verify

aten: Any = torch.ops.aten

WINDOWS: dict[str, dict[str, Any]] = {
    "overlapping, padded": {"kernel_size": 3, "stride": 2, "padding": 1},
    "dilated": {"kernel_size": 2, "stride": 1, "dilation": 3},
    "ceil mode": {"kernel_size": 3, "stride": 2, "ceil_mode": True},
    "unequal": {"kernel_size": (2, 3), "stride": (3, 1), "padding": (1, 0)},
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("window", WINDOWS)
def test_max_pool_saves_one_byte_an_output(window: str, layout: Any) -> None:
    def fn(x: Tensor) -> Tensor:
        return F.max_pool2d(torch.exp(x), **WINDOWS[window])

    x = torch.randn(2, 3, 11, 14).contiguous(memory_format=layout)
    x[0, 0] = -torch.inf  # every place of a window is its maximum
    x[0, 1, :5] = torch.nan
    tg = training_graph(fn, [x], [0])
    smaller = save_less_of_pools(tg)
    verify(smaller)
    planned, report = plan_recompute(smaller)
    verify(planned)
    saved = {n.name: n.meta["val"].dtype for n in planned.nodes() if n.name in report.saved}
    assert list(saved.values()) == [torch.uint8]
    inputs = [x, torch.randn_like(fn(x))]
    for mine, theirs in zip(run_graph(planned, inputs), run_graph(tg, inputs), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
        assert mine.stride() == theirs.stride()


@pytest.mark.parametrize(("side", "dtype"), [(120, torch.uint8), (130, torch.int16)])
def test_offsets_take_the_smallest_type_that_holds_them(side: int, dtype: torch.dtype) -> None:
    def fn(x: Tensor) -> Tensor:
        return F.max_pool2d(x.sin(), 3, 2, 1)

    x = torch.randn(1, 1, side, side)
    tg = training_graph(fn, [x], [0])
    smaller = save_less_of_pools(tg)
    made = [n for n in smaller.nodes("forward") if n.target is aten._to_copy.default]
    assert [node.meta["val"].dtype for node in made] == [dtype]
    inputs = [x, torch.randn_like(fn(x))]
    for mine, theirs in zip(run_graph(smaller, inputs), run_graph(tg, inputs), strict=True):
        assert torch.equal(mine, theirs)


def test_indices_that_the_user_asks_for_stay_int64() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return F.max_pool2d(x.sin(), 2, return_indices=True)

    x = torch.randn(2, 2, 6, 6)
    planned, _ = plan_recompute(save_less_of_pools(training_graph(fn, [x], [0])))
    pooled, places, gradient = run_graph(planned, [x, torch.ones(2, 2, 3, 3)])
    leaf = x.clone().requires_grad_()
    wanted = fn(leaf)
    wanted[0].sum().backward()
    assert torch.equal(pooled, wanted[0])
    assert torch.equal(places, wanted[1])
    assert torch.equal(gradient, leaf.grad)


@pytest.mark.parametrize("name", CALLS)
def test_backward_reads_its_operand_for_the_shape_alone(name: str) -> None:
    """The claim of the table, on ATen: another operand of that layout, the same gradient."""
    blank, given = blank_operand_gradients(name, torch.randn(CALLS[name][1]))
    assert torch.equal(blank, given)


def test_every_row_of_the_table_is_tried() -> None:
    assert {f"aten.{name}_backward.default" for name in CALLS} == SHAPE_ALONE
