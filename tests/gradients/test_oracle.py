"""The oracle itself: a right hand-written backward passes, every planted fault is caught."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.gradients import cases
from trainfuse.testing import (
    Training,
    assert_gradients_match,
    fused_masks,
    gradient_report,
    judge,
    step_gradients,
)
from trainfuse.testing.seeds import seed_all

EPS = 1e-5
FAULTS = (
    "factor",
    "sign",
    "dropped term",
    "missing broadcast sum",
    "wrong axis",
    "transposed operand",
    "fresh mask",
    "stale saved value",
    "bad tail mask",
    "overwrite for accumulate",
    "low-precision sum",
    "no eps",
    "wrong mean divisor",
    "swapped outputs",
    "wrong gelu",
    "lost second cotangent",
)


def plain(x, weight, bias, gain, shift, keep):
    """Norm, linear, GELU, dropout by a given mask; the norm is also used and returned."""
    n = functional.layer_norm(x, x.shape[-1:], gain, shift, EPS)
    h = functional.gelu(n @ weight.T + bias)
    return h * keep * 2.0, h + n


class HandWritten(torch.autograd.Function):
    """The same with its backward written out, so that one fault at a time can be planted."""

    @staticmethod
    def forward(ctx, x, weight, bias, gain, shift, keep, fault):
        centred = x - x.mean(-1, keepdim=True)
        variance = centred.square().mean(-1, keepdim=True)
        rstd = (variance + EPS).rsqrt()
        n = centred * rstd * gain + shift
        z = n @ weight.T + bias
        h = functional.gelu(z)
        ctx.save_for_backward(centred, variance, rstd, n, z, weight, gain, keep)
        ctx.fault = fault
        return h * keep * 2.0, h + n

    @staticmethod
    def backward(ctx, d_out, d_both):
        centred, variance, rstd, n, z, weight, gain, keep = ctx.saved_tensors
        fault = ctx.fault
        if fault == "fresh mask":
            keep = (torch.rand_like(keep) > 0.5).to(keep)
        if fault == "stale saved value":
            n = n.roll(1, 0)
        if fault == "no eps":
            rstd = variance.rsqrt()
        dh = d_out * keep * 2.0
        if fault != "lost second cotangent":
            dh = dh + d_both
        dz = dh * _gelu_slope(z, approximate=fault == "wrong gelu")
        dw = n.T @ dz if fault == "transposed operand" else dz.T @ n
        match fault:
            case "missing broadcast sum":
                db = dz[0].clone()
            case "wrong axis":
                db = dz.sum(1)
            case "bad tail mask":
                db = dz[:-1].sum(0)
            case "low-precision sum":
                db = dz.bfloat16().sum(0).float()
            case _:
                db = dz.sum(0)
        dn = dz @ weight
        if fault != "overwrite for accumulate":
            dn = dn + d_both
        xhat = centred * rstd
        dgain, dshift = (dn * xhat).sum(0), dn.sum(0)
        if fault == "swapped outputs":
            dgain, dshift = dshift, dgain
        columns = xhat.shape[-1] - (fault == "wrong mean divisor")
        dxhat = dn * gain
        dx = dxhat - dxhat.sum(-1, keepdim=True) / columns
        if fault != "dropped term":
            dx = dx - xhat * ((dxhat * xhat).sum(-1, keepdim=True) / columns)
        dx = dx * rstd * {"factor": 1.001, "sign": -1.0}.get(fault, 1.0)
        return dx, dw, db, dgain, dshift, None, None


def _gelu_slope(z: torch.Tensor, approximate: bool) -> torch.Tensor:
    if approximate:
        inner = math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)
        slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * z**2)
        tanh = inner.tanh()
        return 0.5 * (1 + tanh) + 0.5 * z * (1 - tanh**2) * slope
    density = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + torch.erf(z / math.sqrt(2))) + z * density


def _arguments() -> tuple[torch.Tensor, ...]:
    # Square, so that a wrong axis or a transposed operand gives no shape error; a small
    # variance, so that eps matters.
    generator = torch.Generator().manual_seed(3)
    size = 24
    x, weight = (torch.randn(size, size, generator=generator) for _ in range(2))
    bias, gain, shift = (torch.randn(size, generator=generator) for _ in range(3))
    keep = (torch.rand(size, size, generator=generator) > 0.5).float()
    trainable = [t.requires_grad_() for t in (0.1 * x, weight / 5, bias, gain, shift)]
    return (*trainable, keep)


def _faulty(fault: str | None):
    return lambda _: lambda *args: HandWritten.apply(*args, fault)


def test_outputs_that_only_fp64_would_differentiate():
    """In fp64 the cast is no copy, and its result keeps its operand's history."""

    def cast(x):
        y = x.exp()
        with torch.no_grad():
            z = y.to(torch.float64)
        return y.sin(), z

    x = torch.randn(5, requires_grad=True)
    report = assert_gradients_match(cast, (x,), compile_fn=lambda fn: fn)
    assert {e.name for e in report.errors} == {"output0", "output1", "d_arg0"}
    assert max(e.ours for e in report.errors) < 1e-5


