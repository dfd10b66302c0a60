"""Gradients of gradients: whole steps derive them, regions go over to eager, with one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import trainfuse
from tests.capture.scenarios import BACKENDS, assert_like_eager, batch, reasons, seen
from trainfuse.capture import compat
from trainfuse.testing import Training, fused_masks, gradient_report

# Dynamo looks at `.grad` of what it meets between two graphs, and torch warns of that
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

# torch 2.11 traces no create_graph: such a step runs as regions there, and then eagerly
WHOLE = torch.__version__ >= "2.13"


class Exp(torch.autograd.Function):
    """Saves its output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return g * y


class Cube(torch.autograd.Function):
    """Keeps its input without save_for_backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.x = x
        return x**3

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return 3 * g * ctx.x * ctx.x


class Law(torch.autograd.Function):
    """Saves an intermediate value, of which the gradient's gradient knows nothing: that is law."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        s = x.sin()
        ctx.save_for_backward(s)
        return s * s

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (s,) = ctx.saved_tensors
        return g * s


class Critic(nn.Module):
    def __init__(
        self,
        function: Any = None,
        rate: float = 0.0,
        breaks: bool = False,
        norm: Any = nn.LayerNorm,
    ) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 48), nn.Linear(48, 48)
        self.last = nn.Linear(48, 1, bias=False)
        self.norm = norm(48)
        self.drop = nn.Dropout(rate)
        self.function, self.breaks = function, breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.drop(torch.tanh(self.first(x)))
        if self.function is not None:
            h = self.function.apply(h)
        if self.breaks:
            torch._dynamo.graph_break()
        h = torch.sigmoid(self.norm(self.second(h.exp())))
        return self.last(h).view(-1)


def penalty(critic: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """WGAN-GP's: the norm of the gradient by the input, brought to one."""
    x = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return (grad.norm(2, dim=1) - 1).square().mean()


def wgan(function: Any = None, rate: float = 0.0, breaks: bool = False) -> Training:
    critic = Critic(function, rate, breaks)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)

    def step(real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = critic(fake).mean() - critic(real).mean() + 5 * penalty(critic, (real + fake) / 2)
        loss.backward()
        optimizer.step()
        return loss

    batches = [(torch.randn(48, 6), torch.randn(48, 6)) for _ in range(3)]
    return Training(step, critic, batches)


class Field(nn.Module):
    """u(x, t) of a heat equation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1, bias=False)
        )

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return self.net(points)


def pinn() -> Training:
    """A PINN: the loss reads second derivatives, so that its gradient is a third."""
    model = Field()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

    def step(points: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        x = points.detach().requires_grad_()
        u = model(x)
        (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
        loss = (first[:, 1] - second[:, 0]).square().mean() + u.square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return Training(step, model, [(torch.randn(32, 2),) for _ in range(3)])


STEPS = {
    "wgan": wgan,
    "dropout": lambda: wgan(rate=0.3),
    "saves its output": lambda: wgan(Exp),
    "keeps its input": lambda: wgan(Cube),
    "saves a value": lambda: wgan(Law),
    "pinn": pinn,
}


def _line(caplog: pytest.LogCaptureFixture) -> list[str]:
    texts = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    return [text for text in texts if "differentiated again" in text]


@pytest.mark.covers("G20", "S second order")
@pytest.mark.skipif(not WHOLE, reason="this torch traces no create_graph")
@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, "triton" if name in ("wgan", "dropout", "pinn") else "eager") for name in STEPS],
)
def test_whole_steps_derive_and_fuse_them(name, backend, caplog):
    """G20: the penalty's gradient is a part of the one graph."""
    compiled = []

    def compile_fn(training):
        compiled.append(trainfuse.compile(training.step, backend=backend))
        return compiled[-1]

    gradient_report(STEPS[name], compile_fn).check()
    with trainfuse.settings.patch(keep_gradients=True):
        assert compiled[0].explain().capture == "whole_step"
    assert not _line(caplog)


@pytest.mark.covers("G20")
@pytest.mark.parametrize(
    "name", ["wgan", "dropout", "saves its output", "keeps its input", "saves a value", "pinn"]
)
def test_a_compiled_module_goes_over_to_eager_with_one_line(name, caplog):
    """G20: the first call's gradients are right already, its masks those that were drawn."""
    calls = []

    def compile_fn(training):
        trainfuse.compile(training.model, backend="eager", rng="eager")
        calls.append(compat.compiled_call(training.model))
        return training.step

    gradient_report(STEPS[name], compile_fn, rng="eager").check()
    assert len(_line(caplog)) == 1
    assert "differentiated again" in reasons(calls[0])


def test_regions_between_breaks_too(caplog):
    """Values between the regions are nobody's but theirs."""

    def compile_fn(training):
        trainfuse.compile(training.model, backend="eager")
        return training.step

    gradient_report(lambda: wgan(breaks=True), compile_fn).check()
    assert len(_line(caplog)) == 1


def test_masks_of_the_one_seed_are_drawn_again():
    """`rng="fast"`: what is repeated keeps and drops what the compiled region did."""
    critic = Critic(rate=0.4)
    x = torch.randn(12, 6, requires_grad=True)
    compiled = trainfuse.compile(lambda x: critic(x), backend="triton")
    torch.manual_seed(5)
    (grad,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), x)
    torch.manual_seed(5)
    with fused_masks():
        (expected,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        (expected_second,) = torch.autograd.grad(expected.square().sum(), x)
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(second, expected_second, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("weights", [True, False])
def test_masks_inside_attention_too(weights):
    """Dynamo leaves the function whole; without weights its dropout is that of one operator."""
    attention = nn.MultiheadAttention(6, 2, dropout=0.5)
    x = torch.randn(4, 3, 6, requires_grad=True)

    def attend(x):
        return attention(x, x, x, need_weights=weights)[0]

    def twice(fn):
        torch.manual_seed(5)
        (grad,) = torch.autograd.grad(fn(x).sum(), x, create_graph=True)
        return grad, *torch.autograd.grad(grad.square().sum(), x)

    ours = twice(trainfuse.compile(attend, backend="triton", fallback=False))
    with fused_masks():
        expected = twice(attend)
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-5)


def test_a_dropout_of_everything_takes_its_offset():
    """The mask after it is the next one, in the program and in the reference."""
    x = torch.ones(40)

    def fn(x):
        return functional.dropout(x, 1.0), functional.dropout(x, 0.5)

    torch.manual_seed(3)
    ours = trainfuse.compile(fn, backend="triton", fallback=False)(x)
    torch.manual_seed(3)
    with fused_masks():
        torch.testing.assert_close(ours, fn(x))


def test_running_statistics_are_updated_once():
    def scenario(compile_):
        torch.manual_seed(0)
        critic = Critic(norm=nn.BatchNorm1d)
        compile_(critic)
        observed = []
        for i in range(3):
            loss = penalty(critic, batch(i, rows=8)[0])
            loss.backward()
            observed.append(
                seen(loss, list(critic.buffers()), [p.grad for p in critic.parameters()])
            )
        return observed

    assert_like_eager(scenario, "eager")


def test_a_penalty_every_third_step():
    """The plain steps before it have shown no sign of it."""

    def scenario(compile_):
        torch.manual_seed(0)
        critic = Critic(breaks=True)
        compile_(critic)
        optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
        observed = []
        for i in range(6):
            optimizer.zero_grad()
            x, _ = batch(i, rows=8)
            loss = functional.softplus(critic(x)).mean()
            if i % 3 == 2:
                loss = loss + penalty(critic, x)
            loss.backward()
            optimizer.step()
            observed.append(seen(loss, [p.grad for p in critic.parameters()]))
        return observed

    assert_like_eager(scenario, "eager")


def test_gradients_with_a_graph_inside_the_step():
    """backward(create_graph=True), and a loss of the gradients."""

    def scenario(compile_):
        torch.manual_seed(0)
        critic = Critic()
        params = list(critic.parameters())
        optimizer = torch.optim.SGD(params, lr=0.005)

        def step(x):
            optimizer.zero_grad()
            grads = torch.autograd.grad(critic(x).square().mean(), params, create_graph=True)
            loss = sum(g.square().sum() for g in grads if g is not None)
            loss.backward()
            optimizer.step()
            return loss.detach()

        compiled = compile_(step)
        return [seen(compiled(batch(i, rows=8)[0]), params) for i in range(3)]

    assert_like_eager(scenario, "eager")


def test_an_inner_step_that_is_differentiated_through():
    """MAML: parameters that are themselves results."""

    def scenario(compile_):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))
        names = [name for name, _ in model.named_parameters()]

        def loss_of(x, y, *params):
            given = dict(zip(names, params, strict=True))
            return functional.cross_entropy(torch.func.functional_call(model, given, (x,)), y)

        compiled = compile_(loss_of)
        observed = []
        for i in range(3):
            model.zero_grad()
            params = list(model.parameters())
            inner = compiled(*batch(i), *params)
            grads = torch.autograd.grad(inner, params, create_graph=True)
            moved = [p - 0.1 * g for p, g in zip(params, grads, strict=True)]
            outer = compiled(*batch(i + 5), *moved)
            outer.backward()
            observed.append(seen(inner, outer, [p.grad for p in params]))
        return observed

    assert_like_eager(scenario, "eager")


