"""Elements counted in another order than memory has them, where an index says which is meant."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import trainfuse
from trainfuse.testing import assert_gradients_match

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.tanh().transpose(0, 1).reshape(-1),
    "transposed, then computed": lambda x: x.transpose(0, 1).reshape(-1).tanh(),
    "permuted": lambda x: x.view(2, 2, -1).permute(2, 0, 1).reshape(-1).exp(),
    "as it lies": lambda x: x.exp().reshape(-1),
}
PICKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gather": lambda v, i: v.gather(0, i),
    "take_along_dim": lambda v, i: v.take_along_dim(i, 0),
    "index": lambda v, i: v[i],
    "index_select": lambda v, i: v.index_select(0, i),
    "after a sum": lambda v, i: (v - v.logsumexp(0)).gather(0, i),
    "of several": lambda v, i: v.gather(0, torch.cat([i, i + 1])),
}


@pytest.mark.parametrize("at", [1, 5, 10])
@pytest.mark.parametrize("pick", PICKS)
@pytest.mark.parametrize("view", VIEWS)
def test_one_element_of_a_flattened_view(view: str, pick: str, at: int) -> None:
    torch.manual_seed(at)

    def picked(x: Tensor, i: Tensor) -> Tensor:
        return PICKS[pick](VIEWS[view](x), i).sin()

    x = torch.randn(4, 6, requires_grad=True)
    assert_gradients_match(
        picked,
        (x, torch.tensor([at])),
        compile_fn=lambda fn: trainfuse.compile(fn, backend="triton", verify="off"),
    )


@pytest.mark.parametrize("reduce", ["mean", "sum", "amax", "logsumexp"])
def test_a_total_after_a_reduction_without_dimensions(reduce: str) -> None:
    def total(x: Tensor, y: Tensor) -> Tensor:
        own = x.logsumexp(0) if reduce == "logsumexp" else getattr(x, reduce)()
        return (y * own).sin().mean()

    x, y = torch.randn((), requires_grad=True), torch.randn(3, 5, requires_grad=True)
    assert_gradients_match(total, (x, y))
