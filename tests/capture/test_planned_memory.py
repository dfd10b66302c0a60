"""A budget that takes values made again more than once, kept by the plan's own account."""

from __future__ import annotations

import torch

import trainfuse
from benchmarks import models
from benchmarks.cases import full_cases
from benchmarks.contenders import forward_of, step_of


def test_a_quarter_of_a_resnet() -> None:
    """Its first stages are most of it, and hold more than a quarter if all is made again once.

    Planned on fake tensors: nothing runs.
    """
    case = full_cases()["resnet50"]
    model = models.resnet(classes=10).to(memory_format=torch.channels_last)
    images = torch.randn(64, 3, 224, 224).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    plain = step_of(forward_of(case, model, "cpu"), optimizer)
    step = trainfuse.compile(plain, memory_budget=0.25, backend="triton")
    explanation = step.explain(images, torch.randint(10, (64,)))
    step.close()
    memory = explanation.memory
    assert memory.peak <= memory.limit <= 0.25 * memory.unlimited
    rows = [row for row in explanation.saved if row.why == "memory_budget: once more, for later"]
    assert any("convolution" in row.op for row in rows)
    # much less than all of it: 53 convolutions, of which the budget takes most once
    assert 0 < sum(row.times for row in rows if "convolution" in row.op) < 53
