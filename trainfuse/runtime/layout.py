"""Copies that keep a tensor's strides, whatever they are: kernels are made for them."""

from __future__ import annotations

import torch
from torch import Tensor


def dense(value: Tensor) -> Tensor:
    """One copy of what an expanded tensor repeats: a write must not overlap itself."""
    for dim, (size, step) in enumerate(zip(value.shape, value.stride(), strict=True)):
        if step == 0 and size > 1:
            value = value.narrow(dim, 0, 1)
    return value.detach()


def copy_to(value: Tensor, device: torch.device) -> Tensor:
    """A copy with the same strides, on a device."""
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    dense(made).copy_(dense(value))
    return made


def varied(value: Tensor) -> Tensor | None:
    """A copy of a constant tensor whose elements differ, by half of the constant; else None.

    A bias of zeros or a gain of ones hides what a kernel does with it.
    """
    one = dense(value)
    if not value.is_floating_point() or one.numel() < 2:
        return None
    low, high = (bound.item() for bound in one.aminmax())
    if low != high:
        return None
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    spread = torch.linspace(-0.5, 0.5, one.numel(), device=value.device)
    dense(made).copy_(low + spread.view(one.shape) * (abs(low) or 1.0))
    return made
