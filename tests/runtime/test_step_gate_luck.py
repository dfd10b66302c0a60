"""verify="step" where eager's one result is exact by luck: its other roundings decide."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trainfuse
from autodiff import jitter
from autodiff.compare import TensorError
from autodiff.jitter import ROUNDINGS, Jitter
from tests.planting import plant
from trainfuse.runtime import other_roundings, step_gate
from trainfuse.runtime.gate import Gate
from trainfuse.runtime.other_roundings import OtherRoundings, Sides
from trainfuse.testing import rounded_bf16

pytestmark = [  # triton 3.6 and torch 2.11 warn about themselves
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]
COUNT = 11
Step = Callable[[Tensor], Tensor]


def lucky() -> tuple[nn.Parameter, Step, Tensor]:
    """A mean of values that cancel: ATen adds in fp64 on a CPU, and what it leaves is returned."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.rand(COUNT) + 0.5)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        all_ = torch.cat([x, -x, x * 1e-9])
        variance, mean = torch.var_mean(all_)
        y = (all_ - mean) * torch.rsqrt(variance + 1e-5)
        (y[:COUNT] * weight).sin().mean().backward()
        optimizer.step()
        return y[2 * COUNT :].detach()

    return weight, step, torch.randn(COUNT)


def trained(**options: Any) -> tuple[Tensor, str]:
    """The weights after two steps, and the gate's verdict."""
    torch._dynamo.reset()
    weight, step, x = lucky()
    compiled = trainfuse.compile(step, backend="triton", **options)
    with rounded_bf16():
        for _ in range(2):
            compiled(x)
    return weight.detach(), compiled.stats()["gate"]


def without_other_roundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_roundings, "ROUNDINGS", 0)


def test_a_right_step_beside_a_lucky_eager_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = trained(verify="off")
    weight, verdict = trained(verify=1)
    assert verdict == "pass"
    torch.testing.assert_close(weight, plain, rtol=0, atol=0)
    trained(verify=1, fallback=False)
    without_other_roundings(monkeypatch)
    with pytest.raises(trainfuse.GradientMismatch, match="eager's own"):
        trained(verify=1, fallback=False)


def test_a_wrong_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off by 5%, of which no rounding makes more than 1%; each kernel's own check is blind."""
    plant(monkeypatch, "value * 1.05", lambda group: True)
    monkeypatch.setattr(Gate, "compare", lambda *_: None)
    _, verdict = trained(verify="step")
    assert "the step (" in verdict
    with pytest.raises(trainfuse.GradientMismatch, match="eager's own"):
        trained(verify="step", fallback=False)


def test_a_step_that_passes_asks_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(OtherRoundings, "_ask", lambda self: asked.append(self))
    model = nn.Linear(6, 5)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        F.softplus(model(x)).square().mean().backward()
        optimizer.step()

    compiled = trainfuse.compile(step, backend="triton", verify=1)
    for _ in range(3):
        compiled(torch.randn(7, 6))
    assert compiled.stats()["gate"] == "pass"
    assert not asked


@pytest.mark.parametrize(("least", "said"), [(1e-12, "pass"), (1.0, "as captured")])
def test_a_capture_that_seems_wrong_is_judged_by_aten_s_other_roundings(
    least: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """least: the error that ATen on the captured graph must have in two runs."""
    monkeypatch.setattr(step_gate, "_SUSPICIOUS", 1e-12)
    monkeypatch.setattr(step_gate, "_NOISE", 0.0)
    own = step_gate.StepGate.compare

    def unexplained(*_: Any) -> None:
        raise step_gate.Unexplained

    def doubting(gate: Any, ours: Any, native: Any, exact: Any, part: str, *more: Any) -> Any:
        if part != "capture":
            return own(gate, ours, native, exact, part, *more)
        doubt = step_gate.Doubt(more[0], dict.fromkeys(ours, least))
        return gate.reject(TensorError("a gradient", 0, 1.0, 0.0, 9.0), 1, part, doubt)

    monkeypatch.setattr(step_gate.StepGate, "explain", unexplained)
    monkeypatch.setattr(step_gate.StepGate, "compare", doubting)
    _, verdict = trained(verify="step")
    assert said in verdict


class Runs:
    """A reference of one tensor, whose error is its seed's."""

    def __init__(self, *errors: float) -> None:
        self.errors, self.seen = [*errors], 0

    def __call__(self, rounded: AbstractContextManager[object]) -> list[Sides] | None:
        assert isinstance(rounded, Jitter)
        error = self.errors[self.seen % len(self.errors)]
        self.seen += 1
        return [({"x": torch.full((4,), 1.0 + error)}, {"x": torch.ones(4).double()})]


def test_two_runs_must_be_as_far_and_no_more_are_made() -> None:
    runs = Runs(0.5, 0.0, 0.25, 1.0)
    roundings = OtherRoundings(runs)
    assert roundings.reach(0, {"x": 0.25})
    assert runs.seen == 3
    assert roundings.errors(0) == {"x": 0.25}
    assert roundings.errors(1) == {}
    assert roundings.reach(0, {"x": 0.2})
    assert runs.seen == 3, "known already"
    assert roundings.reach(0, {"x": 0.5})
    assert runs.seen == 4
    assert not roundings.reach(0, {"x": 1.5})
    assert runs.seen == ROUNDINGS
    assert not roundings.reach(0, {"x": 1.5})
    assert runs.seen == ROUNDINGS, "they are made once"


@pytest.mark.parametrize("least", [torch.inf, torch.nan])
def test_what_is_no_rounding_asks_for_no_run(least: float) -> None:
    runs = Runs(torch.inf)
    assert not OtherRoundings(runs).reach(0, {"x": least})
    assert runs.seen == 0


def test_one_run_that_strays_and_what_is_not_finite_excuse_nothing() -> None:
    once = Runs(9.0, *[0.0] * ROUNDINGS)
    assert not OtherRoundings(once).reach(0, {"x": 0.1})
    assert not OtherRoundings(Runs(torch.inf, torch.nan)).reach(0, {"x": 0.1})


def test_a_reference_that_fails_is_not_asked_again() -> None:
    assert not OtherRoundings(lambda _: None).reach(0, {"x": 0.1})


def test_large_values_are_moved_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jitter, "_PIECE", 64)
    x = torch.randn(3, 500).t()
    with Jitter(0):
        moved = x.exp()
    off = (moved - x.exp()).abs() / x.exp()
    assert moved.stride() == x.stride()
    assert 0 < float(off.max()) <= 2 * torch.finfo(torch.float32).eps
    assert 0.02 < float((off > 0).float().mean()) < 0.15
