"""Things replaced between two calls: parameters, layers, optimizers, their state and methods."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.capture.scenarios import (
    BACKENDS,
    assert_like_eager,
    batch,
    loss_of,
    ordinary,
    reasons,
    seen,
    small_model,
    state_of,
)


def _replace_parameter(model, optimizer, saved):
    model[0].weight = nn.Parameter(torch.full((9, 6), 0.1))


def _assign_parameters(model, optimizer, saved):
    model.load_state_dict(saved[0], assign=True)


def _replace_layer(model, optimizer, saved):
    model[0] = small_model(5)[0]


def _load(model, optimizer, saved):
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])


def _swap_data(model, optimizer, saved):
    model[0].weight.data = torch.full((9, 6), 0.1)


def _clear_state(model, optimizer, saved):
    optimizer.state.clear()


def _write_state(model, optimizer, saved):
    for state in optimizer.state.values():
        state["exp_avg"] = torch.ones_like(state["exp_avg"])
        state["exp_avg_sq"].add_(1)
        state["step"].fill_(10.0)


def _set_options(model, optimizer, saved):
    optimizer.param_groups[0].update(lr=0.1, weight_decay=0.5, betas=(0.5, 0.9), maximize=True)


CHANGES = [
    _replace_parameter,
    _assign_parameters,
    _replace_layer,
    _load,
    _swap_data,
    _clear_state,
    _write_state,
    _set_options,
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_two_calls_is_seen(change, backend):
    def scenario(compile_):
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        step = compile_(ordinary(model, optimizer))
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        observed = []
        for i in range(5):
            if i == 2:
                change(model, optimizer, saved)
            observed.append((seen(step(*batch(i))), state_of(model, optimizer, grads=True)))
        return observed

    assert_like_eager(scenario, backend, keep_gradients=True)


GLOBAL_MODEL = small_model()


def _step_of_a_global(optimizer, x, y):
    optimizer.zero_grad()
    loss = loss_of(GLOBAL_MODEL, x, y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def test_a_parameter_of_a_global_model_is_replaced_under_an_optimizer_given_as_argument():
    """Dynamo guards no identity between a local and a global."""

    def scenario(compile_):
        GLOBAL_MODEL.load_state_dict(small_model().state_dict())
        GLOBAL_MODEL[0] = small_model()[0]
        optimizer = torch.optim.SGD(GLOBAL_MODEL.parameters(), lr=0.1)
        step = compile_(_step_of_a_global)
        observed = []
        for i in range(4):
            if i == 2:
                GLOBAL_MODEL[0] = small_model(5)[0]
            observed.append((seen(step(optimizer, *batch(i))), state_of(GLOBAL_MODEL)))
        return observed

    assert_like_eager(scenario, "eager")


class Trainer:
    def __init__(self):
        self.model = small_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)

    def __call__(self, x, y):
        self.optimizer.zero_grad()
        loss = loss_of(self.model, x, y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_new_optimizer_is_captured_too(backend):
    def scenario(compile_):
        trainer = Trainer()
        step = compile_(trainer)
        observed = []
        for i in range(5):
            if i == 2:
                params = trainer.model.parameters()
                trainer.optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
            observed.append((seen(step(*batch(i))), state_of(trainer.model, trainer.optimizer)))
        return observed

    (step,) = assert_like_eager(scenario, backend)
    assert {plan.kind for plan in step.plans} == {"whole_step"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_model_and_optimizer_are_arguments(backend):
    def scenario(compile_):
        models = [small_model(1), small_model(2)]
        optimizers = [torch.optim.Adam(m.parameters(), lr=0.02) for m in models]

        def step(model, optimizer, x, y):
            return ordinary(model, optimizer)(x, y)

        compiled = compile_(step)
        losses = [seen(compiled(models[i % 2], optimizers[i % 2], *batch(i))) for i in range(6)]
        return losses, [state_of(m, o) for m, o in zip(models, optimizers, strict=True)]

    (step,) = assert_like_eager(scenario, backend)
    assert {plan.kind for plan in step.plans} == {"whole_step"}


@pytest.mark.parametrize("name", ["step", "zero_grad"])
def test_an_optimizer_s_replaced_method_is_called(name):
    def scenario(compile_):
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps `step` too, and is no reason
        own, calls = getattr(optimizer, name), []

        def replaced(*args, **kwargs):
            calls.append(1)
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.mul_(3.0)
            return own(*args, **kwargs)

        step = compile_(ordinary(model, optimizer))
        observed = []
        for i in range(4):
            if i == 2:
                setattr(optimizer, name, replaced)
            observed.append((seen(step(*batch(i))), state_of(model), len(calls)))
        return observed

    (step,) = assert_like_eager(scenario, "eager")
    assert f"SGD.{name} was replaced" in reasons(step)
    assert "whole_step" in {plan.kind for plan in step.plans}, "the scheduler's wrapper is refused"


def test_sgd_without_momentum_makes_no_state():
    def scenario(compile_):
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compile_(ordinary(model, optimizer))(*batch(0))
        return state_of(model), list(optimizer.state_dict()["state"])

    assert_like_eager(scenario, "triton")


@pytest.mark.parametrize("backend", BACKENDS)
def test_parameters_that_overlap_in_memory(backend):
    def scenario(compile_):
        flat = torch.linspace(-0.2, 0.3, 60)
        a, b = nn.Parameter(flat[:36].view(6, 6)), nn.Parameter(flat[30:54].view(4, 6))
        optimizer = torch.optim.SGD([a, b], lr=0.1, foreach=False)

        def step(x, y):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(torch.tanh(x @ a) @ b.t(), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        compiled = compile_(step)
        return [(seen(compiled(*batch(i))), seen(flat)) for i in range(3)]

    (step,) = assert_like_eager(scenario, backend)
    assert "share memory" in reasons(step)
