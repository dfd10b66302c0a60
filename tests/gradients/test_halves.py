"""Half values that forward and backward both read: one number in both, where rows share it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import trainfuse
from trainfuse.testing import assert_gradients_match, rounded_bf16

# What a number added to a whole row, or column, cancels out of: eager makes no error of it.
INVARIANT: dict[str, Callable[[Tensor], Tensor]] = {
    "layer norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
    "centred": lambda x: x - x.mean(-1, keepdim=True),
    "softmax": lambda x: functional.softmax(x, -1),
    "log softmax": lambda x: functional.log_softmax(x, -1),
    "std": lambda x: x / x.std(-1, keepdim=True),
    "cross entropy": lambda x: functional.cross_entropy(
        x, torch.arange(len(x)) % x.shape[-1], reduction="none"
    ),
}
SHARED: dict[str, Callable[[Tensor], Tensor]] = {
    "a sum's multiple": lambda h: h.sum(-1, keepdim=True) * 0.3,
    "a maximum": lambda h: h.amax(-1, keepdim=True),
    "made of an input": lambda h: h[:, :1].exp() * 3,
    "a mean": lambda h: h.mean(-1, keepdim=True),
}


def triton(step: Callable) -> Callable:
    return trainfuse.compile(step, backend="triton", fallback=False, verify="off")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("name", INVARIANT)
def test_a_shared_half_is_one_number(name: str, shared: str, dtype: torch.dtype) -> None:
    half = (torch.randn(6, 9) * 2).to(dtype)

    def step(x: Tensor, half: Tensor, weight: Tensor) -> Tensor:
        y = INVARIANT[name](x + half + SHARED[shared](half))
        y = y * weight if y.dim() == 2 else y
        return torch.tanh(y) * y

    args = (torch.randn(6, 9, requires_grad=True), half, torch.rand(9, requires_grad=True))
    with rounded_bf16():
        assert_gradients_match(step, args, compile_fn=triton, k=3.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["layer norm", "centred", "softmax", "std"])
def test_a_column_s_half_is_one_number(name: str, dtype: torch.dtype) -> None:
    half = (torch.randn(9) * 2).to(dtype)

    def step(x: Tensor, half: Tensor) -> Tensor:
        y = INVARIANT[name]((x + half * 1.7).t())
        return torch.tanh(y) * y

    args = (torch.randn(6, 9, requires_grad=True), half)
    with rounded_bf16():
        assert_gradients_match(step, args, compile_fn=triton, k=3.0)
