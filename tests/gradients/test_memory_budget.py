"""Compiled steps under a memory budget: gradients, masks and running statistics stay right.

The nets are deep for their width, so that a quarter of the memory can be had.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import trainfuse
from tests.gradients.cases import classify, sgd, training
from tests.gradients.compilers import MASKS
from trainfuse.testing import Training, gradient_report

LAYERS = 8


class Layer(nn.Module):
    """A residual network with dropout, four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.2)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [N, width]."""
        hidden = self.dropout(functional.gelu(self.up(self.norm(x))))
        return x + self.dropout(self.down(hidden))


class ConvLayer(nn.Module):
    """A residual block with batch norm, whose running statistics move once a step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, 2 * width, 1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.SiLU(),
            nn.Conv2d(2 * width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [N, width, H, W]."""
        return functional.relu(x + self.body(x))


def dropped(device: str) -> Training:
    """Dropout in every layer, inside and outside what is recomputed."""
    model = nn.Sequential(nn.Linear(6, 10), *(Layer(10) for _ in range(LAYERS)), nn.Linear(10, 4))
    batches = [(torch.randn(24, 6), torch.randint(4, (24,))) for _ in range(3)]
    model = model.to(device)
    return training(model, sgd(model, 0.1, momentum=0.9), classify, batches, device)


def normed(device: str) -> Training:
    """Batch norm in every layer, and pooling."""
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        *(ConvLayer(6) for _ in range(LAYERS)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 4),
    ).to(device)
    batches = [(torch.randn(4, 3, 10, 10), torch.randint(4, (4,))) for _ in range(3)]
    return training(model, sgd(model, 0.1, momentum=0.9), classify, batches, device)


NETS = {"dropped": dropped, "normed": normed}


@pytest.mark.parametrize(
    ("net", "capture", "backend", "budget"),
    [
        ("dropped", "whole", "triton", 0.5),
        ("dropped", "regions", "triton", 0.5),
        pytest.param("dropped", "whole", "eager", 0.3, marks=pytest.mark.nightly),
        ("normed", "whole", "eager", 0.5),
        pytest.param("normed", "whole", "triton", 0.5, marks=pytest.mark.nightly),
        pytest.param("normed", "regions", "triton", 0.3, marks=pytest.mark.nightly),
        # masks that Inductor reads are eager's, which nothing makes again
        pytest.param("dropped", "whole", "inductor", 0.65, marks=pytest.mark.nightly),
        pytest.param("normed", "whole", "inductor", 0.5, marks=pytest.mark.nightly),
    ],
)
def test_gradients_and_peak(net, capture, backend, budget, compiler):
    compile_fn = compiler(capture, backend, memory_budget=budget)
    gradient_report(lambda: NETS[net]("cpu"), compile_fn, rng=MASKS[backend]).check()
    compile_fn.check()
    (step,) = compile_fn.steps
    with trainfuse.settings.patch(keep_gradients=True):
        explanation = step.explain()
    again = [row for row in explanation.saved if not row.kept]
    assert any(row.why == "memory_budget" for row in again)
    assert not any("seed" in row.op for row in again)
    if capture == "whole":
        memory = explanation.memory
        assert memory.peak <= memory.limit <= budget * memory.unlimited


@pytest.mark.parametrize(
    ("net", "backend"),
    [
        ("dropped", "eager"),
        ("normed", "eager"),
        pytest.param("dropped", "triton", marks=pytest.mark.nightly),
        pytest.param("normed", "triton", marks=pytest.mark.nightly),
    ],
)
def test_an_infeasible_budget_is_said_with_the_least_possible(net, backend, compiler):
    """The least takes values made again more than once, and gradients are as before."""
    compile_fn = compiler("whole", backend, memory_budget=0.02)
    gradient_report(lambda: NETS[net]("cpu"), compile_fn, rng=MASKS[backend]).check()
    (step,) = compile_fn.steps
    with trainfuse.settings.patch(keep_gradients=True):
        explanation = step.explain()
    memory = explanation.memory
    assert memory.limit < memory.peak < 0.5 * memory.unlimited
    assert any("once more" in row.why for row in explanation.saved)
    assert "the least that was found is over memory_budget" in " ".join(str(explanation).split())


def test_regions_say_what_they_save(compiler):
    compile_fn = compiler("regions", "eager")
    training = dropped("cpu")
    step = compile_fn(training)
    step(*training.batches[0])
    (call,) = compile_fn.steps
    explanation = call.explain()
    kept = {row.op for row in explanation.saved if row.kept}
    assert "aten.addmm.default" in kept
    assert "trainfuse.keep_mask.default" not in kept
    assert {row.why for row in explanation.saved if row.op == "trainfuse.keep_mask.default"} == {
        "drawn again from its saved seed"
    }
    assert explanation.memory is None


def test_regions_recompute_nothing_where_it_is_off(compiler):
    compile_fn = compiler("regions", "eager", options={"recompute": False})
    gradient_report(lambda: dropped("cpu"), compile_fn).check()
    (call,) = compile_fn.steps
    rows = call.explain().saved
    assert rows
    assert {(row.kept, row.why) for row in rows} == {(True, "recompute is off")}
