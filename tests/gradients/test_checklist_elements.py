"""The fusion checklist: element types, elementwise operators, broadcasting, in-place, outputs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import trainfuse
from tests.gradients.five_calls import five_calls, t
from trainfuse.testing import assert_gradients_match

HALF = (torch.float16, torch.bfloat16)
FLOATS = (*HALF, torch.float32, torch.float64)


# ------------------------------------------------------------------------------------- dtypes


def chain(x: Tensor, y: Tensor) -> Tensor:
    return (x * y + 1.5) * torch.tanh(x) - y


@pytest.mark.covers("B dtypes")
@pytest.mark.parametrize("dtype", FLOATS)
def test_floating_types(dtype: torch.dtype) -> None:
    five_calls(chain, lambda: (t(40, 30, dtype=dtype), t(40, 30, dtype=dtype)), 1, 1)


@pytest.mark.covers("B dtypes")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool])
def test_integral_types(dtype: torch.dtype) -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x & y) ^ x, (x | y) == y

    five_calls(fn, lambda: (t(40, 30, dtype=dtype), t(40, 30, dtype=dtype)), 1, None)


PROMOTIONS = {
    "half with a 0-dim float": lambda: (t(40, 30, dtype=torch.float16), t()),
    "float with a 0-dim double": lambda: (t(7, 5), t(dtype=torch.float64)),
    "half with float": lambda: (t(40, 30, dtype=torch.bfloat16), t(40, 30)),
    "float with int": lambda: (t(7, 5), t(7, 5, dtype=torch.int64)),
    "bool with float": lambda: (t(7, 5), t(7, 5, dtype=torch.bool)),
    "a number": lambda: (t(7, 5), 3),
}


@pytest.mark.covers("B dtypes")
@pytest.mark.parametrize("name", PROMOTIONS)
def test_promotion(name: str) -> None:
    """As torch promotes; the gradient has its input's type."""

    def fn(x: Tensor, y: Any) -> Tensor:
        return torch.sigmoid(x * y) + x * 2

    five_calls(fn, PROMOTIONS[name], 1, 1)


@pytest.mark.covers("B dtypes")
def test_gradcheck_in_double() -> None:
    step = trainfuse.compile(chain, backend="triton", whole_step=False)
    inputs = (t(3, 4, dtype=torch.float64), t(3, 4, dtype=torch.float64))
    assert torch.autograd.gradcheck(step, inputs)


# --------------------------------------------------------------------------------- pointwise


def positive(x: Tensor) -> Tensor:
    return x.abs() + 0.5


POINTWISE = {
    "roots and logs": lambda x, y: positive(x).sqrt() * positive(y).log() + positive(x).rsqrt(),
    "exponentials": lambda x, y: x.exp() + y.expm1() * positive(x).log1p() - y.exp2(),
    "trigonometry": lambda x, y: x.sin() * y.cos() + torch.atan2(x, positive(y)) + x.tanh().asin(),
    "erf": lambda x, y: x.erf() * y.erfc() + F.gelu(x) - F.gelu(y, approximate="tanh"),
    "rounding": lambda x, y: x.floor() * y + y.round() * x + x.trunc() + y.frac(),
    "powers": lambda x, y: x**2 + y**3 + positive(x) ** 0.5 + positive(x) ** y + 2.0**y,
    "division": lambda x, y: x / positive(y) + positive(x).reciprocal() + torch.rsub(x, y),
    "ternary": lambda x, y: torch.addcmul(x, x, y, value=0.5) + torch.lerp(x, y, 0.3),
    "where": lambda x, y: torch.where(x > y, x * 2, y) + F.threshold(x, 0.2, -1.0),
    "compare": lambda x, y: x * (x < y) + y * (x >= 0.1).float() + torch.maximum(x, y),
    "clamp": lambda x, y: x.clamp(-0.5, 0.5) + y.clamp_min(0.1) + x.clamp_max(0.2),
    "activations": lambda x, y: F.silu(x) * F.softplus(y) + F.elu(x) + F.leaky_relu(y, 0.1),
    "hard activations": lambda x, y: F.hardswish(x) + F.hardtanh(y) * F.mish(x) + F.relu6(y),
    "type_as": lambda x, y: x.type_as(y) * y + (x > 0).type_as(x),
}


@pytest.mark.covers("B pointwise", "G10")
@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise(name: str) -> None:
    """G10: at kinks the subgradient is ATen's; here and in `test_kinks`."""
    five_calls(POINTWISE[name], lambda: (t(24, 21), t(24, 21)), 1, 1)


