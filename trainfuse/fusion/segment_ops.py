"""Sums of rows by key, as two operators of our own: what a scatter-add becomes.

`row_keys` makes of indices what a sort likes: narrow, checked, one row of the result each.
`segment_sum` adds the rows of a source that have equal keys; the keys are sorted, or few. Its
kernels add in an order that only the keys decide (codegen/schedules/segment.py); run by ATen they
mean the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

_library = torch.library.Library("trainfuse", "FRAGMENT")
_library.define("row_keys(Tensor index, Tensor? base, int rows, int total, bool wrap) -> Tensor")
_library.define(
    "segment_sum(Tensor source, Tensor keys, Tensor? order, int rows, int skip) -> Tensor"
)

ROW_KEYS, SEGMENT_SUM = "trainfuse.row_keys.default", "trainfuse.segment_sum.default"
# A radix sort takes one pass a byte of its keys: two bytes hold most vocabularies.
NARROW_ROWS = (1 << 16) - 1
NARROW_BIAS = 1 << 15
RANKED = 1 << 13
"""Keys up to which `segment_sum` sorts them itself, by comparing each with all others."""
FEW, SMALL_TABLE = 512, 1 << 20
"""Keys, and elements of a table, up to which a row's program looks at all keys, and none sorts."""


def key_dtype(total: int) -> torch.dtype:
    """Type of the keys of a result of `total` rows; the key `total` itself means no row."""
    return torch.int16 if total <= NARROW_ROWS else torch.int32


def key_bias(dtype: torch.dtype) -> int:
    """What to add to a key to have its row."""
    return NARROW_BIAS if dtype == torch.int16 else 0


def unsorted(count: int, rows: int, width: int) -> bool:
    """Whether `segment_sum` of as many keys sorts none: these may be indices as they are."""
    return count <= FEW and rows > 1 and rows * width <= SMALL_TABLE


def row_keys(index: Tensor, base: Tensor | None, rows: int, total: int, wrap: bool) -> Tensor:
    """Row index + base of the result as a sort key; an index outside 0 .. rows-1 is an error.

    wrap: negative indices count from the end. Raises IndexError, on a GPU an assertion there.
    """
    torch._check(index.dtype in (torch.int32, torch.int64), lambda: f"{index.dtype} indices")
    row = index.long()
    if wrap:
        row = torch.where(row < 0, row + rows, row)
    inside = (row >= 0) & (row < rows)
    _check(inside)
    keys = row if base is None else row + base
    dtype = key_dtype(total)
    return (torch.where(inside, keys, total) - key_bias(dtype)).to(dtype)


def _check(inside: Tensor) -> None:
    """Raise IndexError unless all are; on a GPU an assertion there."""
    if inside.is_cuda:
        torch._assert_async(inside.all(), "index out of range")
    elif not bool(inside.all()):
        raise IndexError("index out of range in self")


def _row_keys_fake(index: Tensor, base: Tensor | None, rows: int, total: int, wrap: bool) -> Tensor:
    shape = index.shape if base is None else torch.broadcast_shapes(index.shape, base.shape)
    return index.new_empty(shape, dtype=key_dtype(total))


def segment_sum(source: Tensor, keys: Tensor, order: Tensor | None, rows: int, skip: int) -> Tensor:
    """result[r] = sum of source[order[i]] over the i with key r; [N, D] to [rows, D].

    keys: of `row_keys`, sorted. order: where in the source each of them came from; None for at most
    RANKED keys that lie as the source does. These may be int64 indices where they are `unsorted`;
    one out of range is an error. skip: a row that stays 0, or -1. Half types are summed in fp32 and
    rounded once.
    """
    ids = keys.long() + key_bias(keys.dtype)
    if keys.dtype == torch.int64:
        _check((ids >= 0) & (ids < rows))
    kept = (ids < rows) & (ids != skip)
    wide = torch.promote_types(source.dtype, torch.float32)
    total = torch.zeros((rows + 1, source.shape[1]), dtype=wide, device=source.device)
    # index_put_ adds in order on a GPU too, unlike index_add_
    taken = source if order is None else source[order]
    total.index_put_((torch.where(kept, ids, rows),), taken.to(wide), accumulate=True)
    return total[:rows].to(source.dtype)


def _segment_sum_fake(
    source: Tensor, keys: Tensor, order: Tensor | None, rows: int, skip: int
) -> Tensor:
    return source.new_empty((rows, source.shape[1]))


_library.impl("row_keys", row_keys, "CompositeExplicitAutograd")
_library.impl("segment_sum", segment_sum, "CompositeExplicitAutograd")
torch.library.register_fake("trainfuse::row_keys", _row_keys_fake, lib=_library)
torch.library.register_fake("trainfuse::segment_sum", _segment_sum_fake, lib=_library)
