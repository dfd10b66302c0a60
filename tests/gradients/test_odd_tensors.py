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


def _written(x, places):
    rows = (x * 2).detach().clone()
    rows.index_add_(0, places, rows[places] * 0.5)
    columns = x * 3
    columns.scatter_(1, places[:2, None], 0.5)
    view = x.sin()
    view.squeeze(0).index_fill_(0, places, 1.5)
    return (x * 2).sum() + columns.square().sum() + view.sum(), rows, columns, view.exp(), view.mT


@pytest.mark.parametrize("backend", ["triton", "eager"])
def test_what_is_written_in_place_keeps_its_strides(backend):
    """Functional forms of these writes give rows, whatever the layout of what they replace."""

    def compiled(fn):
        return trainfuse.compile(fn, backend=backend, verify="off", fallback=False)

    x, places = torch.randn(4, 6).t().requires_grad_(), torch.tensor([2, 0, 1])
    expected, results = _written(x, places), compiled(_written)(x, places)
    assert expected[1].stride() == expected[2].stride() == (1, 6)
    assert [r.stride() for r in results] == [e.stride() for e in expected]
    assert_gradients_match(_written, (x, places), compile_fn=compiled)


@pytest.mark.parametrize("op", ["xlogy", "copysign", "logaddexp", "logaddexp2"])
def test_a_result_written_in_place_keeps_the_strides_it_was_made_with(op):
    """torch's formulas in Python lay these out as the other operand."""

    def function(x, y):
        made = getattr(torch, op)(x.sin(), y.square() + 0.8) / 1.7
        made[..., 1:] += 0.5
        return made.sum(), made

    args = (torch.randn(7, 4).mT, torch.randn(4, 7, requires_grad=True))
    assert function(*args)[1].stride() == (1, 4)
    assert_gradients_match(function, args, compile_fn=compiled)


@torch.library.custom_op("trainfuse_test::in_rows", mutates_args=())
def in_rows(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape).copy_(x)


@in_rows.register_fake
def _(x):
    return torch.empty_like(x)  # which is not so, as of attention's backward on a GPU


in_rows.register_autograd(lambda ctx, grad: in_rows(grad))


@pytest.mark.parametrize("backend", ["triton", "eager"])
def test_gradients_lie_as_parameters_though_an_operator_says_what_is_not_so(backend):
    parameter = torch.randn(4, 6).t().requires_grad_()

    def step():
        in_rows(parameter).sin().sum().backward()

    compiled = trainfuse.compile(step, backend=backend, verify="off", fallback=False)
    strides, gradients = [], []
    for run in (step, compiled, compiled, compiled):
        parameter.grad = None
        run()
        strides.append(parameter.grad.stride())
        gradients.append(parameter.grad.clone())
    assert strides == [(1, 6)] * 4
    torch.testing.assert_close(gradients[1:], gradients[:1] * 3)


def test_strides_of_dims_of_size_one_decide_layouts():
    """A slice of such a dim gives the same elements, and products of it another layout."""

    def function(x, y, places):
        product = torch.einsum("...i,oi->...o", x[..., ::2], y)
        return product.take_along_dim(places, 0).sum() * 2, product

    args = (
        torch.randn(2, 1, requires_grad=True),
        torch.randn(2, 1),
        torch.tensor([[0, 1], [1, 0]]),
    )
    assert function(*args)[1].stride() == (1, 2)
    assert_gradients_match(function, args, compile_fn=compiled)


def test_a_whole_step_s_written_results_keep_their_strides():
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(x, places):
        out = model(x).t() * 1.5
        shown = out.detach().clone()
        shown.index_add_(0, places, shown[places])
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return shown

    x, places = torch.randn(5, 4), torch.tensor([2, 0])
    want = train_step(x, places).stride()
    step = trainfuse.compile(train_step, **OPTIONS)
    assert [step(x, places).stride() for _ in range(3)] == [want] * 3 == [(1, 3)] * 3
    assert step.explain().capture == "whole_step"
