"""What a region returns is written in place by the code around it, as in eager."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import trainfuse

X = torch.linspace(-2, 2, 24).reshape(2, 3, 4)
MADE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "linear": lambda x, w: functional.linear(x, w),
    "matmul": lambda x, w: x @ w.t(),
    "reshaped": lambda x, w: w.t().reshape(-1, 2),
    "flattened": lambda x, w: (x * w[0]).transpose(0, 1).flatten(1),
    "padded with size 1": lambda x, w: x[:, :1] @ w.t(),
    "twice": lambda x, w: [functional.linear(x, w)] * 2,
    "beside another": lambda x, w: (functional.linear(x, w), w.sum(0)),
    "its sum beside it": lambda x, w: (lambda h: (h, h.sum()))(functional.linear(x, w)),
}
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "mul_": lambda v: v.mul_(1.5),
    "part": lambda v: v[..., :1].add_(2.0),
    "item": lambda v: v.__setitem__((..., 0), 0.5),
    "relu_": lambda v: v.relu_(),
    "mask": lambda v: v.masked_fill_(v > 0.5, 0.1),
    "by a bool": lambda v: v.__setitem__(torch.tensor(True), 1.3),
}


def gradients(fn: Callable[..., Any], write: Callable[[Tensor], Any]) -> list[Tensor]:
    torch.manual_seed(2)
    x, w = X.clone().requires_grad_(), torch.randn(5, 4, requires_grad=True)
    made = fn(x, w)
    first = made[0] if isinstance(made, list | tuple) else made
    write(first)
    others = made if isinstance(made, tuple) else [first]
    loss = sum(
        (value * torch.linspace(0.5, 2, value.numel()).view_as(value)).sum() for value in others
    )
    return [first.detach().clone(), *torch.autograd.grad(loss, [x, w], allow_unused=True)]


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("made", MADE)
def test_results_take_writes(made: str, write: str, backend: str) -> None:
    compiled = trainfuse.compile(
        MADE[made], backend=backend, whole_step=False, fallback=False, check=True
    )
    ours, eager = (gradients(fn, WRITES[write]) for fn in (compiled, MADE[made]))
    torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_to_what_the_backward_reads_does_not_go_unseen(write: str, backend: str) -> None:
    """Eager's backward raises for it."""

    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = functional.linear(x, w)
        return h, functional.gelu(h)

    compiled = trainfuse.compile(fn, backend=backend, whole_step=False, fallback=False)
    for one in (fn, compiled):
        with pytest.raises(RuntimeError, match=r"in-?place"):
            gradients(one, WRITES[write])


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("kind", ["frozen", "no_grad", "step"])
def test_results_without_history_take_values_with_one(kind: str, backend: str) -> None:
    def gradient(compile_: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(7)
        weight = nn.Parameter(torch.randn(5, 4), requires_grad=kind != "frozen")
        optimizer = torch.optim.SGD([weight], lr=0.1)

        def forward(x: Tensor) -> Tensor:
            return functional.linear(x, weight)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            h = functional.linear(x, weight)
            h.square().mean().backward()
            optimizer.step()
            return h.detach()

        run = compile_(step if kind == "step" else forward)
        bias = torch.randn(5, requires_grad=True)
        found = []
        for _ in range(2):
            with torch.no_grad() if kind == "no_grad" else contextlib.nullcontext():
                h = run(X)
            h += bias
            found += torch.autograd.grad(h.square().sum(), bias)
        return found

    ours = gradient(lambda fn: trainfuse.compile(fn, backend=backend, fallback=False))
    torch.testing.assert_close(ours, gradient(lambda fn: fn), rtol=1e-5, atol=1e-5)


def test_a_residual_written_around_compiled_layers() -> None:
    """The loop that users write: layers compiled one by one, what they return added to in place."""

    def trained(compile_: Callable[[nn.Module], Any]) -> list[Tensor]:
        torch.manual_seed(5)
        layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        runs = [compile_(layer) for layer in layers]
        h = X
        for run in runs:
            new = run(h)
            new += h
            h = new
        h.square().mean().backward()
        return [p.grad for p in layers.parameters()]  # type: ignore[misc]  # all have one

    ours = trained(lambda layer: trainfuse.compile(layer, backend="triton", fallback=False))
    torch.testing.assert_close(ours, trained(lambda layer: layer), rtol=1e-5, atol=1e-6)
