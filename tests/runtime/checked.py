"""A small training whose steps are checked, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

QUIET = [  # triton 3.6 and torch 2.11 warn about themselves
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
Step = Callable[..., Any]


def make(optimizer: str = "SGD") -> tuple[nn.Module, Step]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 2))
    update = getattr(torch.optim, optimizer)(model.parameters(), lr=0.05)

    def step(x: Tensor) -> Tensor:
        update.zero_grad()
        loss = F.softplus(model(x)).square().mean()
        loss.backward()
        update.step()
        return loss.detach()

    return model, step


def make_squares() -> tuple[nn.Parameter, Step]:
    """The sum of the squares of three weights' products."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1e-3)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (weight * x).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return weight, step


def batches() -> Iterator[Tensor]:
    torch.manual_seed(1)
    while True:
        yield torch.randn(5, 4)


def train(step: Step, calls: int = 3) -> list[Tensor]:
    return [step(x) for _, x in zip(range(calls), batches(), strict=False)]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
