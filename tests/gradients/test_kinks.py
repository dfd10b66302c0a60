"""Where a derivative is a choice, or a value is extreme, ours is ATen's.

Every case by itself, its operators one by one, and amid a training step; compared as in
tests/gradients/op_db, so NaN and infinities stand where eager's do, and layouts are eager's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import trainfuse
from tests.gradients.op_db import suite
from tests.gradients.op_db.calls import Call, of_sample
from trainfuse.testing import assert_gradients_match

# NaN and overflow make torch warn
pytestmark = pytest.mark.filterwarnings("ignore")

INF, NAN = float("inf"), float("nan")
Case = tuple[Callable[..., Any], tuple[Any, ...]]
_SMOOTH_L1 = torch.ops.aten.smooth_l1_loss.default

TWOS = [-3.0, -2.0, -1.0, -0.5, -0.0, 0.0, 0.5, 1.0, 2.0, 3.0, 6.0]
PAIR = ([0.0, 0.0, -0.0, 1.0, 1.0, -2.0, NAN], [0.0, -0.0, 0.0, 1.0, 2.0, -2.0, 1.0])
TIED = [[1.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0], [-1.0, -0.0, 0.0, -5.0]]
ZEROS = [[0.0, 2.0, 3.0], [0.0, 0.0, 3.0], [1.0, 2.0, 3.0], [0.0, 0.0, 0.0]]

ACTIVATIONS: dict[str, Case] = {
    "clamp at its bounds": (lambda x: x.clamp(-1, 1), (TWOS,)),
    "clamp with bounds crossed": (lambda x: x.clamp(1, -1), (TWOS,)),
    "clamp_min": (lambda x: x.clamp_min(0.5), (TWOS,)),
    "clamp_max": (lambda x: x.clamp_max(0.5), (TWOS,)),
    "clamp by tensors": (lambda x, low, high: torch.clamp(x, low, high), (*PAIR, PAIR[1])),
    "relu": (F.relu, (TWOS,)),
    "relu6": (F.relu6, (TWOS,)),
    "hardtanh": (F.hardtanh, (TWOS,)),
    "hardsigmoid": (F.hardsigmoid, (TWOS,)),
    "hardswish": (F.hardswish, (TWOS,)),
    "leaky_relu": (F.leaky_relu, (TWOS,)),
    "elu": (F.elu, (TWOS,)),
    "selu": (F.selu, (TWOS,)),
    "celu": (F.celu, (TWOS,)),
    "softshrink": (F.softshrink, (TWOS,)),
    "softshrink at NaN": (F.softshrink, ([NAN, 0.5, INF],)),  # few: ATen's code for one element
    "softshrink's zeros": (lambda x: F.softshrink(x).reciprocal(), ([-0.25, -0.0, 0.25],)),
    "hardshrink": (F.hardshrink, (TWOS,)),
    "threshold": (lambda x: F.threshold(x, 0.5, 9.0), (TWOS,)),
    "softplus at its threshold": (lambda x: F.softplus(x, 2.0, 2.0), (TWOS,)),
    "logsigmoid": (F.logsigmoid, (TWOS,)),
    "abs": (torch.abs, (TWOS,)),
    "sign": (lambda x: x.sign() + x, (TWOS,)),
    "round to even": (lambda x: x.round() + x, (TWOS,)),
    "floor": (lambda x: x.floor() + x.frac(), (TWOS,)),
    "remainder": (lambda x: x.remainder(1.5) + x.fmod(-1.5), (TWOS,)),
}
PAIRS: dict[str, Case] = {
    "maximum": (torch.maximum, PAIR),
    "minimum": (torch.minimum, PAIR),
    "fmax": (torch.fmax, PAIR),
    "fmin": (torch.fmin, PAIR),
    "atan2": (torch.atan2, PAIR),
    "hypot": (torch.hypot, PAIR),
    "copysign": (torch.copysign, PAIR),
    "xlogy": (torch.xlogy, PAIR),
    "pow": (torch.pow, ([0.0, 0.0, 0.0, 1.0, 2.0, -2.0], [0.0, 1.0, 2.0, 0.0, -1.0, 2.0])),
    "powers of 0": (lambda x: (x**2, x**3, x**1, x**0, x**0.5, x**-1), ([0.0, -0.0, 1.0],)),
    "l1_loss": (lambda a, b: F.l1_loss(a, b, reduction="none"), PAIR),
    "smooth_l1_loss": (lambda a: F.smooth_l1_loss(a, torch.zeros(11), reduction="none"), (TWOS,)),
    "huber_loss": (lambda a: F.huber_loss(a, torch.zeros(11), reduction="none"), (TWOS,)),
    "sqrt at 0": (lambda x: (x.sqrt(), x.rsqrt(), x.reciprocal()), ([0.0, 1.0, 4.0],)),
    "logit at both zeros": (torch.logit, ([0.0, -0.0, 0.5, 1.0, 2.0, -1.0, NAN],)),
    "logit with eps": (lambda x: torch.logit(x, 0.25), ([0.0, 0.25, 0.5, 0.75, 1.0, NAN],)),
    "branch not taken": (lambda x: torch.where(x > 0, x.log(), x), ([0.0, -1.0, 2.0],)),
}
REDUCTIONS: dict[str, Case] = {
    "amax": (lambda x: x.amax(1), (TIED,)),
    "amin": (lambda x: x.amin((0, 1)), (TIED,)),
    "max along": (lambda x: x.max(1), (TIED,)),
    "min of all": (torch.min, (TIED,)),
    "max of all": (torch.max, (TIED,)),
    "median": (lambda x: x.median(1), (TIED,)),
    "cummax": (lambda x: x.cummax(1), (TIED,)),
    "max_pool": (lambda x: F.max_pool1d(x, 2), (TIED,)),
    "adaptive_max_pool": (lambda x: F.adaptive_max_pool1d(x, 1), (TIED,)),
    "prod": (torch.prod, (ZEROS,)),
    "prod along": (lambda x: x.prod(1), (ZEROS,)),
    "cumprod": (lambda x: x.cumprod(1), (ZEROS,)),
    "norm 2": (lambda x: torch.linalg.vector_norm(x, 2, 1), (ZEROS,)),
    "norm 1": (lambda x: torch.linalg.vector_norm(x, 1, 1), (ZEROS,)),
    "norm 3": (lambda x: torch.linalg.vector_norm(x, 3, 1), (ZEROS,)),
    "norm 0": (lambda x: torch.linalg.vector_norm(x, 0, 1) + x.sum(1), (ZEROS,)),
    "norm 1/2": (lambda x: torch.linalg.vector_norm(x, 0.5, 1), (ZEROS,)),
    "norm inf": (lambda x: torch.linalg.vector_norm(x, INF, 1), (ZEROS,)),
    "norm -inf": (lambda x: torch.linalg.vector_norm(x, -INF, 1), (ZEROS,)),
    "normalize": (F.normalize, (ZEROS,)),
    "cosine": (lambda x: F.cosine_similarity(x, x.flip(0)), (ZEROS,)),
    "distance": (lambda x: F.pairwise_distance(x, x.detach(), eps=0.0), (ZEROS,)),
    "std of equals": (lambda x: x.std(1), (TIED,)),
    "scalar along": (lambda x: (x.exp().sum(0), x.sum(-1, keepdim=True), x.mean(0)), (2.0,)),
    "var of equals": (lambda x: x.var(1), (TIED,)),
}
BIG, TINY = 3e38, 1e-40
FAR = [-200.0, -100.0, -50.0, -20.0, 20.0, 50.0, 90.0, 200.0]
ROWS = [[BIG, BIG, 1.0], [-BIG, -BIG, -BIG], [-INF, 0.0, 1.0], [0.0, 0.0, 0.0]]
EXTREMES: dict[str, Case] = {
    "softmax": (lambda x: x.softmax(1), (ROWS,)),
    "log_softmax": (lambda x: x.log_softmax(1), (ROWS,)),
    "logsumexp": (lambda x: x.logsumexp(1), ([*ROWS, [INF, INF, 0.0], [-INF, -INF, -INF]],)),
    "softmax of nothing": (lambda x: x.softmax(1), ([[-INF, -INF], [INF, 0.0], [NAN, 0.0]],)),
    "exp": (lambda x: (x.exp(), x.expm1()), (FAR,)),
    "sigmoid": (lambda x: (x.sigmoid(), F.logsigmoid(x), F.softplus(x)), (FAR,)),
    "tanh": (lambda x: (x.tanh(), F.gelu(x), F.gelu(x, approximate="tanh")), (FAR,)),
    "silu": (lambda x: (F.silu(x), F.mish(x)), (FAR,)),
    "erf": (lambda x: (x.erf(), x.erfc()), (FAR,)),
    "denormals": (lambda x: (x * 0.5, x + x, x.abs(), -x), ([TINY, -TINY, 3 * TINY],)),
    "denormals under a root": (torch.sqrt, ([TINY, 2 * TINY, 5 * TINY],)),
    "overflow": (lambda x: (x * x, x + x, x * 0.5), ([BIG, -BIG],)),
    "norm that overflows": (lambda x: torch.linalg.vector_norm(x, 2, 1), ([[1e20] * 3],)),
    "layer norm of large": (lambda x: F.layer_norm(x, (3,)), ([[1e15, 2e15, 4e15]],)),
    "layer norm of equals": (lambda x: F.layer_norm(x, (3,)), ([[2.0] * 3, [0.0] * 3],)),
    "sum of infinities": (lambda x: (x.sum(1), x.mean(1)), ([[INF, 1.0], [INF, -INF]],)),
    "signed zeros": (lambda x: (x + 0.0, x * -1.0, x.abs(), 1.0 / x), ([0.0, -0.0],)),
    "interpolated infinity": (
        lambda x: F.interpolate(x, scale_factor=2, mode="linear", align_corners=True),
        ([[[-INF, -INF, 1.0, 2.0]]],),
    ),
    "interpolated infinities": (
        lambda x: F.interpolate(x, (3, 3), mode="bilinear", align_corners=True),
        ([[[[-INF, -INF], [1.0, 2.0]]]],),
    ),
}
_ODD = [0.0, -0.0, 0.5, -0.5, 1.0, -2.5, NAN, INF]  # eight, and so 64 pairs: ATen's vectors whole
ANY = tuple(map(list, zip(*itertools.product(_ODD, repeat=2), strict=True)))
_PARTS = [0.0, -0.0, 1.0, 0.25, 1e-13, 1e-7, 0.5, 0.75]  # ATen stops at a NaN
PARTS = tuple(map(list, zip(*itertools.product(_PARTS, repeat=2), strict=True)))
LOSSES: dict[str, Case] = {
    "l1": (F.l1_loss, ANY),
    "mse": (F.mse_loss, ANY),
    "smooth l1": (lambda a, b: F.smooth_l1_loss(a, b, reduction="none"), ANY),
    "smooth l1, narrow": (lambda a, b: F.smooth_l1_loss(a, b, beta=0.5), ANY),
    "smooth l1 without a bend": (lambda a, b: _SMOOTH_L1(a, b, 2, 0.0), ANY),
    "huber": (lambda a, b: F.huber_loss(a, b, delta=0.5, reduction="none"), ANY),
    "soft margin": (lambda a, b: F.soft_margin_loss(a, b.detach()), ANY),
    "hinge": (lambda a, b: F.hinge_embedding_loss(a, b.detach(), reduction="none"), ANY),
    "poisson": (F.poisson_nll_loss, ANY),
    "divergence": (lambda a, b: F.kl_div(a, b, reduction="sum"), ANY),
    "logits": (F.binary_cross_entropy_with_logits, ANY),
    "cross-entropy": (F.binary_cross_entropy, PARTS),
    "cross-entropy, weighted": (
        lambda a, b: F.binary_cross_entropy(a, b, b.detach() + 1, reduction="none"),
        PARTS,
    ),
}
GROUPS = {
    "activations": ACTIVATIONS,
    "pairs": PAIRS,
    "reductions": REDUCTIONS,
    "extremes": EXTREMES,
    "losses": LOSSES,
}


def _plain(result: Any) -> Any:
    return result


def calls(group: dict[str, Case], dtype: torch.dtype = torch.float32) -> list[Call]:
    made = []
    for name, (fn, values) in group.items():
        leaves: list[Tensor] = [
            torch.tensor(value, dtype=dtype, requires_grad=True) for value in values
        ]
        given = {"input": leaves[0], "args": tuple(leaves[1:]), "kwargs": {}}
        sample = SimpleNamespace(**given, output_process_fn_grad=_plain)
        made.append(of_sample(fn, sample, name))
    return made


@pytest.mark.parametrize("check", [suite.check_alone, suite.check_step])
@pytest.mark.parametrize("group", GROUPS)
def test_eager_s_choice(group, check):
    suite.check_all(calls(GROUPS[group]), check)


@pytest.mark.parametrize("check", [suite.check_alone, suite.check_step])
def test_losses_in_fp64(check):
    """ATen's constants, too, some of which are fp32 numbers in every type."""
    suite.check_all(calls(LOSSES, torch.float64), check)


