"""A scenario told twice, eagerly and compiled: whatever it observes must be the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only

import trainfuse

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
Scenario = Callable[[Compile], Any]
"""Gets `compile` (or the identity), plays its calls, and returns what it saw, as a pytree."""

BACKENDS = ("triton", "eager")


def assert_like_eager(scenario: Scenario, backend: str, **options: Any) -> list[Any]:
    """Play the scenario both ways from one seed; returns the compiled steps."""
    steps: list[Any] = []

    def compile_(target: Callable[..., Any]) -> Any:
        steps.append(trainfuse.compile(target, backend=backend, **options))
        return steps[-1]

    torch.manual_seed(0)
    expected = scenario(lambda target: target)
    torch.manual_seed(0)
    got = scenario(compile_)
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5, equal_nan=True)
    return steps


def seen(*values: Any) -> Any:
    """Copies of tensors, parameters and state, as they are now; None becomes a word."""
    tensors = tree_map_only(torch.Tensor, lambda t: t.detach().clone(), list(values))
    return tree_map_only(type(None), lambda _: torch.tensor(float("nan")), tensors)


def state_of(model: nn.Module, *optimizers: torch.optim.Optimizer, grads: bool = False) -> Any:
    """Parameters, buffers and optimizer state; with `grads`, gradients too."""
    found: list[Any] = [*model.parameters(), *model.buffers()]
    if grads:
        found += [p.grad for p in model.parameters()]
    return seen(found, *(optimizer.state_dict()["state"] for optimizer in optimizers))


def small_model(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.LayerNorm(9), nn.Linear(9, 4))


def batch(seed: int, rows: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, generator=generator)
    return x, torch.randint(4, (rows,), generator=generator)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x), y)


def ordinary(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """zero_grad, loss, backward, step."""

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def reasons(step: Any) -> str:
    """Why the compiled step is not captured whole, or ""."""
    return "; ".join(r.reason for r in step.explain().refusals if r.stage == "capture")
