"""Operators of two tensors lay their result out as eager does, whatever the operands' layouts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import trainfuse

Operator = Callable[[Tensor, Tensor], Tensor]
NAMES = (
    "add mul div pow xlogy atan2 hypot fmod remainder maximum fmin logaddexp logaddexp2 copysign "
    "ldexp float_power heaviside logical_and logical_or logical_xor ge"
)
OPERATORS: dict[str, Operator] = {
    **{name: getattr(torch, name) for name in NAMES.split()},
    "xlog1py": torch.special.xlog1py,
    "floor": partial(torch.div, rounding_mode="floor"),
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "where": lambda a, b: torch.where(a > b, a, b),
}
OF_ONE_SHAPE: dict[str, Operator] = {
    "binary_cross_entropy": partial(functional.binary_cross_entropy, reduction="none"),
    "with_logits": partial(functional.binary_cross_entropy_with_logits, reduction="none"),
    "huber": partial(functional.huber_loss, reduction="none"),
}
SHAPES = (((4, 6), (4, 6)), ((4, 1, 6), (4, 6)), ((4, 6), (4, 1, 6)), ((3, 4, 6), (4, 6)))


def operand(shape: tuple[int, ...], transposed: bool) -> Tensor:
    made = torch.rand(shape) * 0.8 + 0.1
    return made.mT.contiguous().mT if transposed else made


LOSSES = ("l1_loss", "mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy")


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("layouts", [(False, True), (True, False), (True, True)], ids=str)
def test_gradients_of_losses_are_laid_out_as_eager_s(layouts, reduction) -> None:
    """ATen's kernels give rows for some, whatever the operands' layouts."""

    def gradients(function: Callable[..., Any]) -> dict[str, list[tuple[int, ...]]]:
        pairs = {name: [operand((3, 4, 6), t).requires_grad_() for t in layouts] for name in LOSSES}
        values = function(pairs)
        total = torch.stack([value.sum() for value in values.values()]).sum()
        # not `.grad`, which is laid out anew
        found = iter(torch.autograd.grad(total, [leaf for pair in pairs.values() for leaf in pair]))
        return {name: [next(found).stride() for _ in pair] for name, pair in pairs.items()}

    def every(pairs: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        losses = {name: getattr(functional, name) for name in LOSSES}
        return {name: losses[name](*pair, reduction=reduction) for name, pair in pairs.items()}

    options = {"backend": "triton", "fallback": False, "verify": "off", "whole_step": False}
    assert gradients(trainfuse.compile(every, **options)) == gradients(every)


def test_gradient_of_a_margin_loss_is_in_rows() -> None:
    x, target = operand((5, 4), True).requires_grad_(), torch.tensor([0, 3, 1, 1, 2])
    options = {"backend": "triton", "fallback": False, "verify": "off", "whole_step": False}
    compiled = trainfuse.compile(functional.multi_margin_loss, **options)
    got, expected = (
        torch.autograd.grad(function(x, target), x)[0]
        for function in (compiled, functional.multi_margin_loss)
    )
    assert got.stride() == expected.stride() == (4, 1)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("last", [True, False])
def test_unpooling_keeps_channels_last(last) -> None:
    x = torch.randn(2, 3, 4, 6)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    pooled, indices = functional.max_pool2d(x, 2, return_indices=True)
    compiled = trainfuse.compile(functional.max_unpool2d, backend="triton", fallback=False)
    got, expected = (f(pooled, indices, 2) for f in (compiled, functional.max_unpool2d))
    assert got.stride() == expected.stride()
    assert torch.equal(got, expected)


@pytest.mark.parametrize("layouts", [(False, True), (True, False)], ids=str)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_results_are_laid_out_as_eager_s(shapes, layouts) -> None:
    operators = OPERATORS | (OF_ONE_SHAPE if shapes[0] == shapes[1] else {})

    def every(a: Tensor, b: Tensor) -> dict[str, Tensor]:
        return {name: operator(a, b) for name, operator in operators.items()}

    a, b = map(operand, shapes, layouts)
    expected = every(a, b)
    got = trainfuse.compile(every, backend="triton", fallback=False)(a, b)
    assert {k: v.stride() for k, v in got.items()} == {k: v.stride() for k, v in expected.items()}
    torch.testing.assert_close(got, expected)
