"""A first call beside a model that fills most of a device: what its checks hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trainfuse
from tests.runtime.live import Live
from trainfuse import plans
from trainfuse.runtime import captured, gate, plan, reference, room, update_check, update_trial
from trainfuse.runtime.calls import GroupCall
from trainfuse.runtime.foreach_launch import ForeachLauncher
from trainfuse.runtime.gate import Gate
from trainfuse.runtime.launch import GroupLauncher

pytestmark = [  # triton 3.6 and torch 2.11 warn about themselves
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]
Step = Callable[..., Tensor]
FILLED, UNUSED = 0.7, 0.9
"""What the model takes of the device, and what of it a checked call may: the rest is in pieces."""


@pytest.fixture(autouse=True)
def fresh_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has passed yet, and every line may be said once more."""
    monkeypatch.setattr(plans, "GATE", Gate())
    monkeypatch.setattr("trainfuse.log._said", set())


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


def make(layers: int, width: int, rows: int) -> tuple[nn.Module, torch.optim.Optimizer, Step]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(layers)), nn.Linear(width, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step(torch.randn(rows, width))
    return model, optimizer, step


def bytes_held(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    tensors = [t for p in model.parameters() for t in (p, p.grad) if t is not None]
    tensors += [t for state in optimizer.state.values() for t in state.values()]
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("size", [(6, 32, 256), (4, 64, 8)], ids=["activations", "state"])
def test_a_checked_call_fits_where_the_model_fills_the_device(
    size: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer, step = make(*size)
    x = torch.randn(size[2], size[1])
    held = bytes_held(model, optimizer)
    with Live() as eager:
        step(x)
    capacity = (held + eager.peak) / FILLED
    live, sent = Live(), []

    def to_host(tensor: Tensor) -> Tensor:
        sent.append(tensor.numel())
        return live.uncounted(torch.clone)(tensor.detach())

    def free(_: torch.device) -> int:
        return max(int(capacity) - held - live.now, 0)

    for module in (captured, gate, plan, room, update_check):
        monkeypatch.setattr(module, "free_bytes", free)
    for module in (reference, room):
        monkeypatch.setattr(module, "to_host", to_host)
    monkeypatch.setattr(reference, "to_device", lambda tensor, device: tensor.clone())
    # pieces of a fixed size are nothing on a device of a usual one; here they must be small, too
    for piece in ("autodiff.mismatch._PIECE", "autodiff.norms._PIECE", "autodiff.philox._PIECE"):
        monkeypatch.setattr(piece, 1 << 9)
    monkeypatch.setattr(gate, "WORKING_BYTES", 96 << 9)
    monkeypatch.setattr(update_check, "_LEAST", 1 << 9)
    monkeypatch.setattr(update_trial, "GATED_ELEMENTS", 1 << 9)
    for launcher in (GroupLauncher, ForeachLauncher):  # the interpreter copies what it is given
        monkeypatch.setattr(launcher, "__call__", live.uncounted(launcher.__call__))
    own = plan.Plan.__call__

    def counted(self: Any, args: Any) -> Any:
        with live:
            return own(self, args)

    monkeypatch.setattr(plan.Plan, "__call__", counted)
    compiled = trainfuse.compile(step, backend="triton", verify="step")
    compiled(x)
    assert compiled.stats()["gate"] == "pass"
    assert "not compared" not in caplog.text
    assert sent, "everything fitted: the test shows nothing"
    peak = (held + live.peak) / capacity
    assert peak <= UNUSED, f"{peak:.2f} of the device"


def assert_equal(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("where", ["program", "kernel", "comparison", "step"])
def test_a_check_that_runs_out_of_memory_runs_again_in_less(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once: then everything that a check keeps waits on the host, and nothing went uncompared."""
    target, name = {
        "program": (GroupCall, "__call__"),
        "kernel": (gate, "evaluate"),
        "comparison": (Gate, "compare"),
        "step": (captured, "evaluate"),
    }[where]
    left = [1]
    own = getattr(target, name)

    def full_once(*args: Any, **more: Any) -> Any:
        if left:
            left.pop()
            raise torch.OutOfMemoryError("planted")
        return own(*args, **more)

    plain_model, _, plain = make(2, 8, 5)
    seed = torch.get_rng_state()
    trainfuse.compile(plain, backend="triton", verify="off")(torch.ones(5, 8))
    model, _, step = make(2, 8, 5)
    torch.set_rng_state(seed)
    needs: list[int] = []
    needed = plan.Plan.needed
    monkeypatch.setattr(plan.Plan, "needed", lambda *a: (needs.append(needed(*a)), needs[-1])[1])
    monkeypatch.setattr(plan, "free_bytes", lambda _: 1 << 40)
    monkeypatch.setattr(target, name, full_once)
    compiled = trainfuse.compile(step, backend="triton", verify="step")
    compiled(torch.ones(5, 8))
    assert not left, "it never ran out"
    assert "not compared" not in caplog.text
    assert compiled.stats()["gate"] == "pass"
    assert needs[0] < room.EVERYTHING == needs[-1]
    assert_equal(model.state_dict(), plain_model.state_dict())


def test_a_check_that_never_fits_is_named_and_the_step_counts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(gate, "evaluate", full)
    model, _, step = make(2, 8, 5)
    before = [p.detach().clone() for p in model.parameters()]
    compiled = trainfuse.compile(step, backend="triton")
    compiled(torch.ones(5, 8))
    assert "forward_0 was not compared" in caplog.text
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_a_step_that_is_too_large_by_itself_raises_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(GroupCall, "__call__", full)
    model, _, step = make(2, 8, 5)
    before = [p.detach().clone() for p in model.parameters()]
    compiled = trainfuse.compile(step, backend="triton")
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        compiled(torch.ones(5, 8))
    for param, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(param, old)
