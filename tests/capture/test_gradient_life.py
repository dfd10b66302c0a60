"""How long gradients live: where zero_grad stands, what reads them, which call drops them."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch

import trainfuse
from tests.capture.scenarios import (
    BACKENDS,
    assert_like_eager,
    batch,
    loss_of,
    ordinary,
    seen,
    small_model,
    state_of,
)
from trainfuse.capture import optimizers


def _played(compile_, step_of, calls=4, grads=True, optimizer=None):
    model = small_model()
    make = optimizer or (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    optimizer = make(model.parameters())
    step = compile_(step_of(model, optimizer))
    return [(seen(step(*batch(i))), state_of(model, optimizer, grads=grads)) for i in range(calls)]


def zero_after(model, optimizer):
    def step(x, y):
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def zero_to_zeros(model, optimizer):
    def step(x, y):
        optimizer.zero_grad(set_to_none=False)
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def zero_by_module(model, optimizer):
    def step(x, y):
        model.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def never_zeroed(model, optimizer):
    def step(x, y):
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("step_of", [zero_after, zero_to_zeros, zero_by_module, never_zeroed])
def test_gradients_that_the_step_has_not_set_to_none_are_as_eager_leaves_them(step_of, backend):
    (step,) = assert_like_eager(lambda c: _played(c, step_of), backend)
    assert step.explain().capture == "whole_step"


@pytest.mark.parametrize("backend", BACKENDS)
def test_zeroed_gradients_still_update(backend):
    """A parameter that one call does not use is moved by its momentum, as its gradient is 0."""

    def scenario(compile_):
        model, other = small_model(), small_model(2)
        params = [*model.parameters(), *other.parameters()]
        optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1)

        def step(x, y, first):
            optimizer.zero_grad(set_to_none=False)
            loss = loss_of(model if first else other, x, y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        compiled = compile_(step)
        losses = [seen(compiled(*batch(i), i % 2 == 0)) for i in range(5)]
        return losses, state_of(model, optimizer), state_of(other)

    assert_like_eager(scenario, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_read_after_the_update(backend, monkeypatch):
    def step_of(model, optimizer):
        def step(x, y):
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            optimizer.step()
            norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
            return loss.detach(), torch.stack(norms)

        return step

    # the process's first optimizer, or one that has the number of a group of the update phase
    for number in (1, 4):
        monkeypatch.setattr(optimizers, "_NUMBERS", itertools.count(number))
        (step,) = assert_like_eager(lambda c: _played(c, step_of, grads=False), backend)
        assert step.explain().capture == "whole_step"
        assert step.stats()["plans"] == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_optimizers_of_the_same_parameters(backend):
    def scenario(compile_):
        model = small_model()
        first = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        second = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(x, y):
            first.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            first.step()
            second.step()
            return loss.detach()

        compiled = compile_(step)
        return [(seen(compiled(*batch(i))), state_of(model, first, second)) for i in range(3)]

    assert_like_eager(scenario, backend)


def sometimes_zeroed(model, optimizer):
    def step(x, y, zero):
        if zero:
            optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def test_gradients_are_kept_once_a_call_was_seen_to_add_to_them():
    def scenario(compile_):
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = compile_(sometimes_zeroed(model, optimizer))
        return [(seen(step(*batch(i), i % 3 == 1)), state_of(model)) for i in range(7)]

    assert_like_eager(scenario, "eager")


@pytest.mark.parametrize("keep", [False, True])
def test_adding_to_dropped_gradients_is_an_error_that_changes_nothing(keep):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = {"keep_gradients": True} if keep else {}
    step = trainfuse.compile(sometimes_zeroed(model, optimizer), backend="eager", **options)
    step(*batch(0), True)
    if keep:
        step(*batch(1), False)
        return
    before = state_of(model, optimizer)
    for _ in range(2):
        with pytest.raises(trainfuse.TrainfuseError, match="keep_gradients=True"):
            step(*batch(1), False)
    torch.testing.assert_close(state_of(model, optimizer), before, equal_nan=True)
    step(*batch(1), True)


def test_an_ordinary_step_is_traced_once():
    """The marks that dropping needs add no plan of their own."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    step = trainfuse.compile(ordinary(model, optimizer), backend="eager")
    for i in range(3):
        step(*batch(i))
    assert step.stats()["plans"] == 1
    assert all(p.grad is None for p in model.parameters())


class Elsewhere:
    """A compiled step, and an eager one of the same optimizer beside it."""

    def __init__(self, **options):
        self.model = small_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        own = ordinary(self.model, self.optimizer)
        self.compiled = trainfuse.compile(own, backend="eager", **options)

    def eager_step(self, clear):
        clear(self)
        loss_of(self.model, *batch(5)).backward()
        self.optimizer.step()


@pytest.mark.parametrize(
    ("clear", "keep", "told"),
    [
        (lambda e: None, False, True),
        (lambda e: e.optimizer.zero_grad(), False, False),
        (lambda e: None, True, False),
    ],
    ids=["added", "cleared", "kept"],
)
def test_an_eager_step_that_adds_to_dropped_gradients_is_told_so(clear, keep, told, caplog):
    for _ in range(2):  # each of two optimizers is told
        caplog.clear()
        e = Elsewhere(**({"keep_gradients": True} if keep else {}))
        torch.optim.lr_scheduler.StepLR(e.optimizer, 1)
        for i in range(2):
            e.compiled(*batch(i))
        for _ in range(2):
            e.eager_step(clear)
        e.compiled(*batch(2))
        lines = [r for r in caplog.records if "without a zero_grad()" in r.getMessage()]
        assert len(lines) == told
        assert {plan.kind for plan in e.compiled.plans} == {"whole_step"}


def test_what_notices_zero_grad_leaves_the_optimizer_as_it_was():
    e = Elsewhere()
    e.compiled(*batch(0))
    for twin in (e.optimizer, copy.deepcopy(e.optimizer), pickle.loads(pickle.dumps(e.optimizer))):
        assert "zero_grad" not in vars(twin)
        twin.zero_grad()
        twin.zero_grad(set_to_none=False)
