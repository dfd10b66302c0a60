"""What a loss doesn't depend on has no gradient: None, not zeros, in regions as in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import trainfuse
from tests.capture.scenarios import BACKENDS, assert_like_eager, batch, seen, state_of
from trainfuse.capture import reach

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


class Halves(torch.autograd.Function):
    """Two values apart, in one node: of one's gradient, the other's is zeros."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, y * 3

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return g * 2, h * 3


class Model(nn.Module):
    """A trunk and four layers, from which `parts` makes the outputs."""

    def __init__(self, parts: Callable[[Model, torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.trunk = nn.Linear(6, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(6))
        self.parts = parts

    def forward(self, x: torch.Tensor) -> Any:
        return self.parts(self, x)


def heads(m: Model, x: torch.Tensor) -> Any:
    return [layer(x) for layer in m.layers]


def behind_a_trunk(m: Model, x: torch.Tensor) -> Any:
    h = m.trunk(x)
    return [layer(h).relu() for layer in m.layers]


def nested(m: Model, x: torch.Tensor) -> Any:
    h = m.trunk(x)
    return {"a": (m.layers[0](h), {"b": m.layers[1](h)}), "c": m.layers[2](x) * m.scale}


def views(m: Model, x: torch.Tensor) -> Any:
    """Two results of one value, which is returned through them alone."""
    both = torch.cat([m.layers[0](x), m.layers[1](x)])
    return both[:5].t(), both[5:].view(-1), m.layers[2](x).unflatten(1, (2, 3)).transpose(0, 1)


def unbound(m: Model, x: torch.Tensor) -> Any:
    """Several results of one operator: each reaches all that it read."""
    a, b, c = torch.stack([layer(x) for layer in m.layers]).unbind()
    return a, b, c + m.scale


def one_function(m: Model, x: torch.Tensor) -> Any:
    a, b = Halves.apply(m.layers[0](x), m.layers[1](x))
    return a, b, m.layers[2](x)


def cut_off(m: Model, x: torch.Tensor) -> Any:
    """The second result has no history through the first layer."""
    h = m.layers[0](x)
    with torch.no_grad():
        frozen = m.trunk(h)
    return h, m.layers[1](h.detach()) + frozen, m.layers[2](x)


def written(m: Model, x: torch.Tensor) -> Any:
    h = m.layers[0](x)
    base = torch.zeros(10, 6)
    base[:5] = h
    base[5:].add_(m.layers[1](x))
    return base[:5], m.layers[2](x), base[5:] * 2


def checkpointed(m: Model, x: torch.Tensor) -> Any:
    h = checkpoint(m.layers[0], x, use_reentrant=False)
    return h, checkpoint(m.layers[1], x, use_reentrant=False), m.layers[2](x)


def passed_through(m: Model, x: torch.Tensor) -> Any:
    """A second region, which returns a view of what the first one made."""
    h = m.layers[0](x)
    k = m.layers[1](x)
    torch._dynamo.graph_break()
    return h.view(-1), m.layers[2](x), k.view(-1) * 2


def whole_number(m: Model, x: torch.Tensor) -> Any:
    """Results without gradients are in between."""
    h = m.layers[0](x)
    return h.argmax(1), h, m.layers[1](x).detach(), m.layers[2](x)


def leaf_written(m: Model, x: torch.Tensor) -> Any:
    """Parameters that are written past autograd, one of which no result depends on."""
    m.scale.detach().mul_(-0.5)
    m.layers[1].weight.data.clamp_(-0.1, 0.1)
    return m.layers[1](x) + (m.scale * 2).detach(), m.layers[2](x)


PARTS = (
    leaf_written,
    heads,
    behind_a_trunk,
    nested,
    views,
    unbound,
    one_function,
    cut_off,
    written,
    checkpointed,
    passed_through,
    whole_number,
)


def results_of(outputs: Any) -> list[torch.Tensor]:
    flat = torch.utils._pytree.tree_leaves(outputs)
    return [v for v in flat if v.requires_grad]


def gradients(model: nn.Module, x: torch.Tensor) -> Any:
    return seen([p.grad for p in model.parameters()], x.grad)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("parts", PARTS, ids=lambda parts: parts.__name__)
def test_each_set_of_used_results(parts: Callable[..., Any], backend: str) -> None:
    def scenario(compile_: Callable[..., Any]) -> Any:
        model, found = Model(parts), []
        run = compile_(lambda x: model(x))
        for used in range(1, 8):
            x = batch(used)[0].requires_grad_()
            model.zero_grad()
            chosen = [v for i, v in enumerate(results_of(run(x))) if used >> i & 1]
            sum((v.square().sum() for v in chosen), torch.zeros((), requires_grad=True)).backward()
            found.append(gradients(model, x))
        return found

    assert_like_eager(scenario, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("parts", [behind_a_trunk, views, cut_off], ids=lambda p: p.__name__)
def test_training_that_uses_other_results_by_turns(parts: Callable[..., Any], backend: str) -> None:
    """Momentum and weight decay move a parameter whose gradient is zeros."""

    def scenario(compile_: Callable[..., Any]) -> Any:
        model = Model(parts)
        compile_(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=0.1)
        found = []
        for used in (0, 1, 1, 2, 0, 2, 1):
            optimizer.zero_grad()
            results_of(model(batch(used)[0]))[used].square().mean().backward()
            optimizer.step()
            found.append(state_of(model, optimizer, grads=True))
        return found

    assert_like_eager(scenario, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_graph_twice(backend: str) -> None:
    """Each backward through a graph that is kept has its own used results."""

    def scenario(compile_: Callable[..., Any]) -> Any:
        model, found = Model(behind_a_trunk), []
        run = compile_(lambda x: model(x))
        x = batch(1)[0].requires_grad_()
        a, b, c = run(x)
        for loss in (a.sum(), b.square().sum(), (a * c).sum()):
            loss.backward(retain_graph=True)
            found.append(gradients(model, x))
        found.append(
            torch.autograd.grad(c.sum(), [*model.layers[0].parameters(), x], allow_unused=True)[0]
            is None
        )
        return seen(*found)

    assert_like_eager(scenario, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_that_breaks(backend: str) -> None:
    def scenario(compile_: Callable[..., Any]) -> Any:
        model = Model(nested)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)

        def step(x: torch.Tensor) -> Any:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                out = model(x)
            torch._dynamo.graph_break()
            functional.mse_loss(out["a"][0].float(), x).backward()
            optimizer.step()

        step = compile_(step)
        for seed in range(3):
            step(batch(seed)[0])
        return seen([p.grad is None for p in model.parameters()])

    assert_like_eager(scenario, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("view", [False, True], ids=["whole", "view"])
def test_an_input_that_is_written_with_history(view: bool, backend: str) -> None:
    def scenario(compile_: Callable[..., Any]) -> Any:
        model, found = Model(heads), []

        def mixed(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            h.mul_(model.layers[0](x)[: len(h)])
            return model.layers[1](x)

        mixed = compile_(mixed)
        for written in (True, False):
            x = batch(1)[0].requires_grad_()
            model.zero_grad()
            base = model.trunk(x)
            h = base[1:4] if view else base
            out = mixed(h, x)
            (base if written else out).square().sum().backward()
            found.append(gradients(model, x))
        return found

    assert_like_eager(scenario, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_region_that_returns_nothing(backend: str) -> None:
    def scenario(compile_: Callable[..., Any]) -> Any:
        model, found = Model(heads), []

        def scale(h: torch.Tensor, k: torch.Tensor, x: torch.Tensor) -> None:
            h.mul_(model.layers[0](x))
            k.mul_(model.layers[1](x))

        scale = compile_(scale)
        for used in range(3):
            x = batch(1)[0].requires_grad_()
            model.zero_grad()
            h, k = model.trunk(x), model.trunk(x.detach())
            scale(h, k, x)
            (h, k, h * k)[used].square().sum().backward()
            found.append(gradients(model, x))
        return found

    assert_like_eager(scenario, backend)


def test_what_cannot_be_followed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros are the rest then, with the reason."""

    def no_leaf(_: Any) -> Any:
        raise RuntimeError("no tensor without values")

    monkeypatch.setattr(reach.Outline, "leaf", no_leaf)
    model = trainfuse.compile(Model(heads), backend="eager")
    results_of(model(batch(1)[0]))[0].sum().backward()
    said = [r.reason for r in trainfuse.explain(model).refusals]
    assert any("zeros, not None: no tensor without values" in reason for reason in said)
    assert model.layers[0].weight.grad is not None