@pytest.mark.covers("G10")
def test_kinks() -> None:
    """G10: clamp at its bounds, abs and relu at 0, tied maxima, of two tensors and of a row."""

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        clamped = x.clamp(-1.0, 1.0) + y.clamp(min=0.0)
        corners = x.abs() + F.relu(y) * 2
        return clamped, corners, torch.maximum(x, y), (x * 1).amax(-1), (y + 0).amin(0)

    values = torch.tensor([-1.0, 0.0, 1.0, -0.0])
    step = trainfuse.compile(fn, backend="triton", whole_step=False)
    for seed in range(5):
        torch.manual_seed(seed)
        args = [values[torch.randint(4, (6, 5))].requires_grad_() for _ in range(2)]
        cotangents = [torch.randn(6, 5) for _ in range(3)] + [torch.randn(6), torch.randn(5)]
        ours, theirs = (torch.autograd.grad(f(*args), args, cotangents) for f in (step, fn))
        torch.testing.assert_close(ours, theirs)


# ------------------------------------------------------------------------------------- casts


@pytest.mark.covers("B casts")
@pytest.mark.parametrize(("one", "two"), [*itertools.product(FLOATS, FLOATS)])
def test_casts_between_floats(one: torch.dtype, two: torch.dtype) -> None:
    """One kernel a phase, also where the type stays, and the gradient is cast back."""

    def fn(x: Tensor) -> Tensor:
        return torch.tanh(x * 2).to(two) * 3

    five_calls(fn, lambda: (t(40, 30, dtype=one),), 1, 1, calls=2)


@pytest.mark.covers("B casts")
def test_casts_to_and_from_integers() -> None:
    def fn(x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
        whole = (x * 4).to(torch.int32)
        return whole, x.bool(), i.double() * 2, i.to(torch.int64), whole.to(torch.int64) + i

    five_calls(fn, lambda: (t(7, 5), t(7, 5, dtype=torch.int32)), 1, None)


@pytest.mark.covers("B casts")
def test_dtype_arguments() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        y = x.exp()
        return y.sum(-1, dtype=None), y.sum(-1, dtype=torch.float64), y.softmax(-1, torch.float64)

    five_calls(fn, lambda: (t(6, 9),), 1, 1)


# ---------------------------------------------------------------------------------- extremal


@pytest.mark.covers("B extremal")
def test_infinities_and_nan() -> None:
    """Where eager is infinite or NaN, so are we, in values and in gradients."""

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        clamped = x.clamp(min=-1.0) + y.clamp(max=1.0) + x.clamp(1.0, -1.0)
        return x * 2 + y, torch.exp(x) + 1, clamped, torch.maximum(x, y), x + float("nan")

    def reductions(x: Tensor) -> tuple[Tensor, ...]:
        return (x * 1.0).amax(-1), (x + 0.0).amin(-1), (x * 2).sum(-1)

    values = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, -0.0, 1e38, -3.0])

    def make() -> list[Tensor]:
        return [values[torch.randint(7, (6, 8))].requires_grad_() for _ in range(2)]

    for function, count in ((fn, 2), (reductions, 1)):
        step = trainfuse.compile(function, backend="triton", whole_step=False)
        for seed in range(5):
            torch.manual_seed(seed)
            args = make()[:count]
            ours, theirs = step(*args), function(*args)
            torch.testing.assert_close(ours, theirs, equal_nan=True)
            grads = [
                torch.autograd.grad([o.sum() for o in outputs], args) for outputs in (ours, theirs)
            ]
            torch.testing.assert_close(grads[0], grads[1], equal_nan=True)


# --------------------------------------------------------------------------------- broadcast


BROADCASTS: dict[str, tuple[Any, Any, int, int]] = {
    "either side": (lambda x, y: (x + y) * (y - x).exp(), lambda: (t(5), t(7, 5)), 1, 1),
    "rank": (lambda x, y: torch.tanh(x * y) + 1, lambda: (t(3, 4, 5), t(5)), 1, 1),
    "inner and outer one": (
        lambda x, y: torch.tanh(x * y) + 1,
        lambda: (t(4, 1, 6), t(1, 5, 6)),
        1,
        2,  # the sums run over different axes
    ),
    "power of a sum": (lambda x, y, z: (x + y) ** z, lambda: (t(6, 5), t(5), 2), 1, 1),
    "one tensor two ways": (
        lambda x: torch.sigmoid(x[:, None] * x[None, :]) * 2,
        lambda: (t(6),),
        1,
        1,
    ),
    "several shapes": (
        lambda x, y: (x * 2 + y, (y * 3).exp(), x.sigmoid() + 1),
        lambda: (t(6, 5), t(5)),
        2,  # a row's worth of elements is a kernel of its own
        1,
    ),
    "expanded": (lambda x, y: x.expand(4, 6) * y + 1, lambda: (t(6), t(4, 6)), 1, 1),
}