def test_an_argument_that_only_fp64_would_write_with_history():
    """A cast to fp64 is its operand there, and a write to it gives an argument a history."""

    def function(x, y):
        wide = x.to(torch.float64)
        wide.addcmul_(y, y, value=0.5)
        return wide.sin()

    args = (torch.randn(3), torch.randn(3, requires_grad=True))
    assert_gradients_match(function, args, compile_fn=lambda fn: fn)


def test_right_backward_passes():
    report = assert_gradients_match(plain, _arguments(), compile_fn=_faulty(None))
    names = {e.name for e in report.errors}
    gradients = {f"d_arg{i}{of}" for i in range(5) for of in ("", " of output0")}
    # the mask needs no gradient: it is compared with what it was
    assert names == {"output0", "output1", *gradients, "arg5"}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_caught(fault):
    with pytest.raises(AssertionError, match="further from fp64"):
        assert_gradients_match(plain, _arguments(), compile_fn=_faulty(fault))


def test_aliased_runs_are_refused():
    """A compile_fn that works on the caller's own tensors would compare a tensor with itself."""
    kept = torch.randn(3, requires_grad=True)

    class Leaky(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(kept)

        def __deepcopy__(self, memo):
            return self

        def forward(self, x):
            return self.weight * x

    with pytest.raises(AssertionError, match="share storage"):
        assert_gradients_match(Leaky(), (torch.randn(3),), compile_fn=lambda f: f)


def _training(lr: float = 0.5) -> Training:
    training = cases.mlp("cpu")
    # the optimizer is in the step's closure; its rate is what this changes
    (optimizer,) = [
        cell.cell_contents
        for cell in training.step.__closure__
        if isinstance(cell.cell_contents, torch.optim.Optimizer)
    ]
    optimizer.param_groups[0]["lr"] = lr
    return training


def test_seeds_are_torch_s_and_wait_for_no_device():
    torch.manual_seed(7)
    expected = torch.rand(3)
    waiting = len(torch.cuda._queued_calls)
    seed_all(7)
    assert torch.equal(torch.rand(3), expected)
    assert torch.cuda.is_initialized() or len(torch.cuda._queued_calls) == waiting


def test_steps_pass_against_themselves():
    report = gradient_report(_training, lambda t: t.step).check()
    assert report.moved > 0.05
    assert {e.step for e in report.errors} == {0, 1, 2}


def test_weights_that_stand_still_prove_nothing():
    with pytest.raises(AssertionError, match="raise the learning rate"):
        gradient_report(lambda: _training(0.0), lambda t: t.step).check()


@pytest.mark.parametrize(
    "fault",
    [
        lambda p, g, i: g * 1.001,
        lambda p, g, i: torch.zeros_like(g),
        lambda p, g, i: g.roll(1, 0),
        lambda p, g, i: g.bfloat16().float(),
        lambda p, g, i: None,
        lambda p, g, i: g if i < 2 else g * 1.001,
    ],
    ids=["factor", "zero", "rolled", "rounded", "missing", "last step only"],
)
def test_wrong_gradient_of_a_step_is_caught(fault):
    def compiled(training):
        calls = []

        def step(*batch):
            loss = training.step(*batch)
            last = list(training.model.parameters())[-1]
            last.grad = fault(last, last.grad, len(calls))
            calls.append(None)
            return loss

        return step

    report = gradient_report(_training, compiled)
    assert not report.ok
    with pytest.raises(AssertionError):
        report.check()


def test_update_that_is_skipped_is_caught_by_the_next_gradients():
    def compiled(training):
        saved = [p.detach().clone() for p in training.model.parameters()]

        def step(*batch):
            loss = training.step(*batch)
            with torch.no_grad():
                for p, s in zip(training.model.parameters(), saved, strict=True):
                    p.copy_(s)
            return loss

        return step

    report = gradient_report(_training, compiled)
    assert {e.step for e in report.failures} == {1, 2}


def test_running_statistics_are_compared():
    def compiled(training):
        def step(*batch):
            loss = training.step(*batch)
            training.model[1].running_var.mul_(1.01)
            return loss

        return step

    def make():
        training = cases.convnet("cpu")
        training.model[5].p = 0.0  # its masks would differ from the compiled program's
        return training

    failures = {e.name for e in gradient_report(make, compiled).failures}
    assert failures == {"1.running_var"}


def test_masks_are_one_program_s_and_follow_the_generator():
    x = torch.ones(4000)
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        with fused_masks():
            draws.append((functional.dropout(x, 0.3), nn.Dropout(0.3)(x)))
    (first, second), again, other = draws
    assert torch.equal(first, again[0])
    assert torch.equal(second, again[1])
    assert not torch.equal(first, second)
    assert not torch.equal(first, other[0])
    assert abs(float((first == 0).float().mean()) - 0.3) < 0.03
    assert torch.allclose(first[first != 0], torch.tensor(1 / 0.7))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_runs_again_with_its_masks(reentrant):
    """Nested, and with a dropout after it that has a mask of its own."""

    def inner(x):
        return functional.dropout(x, 0.5).exp()

    def chain(x, run):
        def outer(x):
            return functional.dropout(run(inner, x), 0.5)

        return functional.dropout(run(outer, functional.dropout(x, 0.5)), 0.5)

    def again(function, x):
        return checkpoint(function, x, use_reentrant=reentrant)

    x = torch.randn(500, requires_grad=True)
    found = []
    for run in (lambda function, given: function(given), again):
        x.grad = None
        torch.manual_seed(0)
        with fused_masks():
            out = chain(x, run)
            out.sum().backward()
        found.append((out.detach(), x.grad))
    torch.testing.assert_close(*found, rtol=0, atol=0)
    kept = found[0][0] != 0
    assert 0 < int(kept.sum()) < 500


@pytest.mark.parametrize("causal", [False, True])
def test_reference_attention_is_torch_s(causal):
    """With a dropout too rare to hit, the reference attention equals ATen's."""
    q, k, v = torch.randn(3, 2, 2, 5, 4).unbind(0)
    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    with fused_masks():
        got = functional.scaled_dot_product_attention(q, k, v, dropout_p=1e-9, is_causal=causal)
    torch.testing.assert_close(got, expected)


def test_fp64_run_is_fp64_throughout():
    trace = step_gradients(lambda: cases.autocast("cpu"), dtype=torch.float64)
    kinds = {t.dtype for grads in trace.gradients for t in grads.values()}
    assert kinds == {torch.float64}
    # the same step in fp32 outside autocast agrees to fp32's rounding: nothing was bf16
    assert trace.outputs[0]["output0"].dtype is torch.float64


def test_nan_must_be_where_eager_has_it():
    eager = {"a": torch.tensor([1.0, math.nan, math.inf])}
    fp64 = {"a": torch.tensor([1.0, math.nan, math.inf], dtype=torch.float64)}
    (same,) = judge(eager, eager, fp64)
    assert same.ratio <= 1
    for wrong in ([1.0, 0.0, math.inf], [math.nan, math.nan, math.inf], [1.0, math.nan, -math.inf]):
        (error,) = judge({"a": torch.tensor(wrong)}, eager, fp64)
        assert not error.ratio <= 2


def test_integers_dtypes_and_shapes_are_exact():
    one = {"n": torch.tensor([1, 2])}
    assert judge(one, one, one)[0].ratio == 0
    assert judge({"n": torch.tensor([1, 3])}, one, one)[0].ratio == math.inf
    low = {"n": torch.ones(2)}
    assert judge({"n": torch.ones(2, dtype=torch.float64)}, low, low)[0].ratio == math.inf
    assert judge({"n": torch.ones(1, 2)}, low, low)[0].ratio == math.inf
    assert judge({"n": None}, low, low)[0].ratio == math.inf


def test_strides_of_outputs_are_compared():
    """The same numbers in another layout: a caller may view them."""

    def turned(fn):
        return lambda x: (fn(x).t().contiguous().t(),)

    x = torch.randn(3, 5, requires_grad=True)
    assert_gradients_match(lambda x: x.sin(), (x,), compile_fn=lambda f: f)
    with pytest.raises(AssertionError, match="strides are"):
        assert_gradients_match(lambda x: x.sin(), (x,), compile_fn=turned)


def test_what_a_call_writes_to_its_arguments_is_compared():
    def fn(x, count):
        count.add_(1.0)
        return x * count

    arguments = (torch.randn(4, requires_grad=True), torch.randn(4))
    assert_gradients_match(fn, arguments, compile_fn=lambda f: f)
    with pytest.raises(AssertionError, match="arg1"):
        assert_gradients_match(fn, arguments, compile_fn=lambda f: lambda x, c: f(x, c.clone()))


def test_which_outputs_need_a_gradient_is_compared():
    x = torch.randn(4, requires_grad=True)
    with pytest.raises(AssertionError, match="require a gradient"):
        assert_gradients_match(
            lambda x: (x.sin(), x.cos()),
            (x,),
            compile_fn=lambda f: lambda x: (f(x)[0], f(x)[1].detach()),
        )


def test_a_batch_that_a_step_writes_to_is_compared():
    def make():
        training = _training()

        def step(x, y):
            loss = training.step(x, y)
            x.mul_(0.5)
            return loss

        return Training(step, training.model, training.batches)

    def compiled(training):
        return lambda x, y: training.step(x.clone(), y)

    gradient_report(make, lambda t: t.step).check()
    failures = {e.name for e in gradient_report(make, compiled).failures}
    assert failures == {"input0"}


def test_strides_of_gradients_are_compared():
    def compiled(training):
        def step(*batch):
            loss = training.step(*batch)
            weight = next(training.model.parameters())
            weight.grad = weight.grad.t().contiguous().t()
            return loss

        return step

    assert any("strides are" in e.note for e in gradient_report(_training, compiled).failures)
