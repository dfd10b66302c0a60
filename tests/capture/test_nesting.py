"""Compiled things within compiled things."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tests.capture.scenarios import (
    BACKENDS,
    assert_like_eager,
    batch,
    ordinary,
    seen,
    small_model,
    state_of,
)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("inner", ["model", "loss", "both"])
def test_a_step_that_calls_what_is_compiled_is_one_whole_step(inner, backend):
    def scenario(compile_):
        model = small_model()
        called = compile_(model) if inner != "loss" else model

        def loss_of(x, y):
            return functional.cross_entropy(called(x), y)

        loss = compile_(loss_of) if inner != "model" else loss_of
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)

        def step(x, y):
            optimizer.zero_grad()
            value = loss(x, y)
            value.backward()
            optimizer.step()
            return value.detach()

        compiled = compile_(step)
        return [(seen(compiled(*batch(i))), state_of(model, optimizer)) for i in range(3)]

    *_, step = assert_like_eager(scenario, backend)
    assert step.explain().capture == "whole_step"


def test_a_region_s_own_code_calls_a_compiled_step():
    """The inner call's settings end with it: the outer one goes on with its own."""

    def scenario(compile_):
        model = small_model()
        inner = compile_(ordinary(model, torch.optim.SGD(model.parameters(), lr=0.1)))

        def outer(x, y):
            before = torch.tanh(x)
            torch._dynamo.graph_break()
            loss = inner(x, y)
            return before.sum() * loss

        compiled = compile_(outer)
        return [(seen(compiled(*batch(i))), state_of(model)) for i in range(3)]

    assert_like_eager(scenario, "eager")


def test_a_step_with_a_break_that_is_mended_is_captured_whole():
    """Dynamo marks what an optimizer holds when it compiles its step; the mark stays."""

    def scenario(compile_):
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def broken(x, y):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            torch._dynamo.graph_break()
            loss.backward()
            optimizer.step()
            return loss.detach()

        steps = compile_(broken), compile_(ordinary(model, optimizer))
        return [(seen(step(*batch(i))), state_of(model)) for i, step in enumerate(steps)]

    broken, mended = assert_like_eager(scenario, "eager")
    assert broken.explain().capture == "regions"
    assert mended.explain().capture == "whole_step"
