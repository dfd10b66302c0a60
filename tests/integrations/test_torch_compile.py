"""The registered torch.compile backend."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import trainfuse
from trainfuse import testing
from trainfuse.integrations.torch_compile import backend

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def make() -> testing.Training:
    model = nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.SiLU(), nn.Linear(9, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return testing.Training(step, model, [(torch.randn(5, 6),) for _ in range(3)])


def test_the_entry_point_names_the_backend() -> None:
    project = tomllib.loads(PROJECT.read_text())["project"]
    module, _, name = project["entry-points"]["torch_dynamo_backends"]["trainfuse"].partition(":")
    assert getattr(importlib.import_module(module), name) is backend


@pytest.mark.parametrize("generator", ["eager", "triton"])
def test_gradients_through_torch_compile(generator: str) -> None:
    def compile_model(training: testing.Training) -> testing.Step:
        training.model.compile(backend=backend, options={"backend": generator})
        return training.step

    testing.gradient_report(make, compile_model).check()


def test_options_are_validated_and_left_alone() -> None:
    options = {"backend": "eager", "verfy": "off"}
    compiled = torch.compile(nn.Linear(2, 2), backend=backend, options=options)
    with pytest.raises(Exception, match="verify"):
        compiled(torch.randn(1, 2))
    assert options == {"backend": "eager", "verfy": "off"}


def test_off_runs_the_graph_as_it_is() -> None:
    model = nn.Linear(2, 2)
    x = torch.randn(3, 2)
    with trainfuse.settings.patch(enabled=False):
        assert torch.equal(torch.compile(model, backend=backend)(x), model(x))