def test_what_cannot_be_repeated_says_so_and_then_runs_eagerly():
    """The region has overwritten what it would have to read again."""
    weight = nn.Parameter(torch.randn(6, 8))

    def doubled(x):
        return torch.tanh(x.mul_(2) @ weight)

    compiled = trainfuse.compile(doubled, backend="eager")
    x = torch.randn(3, 6, requires_grad=True)
    with pytest.raises(trainfuse.TrainfuseError, match=r"create_graph(.|\n)*writes(.|\n)*fix:"):
        torch.autograd.grad(compiled(x * 1).sum(), x, create_graph=True)
    (grad,) = torch.autograd.grad(compiled(x * 1).sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(doubled(x * 1).sum(), x, create_graph=True)
    torch.testing.assert_close(grad, expected)
    assert grad.requires_grad


def test_a_plain_gradient_costs_no_region(caplog):
    """retain_graph alone is no gradient of a gradient."""
    critic = Critic()
    compiled = trainfuse.compile(lambda x: critic(x), backend="eager")
    for _ in range(3):
        out = compiled(torch.randn(8, 6)).sum()
        out.backward(retain_graph=True)
        out.backward()
    assert not _line(caplog)
    assert len(compiled.plans) == 2


@pytest.mark.covers("G21", "S retain")
def test_backward_twice_after_a_plain_one():
    """G21: the first backward may not spoil, or forbid, what a later one reads again."""

    def scenario(compile_):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.LayerNorm(9), nn.Linear(9, 4))
        compiled = compile_(lambda x: model(x))
        observed = []
        for i in range(4):
            model.zero_grad()
            x, y = batch(i)
            loss = functional.cross_entropy(compiled(x), y)
            if i % 2:
                loss.backward(retain_graph=True)
            loss.backward()
            observed.append(seen(loss, [p.grad for p in model.parameters()]))
        return observed

    for backend in BACKENDS:
        assert_like_eager(scenario, backend)
