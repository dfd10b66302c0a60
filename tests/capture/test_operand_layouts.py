"""Operators of two tensors lay their result out as eager does, whatever the operands' layouts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

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
