"""Parts that Dynamo fails to trace run eagerly: remembered, said once, with the state of eager.

Operators are planted whose shape function raises, or tells a shape that the rest of the program
can't take.
"""

from __future__ import annotations

import logging
import random

import pytest
import torch
from torch import nn

import trainfuse
from tests.capture.twins import BACKENDS
from trainfuse.codegen import lower as lowering
from trainfuse.errors import CaptureError, CompilingFailed, TracingFailed
from trainfuse.plans import Builder

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:`torch.jit"),
]

TRACED: list[str] = []


def _plant(name, fake):
    @torch.library.custom_op(f"trainfuse_tests::{name}", mutates_args=())
    def planted(x: torch.Tensor) -> torch.Tensor:
        return x * 2.0

    @planted.register_fake
    def _(x):
        TRACED.append(name)
        return fake(x)

    planted.register_autograd(lambda ctx, grad: grad * 2.0)
    return planted


def _raises(x):
    raise LookupError("no shape for this")


def _raises_for_few(x):
    return _raises(x) if x.shape[0] < 4 else torch.empty_like(x)


OPERATORS = {
    "raises": _plant("raises", _raises),
    "lies": _plant("lies", lambda x: x.new_empty(*x.shape, 7)),
}
FEW = _plant("few", _raises_for_few)


class Model(nn.Module):
    """A layer, a planted operator whose result meets the input again, a draw, and a layer."""

    def __init__(self, planted):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)
        self.planted = planted
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        h = torch.tanh(self.first(x))
        h = self.planted(h) @ self.second.weight.mT
        return h * torch.rand(()) + self.second.bias


def pair(planted):
    torch.manual_seed(3)
    model, twin = Model(planted), Model(planted)
    twin.load_state_dict(model.state_dict())
    return model, twin


def same(ours, eager):
    for (name, p), q in zip(ours.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p, q, msg=lambda m, n=name: f"{n}: {m}")
        if q.grad is None:
            assert p.grad is None, name
        else:
            torch.testing.assert_close(p.grad, q.grad)
    assert torch.equal(ours.calls, eager.calls)


def lines(caplog):
    return [r.getMessage() for r in caplog.records if "failed to trace" in r.getMessage()]


@pytest.fixture(autouse=True)
def _fresh(caplog):
    caplog.set_level(logging.WARNING, logger="trainfuse")
    TRACED.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=["raises", "lies"])
def planted(request):
    return OPERATORS[request.param]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_module(planted, backend, training, caplog):
    ours, eager = pair(planted)
    ours.train(training)
    eager.train(training)
    trainfuse.compile(ours, backend=backend)
    for call in range(3):
        x = torch.randn(5, 6)
        results = []
        for model in (ours, eager):
            torch.manual_seed(call)
            random.seed(call)
            with torch.set_grad_enabled(training):
                out = model(x)
            if training:
                out.square().sum().backward()
            results.append((out, torch.get_rng_state(), random.getstate()))
        torch.testing.assert_close(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])
        assert results[0][2] == results[1][2]
        if call == 0:
            tried = len(TRACED)
            assert tried
    same(ours, eager)
    assert len(TRACED) == tried, "a part that failed was traced again"
    assert len(lines(caplog)) == 1, lines(caplog)
    assert "test_frames.py:" in lines(caplog)[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_function_that_stays_differentiable(planted, backend, caplog):
    def fn(x, w):
        return ((planted(x * w) @ w.mT).sin() * x.sum(),)

    x, w = torch.randn(4, 4), torch.randn(4, 4)
    compiled = trainfuse.compile(fn, backend=backend)
    for _ in range(2):
        ours, eager = x.clone().requires_grad_(), x.clone().requires_grad_()
        (got,), (expected,) = compiled(ours, w), fn(eager, w)
        torch.testing.assert_close(got, expected)
        got.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(ours.grad, eager.grad)
    assert len(lines(caplog)) == 1
    reasons = [r.reason for r in compiled.explain().refusals]
    assert any("failed to trace" in reason for reason in reasons)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_training_step(planted, backend, caplog):
    models = pair(planted)
    steps = []
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def step(x, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        steps.append(step)
    compiled = trainfuse.compile(steps[0], backend=backend)
    for call in range(3):
        x = torch.randn(5, 6)
        torch.manual_seed(call)
        got = compiled(x)
        after = torch.get_rng_state()
        torch.manual_seed(call)
        torch.testing.assert_close(got, steps[1](x))
        assert torch.equal(after, torch.get_rng_state())
        if call == 0:
            tried = len(TRACED)
    same(*models)
    assert len(TRACED) == tried, "a part that failed was traced again"
    assert len(lines(caplog)) == 1, lines(caplog)


def test_what_ran_before_runs_once(planted):
    """A frame that goes on after a break fails: what the first part did is not done again."""
    done = []

    def fn(x, seen):
        seen.add_(1)
        y = x * 2
        torch._dynamo.graph_break()
        done.append(float(seen))
        return planted(y) @ x

    x, seen = torch.randn(3, 3), torch.zeros(())
    compiled = trainfuse.compile(fn, backend="eager", whole_step=False)
    torch.testing.assert_close(compiled(x, seen), (x * 4) @ x)
    assert seen == 1
    assert done == [1.0]


def test_plans_of_other_shapes_stay(caplog):
    def fn(x):
        return FEW(x * 3).sin()

    compiled = trainfuse.compile(fn, backend="eager", whole_step=False)
    many, few = torch.randn(8, 2), torch.randn(2, 2)
    compiled(many)
    torch.testing.assert_close(compiled(few), (few * 6).sin())
    calls = compiled.stats()["calls"]
    torch.testing.assert_close(compiled(many), (many * 6).sin())
    assert compiled.stats()["calls"] == calls + 1
    tried = len(TRACED)
    compiled(few)
    assert len(TRACED) == tried
    assert len(lines(caplog)) == 1


def test_a_fault_within_dynamo(monkeypatch, caplog):
    """Not an operator's: an assertion of Dynamo's own fails, once the graph is traced."""

    def fails(*_, **__):
        assert 1 > 2, "planted in Dynamo"

    monkeypatch.setattr(torch._dynamo.output_graph.OutputGraph, "remove_unused_graphargs", fails)
    compiled = trainfuse.compile(lambda x: x.sin() * 2, backend="eager", whole_step=False)
    x = torch.randn(3)
    torch.testing.assert_close(compiled(x), x.sin() * 2)
    assert len(lines(caplog)) == 1
    assert "planted in Dynamo" in lines(caplog)[0]


@pytest.mark.parametrize("whole_step", [True, False])
@pytest.mark.parametrize("how", [{"fallback": False}, {"strict": True}], ids=str)
def test_a_clear_error_where_fallback_is_off(planted, how, whole_step):
    def fn(x):
        return planted(x) @ x

    compiled = trainfuse.compile(fn, backend="eager", whole_step=whole_step, **how)
    state = torch.get_rng_state()
    with pytest.raises(TracingFailed, match=r"(?s)failed to trace.*test_frames\.py:"):
        compiled(torch.ones(3, 3))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("of", ["forward", "split"])
@pytest.mark.parametrize("whole_step", [True, False])
def test_trainfuses_own_faults_are_called_so(of, whole_step, monkeypatch, caplog):
    """The part runs eagerly, and nobody is told that torch was at fault."""

    def broken(*_, **__):
        raise LookupError("planted")

    if of == "forward":
        monkeypatch.setattr(lowering, "print_module", broken)
    else:
        monkeypatch.setattr(Builder, "joint_passes", broken)
    options = {"backend": "triton", "whole_step": whole_step, "verify": "off"}

    def fn(x):
        return (x.sin() * 2).exp().square()

    x = torch.ones(5, 3, requires_grad=True)
    for how in ({"fallback": False}, {"strict": True}):
        compiled = trainfuse.compile(fn, **options, **how)
        with pytest.raises(
            CompilingFailed, match=r"(?s)trainfuse failed.*LookupError: planted.*report"
        ):
            compiled(x)
    compiled = trainfuse.compile(fn, **options)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), fn(x))
    told = [r.getMessage() for r in caplog.records if "runs eagerly" in r.getMessage()]
    assert len(told) == 1
    assert "trainfuse failed to compile it" in told[0]
    assert "LookupError: planted" in told[0]


@pytest.mark.parametrize("kind", ["function", "module"])
def test_a_clear_error_under_fullgraph(planted, kind):
    target = (lambda x: planted(x) @ x) if kind == "function" else Model(planted)
    compiled = trainfuse.compile(target, backend="eager", fullgraph=True)
    with pytest.raises(CaptureError, match="can't be captured whole"):
        compiled(torch.ones(6, 6))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_programs_own_errors(backend, caplog):
    """Operands that don't match: eager's error, from the user's line; good calls are compiled."""

    def fn(x, y):
        return (x @ y).sin()

    compiled = trainfuse.compile(fn, backend=backend)
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    with pytest.raises(RuntimeError) as expected:
        fn(x, y)
    for _ in range(2):
        with pytest.raises(RuntimeError) as got:
            compiled(x, y)
        assert (type(got.value), str(got.value)) == (RuntimeError, str(expected.value))
        assert got.traceback[-1].path.name == "test_frames.py"
    assert not lines(caplog)
    torch.testing.assert_close(compiled(x, y.mT), (x @ y.mT).sin())
    assert compiled.stats()["calls"] == 1


def test_an_exception_of_the_program(planted, caplog):
    """What it raises beside an operator that can't be traced comes out as it is."""

    def fn(x, wrong):
        y = planted(x)
        if wrong:
            raise ValueError("the user's own")
        return y @ x

    compiled = trainfuse.compile(fn, backend="eager")
    x = torch.randn(3, 3)
    for _ in range(2):
        torch.testing.assert_close(compiled(x, False), x * 2 @ x)
        with pytest.raises(ValueError, match=r"^the user's own$"):
            compiled(x, True)
    assert len(lines(caplog)) == 1


def test_our_own_errors_are_let_through():
    def fn(x):
        return torch.special.airy_ai(x) * 2

    with (
        trainfuse.strict_fusion(),
        pytest.raises(trainfuse.TrainfuseError, match="strict_fusion"),
    ):
        trainfuse.compile(fn, backend="triton", skip_ops="aten.mul")(torch.randn(4))


def test_explain_runs_nothing(planted):
    done = []

    def fn(x):
        y = planted(x) @ x
        done.append(1)
        return y

    explanation = trainfuse.explain(trainfuse.compile(fn, backend="eager"), torch.ones(3, 3))
    assert not done
    assert any("failed to trace" in r.reason for r in explanation.refusals)
