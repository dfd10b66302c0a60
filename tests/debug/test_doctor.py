"""Doctor and bisect: each verdict on a step that deserves it, and the state put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trainfuse
from tests import planting
from trainfuse.debug.preserve import preserved
from trainfuse.runtime.gate import Gate

pytestmark = [  # triton 3.6 and torch 2.11 warn about themselves
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]
Step = Callable[[Tensor], Tensor]
STAGES = [
    "settings", "backend", "capture", "fused groups", "left as ATen", "checks", "CUDA graph",
    "speed",
]  # fmt: skip


def make_step(branch: bool = False) -> tuple[nn.Module, torch.optim.Optimizer, Step, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.softplus(model(x)).square().mean()
        loss.backward()
        if branch and loss > 0:
            loss = loss + 1
        optimizer.step()
        return loss.detach()

    return model, optimizer, step, torch.randn(5, 6)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    moments = {
        f"{i}.{name}": value.clone()
        for i, p in enumerate(model.parameters())
        for name, value in optimizer.state.get(p, {}).items()
    }
    values = {name: value.clone() for name, value in model.state_dict().items()}
    return {**values, **moments, "rng": torch.get_rng_state()}


def plant(monkeypatch: pytest.MonkeyPatch, name: str, factor: float = 1.01) -> None:
    """Make the kernel of one group scale what it stores, and let its own check miss it."""
    planting.plant(monkeypatch, f"value * {factor}", lambda group: group.name == name)
    monkeypatch.setattr(Gate, "compare", lambda *_: None)


def groups_of(step: Step, x: Tensor) -> list[str]:
    explanation = trainfuse.explain(trainfuse.compile(step, backend="triton"), x)
    return [group.name for group in explanation.groups if group.schedule != "foreach"]


@pytest.mark.parametrize("trained", [False, True])
def test_preserved_puts_everything_back(trained: bool) -> None:
    model, optimizer, step, x = make_step()
    if trained:
        step(x)
    before, grads = state_of(model, optimizer), [p.grad for p in model.parameters()]
    with preserved(step, [x]):
        step(x)
        x.zero_()
        assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"])
    after = state_of(model, optimizer)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert x.all()
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))


def test_a_sound_step_passes_every_stage_and_is_not_trained() -> None:
    model, optimizer, step, x = make_step()
    compiled = trainfuse.compile(step, backend="eager")
    compiled(x)
    before = state_of(model, optimizer)
    diagnosis = trainfuse.doctor(compiled, x)
    after = state_of(model, optimizer)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert [stage.name for stage in diagnosis.stages] == STAGES
    assert diagnosis.stage("capture").ok
    assert diagnosis.stage("checks").value == "pass"
    assert "backward" in diagnosis.stage("fused groups").value
    assert "runs on the host" in diagnosis.stage("CUDA graph").value
    assert "times as fast" in str(diagnosis)
    assert diagnosis.to_dict()["stages"][0]["name"] == "settings"
    compiled(x)  # the step that was asked about goes on
    assert compiled.stats()["calls"] == 2


def test_off_is_the_first_thing_it_says() -> None:
    _, _, step, x = make_step()
    with trainfuse.fuser("none"):
        diagnosis = trainfuse.doctor(step, x)
    assert diagnosis.failing is not None
    assert diagnosis.failing.name == "backend"
    assert [stage.name for stage in diagnosis.stages] == STAGES[:2]
    assert "enabled=False (patch)" in diagnosis.stage("settings").value


def test_a_branch_on_a_tensor_fails_at_capture() -> None:
    _, _, step, x = make_step(branch=True)
    with trainfuse.fuser("eager"):
        diagnosis = trainfuse.doctor(step, x)
    assert diagnosis.failing is not None
    assert diagnosis.failing.name == "capture"
    assert "regions" in diagnosis.failing.value


def test_a_module_is_differentiated_and_left_uncompiled() -> None:
    model, _, _, x = make_step()
    with trainfuse.fuser("eager"):
        diagnosis = trainfuse.doctor(model, x)
    assert diagnosis.stage("capture").ok is None
    assert "backward" in diagnosis.stage("fused groups").value
    assert all(p.grad is None for p in model.parameters())


def test_a_wrong_kernel_fails_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, step, x = make_step()
    plant(monkeypatch, "backward_0")
    with trainfuse.fuser("triton"):
        diagnosis = trainfuse.doctor(step, x)
    assert diagnosis.failing is not None
    assert diagnosis.failing.name == "checks"
    assert "gradient of" in diagnosis.failing.value
    with trainfuse.settings.patch(backend="triton", fallback=False):
        stopped = trainfuse.doctor(step, x)
    assert stopped.failing is not None
    assert stopped.failing.name == "run"
    assert "error against fp64" in stopped.failing.value


@pytest.mark.parametrize("place", [0, 1, -1])
def test_bisect_names_the_wrong_group_in_few_runs(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, step, x = make_step()
    names = groups_of(step, x)
    assert len(names) >= 4
    plant(monkeypatch, names[place])
    before = state_of(model, optimizer)
    with trainfuse.fuser("triton"):
        culprit = trainfuse.bisect(step, x)
    assert culprit.group is not None
    assert culprit.group.name == names[place]
    assert culprit.number == names.index(names[place]) + 1
    assert culprit.runs <= 2 + (len(names) - 1).bit_length()
    assert f"{names[place]} (" in str(culprit)
    assert "test_doctor.py" in str(culprit)
    after = state_of(model, optimizer)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_bisect_of_a_right_step_and_of_a_module() -> None:
    model, _, step, x = make_step()
    with trainfuse.fuser("triton"):
        for target in (step, model):
            culprit = trainfuse.bisect(target, x)
            assert culprit.group is None
            assert culprit.runs == 1
            assert "no group of" in str(culprit)


def test_bisect_blames_no_group_for_what_is_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, step, x = make_step()
    with trainfuse.fuser("triton"):
        culprit = trainfuse.bisect(step, x, tolerance=-1.0)
    assert culprit.group is None
    assert "no group fused" in str(culprit)


@pytest.mark.parametrize("ask", [trainfuse.doctor, trainfuse.bisect])
def test_what_is_no_function_is_refused(ask: Callable[..., Any]) -> None:
    with pytest.raises(trainfuse.OptionError, match="takes a train step"):
        ask(3)


def test_a_step_may_return_a_loss_that_was_differentiated() -> None:
    weight = nn.Parameter(torch.randn(4, 4))

    def step(x: Tensor) -> Tensor:
        weight.grad = None
        loss = torch.tanh(x @ weight).square().sum()
        loss.backward()
        return loss

    x = torch.randn(4, 4, requires_grad=True)
    with trainfuse.fuser("eager"):
        diagnosis = trainfuse.doctor(step, x)
        assert trainfuse.bisect(step, x).group is None
    assert "backward" in diagnosis.stage("fused groups").value
    assert x.grad is None
