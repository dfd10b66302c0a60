"""Elements counted in another order than memory has them, where an index says which is meant."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

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


FOUR = torch.ones(1, 4, 1, dtype=torch.int64)


def of_rows(x: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:])


# x is [3, 4, 6], its rows are [4, 6] and their parts [6]; an index for each row or part
PARTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "of a row of normed parts": lambda x, i: of_rows(x).flatten(1).gather(1, i[:, None]),
    "of a row's log-softmax": lambda x, i: (
        of_rows(x).flatten(1).log_softmax(1).gather(1, i[:, None])
    ),
    "of a loss": lambda x, i: functional.cross_entropy(of_rows(x).flatten(1), i, reduction="sum"),
    "of normed groups": lambda x, i: functional.cross_entropy(
        functional.group_norm(x.view(3, 8, 3), 4).flatten(1), i
    ),
    "of parts that lie across": lambda x, i: (
        of_rows(x).transpose(1, 2).flatten(1).log_softmax(1).gather(1, i[:, None])
    ),
    "of each part": lambda x, i: (of_rows(x) - of_rows(x).logsumexp((1, 2), True)).gather(
        2, (i % 6)[:, None, None] * FOUR
    ),
    "of the parts' results": lambda x, i: (
        (of_rows(x) * x.amax(2, True)).sum(2).log_softmax(1).gather(1, (i % 4)[:, None])
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_one_element_of_rows_in_parts(name: str) -> None:
    """An index that counts over a row is none within its parts."""
    for index in ([0, 7, 23], [5, 6, 1]):
        assert_gradients_match(
            PARTS[name],
            (torch.randn(3, 4, 6, requires_grad=True), torch.tensor(index)),
            compile_fn=lambda fn: trainfuse.compile(fn, backend="triton", verify="off"),
        )


@pytest.mark.parametrize("reduce", ["mean", "sum", "amax", "logsumexp"])
def test_a_total_after_a_reduction_without_dimensions(reduce: str) -> None:
    def total(x: Tensor, y: Tensor) -> Tensor:
        own = x.logsumexp(0) if reduce == "logsumexp" else getattr(x, reduce)()
        return (y * own).sin().mean()

    x, y = torch.randn((), requires_grad=True), torch.randn(3, 5, requires_grad=True)
    assert_gradients_match(total, (x, y))
