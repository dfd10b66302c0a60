"""Operators whose result eager lays out otherwise than torch's formulas, operands permuted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trainfuse
from trainfuse.testing import assert_gradients_match

OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "logsigmoid": F.logsigmoid,
    "power of a number": lambda x: 2.0**x,
    "power of 1": lambda x: 1.0**x,
    "exp2": torch.exp2,
}


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("permuted", [True, False])
def test_results_lie_as_eagers(name: str, permuted: bool) -> None:
    """And so does what is computed from them."""

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        made = OPERATORS[name](x.tanh())
        return made, made.sin() * 0.5

    torch.manual_seed(0)
    x = torch.randn(4, 5, 3)
    x = x.mT if permuted else x
    assert_gradients_match(
        step,
        (x.requires_grad_(),),
        compile_fn=lambda fn: trainfuse.compile(fn, backend="triton", verify="off"),
    )


class Compared(nn.Module):
    """A permuted parameter, on the right."""

    def __init__(self, compare: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.compare, self.limit = compare, nn.Parameter(torch.randn(16, 3).mT)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        return torch.where(self.compare(x, self.limit), x, self.limit * 0.5).sin()


COMPARISONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    ">": lambda x, p: x > p,
    "<": lambda x, p: x < p,
    ">=": lambda x, p: x >= p,
    "<=": lambda x, p: x <= p,
    "torch.gt": lambda x, p: torch.gt(x, p),
    "the other way round": lambda x, p: p > x,
}


@pytest.mark.parametrize("name", COMPARISONS)
def test_a_parameter_on_the_right_is_asked_first(name: str) -> None:
    """Python's rule for operands whose type derives from the other's; the layout tells."""
    torch.manual_seed(0)
    assert_gradients_match(Compared(COMPARISONS[name]), (torch.randn(3, 16),))
