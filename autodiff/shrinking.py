"""Soft shrinkage as ATen's kernels have it, its derivative at NaN among it."""

from __future__ import annotations

import torch
from torch import Tensor


def softshrink(x: Tensor, lambd: float = 0.5) -> Tensor:
    """aten.softshrink: x less its sign times lambd, a zero with its sign within lambd of 0.

    lambd: not negative; a number of x's dtype, as there. The slope at NaN is 1, as in ATen's
    kernels (aten/src/ATen/native/cuda/ActivationSoftshrinkKernel.cu), and within lambd 0 whatever
    the gradient: torch's decomposition has 0 there times the gradient.
    """
    torch._check(lambd >= 0, lambda: f"lambda must be greater or equal to 0, but found {lambd}.")
    bound = torch.scalar_tensor(lambd, dtype=x.dtype, device=x.device)
    return torch.where((x >= -bound) & (x <= bound), x.detach() * 0, x - torch.sign(x) * bound)
