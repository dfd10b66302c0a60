"""Sizes and numbers that data decides, inside a whole step: right at every call, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import trainfuse

Loss = Callable[..., torch.Tensor]


def masked(y: torch.Tensor, on: torch.Tensor) -> torch.Tensor:
    return y[on].mean()


def selected(y: torch.Tensor, on: torch.Tensor) -> torch.Tensor:
    return torch.masked_select(y, on).square().mean()


def rows_found(y: torch.Tensor, on: torch.Tensor) -> torch.Tensor:
    """A view of the found indices takes their number: it is needed where no kernel reads it."""
    return y[torch.nonzero(on)[:, 0]].exp().sum()


def counted_slice(y: torch.Tensor, on: torch.Tensor) -> torch.Tensor:
    return y[: int(on.sum())].exp().sum()


def repeated(y: torch.Tensor, on: torch.Tensor) -> torch.Tensor:
    return torch.repeat_interleave(y, on.long() + 1).square().sum()


def distinct(y: torch.Tensor, on: torch.Tensor) -> torch.Tensor:
    return y[torch.unique(on.long())].sum()


def taken(y: torch.Tensor, on: torch.Tensor) -> torch.Tensor:
    return torch.take(y, -on.sum().clamp(min=1)).exp()


LOSSES = [masked, selected, rows_found, counted_slice, repeated, distinct, taken]
CASES = [*((loss, "triton") for loss in LOSSES), (masked, "inductor"), (rows_found, "inductor")]


def make(loss: Loss, model: nn.Module) -> Callable[..., torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, *data: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        result = loss(model(x).flatten().tanh(), *data)
        result.backward()
        optimizer.step()
        return result

    return step


def run_both(loss: Loss, calls: list[tuple[torch.Tensor, ...]], backend: str) -> Any:
    """Run each call compiled and eagerly; losses and parameters must agree after each."""
    ours = nn.Linear(4, 1)
    theirs = copy.deepcopy(ours)
    # Inductor has no code for some of these: it leaves them to ATen
    strict = {"fallback": backend != "triton"}
    step = trainfuse.compile(make(loss, ours), backend=backend, check=True, **strict)
    eager = make(loss, theirs)
    for args in calls:
        torch.testing.assert_close(step(*args), eager(*args))
        torch.testing.assert_close(ours.weight, theirs.weight)
    explanation = step.explain()
    step.close()
    return explanation


@pytest.mark.parametrize(("loss", "backend"), CASES)
def test_size_differs_at_each_call(loss, backend):
    masks = [torch.arange(9) % n == 0 for n in (2, 5, 1)]
    run_both(loss, [(torch.randn(9, 4), on) for on in masks], backend)


def test_masked_loss_is_one_whole_step():
    masks = [torch.arange(9) % n == 0 for n in (2, 3)]
    explanation = run_both(masked, [(torch.randn(9, 4), on) for on in masks], "triton")
    assert explanation.capture == "whole_step"
    assert len(explanation.groups) >= 2


def first_counts(y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Captured for at least three classes; one class broadcasts, in eager."""
    return (y[:3] * torch.bincount(labels)[:3]).sum()


def test_assumption_that_fails_is_checked_before_anything_is_written():
    """The step is run in another form, and trains once: not twice, nor with three classes."""
    several, one = torch.arange(9), torch.zeros(9, dtype=torch.int64)
    calls = [(torch.randn(9, 4), labels) for labels in (several, several, one, several)]
    explanation = run_both(first_counts, calls, "triton")
    assert explanation.capture == "regions"
    assert "assumed" in explanation.capture_reason


def test_user_s_own_check_is_kept():
    def positive(y: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        number = count.item()
        torch._check(number > 0)
        return y.sum() * number

    step = trainfuse.compile(make(positive, nn.Linear(4, 1)), backend="triton")
    assert step(torch.randn(9, 4), torch.tensor(2)).isfinite()
    with pytest.raises(RuntimeError):
        step(torch.randn(9, 4), torch.tensor(-2))
    step.close()


@pytest.mark.parametrize("whole", [True, False])
def test_singular_matrix_raises_as_in_eager(whole):
    """The check of LAPACK's result is an effect, which no value depends on."""

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = torch.linalg.inv(x @ x.T + 1.0).square().sum()
        if whole:
            loss.backward()
        return loss

    compiled = trainfuse.compile(step, backend="triton", fallback=False)
    x = torch.randn(3, 5, requires_grad=True)
    torch.testing.assert_close(compiled(x), step(x))
    with pytest.raises(torch.linalg.LinAlgError):
        compiled(torch.zeros(3, 5, requires_grad=True))
    compiled.close()


def test_gradient_whose_size_is_data():
    """index_fill's value has a share of each distinct index, of which torch 2.11 counts one."""

    def filled(x: torch.Tensor, index: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.index_fill(x, 1, index, value).square()

    compiled = trainfuse.compile(
        filled, backend="triton", fallback=False, verify="off", whole_step=False
    )
    for index in ([0, 2, 4], [1, 1, 3], [2, 2, 2]):
        results = []
        for function in (compiled, filled):
            torch.manual_seed(0)
            x, value = (torch.randn(size, requires_grad=True) for size in ((4, 5), ()))
            y = function(x, torch.tensor(index), value)
            results.append(torch.autograd.grad(y, (x, value), torch.randn(4, 5)))
        torch.testing.assert_close(*results)
    compiled.close()


@pytest.mark.parametrize("loss", ["mse_loss", "smooth_l1_loss", "binary_cross_entropy"])
def test_mean_over_a_size_that_changes(loss):
    """A share of it is a number made of the size: no kernel holds it."""
    function = getattr(nn.functional, loss)
    compiled = trainfuse.compile(
        function, backend="triton", fallback=False, verify="off", whole_step=False, dynamic=True
    )
    for size in (5, 7, 9):
        target, results = torch.rand(size, 4), []
        for run in (compiled, function):
            x = torch.linspace(0.1, 0.9, 4 * size).reshape(4, size).mT.requires_grad_()
            results += torch.autograd.grad(run(x, target), x)
        torch.testing.assert_close(*results)
        assert results[0].stride() == results[1].stride()
    compiled.close()
