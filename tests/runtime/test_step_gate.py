"""verify="step": wrong gradients never reach a parameter, right ones go through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trainfuse
from tests.planting import of_phase, plant
from trainfuse import pipeline, plans
from trainfuse.runtime import captured, step_gate
from trainfuse.runtime.gate import Gate

pytestmark = [  # triton 3.6 and torch 2.11 warn about themselves
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]
Step = Callable[[Tensor], Tensor]
BACKENDS = ("triton", "inductor", "eager")


class Net(nn.Module):
    """A bias whose true gradient is zero (before batch norm), dropout, and a running buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.drop, self.last = nn.Dropout(0.3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(F.gelu(self.norm(self.first(x)))))


def make_step() -> tuple[Net, Step, Tensor]:
    torch.manual_seed(0)
    model = Net()
    # not Adam, which turns the sign of a zero gradient's noise into a full step
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.softplus(model(x)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, step, torch.randn(5, 6)


def trained(backend: str, calls: int = 3, **options: Any) -> tuple[Net, trainfuse.CompiledStep]:
    model, step, x = make_step()
    compiled = trainfuse.compile(step, backend=backend, **options)
    for _ in range(calls):
        compiled(x)
    return model, compiled


def assert_same(ours: Net, theirs: Net) -> None:
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-4, atol=1e-5)


def plant_in_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that scales a gradient: kernels are right for the wrong graph."""

    def wrong(state: Any) -> Any:
        graph, _ = state.graph.copy()
        (update,) = (n for n in graph.nodes() if n.target is torch.ops.trainfuse.update.default)
        params, grads, number = update.args
        with graph.graph.inserting_before(update):
            scaled = graph.graph.call_function(torch.ops.aten.mul.Tensor, (grads[0], 1.01))
        scaled.meta = {"val": grads[0].meta["val"]}
        update.args = (params, [scaled, *grads[1:]], number)
        facts = {**graph.facts, scaled: graph.facts[grads[0]]}
        return replace(state, graph=graph.replace(facts=facts))

    planted = [*pipeline.PASSES]
    planted.insert(3, ("planted", wrong, "scales a gradient"))
    monkeypatch.setattr(pipeline, "PASSES", tuple(planted))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_right_step_passes_and_is_left_alone(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []
    own = step_gate.judge

    def counted(ours: Any, *rest: Any, **options: Any) -> Any:
        compared.append(len(ours))
        return own(ours, *rest, **options)

    monkeypatch.setattr(step_gate, "judge", counted)
    plain, _ = trained(backend)
    assert compared == []
    model, compiled = trained(backend, verify="step")
    assert compared == [6, 3]  # gradients; then the loss and batch norm's statistics
    assert compiled.stats()["gate"] == "pass"
    assert_same(model, plain)


def test_a_number_compares_again_every_so_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    own = step_gate.judge
    monkeypatch.setattr(step_gate, "judge", lambda *a, **k: (compared.append(1), own(*a, **k))[1])
    _, compiled = trained("triton", calls=5, verify=2)
    assert len(compared) == 2 * 3
    assert compiled.stats()["calls"] == 5


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wrong_pass_is_replaced_by_the_captured_graph(
    backend: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain, _ = trained(backend)
    plant_in_pass(monkeypatch)
    caplog.clear()
    model, compiled = trained(backend, verify="step")
    (line,) = {r.getMessage() for r in caplog.records if r.levelname == "WARNING"}
    assert "gradient of first.weight" in line
    assert "eager's own" in line
    assert "gradient of" in compiled.stats()["gate"]
    assert_same(model, plain)


def test_a_wrong_kernel_that_its_own_check_missed_is_found(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain, _ = trained("triton")
    plant(monkeypatch, "value * 1.05", of_phase("backward"))
    monkeypatch.setattr(Gate, "compare", lambda *_: None)
    model, compiled = trained("triton", verify="step")
    assert "gradient of" in compiled.stats()["gate"]
    assert len([r for r in caplog.records if "runs as ATen" in r.getMessage()]) == 1
    assert_same(model, plain)


@pytest.mark.parametrize("how", [{"fallback": False}, {"strict": True}], ids=str)
def test_where_nothing_may_fall_back_a_mismatch_raises_and_nothing_has_changed(
    how: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_in_pass(monkeypatch)
    monkeypatch.setattr(plans, "refuse_unfused", lambda state: None)
    model, step, x = make_step()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seed = torch.get_rng_state()
    compiled = trainfuse.compile(step, backend="triton", verify="step", **how)
    with pytest.raises(trainfuse.GradientMismatch, match="eager's own"):
        compiled(x)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), seed)


@torch.library.custom_op("step_gate_test::single", mutates_args=())
def single(x: Tensor) -> Tensor:
    """Twice x, for fp32 alone."""
    if x.dtype is not torch.float32:
        raise RuntimeError("expected fp32")
    return x * 2


@single.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


single.register_autograd(lambda _, grad: single(grad))


def test_an_operator_without_fp64_keeps_its_precision_and_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        single(torch.tanh(x @ weight)).square().mean().backward()
        optimizer.step()

    compiled = trainfuse.compile(step, backend="eager", verify="step")
    compiled(torch.randn(5, 4))
    assert compiled.stats()["gate"] == "pass"
    lines = [r.getMessage() for r in caplog.records if "own precision" in r.getMessage()]
    assert len(lines) == 1
    assert "step_gate_test.single" in lines[0]
    assert "expected fp32" in lines[0]


def test_no_room_for_the_reference_is_said_and_the_step_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError

    plain, _ = trained("eager")
    monkeypatch.setattr(captured, "evaluate", full)
    model, compiled = trained("eager", verify="step")
    assert "no memory" in caplog.text
    assert compiled.stats()["gate"] == "pass"
    assert_same(model, plain)
