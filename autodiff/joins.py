"""Joining tensors as pointwise selection, so that what makes and reads the pieces fuses with it.

The backward of a split (query, key and value in one projection) joins a few equal pieces. As a
chain of `where` over the piece's number each output element is written once, by the kernel that
also sums it for a bias gradient; ATen's copy kernels write and read it apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .rewrite import known_equal

MAX_PIECES = 4
"""More pieces than this read too much: every element looks at every piece's place in the chain."""
MIN_ELEMENTS = 1 << 14
"""Smaller results are launches, whichever kernel makes them."""


def _worthwhile(result_elements: Any) -> bool:
    return isinstance(result_elements, int) and result_elements >= MIN_ELEMENTS


def _numbers(size: int, dim: int, rank: int, device: torch.device) -> Tensor:
    """0 .. size-1 along one dimension of a rank, 1 elsewhere."""
    shape = [1] * rank
    shape[dim] = size
    return torch.arange(size, device=device).view(shape)


def select_scatter(base: Tensor, piece: Tensor, dim: int, index: int) -> Any:
    """aten.select_scatter: base with one slice replaced."""
    dim, size = dim % base.dim(), base.shape[dim]
    if not _worthwhile(base.numel()) or size > MAX_PIECES or piece.dtype != base.dtype:
        return NotImplemented
    chosen = _numbers(size, dim, base.dim(), base.device) == index % size
    return torch.where(chosen, piece.unsqueeze(dim), base)


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """aten.cat of a few tensors of one shape: a selection over a new dimension, then merged."""
    first = tensors[0]
    if not 2 <= len(tensors) <= MAX_PIECES or first.dim() == 0:
        return NotImplemented
    same = all(
        t.dtype == first.dtype and t.dim() == first.dim() and known_equal(a, b)
        for t in tensors
        for a, b in zip(t.shape, first.shape, strict=False)
    )
    if not same or not _worthwhile(first.numel()):
        return NotImplemented
    dim %= first.dim()
    number = _numbers(len(tensors), dim, first.dim() + 1, first.device)
    result = tensors[-1].unsqueeze(dim)
    for i in reversed(range(len(tensors) - 1)):
        result = torch.where(number == i, tensors[i].unsqueeze(dim), result)
    shape = list(first.shape)
    shape[dim] *= len(tensors)
    return result.reshape(shape)


def scatter_add(base: Tensor, dim: int, index: Tensor, source: Tensor) -> Any:
    """aten.scatter_add of one element a row, as the backward of a gather: added where it belongs.

    An index that is no place of the row, for which ATen stops the program, makes the first one NaN.
    """
    rank = base.dim()
    if rank == 0 or not base.is_floating_point():
        return NotImplemented
    dim %= rank
    thin = [1 if axis == dim else size for axis, size in enumerate(base.shape)]
    if not (known_equal(list(index.shape), thin) and known_equal(list(source.shape), thin)):
        return NotImplemented
    size = base.shape[dim]
    inside = (index >= 0) & (index < size)
    # compared in 32 bits: 64 take twice the arithmetic of each element
    place = torch.where(inside, index, 0).to(torch.int32)
    added = source.masked_fill(~inside, math.nan)
    columns = _numbers(size, dim, rank, base.device).to(torch.int32)
    return base + torch.where(place == columns, added, 0.0)


def joins() -> dict[Any, Any]:
    """Operators of this module with their formulas."""
    aten = torch.ops.aten
    return {
        aten.select_scatter.default: select_scatter,
        aten.cat.default: cat,
        aten.scatter_add.default: scatter_add,
    }
