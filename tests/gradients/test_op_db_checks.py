"""What judges op_db's operators: each kind of fault, planted, is found."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.gradients.op_db import exclusions, suite
from tests.gradients.op_db import runs as runs_module
from tests.gradients.op_db.calls import Call, joined, of_sample, permuted, scattered
from tests.gradients.op_db.checks import problems
from tests.gradients.op_db.extremal import VALUES, extremal
from tests.gradients.op_db.runs import (
    Outcome,
    cotangents,
    differentiate,
    differentiate_twice,
    references,
    step_references,
    take_step,
)
from tests.gradients.op_db.samples import OPERATORS, choose
from trainfuse.codegen import triton_ops
from trainfuse.codegen.op_text import Row


def call_of(fn: Any, *args: Any) -> Call:
    def plain(result: Any) -> Any:
        return result

    sample = SimpleNamespace(input=args[0], args=args[1:], kwargs={}, output_process_fn_grad=plain)
    return of_sample(fn, sample)


def leaf(*shape: int, **options: Any) -> Tensor:
    return torch.randn(shape, requires_grad=True, **options)


@pytest.fixture
def runs() -> tuple[Outcome, Outcome]:
    """Eager's and fp64's outcome of a call with two outputs, one of them a view."""
    return references(call_of(lambda x, y: (torch.tanh(x) * y, x[:3]), leaf(5, 6), leaf(6)))


def changed(outcome: Outcome, **change: Any) -> Outcome:
    return replace(outcome, **change)


def first(tensors: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    return (value, *tensors[1:])


def with_nan(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor[0, 0] = float("nan")
    return tensor


FAULTS = {
    "output": lambda o: {"outputs": first(o.outputs, o.outputs[0] * 1.001)},
    "NaN": lambda o: {"outputs": first(o.outputs, with_nan(o.outputs[0]))},
    "gradient": lambda o: {"gradients": first(o.gradients, -o.gradients[0])},
    "no gradient": lambda o: {"gradients": first(o.gradients, None)},
    "dtype": lambda o: {"outputs": first(o.outputs, o.outputs[0].double())},
    "shape": lambda o: {"gradients": first(o.gradients, o.gradients[0][None])},
    "layout": lambda o: {"gradients": first(o.gradients, o.gradients[0].t().contiguous().t())},
    "flag": lambda o: {"flags": (False, *o.flags[1:])},
    "alias": lambda o: {"aliases": (None, None)},
    "written": lambda o: {"written": (1,)},
    "count": lambda o: {"outputs": o.outputs[:1]},
}


def test_eager_itself_is_right(runs):
    eager, exact = runs
    assert eager.aliases == (None, 0)
    assert problems(eager, eager, exact) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(runs, fault):
    eager, exact = runs
    assert problems(changed(eager, **FAULTS[fault](eager)), eager, exact)


def test_wrong_loss_is_found():
    call = call_of(torch.sin, leaf(40))
    weights = cotangents(references(call)[0].outputs)
    eager, exact = step_references(call, weights)
    assert problems(eager, eager, exact) == []
    assert problems(changed(eager, loss=eager.loss + 1e-3), eager, exact)


def test_step_function_where_eager_is_far_from_fp64():
    """10 * 0.7 is 7 in fp32 and less in fp64: floor differs, and ours must side with eager."""
    x = torch.full((4,), 0.7, requires_grad=True)
    eager, exact = references(call_of(lambda x: torch.floor(x * 10.0) + 0 * x, x))
    assert not torch.equal(eager.outputs[0].double(), exact.outputs[0])
    assert problems(eager, eager, exact) == []
    zeros = changed(eager, outputs=(torch.zeros(4),))
    assert problems(zeros, eager, exact)


def test_random_operators_give_the_reference_eager_s_numbers():
    """fp64 draws others: without that, twice eager's error would accept anything."""
    call = call_of(lambda x: torch.bernoulli(x.detach().sigmoid()) * x + torch.randn(9), leaf(9))
    eager, exact = references(call)
    torch.testing.assert_close(eager.outputs[0].double(), exact.outputs[0])
    assert problems(changed(eager, outputs=(eager.outputs[0] + 0.1,)), eager, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operator_without_fp64_gives_the_reference_eager_s_results(dtype, monkeypatch):
    """In either way of calling it; what surrounds it is in fp64. A result of ours may not err."""
    library = torch.ops.aten._softmax
    monkeypatch.setattr(runs_module, "FUSED_ATTENTION", frozenset({library}))
    x = torch.randn(5, 8).to(dtype).requires_grad_()

    def function(x: Tensor) -> Any:
        first = library(x, 1, False)
        return first, library.default(x, 1, False), first.sin()

    eager, exact = references(call_of(function, x))
    for i in range(2):
        assert exact.outputs[i].dtype is torch.float64
        assert exact.outputs[i].equal(eager.outputs[i].double())
    assert not exact.outputs[2].equal(eager.outputs[2].double())
    assert exact.outputs[2].equal(eager.outputs[0].double().sin())
    assert not problems(eager, eager, exact)
    off = eager.outputs[0] * (1 + 4 * torch.finfo(dtype).eps)
    wrong = replace(eager, outputs=(off, *eager.outputs[1:]))
    assert problems(wrong, eager, exact)


def test_operators_without_fp64_run_in_the_type_of_each(monkeypatch):
    """In one pack with calls of other types, and several times in a call."""
    library = torch.ops.aten._softmax
    monkeypatch.setattr(runs_module, "FUSED_ATTENTION", frozenset({library}))
    types = (torch.float32, torch.bfloat16, torch.float16, torch.bfloat16)
    calls = [
        call_of(
            lambda x: library(x.sin(), 1, False), torch.randn(5, 8, dtype=t, requires_grad=True)
        )
        for t in types
    ]
    eager, exact = references(joined(calls))
    for call, ours, theirs in zip(calls, eager.outputs, exact.outputs, strict=True):
        narrow = call.leaves[0].dtype
        wide = call.leaves[0].detach().double().sin().to(narrow)
        assert theirs.equal(library(wide, 1, False).double())
        assert ours.dtype is narrow
    assert not problems(eager, eager, exact)


def test_scattered_leaves_have_gaps_and_equal_elements():
    call = call_of(torch.add, leaf(3, 4), leaf(3, 4))
    apart = scattered(call)
    assert apart is not None
    for tensor, old in zip(apart.fresh(), call.leaves, strict=True):
        assert tensor.stride() == (9, 2)
        assert torch.equal(tensor, old)
    assert scattered(call_of(torch.add, leaf(), leaf())) is None


def test_permuted_leaves_are_dense_and_equal():
    call = call_of(torch.add, leaf(2, 3, 4), leaf(4))
    turned = permuted(call)
    assert turned is not None
    for tensor, old, strides in zip(turned.fresh(), call.leaves, ((12, 1, 3), (1,)), strict=True):
        assert tensor.stride() == strides
        assert torch.equal(tensor, old)
        assert tensor.requires_grad
    assert permuted(call_of(torch.sin, leaf(5))) is None


def test_extremal_pairs_all_meet():
    pairs = extremal(call_of(torch.mul, leaf(3), leaf(3)), pointwise=True).leaves
    assert [len(t) for t in pairs] == [len(VALUES) ** 2] * 2
    rows = extremal(call_of(torch.softmax, leaf(4, 9), -1), pointwise=False).leaves[0]
    assert rows.shape == (4, 9)
    assert rows.isnan().any()
    assert rows.isinf().any()


@pytest.mark.parametrize("check", [suite.check_alone, suite.check_step])
def test_planted_kernel_is_found_and_named(check):
    """sigmoid off by one part in a thousand, in a plan of three calls."""
    calls = choose(OPERATORS["sigmoid"].samples(torch.float32), 1)
    calls += choose(OPERATORS["sin"].samples(torch.float32), 2)
    suite.check_all(calls, check)
    planted = {"aten.sigmoid": Row("1.001 / (1.0 + libdevice.exp(-{self}))")}
    with (
        mock.patch.dict(triton_ops.OPS, planted),
        pytest.raises(
            AssertionError, match=r"sigmoid\(float32(.*\n)+.*op_db sigmoid --dtype float32"
        ),
    ):
        suite.check_all(calls, check)


def test_gradient_may_be_laid_out_as_in_a_trace(runs):
    """Where a dispatch mode makes ATen derive otherwise, and nowhere else."""
    eager, exact = runs
    turned = changed(eager, **FAULTS["layout"](eager))
    assert problems(turned, changed(eager, traced=eager), exact)
    assert not problems(turned, changed(eager, traced=turned), exact)


def test_joined_calls_keep_their_order():
    calls = [call_of(torch.sin, leaf(3)), call_of(torch.cos, leaf(4))]
    outcome, _ = references(joined(calls))
    assert [tuple(o.shape) for o in outcome.outputs] == [(3,), (4,)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("run", [differentiate, differentiate_twice])
def test_the_reference_is_given_the_cotangents_that_eager_is_given(run, dtype):
    """Unrounded, they would count as eager's error, and a sum that cancels as ours."""
    call = call_of(lambda x: x * 1.0 if run is differentiate else x * x, leaf(50, dtype=dtype))
    eager, exact = references(call, run)
    theirs = eager.gradients[0]
    assert exact.gradients[0].dtype is torch.float64
    torch.testing.assert_close(exact.gradients[0].to(dtype), theirs, rtol=4e-3, atol=0)
    if run is differentiate:
        assert torch.equal(exact.gradients[0], theirs.double())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_products_of_a_half_output_are_added_in_its_type(dtype):
    """Amid a step in fp32; what its rounding doesn't explain is found."""
    call = call_of(lambda x: x.to(dtype), leaf(60))
    weights = cotangents(references(call)[0].outputs)
    eager, exact = step_references(call, weights)
    assert eager.loss.dtype is torch.float32
    rounding = torch.finfo(dtype).eps * abs(float(exact.loss))
    assert not problems(changed(eager, loss=eager.loss + rounding), eager, exact)
    assert problems(changed(eager, loss=eager.loss + 40 * rounding + 1), eager, exact)


def test_a_loss_that_is_too_large_for_its_type():
    """Eager's terms overflow with both signs, which is NaN; the sum is infinite, of its sign."""
    x = torch.full((64,), 60000.0, dtype=torch.float16, requires_grad=True)
    call = call_of(lambda x: x * 1.0, x)
    weights = cotangents(references(call)[0].outputs)
    eager, exact = step_references(call, weights)
    assert float(exact.loss.abs()) > torch.finfo(torch.float16).max
    right, nan = exact.loss.half(), torch.tensor(float("nan")).half()
    eager = changed(eager, loss=nan)
    assert not problems(changed(eager, loss=right), eager, exact)
    assert problems(changed(eager, loss=-right), eager, exact)
    assert problems(changed(eager, loss=right.new_zeros(())), eager, exact)


def test_a_loss_of_the_largest_numbers_of_a_type():
    """fp64 has others, whose sum is no number: the reference's is then that of eager's outputs."""
    x = torch.tensor([float("inf"), -float("inf"), float("inf")] * 9, requires_grad=True)
    call = call_of(lambda x: torch.nan_to_num(x) + 0.0 * torch.nan_to_num(x, 0, 0, 0), x)
    call = replace(call, leaves=(x.detach().half().requires_grad_(),))
    weights = cotangents(references(call)[0].outputs)
    eager, exact = step_references(call, weights)
    wanted = (eager.outputs[0].double() * weights[0].double()).sum()
    torch.testing.assert_close(exact.loss, wanted)
    assert not problems(changed(eager, loss=wanted.half()), eager, exact)
    assert problems(changed(eager, loss=-wanted.half()), eager, exact)


def test_what_eager_can_t_do_amid_a_step_is_left_out():
    """A view of memory that the input's product has not."""
    base = torch.randn(20, requires_grad=True)
    call = call_of(lambda x: torch.as_strided(x, (2, 2), (1, 2), 10) * 2, base[:10].detach())
    call = replace(call, leaves=(base.detach()[:10].requires_grad_(),))
    assert suite.able([call], suite.check_alone) == [call]
    assert suite.eager_error(call, take_step) is not None
    assert suite.able([call], suite.check_step) == []


def test_only_what_dynamo_can_t_trace_is_left_out():
    """Of the operators that are named for it, and no other."""
    x = torch.randn(5, 50, requires_grad=True)
    view = replace(call_of(lambda x: torch.view_copy(x, (50, -1)), x), name="view_copy")
    assert exclusions.stock_error(view) is None
    raising = replace(call_of(lambda x: torch.view_copy(x, (3, -1)), x), name="view_copy")
    assert exclusions.stock_error(raising) is not None
    assert exclusions.stock_error(replace(raising, name="other")) is None


@pytest.mark.parametrize("name", ["nn.functional.grid_sample", "linalg.lstsq"])
def test_operators_without_an_answer_are_given_finite_values(name):
    call = replace(call_of(torch.mul, leaf(6, 9), leaf(6, 9)), name=name)
    assert all(t.isfinite().all() for t in extremal(call, pointwise=False).leaves)
    other = replace(call, name="linalg.det")
    assert not all(t.isfinite().all() for t in extremal(other, pointwise=False).leaves)


def test_where_eager_overflows_on_its_way_fp64_is_right_too(runs):
    eager, exact = runs
    half = exact.outputs[0].half()
    spoilt = changed(eager, outputs=first(eager.outputs, half.masked_fill(half > 0, 0.0)))
    for ours, right in ((half, True), (spoilt.outputs[0], True), (half * 0.5, False)):
        found = problems(changed(spoilt, outputs=first(eager.outputs, ours)), spoilt, exact)
        assert (not found) == right, found
