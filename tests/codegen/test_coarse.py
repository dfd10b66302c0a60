"""Exponentials take the hardware's short way only where no result can show it."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from codegen_support import lowered, trace
from torch import Tensor

from autodiff.ops import op_name
from trainfuse.codegen.coarse import coarse_nodes

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
    "of a difference": (lambda x: ((x - 2).exp() - 1).to(BF16), FP32, True),
    "a sum": (lambda x: x.exp().sum(-1), FP32, False),
    "a sum of a softmax": (lambda x: torch.logsumexp(x, -1), FP32, True),
    "a comparison": (lambda x: x.exp() > 1, FP32, False),
    "sigmoid": (lambda x: 1 - x.sigmoid(), BF16, True),
    "sigmoid in fp32": (lambda x: x.sigmoid(), FP32, False),
    "silu": (lambda x: torch.nn.functional.silu(x.float()).to(BF16), FP32, True),
    "of a rounded difference": (lambda x: (x - 2).to(BF16).exp() - 1, FP32, True),
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
    assert found == (every if expected else frozenset())
    assert ("fast_expf" in lowered(case).source) == expected


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
        assert re.search(rf"online_softmax\(.*, {coarse}\)", source)


def _long_softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)
