"""Hooks of every kind, there before the first call or added after it: each runs as eagerly."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import trainfuse
from tests.capture.scenarios import (
    assert_like_eager,
    batch,
    loss_of,
    ordinary,
    reasons,
    seen,
    small_model,
    state_of,
)

# Dynamo looks at `.grad` of what it meets between two graphs, and torch warns of that
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


def _triple(p):
    p.grad.mul_(3)


def _tripled(grads):
    return tuple(None if g is None else g * 3 for g in grads)


HOOKS = {
    "gradient": lambda m: m[0].weight.register_hook(lambda g: g * 3),
    "accumulated": lambda m: m[0].weight.register_post_accumulate_grad_hook(_triple),
    "forward": lambda m: m[0].register_forward_hook(lambda mod, args, out: out * 2),
    "before forward": lambda m: m[0].register_forward_pre_hook(lambda mod, args: (args[0] * 2,)),
    "backward": lambda m: m[2].register_full_backward_hook(lambda mod, gi, go: _tripled(gi)),
    "before backward": lambda m: m[2].register_full_backward_pre_hook(lambda mod, go: _tripled(go)),
    "every module": lambda m: nn.modules.module.register_module_forward_hook(
        lambda mod, args, out: out * 1.5 if isinstance(mod, nn.LayerNorm) else None
    ),
}


@pytest.mark.covers("C1", "S hooks")
@pytest.mark.parametrize("added_at", [0, 2])
@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_is_run_and_gone_when_removed(kind, added_at):
    def scenario(compile_):
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = compile_(ordinary(model, optimizer))
        observed, handle = [], None
        for i in range(5):
            if i == added_at:
                handle = HOOKS[kind](model)
            if i == 4:
                handle.remove()
            observed.append((seen(step(*batch(i))), state_of(model, grads=True)))
        return observed

    assert_like_eager(scenario, "eager", keep_gradients=True)


def test_optimizers_that_step_in_hooks():
    """The step names no optimizer: they are in the hooks of its parameters."""

    def scenario(compile_):
        model = small_model()
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

        def update(p):
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(update)

        def step(x, y):
            loss = loss_of(model, x, y)
            loss.backward()
            return loss.detach()

        compiled = compile_(step)
        return [(seen(compiled(*batch(i))), state_of(model, grads=True)) for i in range(3)]

    (step,) = assert_like_eager(scenario, "eager")
    assert "gradient hook" in reasons(step)


@pytest.mark.covers("C1", "S hooks")
def test_a_hook_on_an_input_of_a_later_call():
    def scenario(compile_):
        model, calls = small_model(), []
        step = compile_(ordinary(model, torch.optim.SGD(model.parameters(), lr=0.1)))
        observed = []
        for i in range(3):
            x, y = batch(i)
            x.requires_grad_()
            if i == 1:
                x.register_hook(lambda g: (calls.append(1), g * 2)[1])
            observed.append((seen(step(x, y), x.grad), state_of(model), len(calls)))
        return observed

    assert_like_eager(scenario, "eager")


def test_hooks_on_every_module_are_a_recorded_reason():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = trainfuse.compile(ordinary(model, optimizer), backend="eager")
    strict = trainfuse.compile(ordinary(model, optimizer), backend="eager", fullgraph=True)
    handle = HOOKS["every module"](model)
    try:
        step(*batch(0))
        step(*batch(1))
        with pytest.raises(trainfuse.CaptureError, match="every module"):
            strict(*batch(0))
    finally:
        handle.remove()
    assert reasons(step).count("every module") == 1
    step(*batch(2))
    assert step.explain().capture == "whole_step"


_IN_A_HOOK = """
import gc, sys, torch, trainfuse

weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([weight], lr=0.1)
weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())

def step(x):
    (weight * x).sum().backward()

compiled = trainfuse.compile(step, backend="eager")
for _ in range(2):
    compiled(torch.ones(3))
gc.collect()
if trees := sys.modules.get("torch._inductor.cudagraph_trees"):
    assert sys.getrefcount(trees.local.tree_manager_locks) > 1
"""


def test_an_optimizer_first_traced_within_a_backward_leaves_memory_sound():
    """torch 2.11 then frees two objects that are in use, and the next collection crashes."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", _IN_A_HOOK], check=True, timeout=300)