@pytest.mark.covers("B broadcast", "B broadcast gradient", "S broadcast")
@pytest.mark.parametrize("name", BROADCASTS)
def test_broadcast(name: str) -> None:
    fn, make, forward, backward = BROADCASTS[name]
    five_calls(fn, make, forward, backward)


@pytest.mark.covers("B broadcast gradient")
def test_an_expanded_output_keeps_stride_zero() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.tanh(x * 2).expand(4, 6)

    five_calls(fn, lambda: (t(6),), 1, 1)
    x = t(6)
    out = trainfuse.compile(fn, backend="triton", whole_step=False)(x)
    assert out.stride() == (0, 1)


@pytest.mark.covers("B sum_to_size", "S broadcast")
@pytest.mark.parametrize(
    ("size", "forward", "backward"),
    [((4, 5, 6), 1, 1), ((5, 6), 1, 1), ((1, 6), 1, 1), ((6,), 1, 1)],
)
def test_sum_to_size(size: tuple[int, ...], forward: int, backward: int) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh((x * y).sum_to_size(size)) * 2

    five_calls(fn, lambda: (t(4, 5, 6), t(5, 6)), forward, backward)


@pytest.mark.covers("B sum_to_size")
@pytest.mark.parametrize("dynamic", [None, True])
def test_sum_to_size_of_new_sizes(dynamic: bool | None) -> None:
    """Sizes are constants of a kernel: each size is a plan; with dynamic=True one plan, on ATen."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh((x * y).sum_to_size(y.shape)) * 2

    step = trainfuse.compile(fn, backend="triton", whole_step=False, dynamic=dynamic)
    for rows in (3, 4, 7, 4):
        args = (t(rows, 5, 6), t(5, 6))
        assert_gradients_match(fn, args, compile_fn=lambda _: step, seed=rows)
    assert len(step.plans) == (2 if dynamic else 6)
    assert step.stats()["gate"] == "pass"


# ---------------------------------------------------------------------------------- in-place


def in_place_chain(x: Tensor, y: Tensor) -> Tensor:
    h = x * 2
    h.add_(y).mul_(y).sigmoid_()
    return h


def in_place_loop(x: Tensor, y: Tensor) -> Tensor:
    h = x * 1
    for i in range(4):
        h[i] = h[i] + y[0] * i
        h += y
    return h


def in_place_input(x: Tensor, buffer: Tensor) -> Tensor:
    buffer.mul_(0.9).add_(x.detach(), alpha=0.1)
    return torch.tanh(x) * buffer


@pytest.mark.covers("B in-place")
@pytest.mark.parametrize(
    ("fn", "make", "forward", "backward"),
    [
        (in_place_chain, lambda: (t(4, 6), t(4, 6)), 1, 1),
        (in_place_loop, lambda: (t(4, 6), t(4, 6)), None, None),
        (in_place_input, lambda: (t(4, 6), t(4, 6, grad=False)), 1, 1),
    ],
)
def test_in_place(fn: Any, make: Any, forward: int | None, backward: int | None) -> None:
    """Writes into slices are nodes of their own: the loop is compared, its kernels not counted."""
    if forward is None:
        step = trainfuse.compile(fn, backend="triton", whole_step=False)
        for seed in range(5):
            assert_gradients_match(fn, make(), compile_fn=lambda _: step, seed=seed)
        return
    five_calls(fn, make, forward, backward)


# ----------------------------------------------------------------------------------- outputs


@pytest.mark.covers("B outputs")
def test_an_input_passed_through() -> None:
    """It is the input, not a copy."""

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, torch.tanh(x * y) + 1, y

    five_calls(fn, lambda: (t(4, 6), t(4, 6, grad=False)), 1, 1)
    x, y = t(4, 6), t(4, 6, grad=False)
    out = trainfuse.compile(fn, backend="triton", whole_step=False)(x, y)
    assert out[0] is x
    assert out[2] is y