def test_a_well_classified_sample_keeps_its_gradient():
    """exp(-18) of it: sigmoid - 1, as torch takes it apart, would be 0."""

    def loss(x: Tensor) -> Tensor:
        return F.soft_margin_loss(x, torch.ones_like(x), reduction="sum")

    x = torch.tensor([18.0, 19.0], requires_grad=True)
    assert_gradients_match(
        loss, (x,), compile_fn=lambda fn: trainfuse.compile(fn, backend="triton")
    )


def _guarded_root(variance: Tensor) -> Tensor:
    return torch.where(variance > 0, variance, 1.0).sqrt()


DEVIATIONS: dict[str, Callable[[Tensor, Any], Any]] = {
    "std": lambda x, dim: x.std(dim),
    "std and mean": torch.std_mean,
    "guarded root": lambda x, dim: _guarded_root(0.5 * x.var(dim, correction=0)),
    "compared": lambda x, dim: x.var(dim).eq(0) + x.mean(dim),
}


@pytest.mark.parametrize("deviation", DEVIATIONS)
@pytest.mark.parametrize(
    ("sizes", "dim"),
    [
        ((4, 7), -1),  # rows in registers
        ((37, 600), 0),  # columns, whose lanes are merged
        ((10, 40_000), -1),  # rows in chunks
        ((7, 9), None),  # everything
    ],
)
def test_equal_values_have_no_deviation(deviation, sizes, dim):
    """Eager's variance of them is 0, whatever their mean rounds to, and so is a root's gradient."""
    values = torch.rand(sizes).mean(dim, keepdim=True) if dim is not None else torch.rand(())
    x = values.expand(sizes).clone().requires_grad_()
    function = DEVIATIONS[deviation]
    compiled = []

    def compile_fn(fn: Callable[..., Any]) -> Callable[..., Any]:
        compiled.append(trainfuse.compile(fn, backend="triton", fallback=False, verify="off"))
        return compiled[0]

    assert_gradients_match(lambda x: function(x, dim), (x,), compile_fn=compile_fn)
    assert compiled[0].stats()["kernels"] > 0


@pytest.mark.parametrize(("sizes", "dim"), [((4, 7), -1), ((37, 600), 0), ((2, 40_000), -1)])
def test_a_mean_with_an_infinity_is_infinite(sizes, dim):
    """The error of a mean, which is added for the deviation's sake, is NaN then."""
    x = torch.rand(sizes)
    x.select(dim, -1).fill_(INF)  # the last: Welford's mean, as eager's, is NaN after it
    compiled = trainfuse.compile(
        lambda x: torch.std_mean(x, dim), backend="triton", fallback=False, verify="off"
    )
    deviation, mean = compiled(x)
    assert compiled.stats()["kernels"] > 0
    assert deviation.isnan().all()
    assert torch.equal(mean, torch.full_like(mean, INF))
