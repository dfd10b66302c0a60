"""Activation checkpointing inside a step: the whole step is captured, dropout included."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.capture.scenarios import BACKENDS, assert_like_eager, batch, seen, state_of


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_checkpointed_dropout(p, reentrant, backend):
    def scenario(compile_):
        torch.manual_seed(0)
        first = nn.Linear(6, 6)
        body = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Dropout(p), nn.Linear(32, 4))
        optimizer = torch.optim.SGD([*first.parameters(), *body.parameters()], lr=0.1)

        def step(x, y):
            optimizer.zero_grad()
            out = checkpoint(body, first(x), use_reentrant=reentrant)
            loss = functional.cross_entropy(out, y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        compiled = compile_(step)
        calls = [(seen(compiled(*batch(i))), state_of(body), state_of(first)) for i in range(3)]
        return calls, torch.get_rng_state()

    (step,) = assert_like_eager(scenario, backend, rng="eager")
    assert step.explain().capture == "whole_step"
