"""Draws that nobody reads: eager makes them, and those after depend on it (`rng="eager"`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import trainfuse

Draws = Callable[[Tensor, Tensor], Tensor]


def dropped(x: Tensor, w: Tensor) -> Tensor:
    functional.dropout(x, 0.3)
    return x * w


def dropped_with_a_gradient(x: Tensor, w: Tensor) -> Tensor:
    h = (x * w).sin()  # saved for the backward
    functional.dropout(h, 0.3)
    return h.exp()


def unread_numbers(x: Tensor, w: Tensor) -> Tensor:
    torch.rand_like(x)
    torch.bernoulli(torch.full_like(x, 0.5))
    torch.randn(3, device=x.device)
    return x * w


def without_gradients(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        functional.dropout(x * w, 0.5).add_(w)
    return x * w


def read_and_unread(x: Tensor, w: Tensor) -> Tensor:
    h = functional.dropout((x * w).sin(), 0.3)
    functional.dropout(h, 0.2)
    return functional.dropout(h.exp(), 0.4) * h


def in_a_checkpoint(x: Tensor, w: Tensor) -> Tensor:
    return checkpoint(read_and_unread, x, w, use_reentrant=False)


def in_a_reentrant_checkpoint(x: Tensor, w: Tensor) -> Tensor:
    return checkpoint(read_and_unread, x, w, use_reentrant=True)


DRAWS: tuple[Draws, ...] = (
    dropped,
    dropped_with_a_gradient,
    unread_numbers,
    without_gradients,
    read_and_unread,
    in_a_checkpoint,
    in_a_reentrant_checkpoint,
)


class Model(nn.Module):
    def __init__(self, draws: Draws) -> None:
        super().__init__()
        self.draws = draws
        self.weight = nn.Parameter(torch.linspace(-1, 1, 6))

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(self.draws(x, self.weight), 0.5).square().sum()


def losses(model: Model, compiled: Callable[..., Any], whole: bool) -> list[Tensor]:
    """Losses and gradients of three steps, and the generator's next numbers."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = model if whole else compiled(model)

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        loss = run(x)
        loss.backward()
        grad = model.weight.grad
        assert grad is not None
        grad = grad.clone()
        optimizer.step()
        return loss.detach(), grad

    if whole:
        step = compiled(step)
    found = []
    for seed in range(3):
        found += step(torch.linspace(-2, 2, 30).view(5, 6).roll(seed))
        found.append(torch.rand(4))
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["triton", "eager", "inductor"])
@pytest.mark.parametrize("whole", [True, False], ids=["step", "region"])
@pytest.mark.parametrize("draws", DRAWS, ids=lambda draws: draws.__name__)
def test_the_generator_is_where_eager_leaves_it(draws: Draws, whole: bool, backend: str) -> None:
    eager = losses(Model(draws), lambda fn: fn, whole)
    ours = losses(
        Model(draws),
        lambda fn: trainfuse.compile(fn, backend=backend, rng="eager", fallback=False),
        whole,
    )
    for mine, theirs in zip(ours, eager, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
