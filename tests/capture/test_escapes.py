"""Outputs that the caller goes on to differentiate: no whole step cuts them off."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tests.capture.scenarios import (
    assert_like_eager,
    batch,
    loss_of,
    reasons,
    seen,
    small_model,
    state_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


def _played(make_step, use, calls=3):
    """A scenario: a step of one model, whose results `use` may differentiate for another."""

    def scenario(compile_):
        model, other = small_model(), small_model(2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = compile_(make_step(model, other, optimizer))
        observed = []
        for i in range(calls):
            other.zero_grad()
            results = step(*batch(i))
            use(results)
            observed.append((seen(results), state_of(model), state_of(other, grads=True)))
        return observed

    return scenario


def second_loss(model, other, optimizer):
    def step(x, y):
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        return loss, loss_of(other, x, y)

    return step


def kept_graph(model, other, optimizer):
    def step(x, y):
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward(retain_graph=True)
        return loss

    return step


def penalty(model, other, optimizer):
    def step(x, y):
        x = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(other(x).sum(), x, create_graph=True)
        return grad.square().sum()

    return step


@pytest.mark.parametrize(
    ("make_step", "use"),
    [
        (second_loss, lambda results: results[1].backward()),
        (kept_graph, lambda loss: loss.backward()),
        (penalty, lambda loss: loss.backward()),
    ],
)
def test_a_step_with_a_result_that_is_differentiated_runs_as_regions(make_step, use):
    (step,) = assert_like_eager(_played(make_step, use), "eager")
    assert step.explain().capture == "regions"
    if torch.__version__ >= "2.13" or make_step is not penalty:
        assert "cut it off" in reasons(step)


def logged(model, other, optimizer):
    def step(x, y):
        optimizer.zero_grad()
        logits = model(x)
        loss = functional.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        return {"loss": loss, "logits": logits, "scaled": loss * 2, "right": logits.argmax(1) == y}

    return step


def two_losses(model, other, optimizer):
    """The first loss keeps the graph for the second, which frees it."""

    def step(x, y):
        optimizer.zero_grad()
        logits = model(x)
        one, two = functional.cross_entropy(logits, y), logits.square().mean()
        one.backward(retain_graph=True)
        two.backward()
        optimizer.step()
        return one, two

    return step


@pytest.mark.parametrize("make_step", [logged, two_losses])
def test_results_whose_history_the_step_freed_are_no_reason(make_step):
    (step,) = assert_like_eager(_played(make_step, lambda results: None), "eager")
    assert step.explain().capture == "whole_step"
