"""Numbers beside tensors in fp64: Triton makes fp32 of what its functions are given."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import trainfuse

OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "pad": lambda x: F.pad(x, (1, 2), value=-0.9),
    "pad two dims": lambda x: F.pad(x, (1, 2, 0, 3), value=0.1),
    "where": lambda x: torch.where(x > 0, x, 0.9),
    "where of numbers": lambda x: torch.where(x > 0, 0.1, 0.9).to(x.dtype) * x,
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.9),
    "threshold": lambda x: F.threshold(x, 0.3, 0.9),
    "clamp": lambda x: x.clamp(-0.3, 0.7),
    "hardtanh": lambda x: F.hardtanh(x, -0.3, 0.7),
    "maximum": lambda x: torch.maximum(x, torch.full_like(x, 0.3)),
    "pow": lambda x: x.abs() ** 0.3,
    "power of a number": lambda x: 0.3**x,
    "remainder": lambda x: torch.remainder(x, 0.3),
    "fmod": lambda x: torch.fmod(x, 0.3),
    "copysign": lambda x: x.copysign(-0.3) * 0.1,
    "lerp": lambda x: x.lerp(x.cos(), 0.3),
    "addcmul": lambda x: x.addcmul(x.sin(), x.cos(), value=0.3),
    "addcdiv": lambda x: x.addcdiv(x.sin(), x.cosh(), value=0.3),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.3),
    "elu": lambda x: F.elu(x, 0.3),
    "celu": lambda x: F.celu(x, 0.3),
    "softplus": lambda x: F.softplus(x, beta=0.3),
    "hardshrink": lambda x: F.hardshrink(x, 0.3),
    "softshrink": lambda x: F.softshrink(x, 0.3),
    "logit": lambda x: x.sigmoid().logit(0.1),
    "xlogy": lambda x: torch.xlogy(x, 0.3),
    "atan2": lambda x: torch.atan2(x, torch.full_like(x, 0.3)),
    "nan_to_num": lambda x: (x / (x > 0)).nan_to_num(0.1, 0.7, -0.3),
    "heaviside": lambda x: torch.heaviside(x.detach().round(), torch.full_like(x, 0.3)) * x,
    "full": lambda x: x + torch.full((3, 1), 0.3, dtype=x.dtype),
    "huber": lambda x: F.huber_loss(x, x.cos(), reduction="none", delta=0.3),
    "smooth_l1": lambda x: F.smooth_l1_loss(x, x.cos(), reduction="none", beta=0.3),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:], eps=0.3),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_numbers_keep_their_digits(name: str) -> None:
    """Values and gradients to fp64's last digits; fp32's rounding would be 1e-8."""
    torch.manual_seed(0)
    operator = OPERATORS[name]
    x = torch.randn(3, 20, dtype=torch.float64)
    compiled = trainfuse.compile(
        lambda x: operator(x * 1.5).mul(0.7), backend="triton", fallback=False, verify="off"
    )
    found = []
    for call in (compiled, lambda x: operator(x * 1.5).mul(0.7)):
        leaf = x.clone().requires_grad_()
        out = call(leaf)
        found.append((out.detach(), *torch.autograd.grad(out.sum(), leaf, allow_unused=True)))
    for ours, eager in zip(*found, strict=True):
        assert (ours is None) == (eager is None)
        if eager is not None:
            torch.testing.assert_close(ours, eager, rtol=1e-12, atol=1e-13, equal_nan=True)
