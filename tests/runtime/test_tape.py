"""A reference's calls, noted at its second run and then replayed: the same values in less time."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import trainfuse
from tests.runtime.checked import QUIET, train
from tests.runtime.checked import make as make_checked
from tests.runtime.graphs import trace
from trainfuse.runtime import captured
from trainfuse.runtime.fallback import Boundary
from trainfuse.runtime.reference import Native, Widened, evaluate
from trainfuse.runtime.reference_schedule import schedule
from trainfuse.runtime.tape import Recording, Tape, Untaped

pytestmark = [*QUIET, pytest.mark.usefixtures("fresh_gate")]


def network(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
    """Products of halves, views, several results, casts, an input that is a result."""
    product = (x @ w).float()
    parts = torch.split(F.layer_norm(product + b, (8,)), 4, 1)
    mean = torch.var_mean(parts[1].t(), 0)[1]
    return [parts[0].sum(0), mean, F.gelu(product).bfloat16() @ w, x[1:], torch.cat([mean, mean])]


def inputs() -> list[Tensor]:
    return [*(torch.randn(8, 8, dtype=torch.bfloat16) for _ in range(2)), torch.randn(8)]


@pytest.mark.parametrize("wide", [False, True])
def test_replayed_it_gives_what_an_evaluation_gives_on_other_values(wide: bool) -> None:
    tg = trace(network, inputs())
    plan = schedule(tg.nodes(), tg.output_nodes, wide=wide)
    run = Widened(Boundary()) if wide else Native()
    recording, evaluated = Recording(Boundary()), []

    def values(args: list[Tensor]) -> list[Tensor]:
        given: dict[fx.Node, Any] = dict(
            zip(tg.graph.find_nodes(op="placeholder"), args, strict=True)
        )

        def once() -> dict[fx.Node, Any]:
            evaluated.append(True)
            return evaluate(plan, given, run)

        found = recording.values(once, plan.wanted, args, nullcontext)
        expected = evaluate(plan, given, run)
        for node in plan.wanted:
            assert found[node].dtype is expected[node].dtype
            assert torch.equal(found[node], expected[node])
        return [*found.values()]

    for _ in range(4):
        args = inputs()
        made = values(args)
        memory = {t.untyped_storage().data_ptr() for t in args}
        assert not memory & {t.untyped_storage().data_ptr() for t in made}
    assert len(evaluated) == 2


def test_what_is_read_last_is_forgotten_at_once() -> None:
    alive: list[weakref.ref[Any]] = []
    own = torch.exp

    def watched(x: Tensor) -> Tensor:
        made = own(x)
        alive.append(weakref.ref(made))
        return made

    def calls(x: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.ops.aten.exp.default(x)
        return x

    x = torch.zeros(3)
    with Tape([x]) as tape:
        result = calls(x)
    replay = tape.replay([result])
    for name, value in replay.__globals__.items():
        if value is torch.ops.aten.exp.default:
            replay.__globals__[name] = lambda x: (count.append(living()), watched(x))[1]
    count: list[int] = []

    def living() -> int:
        return sum(ref() is not None for ref in alive)

    (again,) = replay(x)
    assert torch.equal(again, result)
    assert count == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        (lambda x, other: x * float(x.sum()), "decides by values"),
        (lambda x, other: x[x > 0], "decides by values"),
        (lambda x, other: x * other, "from elsewhere"),
    ],
    ids=["number", "size", "another tensor"],
)
def test_what_depends_on_more_than_its_inputs_sizes_is_not_recorded(
    odd: Callable[..., Tensor], why: str
) -> None:
    x, other = torch.randn(5), torch.randn(5)
    with pytest.raises(Untaped, match=why), Tape([x]):
        odd(x, other)
    node: Any = "the result"
    recording = Recording(Boundary())
    for _ in range(4):
        x = torch.randn(5)
        found = recording.values(lambda x=x: {node: odd(x, other)}, [node], [x], nullcontext)
        assert torch.equal(found[node], odd(x, other))


def test_a_replay_that_fails_runs_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the same state of the generators."""
    node: Any = "the result"
    recording = Recording(Boundary())

    def draw() -> dict[Any, Tensor]:
        return {node: torch.rand(4)}

    def same() -> Any:
        torch.manual_seed(3)
        return nullcontext()

    def values() -> Tensor:
        return recording.values(draw, [node], [], same)[node]

    expected = values()
    assert torch.equal(values(), expected)
    assert torch.equal(values(), expected), "replayed"

    def broken() -> list[Tensor]:
        torch.rand(1)
        raise RuntimeError("no more")

    monkeypatch.setattr(recording, "_replay", broken)
    assert torch.equal(values(), expected)
    assert torch.equal(values(), expected)


def test_a_step_s_reference_is_replayed_with_today_s_masks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs: list[bool] = []
    own = captured.evaluate
    monkeypatch.setattr(captured, "evaluate", lambda *a: (runs.append(True), own(*a))[1])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5), nn.Tanh(), nn.Linear(32, 2))
    update = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(x: Tensor) -> Tensor:
        update.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        update.step()
        return loss.detach()

    compiled = trainfuse.compile(step, verify=1)
    train(compiled, 5)
    assert compiled.stats()["gate"] == "pass"
    assert len(runs) == 2


def test_sizes_that_change_are_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[bool] = []
    own = captured.evaluate
    monkeypatch.setattr(captured, "evaluate", lambda *a: (runs.append(True), own(*a))[1])
    _, step = make_checked()
    compiled = trainfuse.compile(step, verify=1, dynamic=True)
    for rows in (5, 6, 7, 8):
        compiled(torch.randn(rows, 4))
    assert compiled.stats()["gate"] == "pass"
    assert len(runs) >= 4
