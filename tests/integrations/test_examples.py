"""Every example runs for two steps, and explains itself; nothing in it is only for show."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

import trainfuse

FOLDER = Path(__file__).parents[2] / "examples"
# lightning_gpt.py has its own test, beside the callback's
NAMES = sorted(p.stem for p in FOLDER.glob("*.py") if p.stem not in ("__init__", "lightning_gpt"))


@pytest.mark.parametrize("name", NAMES)
def test_two_steps(name):
    module = importlib.import_module(f"examples.{name}")
    with trainfuse.settings.patch(backend="eager"):
        losses = module.main(steps=2)
    assert len(losses) == 2
    assert all(loss == loss and loss > 0 for loss in losses)


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"regions"}))
def test_the_step_is_captured_whole(name):
    module = importlib.import_module(f"examples.{name}")
    before = [p.detach().clone() for p in module.model.parameters()]
    explanation = trainfuse.explain(module.train_step, *module.example_inputs())
    assert explanation.capture == "whole_step", explanation.capture_reason
    assert explanation.graph_count == 1
    after = list(module.model.parameters())
    assert all(torch.equal(p, q) for p, q in zip(after, before, strict=True)), "explain trained"


def test_examples_are_listed():
    assert {"mlp", "block", "gpt", "convnet", "lstm", "regions"} <= set(NAMES)
