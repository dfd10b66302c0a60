"""Exponentials take the hardware's short way only where no result can show it."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from codegen_support import error, lowered, reference, run_case, trace
from torch import Tensor

from autodiff.ops import op_name
from trainfuse.codegen import interpreted
from trainfuse.codegen.coarse import coarse_nodes, probability

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DECOMPOSED = torch._decomp.get_decompositions(
    [torch.ops.aten._softmax, torch.ops.aten._log_softmax, torch.ops.aten.logsumexp]
)

# (function, type of its inputs, whether its exponentials are coarse)
CASES: dict[str, tuple[Callable[..., object], torch.dtype, bool]] = {
    "softmax": (lambda x: x.softmax(-1), BF16, True),
    "softmax in fp16": (lambda x: x.softmax(-1), FP16, True),
    "softmax in fp32": (lambda x: x.softmax(-1), FP32, False),
    "rounded after": (lambda x: (x.softmax(-1) * 3).to(FP16), FP32, True),
    "a part is not rounded": (
        lambda x: (lambda p: ((p * 3).to(FP16), p * 2))(x.softmax(-1)),
        FP32,
        False,
    ),
    "written itself": (lambda x: (lambda e: (e.to(BF16), e))(x.exp()), FP32, False),
    "half arithmetic": (lambda x: x.exp(), BF16, True),
    "a product": (lambda x: (x.exp() * 3).to(BF16), FP32, True),
    "differences of exponentials cancel": (lambda x: (x.exp() - 1).to(BF16), FP32, False),
    "of a difference": (lambda x: ((x - 2).exp() - 1).to(BF16), FP32, False),
    "of the distance from the peak": (
        lambda x: ((x - x.amax(-1, True)).exp() * 3).to(BF16),
        FP32,
        True,
    ),
    "close to the peak, less one": (
        lambda x: ((x - x.amax(-1, True)).exp() - 1).to(BF16),
        FP32,
        False,
    ),
    "another row's peak": (
        lambda x: (x - (x * 2).amax(-1, True)).exp().sum(-1),
        FP32,
        False,
    ),
    "a probability less one": (lambda x: (x.log_softmax(-1).exp() - 1).to(BF16), FP32, True),
    "a sum": (lambda x: x.exp().sum(-1), FP32, False),
    "a sum of a softmax": (lambda x: torch.logsumexp(x, -1), FP32, True),
    "a comparison": (lambda x: x.exp() > 1, FP32, False),
    "sigmoid": (lambda x: 1 - x.sigmoid(), BF16, True),
    "sigmoid in fp32": (lambda x: x.sigmoid(), FP32, False),
    "silu": (lambda x: torch.nn.functional.silu(x.float()).to(BF16), FP32, True),
    "of a rounded difference": (lambda x: (x - 2).to(BF16).exp() - 1, FP32, True),  # in halves
    "of a rounded number": (lambda x: (x.to(BF16).float().exp() - 1).to(BF16), FP32, False),
    "in fp64": (lambda x: (x.double().exp() * 2).to(BF16), FP32, False),
}


@pytest.mark.parametrize("name", CASES)
def test_where(name: str) -> None:
    fn, dtype, expected = CASES[name]
    case = trace(fn, [torch.randn(8, 24).to(dtype)], table=DECOMPOSED)
    found = coarse_nodes(case.nodes, case.outputs)
    exponentials = {"aten.exp.default", "aten.sigmoid.default", "aten.silu.default"}
    every = {n for n in case.nodes if op_name(n.target) in exponentials}
    assert every
    assert found & every == (every if expected else frozenset())
    short = re.search(r"fast_expf|lib\.(sigmoid|silu)\(.*, True\)", lowered(case).source)
    assert (short is not None) == expected


def test_a_probability_is_of_its_own_row_s_sum() -> None:
    """With any other factor, one near 1 need not be the peak's, whose exponential is exact."""

    def doubled(x: Tensor) -> Tensor:
        shifted = x - x.amax(-1, True)
        return ((shifted - (shifted.exp().sum(-1, True) * 2).log()).exp() - 1).to(BF16)

    case = trace(doubled, [torch.randn(8, 24)])
    first, last = (node for node in case.nodes if op_name(node.target) == "aten.exp.default")
    assert coarse_nodes(case.nodes, case.outputs) == {first}
    assert probability(last, case.nodes) is None


def test_a_target_that_is_all_but_certain() -> None:
    """exp2 is off by up to two ulps anywhere but at 0; p - 1 would show it."""
    case = trace(lambda x: (x.log_softmax(-1).exp() - 1).to(BF16), [torch.randn(8, 24)], DECOMPOSED)
    source = lowered(case).source
    assert re.search(r"fast_expf\(t\d+\) \* libdevice\.exp\(-t\d+\)", source)
    assert source.count("libdevice.exp(") == 1


GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    # of a target in column 0, as losses make it: from log-probabilities
    "cross-entropy": lambda x: (x.log_softmax(-1).exp() - (torch.arange(24) == 0).float()).to(BF16),
    "close to the peak": lambda x: (((x - x.amax(-1, True)).exp() - 1) * (x > -1)).to(BF16),
    "a shift of one's own": lambda x: (((x - 0.5).exp() - 0.60653066) * (x > -1)).to(BF16),
    "its logarithm": lambda x: (x - 0).exp().sum(-1).log().to(BF16),
    "a product": lambda x: (x.softmax(-1) * 3).to(BF16),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_an_error_of_two_ulps_is_not_shown(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the hardware's exp2 may have it anywhere but at 0, at a target that is all but certain."""
    rows = torch.randn(64, 24) - 17
    rows[:, 0] = 0
    if name != "cross-entropy":
        rows[:, 1] = -2e-6 * torch.rand(64)
    if "logarithm" in name:
        rows[:, 0], rows[:, 1] = rows[:, 1].clone(), -17
    monkeypatch.setattr(
        interpreted,
        "fast_expf",
        interpreted._elementwise(
            lambda x: (np.exp(x) * np.where(x == 0, 1, 1 + 2.0**-22)).astype(x.dtype)
        ),
    )
    case = trace(GRADIENTS[name], [rows], DECOMPOSED)
    (ours,) = run_case(case, [rows], lowered(case))
    (eager,), (exact,) = (reference(case, [rows], dtype) for dtype in (None, torch.float64))
    size = float(exact.double().square().mean().sqrt())
    allowed = 2 * error(eager, exact) + 2.0**-7 * size  # the interpreter truncates
    assert error(ours, exact) <= allowed


def test_the_short_way_is_within_as_many_ulps_as_the_argument() -> None:
    """What the module promises of exp2(x log2(e)), its product rounded to fp32."""
    x = np.linspace(-100, 88, 200_001, dtype=np.float32)
    short = np.exp2((x * np.float32(np.log2(np.e))).astype(np.float64))
    exact = np.exp(x.astype(np.float64))
    ulps = np.abs(short / exact - 1) / 2.0**-23
    assert np.all(ulps <= np.abs(x) + 1)
    assert ulps.max() * 2.0**-23 * 40 < 2.0**-11  # of half a step of fp16


def test_both_forms_of_the_online_softmax() -> None:
    for dtype, coarse in ((BF16, True), (FP32, False)):
        case = trace(_long_softmax, [torch.randn(2, 40000).to(dtype)], table=DECOMPOSED)
        source = lowered(case).source
        assert re.search(rf"online_softmax_groups\(.*, {coarse}, 8\)", source)


def _long_softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


@pytest.mark.parametrize(
    ("divided", "once"),
    [
        (lambda x: x.softmax(-1), True),
        (lambda x: x.double().softmax(-1), False),
        (lambda x: x / x.sum(-1, True), False),
        (lambda x: x / x.exp().sum(-1, True), False),
        (lambda x: x / (x - (x * 2).amax(-1, True)).exp().sum(-1, True), False),
    ],
    ids=["softmax", "in fp64", "any sum", "of any exponential", "another row's peak"],
)
def test_a_row_is_divided_by_its_softmax_sum_once(
    divided: Callable[[Tensor], Tensor], once: bool
) -> None:
    """The sum is from 1 to the row's length; a reciprocal of any number may be 0 or infinite."""
    source = lowered(trace(divided, [torch.randn(8, 24)], table=DECOMPOSED)).source
    assert (" * (1.0 / " in source) == once


SLOPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gelu": lambda g, x: torch.ops.aten.gelu_backward(g, x, approximate="tanh"),
    "silu": torch.ops.aten.silu_backward.default,
}


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", SLOPES)
def test_slopes_at_every_half_number(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Far out, too, where a slope is a product of 0 and something huge; reciprocals are rough."""
    stock = interpreted.fast_dividef

    def rough(a: object, b: object) -> object:
        made = stock(a, b)
        made.handle.data *= np.float32(1 + 2.0**-23)
        return made

    monkeypatch.setattr(interpreted, "fast_dividef", rough)
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    x = x[x.abs() <= 1e4]
    args = [torch.ones_like(x), x]
    case = trace(SLOPES[name], args)
    kernel = lowered(case)
    assert ", True)" in kernel.source
    (ours,) = run_case(case, args, kernel)
    (exact,) = reference(case, args, torch.float64)
    step = torch.finfo(dtype).eps
    assert torch.all((ours.double() - exact).abs() <= step * exact.abs().clamp_min(2e-3))
