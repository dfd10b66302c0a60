"""The interpreter that the suite runs kernels on rounds bf16 as torch does."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

SIZE = tl.constexpr(4096)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # a GPU rounds so by itself


@triton.jit
def store_as_bf16(source, target):
    i = tl.arange(0, SIZE)
    tl.store(target + i, tl.load(source + i))


def test_fp32_to_bf16_rounds_to_nearest_even():
    x = torch.randn(4096) * torch.logspace(-30, 30, 4096)
    x[:6] = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 3.4e38])
    # ties: halfway between two bf16 values, both parities
    x[6:8] = torch.tensor([1.00390625, 1.01171875])
    x = x.to(DEVICE)
    out = torch.empty(4096, dtype=torch.bfloat16, device=DEVICE)
    store_as_bf16[(1,)](x, out)
    torch.testing.assert_close(out, x.bfloat16(), rtol=0, atol=0, equal_nan=True)
