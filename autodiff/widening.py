"""What formulas share: the type that ATen accumulates in, and emptiness."""

from __future__ import annotations

import torch
from torch import Tensor

from .rewrite import known_equal


def widened(value: Tensor) -> Tensor:
    """The value in the type that ATen accumulates it in."""
    if value.dtype in (torch.float16, torch.bfloat16):
        return value.to(torch.float32)
    return value


def is_empty(value: Tensor) -> bool:
    """Whether a tensor is known to have no elements."""
    return known_equal(value.numel(), 0)
