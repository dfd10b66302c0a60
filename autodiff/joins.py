"""Joining tensors as pointwise selection, so that what makes and reads the pieces fuses with it.

The backward of a split (query, key and value in one projection) joins a few equal pieces. As a
chain of `where` over the piece's number each output element is written once, by the kernel that
also sums it for a bias gradient; ATen's copy kernels write and read it apart.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .rewrite import known_equal

MAX_PIECES = 4
"""More pieces than this read too much: every element looks at every piece's place in the chain."""
_TYPES = frozenset(
    {torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.bool}
    | {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
)
MIN_ELEMENTS = 1 << 10
"""Smaller results are launches, whichever kernel makes them."""


def _worthwhile(result_elements: Any) -> bool:
    return isinstance(result_elements, int) and result_elements >= MIN_ELEMENTS


def _selectable(*pieces: Tensor) -> bool:
    """Whether a selection can choose among pieces: of one type, which kernels have."""
    first = pieces[0].dtype
    return first in _TYPES and all(piece.dtype == first for piece in pieces)


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


# Joins that only pay where a padding is a masked load: each piece is padded to the result's size.


def _coordinate(like: Tensor, dim: int) -> Tensor:
    return _numbers(like.shape[dim], dim, like.dim(), like.device)


def _placed(piece: Tensor, dim: int, start: int, size: int) -> Tensor:
    """A piece at its place along a dimension of `size`, zeros around it."""
    after = [start, size - start - piece.shape[dim]]
    pads = [0, 0] * (piece.dim() - 1 - dim) + after
    return torch.ops.aten.constant_pad_nd(piece, pads, 0)


def select_into(base: Tensor, piece: Tensor, dim: int, index: int) -> Any:
    """aten.select_scatter of any size: the slice where the coordinate is `index`, else the base."""
    dim, size = dim % base.dim(), base.shape[dim]
    if not _worthwhile(base.numel()) or not isinstance(size, int) or not _selectable(base, piece):
        return NotImplemented
    return torch.where(_coordinate(base, dim) == index % size, piece.unsqueeze(dim), base)


def slice_scatter(
    base: Tensor,
    piece: Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
    *,
    parts: bool = True,
) -> Any:
    """aten.slice_scatter: base with a range replaced.

    Equal parts, one after another or in turns, are a new dimension if `parts`; other ranges are
    padded.
    """
    if not _worthwhile(base.numel()) or not _selectable(base, piece) or base.dim() == 0:
        return NotImplemented
    dim %= base.dim()
    size, count = base.shape[dim], piece.shape[dim]
    if not (isinstance(size, int) and isinstance(count, int)) or count == 0:
        return NotImplemented
    first = slice(start, end, step).indices(size)[0]
    if count == size:
        return piece.clone()
    shape = list(base.shape)
    if parts and step > 1 and count * step == size and first < step <= MAX_PIECES:
        split = [*shape[:dim], count, step, *shape[dim + 1 :]]
        number = _numbers(step, dim + 1, len(split), base.device)
        piece = piece.unsqueeze(dim + 1)
        return torch.where(number == first, piece, base.reshape(split)).reshape(shape)
    if step != 1:
        return NotImplemented
    if parts and size % count == 0 and first % count == 0 and size // count <= MAX_PIECES:
        split = [*shape[:dim], size // count, count, *shape[dim + 1 :]]
        number = _numbers(size // count, dim, len(split), base.device)
        piece = piece.unsqueeze(dim)
        return torch.where(number == first // count, piece, base.reshape(split)).reshape(shape)
    place = _coordinate(base, dim)
    if first == 0:
        inside = place < count
    elif first + count == size:
        inside = place >= first
    else:
        inside = (place >= first) & (place < first + count)
    return torch.where(inside, _placed(piece, dim, first, size), base)


def cat_of_unequal(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """aten.cat of a few tensors: each padded to the result, chosen by the coordinate."""
    first = tensors[0]
    if not 2 <= len(tensors) <= MAX_PIECES or first.dim() == 0:
        return NotImplemented
    if not _selectable(*tensors) or any(t.dim() != first.dim() for t in tensors):
        return NotImplemented
    dim %= first.dim()
    sizes = [t.shape[dim] for t in tensors]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return NotImplemented
    if not _worthwhile(sum(t.numel() for t in tensors)):
        return NotImplemented
    total = sum(sizes)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    result = _placed(tensors[-1], dim, starts[-1], total)
    place = _coordinate(result, dim)
    for i in reversed(range(len(sizes) - 1)):
        result = torch.where(
            place < starts[i + 1], _placed(tensors[i], dim, starts[i], total), result
        )
    return result


def cut(x: Tensor, pad: list[int], value: float = 0) -> Any:
    """aten.constant_pad_nd that only takes away: a copy of a slice."""
    if any(type(amount) is not int or amount > 0 for amount in pad):
        return NotImplemented
    result = x
    for place in range(len(pad) // 2):
        dim, (before, after) = x.dim() - 1 - place, pad[2 * place : 2 * place + 2]
        if before or after:
            result = result.narrow(dim, -before, x.shape[dim] + before + after)
    return result.clone()


def padded_joins(*, parts: bool = True) -> dict[Any, Any]:
    """Operators that `joins` leaves, for kernels that load what they pad.

    parts: whether equal ranges may become a new dimension, through which no index map passes.
    """
    aten = torch.ops.aten
    return {
        aten.select_scatter.default: select_into,
        aten.slice_scatter.default: functools.partial(slice_scatter, parts=parts),
        aten.cat.default: cat_of_unequal,
        aten.constant_pad_nd.default: cut,
    }


def joins() -> dict[Any, Any]:
    """Operators of this module with their formulas."""
    aten = torch.ops.aten
    return {
        aten.select_scatter.default: select_scatter,
        aten.cat.default: cat,
        aten.scatter_add.default: scatter_add,
    }
