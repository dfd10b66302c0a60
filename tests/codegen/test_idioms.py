"""Nodes that are computed together give what they give one by one."""

from __future__ import annotations

import pytest
import torch
from codegen_support import lowered, run_case, trace
from torch import Tensor

NUMBERS = [0.0, -0.0, 1.5, -2.25, float("inf"), float("-inf"), float("nan"), 3e38, 1e-45]


def dropped(x: Tensor, mask: Tensor) -> Tensor:
    return x * mask * 1.1111111111111112


def dropped_by_its_mask(x: Tensor, mask: Tensor) -> Tensor:
    return mask * x * 1.1111111111111112


@pytest.mark.parametrize("fn", [dropped, dropped_by_its_mask])
def test_a_mask_takes_the_scale(fn: object) -> None:
    """To the bit: zeros keep their signs, and what is infinite is NaN where it is dropped."""
    x = torch.tensor(NUMBERS * 2)
    mask = torch.arange(len(x)) < len(NUMBERS)
    case = trace(fn, [x, mask])
    kernel = lowered(case)
    assert ", 1.1111111111111112, 0.0)" in kernel.source
    assert kernel.source.count("# aten.mul.Tensor") == 1
    (ours,) = run_case(case, [x, mask], kernel)
    expected = dropped(x, mask)
    assert torch.equal(ours.isnan(), expected.isnan())
    known = ~expected.isnan()
    assert torch.equal(ours[known].view(torch.int32), expected[known].view(torch.int32))


def test_fp64_keeps_its_scale() -> None:
    """A number in tl.where is fp32."""
    case = trace(dropped, [torch.randn(9, dtype=torch.float64), torch.ones(9, dtype=torch.bool)])
    assert "tl.where" not in lowered(case).source
