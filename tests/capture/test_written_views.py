"""Writes through permuted views: memory keeps its layout, and so does what is computed from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import trainfuse
from trainfuse.testing import Training, assert_gradients_match, gradient_report

INDEX = torch.tensor([[0, 2], [1, 1], [3, 0]])
ROW, ONES = INDEX[0, :1], torch.ones(1, 6)
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "scatter_ of a number": lambda v: v.scatter_(0, INDEX, 0.6),
    "scatter_": lambda v: v.scatter_(0, INDEX, torch.ones(3, 2)),
    "scatter_add_": lambda v: v.scatter_add_(0, INDEX, torch.ones(3, 2)),
    "scatter_reduce_": lambda v: v.scatter_reduce_(0, INDEX, torch.ones(3, 2), "amax"),
    "index_fill_": lambda v: v.index_fill_(0, ROW, 0.3),
    "index_copy_": lambda v: v.index_copy_(0, ROW, ONES.to(v)),
    "index_add_": lambda v: v.index_add_(0, ROW, ONES.to(v)),
    "index_put_": lambda v: v.index_put_((INDEX[:, 0],), torch.ones(3, 6)),
    "masked_fill_": lambda v: v.masked_fill_(v > 0, 0.7),
    "masked_scatter_": lambda v: v.masked_scatter_(v > 0, torch.ones(50)),
    "cumsum_": lambda v: v.cumsum_(0),
    "tril_": lambda v: v.tril_(),
    "renorm_": lambda v: v.renorm_(2, 0, 1.0),
    "addmm_": lambda v: v.addmm_(torch.ones(4, 2), torch.ones(2, 6)),
    "addr_": lambda v: v.addr_(torch.ones(4), torch.ones(6)),
    "baddbmm_": lambda v: v.unsqueeze(0).baddbmm_(torch.ones(1, 4, 2), torch.ones(1, 2, 6)),
    "copysign_": lambda v: v.copysign_(torch.ones(4, 6)),
    "copy_": lambda v: v.copy_(torch.ones(4, 6)),
    "an element": lambda v: v.__setitem__((slice(None), 0), 1.0),
    "one after the other": lambda v: v.masked_fill_(v > 0, 0.7).mul_(2).tril_(),
}
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda y: y.transpose(0, 1),
    "detached": lambda y: y.transpose(0, 1).detach(),
    "of a view": lambda y: y.view(2, 3, 4).view(6, 4).t(),
    "of a view in other rows": lambda y: y.view(2, 12).view(6, 4).t(),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("write", WRITES)
def test_the_layout_stays(write: str, view: str) -> None:
    """Values, gradients and the strides of all that is handed out equal eager's."""

    def written(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x * 2
        seen = VIEWS[view](y)
        WRITES[write](seen)
        return y.exp(), y, seen + 1

    torch.manual_seed(0)
    assert_gradients_match(
        written,
        (torch.randn(6, 4, requires_grad=True),),
        compile_fn=lambda fn: trainfuse.compile(fn, backend="triton", verify="off", fallback=False),
    )


@pytest.mark.parametrize("write", ["scatter_", "masked_fill_", "index_add_", "addmm_"])
def test_the_layout_stays_without_history(write: str) -> None:
    """As bytes in memory: a caller's own tensor, written through its transposed view."""
    mine = [torch.randn(6, 4)]
    mine.append(mine[0].clone())

    def step(x: Tensor) -> Tensor:
        WRITES[write](x.t())
        return x + 1

    ours, eager = trainfuse.compile(step, backend="triton")(mine[0]), step(mine[1])
    assert (ours.stride(), mine[0].stride()) == (eager.stride(), mine[1].stride())
    torch.testing.assert_close(mine[0], mine[1])
    torch.testing.assert_close(ours, eager)


def test_a_view_of_the_backward_is_made_again_in_the_update() -> None:
    """Where any view is written, functionalization makes a gradient's view anew for each reader."""

    def made() -> Training:
        torch.manual_seed(4)
        model = nn.Module()
        model.register_buffer("seen", torch.zeros(3))
        model.weight = nn.Parameter(torch.randn(5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor, target: Tensor) -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            joined = torch.cat([model.weight, x])
            model.seen[1].add_(x.amax())
            loss = binary_cross_entropy_with_logits(joined, target)
            loss.backward()
            optimizer.step()
            return loss

        return Training(step, model, [(torch.randn(4), torch.rand(9)) for _ in range(2)])

    def compiled(training: Training) -> Callable[..., Any]:
        return trainfuse.compile(training.step, backend="triton", fallback=False, check=True)

    gradient_report(made, compiled, steps=2).check()
