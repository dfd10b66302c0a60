"""Custom autograd.Functions: the user's backward is law, in whole steps and in regions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import trainfuse
from tests.capture.scenarios import assert_like_eager, batch, reasons, seen
from trainfuse.testing import Training, gradient_report

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


class Unequal(torch.autograd.Function):
    """No derivative of its forward at all."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return 3 * g * w, (2 * g * x).sum(0)


class Zero(torch.autograd.Function):
    """Zeros on purpose, by setup_context, which torch.func wants."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(g)


class Nothing(torch.autograd.Function):
    """None for every input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[None, None]:
        return None, None


class InPlace(torch.autograd.Function):
    """Writes to a copy that it then saves the source of."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y += 1
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return 3 * g


class Dirty(torch.autograd.Function):
    """Writes to its input, and says so."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return 1.5 * g


class Sorted(torch.autograd.Function):
    """An output that is not differentiable."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = x.sort(-1)
        ctx.mark_non_differentiable(indices)
        ctx.save_for_backward(indices)
        return values, indices

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor, _: Any) -> torch.Tensor:
        (indices,) = ctx.saved_tensors
        return torch.zeros_like(g).scatter(-1, indices, g)


class Missing(torch.autograd.Function):
    """Two outputs, a missing cotangent, and a constant made in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x * 0.3

    @staticmethod
    def backward(ctx: Any, a: torch.Tensor | None, b: torch.Tensor | None) -> Any:
        total: Any = 0
        if a is not None:
            total = total + 0.7 * a
        if b is not None:
            total = total + 1.1 * b
        return total


class WritesGradient(torch.autograd.Function):
    """A backward that writes in place, a number among it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        g = g.clone()
        g.mul_(2)
        g[0] = 0
        g[1:3].neg_()
        return g


FUNCTIONS = {
    "unequal": lambda x, w: Unequal.apply(x, w),
    "zeros": lambda x, w: Zero.apply(x) + w * x.cos(),
    "none": lambda x, w: Nothing.apply(x, 2.0) + w * x,
    "in place": lambda x, w: InPlace.apply(x) * w,
    "dirty": lambda x, w: Dirty.apply(x * 1.5) * w,
    "not differentiable": lambda x, w: Sorted.apply(x * w)[0],
    "missing cotangent": lambda x, w: Missing.apply(x * w)[1],
    "writes its gradient": lambda x, w: WritesGradient.apply(x * w),
}


class Net(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 40), nn.Linear(40, 33)
        self.weight = nn.Parameter(torch.randn(40))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.function(torch.tanh(self.first(x)), self.weight))


@pytest.mark.covers("G2", "G3", "S custom Function")
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "regions"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_users_backward_is_law(name, whole):
    """G2, G3: three steps against eager and fp64."""
    compiled = []

    def make() -> Training:
        model = Net(FUNCTIONS[name])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def step(x, y):
            optimizer.zero_grad()
            loss = functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        batches = [(torch.randn(21, 7), torch.randn(21, 33)) for _ in range(3)]
        return Training(step, model, batches)

    def compile_fn(training):
        if whole:
            compiled.append(trainfuse.compile(training.step, backend="eager"))
            return compiled[0]
        trainfuse.compile(training.model, backend="eager")
        return training.step

    gradient_report(make, compile_fn).check()
    if whole:
        assert [plan.kind for plan in compiled[0].plans] == ["whole_step"]


def _through_torch_compile(fn):
    return torch.compile(fn, backend="trainfuse", options={"backend": "eager"})


@pytest.mark.covers("G2")
@pytest.mark.parametrize("compile_fn", [trainfuse.compile, _through_torch_compile])
def test_in_place_inside_a_function_by_hand(compile_fn):
    """G2: the gradient is 3, whatever the derivative of the forward."""
    compiled = compile_fn(lambda x: InPlace.apply(x))
    x = torch.randn(5, requires_grad=True)
    (grad,) = torch.autograd.grad(compiled(x).sum(), x)
    assert torch.equal(grad, torch.full((5,), 3.0))


def _zero_and_square(x):
    return (Zero.apply(x) + x * x).sum()


@pytest.mark.covers("G3")
@pytest.mark.parametrize("inside", [False, True])
def test_a_function_under_torch_func_keeps_its_backward(inside):
    """G3: Dynamo itself would differentiate the forward."""

    def gradient(x):
        return torch.func.grad(_zero_and_square)(x) * 1.5

    target = gradient if inside else torch.func.grad(_zero_and_square)

    def scenario(compile_):
        compiled = compile_(target)
        return [seen(compiled(batch(i)[0])) for i in range(3)]

    assert_like_eager(scenario, "eager")


@pytest.mark.covers("G3")
def test_a_function_under_torch_func_within_a_step():
    """G3: the step is not captured whole, and says why."""

    def scenario(compile_):
        torch.manual_seed(0)
        model = nn.Linear(6, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x, y):
            optimizer.zero_grad()
            extra = torch.func.grad(_zero_and_square)(x)
            loss = functional.cross_entropy(model(x + extra), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        compiled = compile_(step)
        return [seen(compiled(*batch(i)), list(model.parameters())) for i in range(3)]

    (step,) = assert_like_eager(scenario, "eager")
    assert "torch.func" in reasons(step)
