"""Tensors that are more than their memory: sign bits still to be turned, layouts unlike planned."""

from __future__ import annotations

import pytest
import torch

import trainfuse
from trainfuse.testing import assert_gradients_match

# The gate would rescue what these tests are about.
OPTIONS = {"backend": "triton", "verify": "off", "fallback": False}


def compiled(fn):
    return trainfuse.compile(fn, **OPTIONS)


def conjugate_s_part(z):
    y = z.conj().imag
    return y * 2 + 1, (y.exp() + 1).sin()


def test_view_with_a_sign_bit_is_no_kernel_s_input():
    """Its memory holds the negative: a kernel that reads it would be wrong."""
    z = torch.randn(5, dtype=torch.complex64)
    torch.testing.assert_close(compiled(conjugate_s_part)(z), conjugate_s_part(z))
    y = z.conj().imag
    assert y.is_neg()
    step = compiled(lambda y: (y * 2 + 1).exp())
    torch.testing.assert_close(step(y), (y * 2 + 1).exp())


def test_copy_turns_a_conjugate():
    def fn(z):
        return torch.view_as_real(torch.fft.fft(z).conj().resolve_conj()) * 2

    z = torch.randn(6, dtype=torch.complex64)
    torch.testing.assert_close(compiled(fn)(z), fn(z))


def test_copied_parts_are_no_views_of_the_input():
    """Writing to a result must not write to the argument."""

    def fn(x):
        return torch.split_with_sizes_copy(x, [2, 3]), torch.unbind_copy(x)[0]

    x = torch.randn(5, 4)
    before = x.clone()
    (first, second), row = compiled(fn)(x)
    for result in (first, second, row):
        result.add_(1)
    assert torch.equal(x, before)


@torch.library.custom_op("trainfuse_tests::columns", mutates_args=())
def columns(x: torch.Tensor) -> torch.Tensor:
    """A copy of x laid out in columns."""
    return x.t().contiguous().t()


@columns.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)  # in rows: as many operators' shape functions, it is careless


columns.register_autograd(lambda ctx, grad: columns(grad))


def test_operator_whose_layout_is_not_what_it_promised():
    """A kernel's offsets are made of promised strides."""

    def fn(x):
        return ((columns(x) * 2 + 1).sin() * x).sum(1)

    step = compiled(fn)
    for _ in range(3):
        x = torch.randn(5, 7, requires_grad=True)
        assert_gradients_match(fn, (x,), compile_fn=lambda _: step)
    assert step.stats()["kernels"] >= 1


def strided_range(x):
    """Each row starts at three times its number: a range whose steps are not 1."""
    rows = torch.arange(0, 3 * x.shape[0], 3, device=x.device).unsqueeze(1)
    columns = torch.arange(x.shape[1], device=x.device)
    return x * (rows + columns)


def scalar_conditions(x, y):
    """Comparisons of 0-d tensors joined with those of rows."""
    both = (x == 0.0) & (y <= 0.5)
    return torch.where(both | (y > 2.0), x, x * y)


@pytest.mark.parametrize("fn", [strided_range, scalar_conditions])
def test_small_programs(fn):
    args = (torch.randn(4, 5, requires_grad=True), torch.randn((), requires_grad=True))
    count = fn.__code__.co_argcount
    assert_gradients_match(fn, args[:count], compile_fn=compiled)
