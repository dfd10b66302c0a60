"""Gradient equivalence of functions and modules compiled by themselves, under random cotangents."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import trainfuse
from tests.gradients.compilers import BACKENDS, MASKS
from trainfuse.testing import assert_gradients_match


def _t(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def pointwise_chain(x, y):
    return torch.tanh(x * y + 0.5) * torch.sigmoid(x) - y.abs()


def broadcast(x, row, column):
    """Cotangents are summed back to each operand's shape."""
    return (x + row) * column.exp()


def two_outputs(x):
    """Both cotangents reach x; one value is used inside and returned."""
    h = torch.sin(x) * 2
    return h, h.square() + x


def norm_chain(x, gain, shift):
    return functional.layer_norm(x, x.shape[-1:], gain, shift).softmax(-1) * x


def rms(x, gain):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * gain


def losses(x, y):
    return functional.mse_loss(x, y) + functional.smooth_l1_loss(x.exp(), y) + x.logsumexp(-1).sum()


def statistics_both(x):
    return x.var(-1, keepdim=True), x.std(0, correction=0), x.mean()


def views(x):
    """Index maps: permuted, split and merged, before and after arithmetic."""
    y = x.transpose(0, 1).reshape(-1, 2, x.shape[0] // 2)
    return (y * 3).flatten().cos(), (x.unsqueeze(0) + 1).permute(2, 0, 1).exp()


def where_and_extremes(x, y):
    return torch.where(x > 0, x.clamp(max=1.0), y.clamp_min(-0.5)) + torch.maximum(x, y)


def linear_gelu(x, weight, bias):
    return functional.gelu(functional.linear(x, weight, bias), approximate="tanh")


def detached(x, y):
    """A detached factor passes no gradient; y gets none at all."""
    return x * (x * y).detach(), y.detach().exp()


# 5 x 6 and 3 x 14: neither fills a block; 130: a block and a bit.
FUNCTIONS = {
    "pointwise_chain": (pointwise_chain, lambda: (_t(5, 6), _t(5, 6))),
    "long": (pointwise_chain, lambda: (_t(3, 130), _t(3, 130))),
    "broadcast": (broadcast, lambda: (_t(4, 3, 5), _t(5), _t(3, 1))),
    "two_outputs": (two_outputs, lambda: (_t(7, 3),)),
    "norm_chain": (norm_chain, lambda: (_t(3, 14), _t(14), _t(14))),
    "rms": (rms, lambda: (_t(6, 10), _t(10))),
    "losses": (losses, lambda: (_t(6, 5), _t(6, 5))),
    "statistics": (statistics_both, lambda: (_t(5, 9),)),
    "views": (views, lambda: (_t(6, 4),)),
    "where": (where_and_extremes, lambda: (_t(5, 6), _t(5, 6))),
    "linear_gelu": (linear_gelu, lambda: (_t(5, 6), _t(7, 6), _t(7))),
    "detached": (detached, lambda: (_t(4, 4), _t(4, 4))),
}


def _compile(backend: str):
    return lambda fn: trainfuse.compile(fn, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name, backend):
    fn, arguments = FUNCTIONS[name]
    assert_gradients_match(fn, arguments(), compile_fn=_compile(backend))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["pointwise_chain", "norm_chain", "broadcast"])
def test_dtypes(name, dtype):
    """Low precision needs enough elements that one lucky rounding doesn't decide."""
    fn, _ = FUNCTIONS[name]
    arguments = {
        "pointwise_chain": lambda: (_t(40, 30), _t(40, 30)),
        "norm_chain": lambda: (_t(24, 50), _t(50), _t(50)),
        "broadcast": lambda: (_t(20, 16, 15), _t(15), _t(16, 1)),
    }[name]()
    assert_gradients_match(fn, arguments, dtype=dtype, compile_fn=_compile("triton"))


@pytest.mark.parametrize("backend", ["triton", "inductor"])
def test_module_with_running_statistics(backend):
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.SiLU(), nn.Dropout(0.3))
    before = {n: t.clone() for n, t in module.state_dict().items()}
    report = assert_gradients_match(
        module, (_t(9, 6),), compile_fn=_compile(backend), rng=MASKS[backend]
    )
    assert {"d_0.weight", "d_1.bias", "buffer_1.running_mean"} <= {e.name for e in report.errors}
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), "the caller's module was changed"


def test_one_mask_in_forward_and_backward():
    """Where dropout zeroed the output the gradient is zero, and nowhere else."""
    step = trainfuse.compile(lambda x: functional.dropout(x, 0.4) * 1.0 + 0.0, backend="triton")
    x = torch.ones(64, 33, requires_grad=True)
    out = step(x)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(out == 0, grad == 0)
    assert abs(float((out == 0).float().mean()) - 0.4) < 0.04


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_at_its_ends(p):
    assert_gradients_match(
        lambda x: functional.dropout(x * 2, p) + x, (_t(5, 7),), compile_fn=_compile("triton")
    )


def test_five_calls_draw_five_masks():
    fn = trainfuse.compile(lambda x: functional.dropout(x.exp(), 0.5) * 2, backend="triton")
    x = torch.zeros(50)
    masks = {tuple((fn(x) == 0).tolist()) for _ in range(5)}
    assert len(masks) == 5
