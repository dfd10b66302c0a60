"""Linear interpolation as ATen's kernels have it: each neighbour by its own weight.

torch's decomposition has x1 + (x2 - x1) * w, which is NaN where the neighbours are infinite, and
where only one that weighs nothing is: a mask of -inf, upsampled, would be lost.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._compat import suggest_memory_format
from .widening import widened


def upsample_linear(
    x: Tensor, size: Sequence[Any], align_corners: bool, scales: Sequence[float | None]
) -> Tensor:
    """aten.upsample_linear1d, bilinear2d and trilinear3d of floating [N, C, *lengths].

    size: lengths of the result. scales: factors that were asked for, or None. The layout is ATen's.
    """
    work = widened(x)
    rank = len(size)
    axes = [
        _neighbours(x.shape[2 + axis], size[axis], align_corners, scales[axis], work)
        for axis in range(rank)
    ]
    values = []
    for corner in itertools.product((0, 1), repeat=rank):
        places: list[Tensor | None] = [None, None]
        for axis, upper in enumerate(corner):
            places.append(axes[axis][upper].reshape(-1, *[1] * (rank - 1 - axis)))
        values.append(torch.ops.aten._unsafe_index(work, places))
    for axis in reversed(range(rank)):
        weight = axes[axis][2].reshape(-1, *[1] * (rank - 1 - axis))
        pairs = zip(values[::2], values[1::2], strict=True)
        values = [low * (1.0 - weight) + high * weight for low, high in pairs]
    return values[0].to(x.dtype).contiguous(memory_format=_layout(x))


def _neighbours(
    length: Any, wanted: Any, align_corners: bool, scale: float | None, work: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Along one axis: the neighbours' places, and the weight of the second."""
    number = torch.arange(wanted, device=work.device).to(work.dtype)
    if align_corners:
        source = number * ((length - 1.0) / (wanted - 1.0) if wanted > 1 else 0)
    else:
        step = 1.0 / scale if scale is not None and scale > 0 else length / wanted
        source = (number + 0.5) * step - 0.5
    source = source.clamp(min=0.0)
    low = source.to(torch.int64)
    high = (low + 1).clamp(max=length - 1)
    return low, high, (source - low).clamp(0.0, 1.0)


def _layout(x: Tensor) -> torch.memory_format:
    """ATen's choice: few channels on a GPU are interpolated as planes."""
    if x.device.type == "cuda" and x.shape[1] < 16:
        return torch.contiguous_format
    return suggest_memory_format(x)
