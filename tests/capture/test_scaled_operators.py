"""`alpha` and `value`: operands of several types are scaled and added in the widest of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import trainfuse
from trainfuse.testing import assert_gradients_match, rounded_bf16

Scaled = Callable[[Tensor, Tensor, Tensor], Tensor]
FORMS: dict[str, Scaled] = {
    "add_": lambda x, a, b: x.add_(a, alpha=0.3),
    "sub_": lambda x, a, b: x.sub_(a, alpha=0.3),
    "addcmul_": lambda x, a, b: x.addcmul_(a, b, value=0.3),
    "addcdiv_": lambda x, a, b: x.addcdiv_(a, b, value=0.3),
    "add": lambda x, a, b: torch.add(x, a, alpha=0.3),
    "addcmul": lambda x, a, b: torch.addcmul(x, a, b, value=0.3),
    "addcdiv": lambda x, a, b: torch.addcdiv(x, a, b, value=0.3),
    "addcdiv of a method": lambda x, a, b: x.addcdiv(a, b, value=0.3),
}
TYPES = ((torch.float64, torch.float32), (torch.float32, torch.bfloat16))


@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_the_widest_type_computes(form: str, types: tuple[torch.dtype, torch.dtype]) -> None:
    wide, narrow = types
    torch.manual_seed(0)
    x, a, b = torch.randn(64).to(wide), torch.randn(64).to(narrow), torch.rand(64).to(narrow) + 0.5

    def scaled(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return FORMS[form](x.clone(), a, b).sin()

    with rounded_bf16():
        assert_gradients_match(
            scaled,
            (x.requires_grad_(), a.requires_grad_(), b.requires_grad_()),
            compile_fn=lambda fn: trainfuse.compile(fn, backend="triton", fallback=False),
        )


def test_an_average_of_halves_is_not_rounded_to_them() -> None:
    """As eager keeps it: bit for bit."""
    average, value = torch.randn(1000), torch.randn(1000).bfloat16()
    step = trainfuse.compile(lambda m, x: m.mul_(0.9).add_(x, alpha=0.1).sin(), backend="triton")
    ours, eager = average.clone(), average.clone()
    for _ in range(3):
        step(ours, value)
        eager.mul_(0.9).add_(value, alpha=0.1)
    torch.testing.assert_close(ours, eager, rtol=2e-7, atol=1e-7)


def test_a_factor_that_is_a_tensor_breaks_no_graph() -> None:
    def step(x: Tensor, a: Tensor, by: Tensor) -> Tensor:
        x = x.clone()
        return x.addcmul_(a, a, value=by).add_(a, alpha=by).sin()

    x, a, by = torch.randn(40), torch.randn(40), torch.tensor(0.3)
    compiled = trainfuse.compile(step, backend="triton")
    torch.testing.assert_close(compiled(x, a, by), step(x, a, by))
    assert compiled.explain().graph_break_count == 0
