"""Where ATen's one result is exact by luck, its other roundings say what may be expected."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import trainfuse
from autodiff.jitter import Jitter
from tests.planting import plant
from trainfuse.errors import FusionError
from trainfuse.testing import rounded_bf16


def _cancels(x: Tensor) -> Tensor:
    """ATen adds in fp64 on a CPU, and values of order 1 come to 1e-9."""
    return F.layer_norm(torch.cat([x, -x, x * 1e-9]), (33,)).asinh()


def _equal(x: Tensor) -> Tensor:
    """By Welford's method a mean of equal values is exact; divided by n their sum is not."""
    return F.layer_norm(F.threshold(x, 9.0, -0.8), (11,)).sin()


def _halves(x: Tensor) -> Tensor:
    """ATen rounds three times, and its errors cancel."""
    half = F.logsigmoid(torch.full((), 0.9).to(torch.bfloat16))
    return torch.atan2(x, half.square() + 1.0)


@pytest.mark.parametrize("case", [_cancels, _equal, _halves], ids=lambda case: case.__name__)
def test_a_right_kernel_beside_a_lucky_reference_passes(case: Callable[[Tensor], Tensor]) -> None:
    with rounded_bf16():
        for seed in range(8):
            torch.manual_seed(seed)
            torch._dynamo.reset()
            step = trainfuse.compile(case, backend="triton", fallback=False)
            step(torch.randn(11))


@pytest.mark.parametrize("case", [_cancels, _equal, _halves], ids=lambda case: case.__name__)
def test_a_wrong_one_does_not(
    case: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off by 10%, which no rounding explains."""
    plant(monkeypatch, "value * 1.1 + 0.001", lambda group: True)
    step = trainfuse.compile(case, backend="triton", fallback=False)
    with rounded_bf16(), pytest.raises(FusionError, match="failed in gate"):
        step(torch.randn(11))


def test_other_roundings_are_of_the_size_of_rounding() -> None:
    x = torch.randn(10_000)
    with Jitter(0):
        moved = x.exp()
    off = (moved - x.exp()).abs() / x.exp()
    assert 0 < float(off.max()) <= 2 * torch.finfo(torch.float32).eps
    assert 0.04 < float((off > 0).float().mean()) < 0.13
    with Jitter(0):
        assert torch.equal(x.exp(), moved)  # the same in every block
        assert torch.equal(-x, x.neg())
        assert torch.equal(x.clone(), x)
    with Jitter(1, operands=True):
        assert float((torch.cat([x, -x]).sum()).abs()) < 1e-1
