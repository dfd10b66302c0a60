"""One step through every room, in seconds: what a pre-commit hook runs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trainfuse
from trainfuse import testing


def make() -> testing.Training:
    """Linear, layer norm, GELU, cross-entropy, SGD: each fused kind once."""
    model = nn.Sequential(nn.Linear(7, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # 3 rows: odd, and fewer than a block of any schedule
    batches = [(torch.randn(3, 7), torch.randint(5, (3,))) for _ in range(3)]

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return testing.Training(step, model, batches)


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_a_whole_step_has_eagers_gradients(backend: str) -> None:
    compiled: list[trainfuse.CompiledStep] = []

    def compile_step(training: testing.Training) -> trainfuse.CompiledStep:
        compiled.append(trainfuse.compile(training.step, backend=backend))
        return compiled[-1]

    testing.gradient_report(make, compile_step).check()
    with trainfuse.settings.patch(keep_gradients=True):  # the plan that the report has run
        explanation = compiled[0].explain()
    assert explanation.capture == "whole_step"
    assert explanation.backend == backend
    assert "make.<locals>.step, plans: whole step>" in repr(compiled[0])
    assert explanation.count("forward") > 0
    assert explanation.count("backward") > 0
    assert compiled[0].stats()["gate"] == "pass"
