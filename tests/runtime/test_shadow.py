"""Dynamo's graph under eager autograd: the same step, and no trace of having run it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import trainfuse
from trainfuse.capture import shadow
from trainfuse.capture.shadow import Seen, Shadow
from trainfuse.runtime import captured, step_gate

pytestmark = [  # triton 3.6 and torch 2.11 warn about themselves
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]
Make = Callable[[], tuple[Callable[..., Any], nn.Module, tuple[Tensor, ...]]]


def _step(model: nn.Module, loss_of: Callable[..., Tensor], **sgd: Any) -> Callable[..., Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **sgd)

    def step(*batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(*batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def batch_norm() -> Any:
    """Statistics that are written although no schema says so, and a dropout."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.4), nn.Linear(8, 3))
    return _step(model, lambda x: model(x).square().mean()), model, (torch.randn(5, 6),)


def checkpointed() -> Any:
    """A stretch that runs twice, with the same mask."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.4), nn.Linear(8, 6))

    def loss_of(x: Tensor) -> Tensor:
        y = checkpoint(model, x, use_reentrant=False)
        return (F.dropout(y, 0.2) + x).exp().mean()

    return _step(model, loss_of), model, (torch.randn(5, 6),)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.attention(x, x, x, need_weights=False)[0] * self.calls


def attention() -> Any:
    """Dropout inside of attention, and a counter that is used in the maths."""
    model = _Attention()
    return _step(model, lambda x: model(x).square().mean()), model, (torch.randn(2, 5, 8),)


def autocast() -> Any:
    """Halves, an in-place activation, a written input, and a clipped gradient."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.LayerNorm(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = torch.zeros(2)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        loss = y.float().square().mean()
        loss.backward()
        seen.add_(y.detach().float().mean(0))
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        return loss.detach()

    return step, model, (torch.randn(5, 6),)


def around() -> Any:
    """Autocast around the step, which no node of its graph says."""
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 2))
    step = _step(model, lambda x: model(x).float().square().mean())
    return step, model, (torch.randn(5, 6),)


MAKERS: dict[str, Make] = {
    make.__name__: make for make in (batch_norm, checkpointed, attention, autocast, around)
}


def run(compiled: Any, make: Make, batch: tuple[Tensor, ...]) -> Any:
    with torch.autocast("cpu", torch.bfloat16, enabled=make is around):
        return compiled(*batch)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_it_sees_the_step_and_leaves_no_trace(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[tuple[Seen, Any]] = []
    look = Shadow.look

    def watched(self: Shadow, *given: Any) -> Seen:
        def state() -> list[Any]:
            tensors = [t.detach().clone() for t in self._args if isinstance(t, Tensor)]
            return [*tensors, torch.get_rng_state()]

        before = state()
        # the caller forks the generator
        with torch.random.fork_rng():
            seen = look(self, *given)
        torch.testing.assert_close(state(), before, rtol=0, atol=0)
        looks.append((seen, self))
        return seen

    results: list[Any] = []
    suspected: list[bool] = []
    differ = step_gate.References._differ
    monkeypatch.setattr(
        step_gate.References,
        "_differ",
        lambda *a: (suspected.append(differ(*a)), suspected[-1])[1],
    )
    own = captured.CapturedStep.seen
    monkeypatch.setattr(Shadow, "look", watched)
    monkeypatch.setattr(
        captured.CapturedStep, "seen", lambda *a: (results.append(own(*a)), results[-1])[1]
    )
    torch.manual_seed(0)
    step, model, batch = make()
    compiled = trainfuse.compile(step, backend="eager", verify=1)
    for _ in range(3):
        run(compiled, make, batch)
    assert compiled.stats()["gate"] == "pass"
    assert compiled.explain().capture == "whole_step"
    assert len(looks) == 3
    assert suspected
    assert not any(suspected)
    assert all(result is not None for result in results), "the masks were other ones"
    trained = [p for p in model.parameters() if p.requires_grad]
    (gradients,) = looks[-1][0].gradients
    assert gradients.keys() == {id(p) for p in trained}
    written = {name for result in results for name in result.written}
    mutated = {name for name, _ in model.named_buffers()}
    assert {name for name in written if name in mutated} == mutated


def test_integers_are_copied_only_where_an_operator_writes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether the others have changed would be asked of the device, which is waited for."""
    copied: list[list[Tensor]] = []
    look, compare = Shadow.look, shadow._Writes._compare

    def watched(self: Shadow, copies: Any, *more: Any) -> Seen:
        return look(self, lambda t: (copied.append([x.clone() for x in t]), copies(t))[1], *more)

    asked: list[int] = []
    monkeypatch.setattr(Shadow, "look", watched)
    monkeypatch.setattr(
        shadow._Writes, "_compare", lambda self: (asked.append(len(self._old)), compare(self))[1]
    )
    model = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 2))
    calls = torch.zeros(2, dtype=torch.int64)

    def loss_of(ids: Tensor) -> Tensor:
        if counting:
            calls.add_(1)
        return model(ids).square().mean()

    for counting in (False, True):
        torch.compiler.reset()
        compiled = trainfuse.compile(_step(model, loss_of), backend="eager", verify=1)
        for _ in range(2):
            compiled(torch.tensor([[1, 2], [0, 6]]))
        assert compiled.stats()["gate"] == "pass"
        integers = [t for some in copied for t in some if not t.is_floating_point()]
        assert [t.tolist() for t in integers] == (
            [[0, 0], [1, 1], [1, 1], [2, 2]] if counting else []
        )
        assert asked == [int(counting)] * 2
        asked.clear()
    assert calls.tolist() == [2, 2]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_taken_over_it_trains_as_the_plan_would(make: Make) -> None:
    states = []
    for take_over in (False, True):
        torch.manual_seed(0)
        step, model, batch = make()
        compiled = trainfuse.compile(step, backend="eager")
        with pytest.MonkeyPatch.context() as patch:
            if take_over:
                beside = Shadow.beside

                def mine(self: Shadow, run: Any, beside: Any = beside) -> Any:
                    self._took_over = True
                    return beside(self, run)

                patch.setattr(Shadow, "beside", mine)
            losses = [run(compiled, make, batch) for _ in range(3)]
        states.append((losses, dict(model.state_dict())))
        assert bool(compiled.stats()["calls"]) is not take_over
    torch.testing.assert_close(*states, rtol=2e-3, atol=1e-4)
