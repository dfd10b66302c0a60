"""Derivatives of elementwise losses as ATen's kernels have them, where torch's formulas differ."""

from __future__ import annotations

import torch
from torch import Tensor

from .widening import widened

_MEAN = 1  # aten::Reduction
_EPSILON = 9.999999960041972e-13  # ATen's 1e-12f, in fp64 too


def smooth_l1_loss_backward(
    gradient: Tensor, x: Tensor, target: Tensor, reduction: int, beta: float
) -> Tensor:
    """aten.smooth_l1_loss_backward: g (x - t) / beta within beta of the target, else -g or g.

    The result is contiguous. ATen asks whether an element is far, which a NaN isn't, and so hands
    it on; torch's formula asks whether it is near, and takes a NaN's sign, which is 0.
    Source: aten/src/ATen/native/cpu/BinaryOpsKernel.cpp.
    """
    apart = widened(x) - widened(target)
    g = _share(widened(gradient), x, reduction)
    far = torch.where(apart > 0, g, -g)
    slope = torch.where(torch.abs(apart) >= beta, far, apart * g / beta)
    return slope.to(x.dtype).contiguous()


def binary_cross_entropy_backward(
    gradient: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
) -> Tensor:
    """aten.binary_cross_entropy_backward: g (x - t) / max(x (1 - x), epsilon), weighted.

    Its epsilon is an fp32 number in every type, which torch's formula has in fp64. Source:
    aten/src/ATen/native/Loss.cpp and cuda/Loss.cu.
    """
    work = widened(x)
    slope = (work - widened(target)) / torch.clamp(work * (1 - work), min=_EPSILON)
    slope = slope * widened(gradient)
    if weight is not None:
        slope = slope * widened(weight)
    return _share(slope, x, reduction).to(x.dtype)


def _share(value: Tensor, x: Tensor, reduction: int) -> Tensor:
    """What one element has of a mean."""
    return value / max(x.numel(), 1) if reduction == _MEAN else value
