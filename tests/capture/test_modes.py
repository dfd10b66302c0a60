"""A graph that raises leaves grad mode and autocast as the user's own blocks would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import trainfuse
from autodiff.masks import Masks
from tests.capture.scenarios import reasons


def modes() -> tuple[Any, ...]:
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    dtype = torch.get_autocast_dtype("cpu")
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), dtype, depth


def product(weight: nn.Parameter, x: Tensor) -> Tensor:
    """Under autocast, which keeps a parameter's cast while its block lasts."""
    with torch.autocast("cpu", torch.bfloat16):
        return x @ weight


@pytest.fixture
def clean() -> Any:
    before = modes()
    yield before
    while modes()[-1] > before[-1]:  # a test that fails spoils no other
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()
    torch.set_autocast_enabled("cpu", before[1])
    torch.set_grad_enabled(before[0])


@pytest.mark.parametrize("outer", [False, True], ids=["alone", "within autocast"])
def test_a_region_that_runs_eagerly(clean: Any, outer: bool) -> None:
    weight = nn.Parameter(torch.randn(4, 4))

    def region(x: Tensor, index: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = x @ weight
            with torch.no_grad():
                k = h.float()[index].sum(0)
        x.mul_(weight)  # a value with history over an input without: no plan is made
        return k + x

    compiled = trainfuse.compile(region, backend="eager", whole_step=False)
    compiled(torch.ones(4, 4), torch.tensor([1]))
    assert "needs no" in reasons(compiled)
    with torch.autocast("cpu", torch.float16, enabled=outer):
        before = modes()
        with pytest.raises(IndexError):
            compiled(torch.ones(4, 4), torch.tensor([9]))
        assert modes() == before
    assert modes() == clean


def test_a_comparison_for_which_there_is_no_memory(
    clean: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Eager's side of it runs out amid autocast: casts that stay cached would never be renewed."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = functional.dropout(model(x), 0.5).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(Masks, "dropout", full)
    compiled = trainfuse.compile(step, backend="eager", verify="step")
    x = torch.randn(3, 4)
    compiled(x)
    assert "not compared" in caplog.text
    assert modes() == clean
    first = product(model.weight, x)
    with torch.no_grad():
        model.weight.mul_(2)
    torch.testing.assert_close(product(model.weight, x), 2 * first)
