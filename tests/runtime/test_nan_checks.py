"""A NaN is traced to the kernel that made it, and the step done right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainfuse
from tests.planting import of_phase, plant
from tests.runtime.checked import QUIET, make, make_squares, train, warnings_of
from trainfuse import pipeline
from trainfuse.runtime import finite

pytestmark = [*QUIET, pytest.mark.usefixtures("fresh_gate")]


def overflowing(monkeypatch: pytest.MonkeyPatch, above: float) -> None:
    """A backward kernel that makes a NaN of what it stores where that is large."""
    value = f'tl.where(tl.abs(value) > {above}, float("nan"), value)'
    plant(monkeypatch, value, of_phase("backward"))


def growing() -> Iterator[Tensor]:
    """Inputs of the first steps are small, later ones large."""
    for scale in (0.01, 0.01, 0.01, 50.0, 0.5, 0.5):
        yield scale * torch.ones(5, 4)


@pytest.mark.covers("T2")
def test_a_nan_of_ours_is_traced_to_its_kernel_and_the_step_done_right(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain_model, plain = make()
    expected = [plain(x) for x in growing()]
    overflowing(monkeypatch, 0.9)
    model, step = make()
    compiled = trainfuse.compile(step, backend="triton", nan_check=True)
    losses = [compiled(x) for x in growing()]
    (line,) = warnings_of(caplog)
    assert line.startswith("backward_")
    assert "NaN in" in line
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.state_dict(), plain_model.state_dict(), rtol=1e-4, atol=1e-5)


def test_a_nan_in_a_region_s_backward_is_traced_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gradients(model: nn.Module) -> list[Any]:
        found = []
        for x in growing():
            model.zero_grad()
            model(x).exp().sum().backward()
            found.append([p.grad for p in model.parameters()])
        return found

    expected = gradients(make()[0])
    overflowing(monkeypatch, 3.0)
    found = gradients(trainfuse.compile(make()[0], backend="triton", nan_check=True))
    (line,) = warnings_of(caplog)
    assert line.startswith("backward_")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("verify", ["off", "kernels", "step"])
def test_the_user_s_own_nan_is_said_once_and_kept(
    verify: str, caplog: pytest.LogCaptureFixture
) -> None:
    weight = nn.Parameter(torch.tensor([0.5, 2.0]))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (weight * x).log().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = trainfuse.compile(step, backend="triton", verify=verify, nan_check=True)
    assert compiled(torch.ones(2)).isfinite()
    for _ in range(3):
        assert compiled(-torch.ones(2)).isnan()
    (line,) = [text for text in warnings_of(caplog) if "not finite" in text]
    assert "in eager neither" in line
    assert "aten.log.default at test_nan_checks.py:" in line
    assert compiled.stats()["gate"] == "pass"


def test_a_nan_that_no_kernel_makes_sends_the_step_to_aten(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A pass that divides by zero: every kernel is right."""
    plain_model, plain = make()
    expected = train(plain)

    def wrong(state: Any) -> Any:
        graph, _ = state.graph.copy()
        (update,) = (n for n in graph.nodes() if n.target is torch.ops.trainfuse.update.default)
        params, grads, number = update.args
        with graph.graph.inserting_before(update):
            made = graph.graph.call_function(torch.ops.aten.div.Tensor, (grads[0], 0.0))
        made.meta = {"val": grads[0].meta["val"]}
        update.args = (params, [made, *grads[1:]], number)
        return replace(
            state, graph=graph.replace(facts={**graph.facts, made: graph.facts[grads[0]]})
        )

    planted = [*pipeline.PASSES]
    planted.insert(3, ("planted", wrong, "divides by zero"))
    monkeypatch.setattr(pipeline, "PASSES", tuple(planted))
    model, step = make()
    compiled = trainfuse.compile(step, backend="triton")
    losses = train(compiled)
    (line,) = warnings_of(caplog)
    assert "the step (loss or gradient)" in line
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.state_dict(), plain_model.state_dict(), rtol=1e-4, atol=1e-5)


def test_without_being_asked_the_loss_is_looked_at_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No wait at each step; a loss that turned NaN is traced from the state of that call."""
    monkeypatch.setattr(finite, "EVERY", 4)
    looked: list[int] = []
    own = finite.all_finite
    monkeypatch.setattr(
        "trainfuse.runtime.checks.all_finite", lambda t: (looked.append(1), own(t))[1]
    )
    value = 'tl.where(value > 9.0, float("nan"), value)'
    plant(monkeypatch, value, of_phase("forward"), into="out0, ")
    _, step = make_squares()
    compiled = trainfuse.compile(step, backend="triton")
    losses = [compiled(torch.full((3,), x)) for x in (1.0, 1.0, *[4.0] * 8)]
    assert len(looked) == 2, "the first call, and the one after a NaN was seen"
    found = [bool(loss.isfinite()) for loss in losses]
    assert found == [True, True, False, False, False, *[True] * 5]
    (line,) = warnings_of(caplog)
    assert line.startswith("forward_")


def test_sums_that_overflow_are_no_infinity() -> None:
    large = torch.full((100,), 3e38)
    assert finite.all_finite([large, torch.ones(2)])
    assert not finite.all_finite([torch.ones(2), torch.tensor([1.0, float("inf")])])
    assert not finite.all_finite([torch.tensor(float("nan"))])
    assert finite.all_finite([torch.tensor(3), torch.ones(0)])
