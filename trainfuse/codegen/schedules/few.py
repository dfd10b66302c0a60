"""Sums of rows by few keys, in one launch: programs of a few rows of the table look at all keys.

Keys are cut in slices. A slice finds its places of a row one by one, in order, all slices at once,
and adds what lies there; then the slices' sums are added. So a row that has all keys takes as many
steps as a slice has keys, and most rows take one or none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainfuse.codegen.builder import Builder
from trainfuse.codegen.ir import ArgRef, Check, Load, Loop
from trainfuse.codegen.scalars import HALF, TRITON_TYPE
from trainfuse.codegen.tile import power_of_two

SLICES = 16
ELEMENTS, WARPS = 2048, 1
"""Of all slices of a program's tile; and its warps, which would have to meet at each step."""


@dataclass(frozen=True, slots=True)
class Matches:
    """The sums of a tile's rows, of at least two.

    keys: in no order. low, high: keys of the first row and past the last. skip: the key of a row
    that stays zero, or None. source: their rows, `stride` apart; column: text of where in a row the
    tile's columns are. dtype: of the sums.
    """

    keys: ArgRef
    key_dtype: torch.dtype
    count: int
    low: int
    high: int
    skip: int | None
    source: ArgRef
    source_dtype: torch.dtype
    stride: int
    column: str
    dtype: torch.dtype

    def add(self, builder: Builder, rows: int, block: int, col_mask: str) -> None:
        """Define `total` from `row` and `col`."""
        slices = min(SLICES, power_of_two(self.count))
        lanes = power_of_two(self.count) // slices
        size = slices * lanes
        mask = "place_mask" if self.count < size else ""
        lane = f"tl.arange(0, {lanes})[None, None, :]"
        builder.note("place", f"tl.arange(0, {slices})[None, :, None] * {lanes} + {lane}")
        if mask:
            builder.note(mask, f"place < {self.count}")
        wide = "" if self.key_dtype == torch.int64 else "tl.int32"
        load = Load("key", self.keys, "place", mask, wide, other=str(self.low))
        inside = f"(key >= {self.low}) & (key < {self.high})"
        builder.body.extend((load, Check(inside, "index out of range")))
        key = f"key + {-self.low}" if self.low else "key"
        tests = [f"({key} == row[:, :, None])", mask]
        tests += [] if self.skip is None else [f"(key != {self.skip})"]
        text = f"tl.where({' & '.join(filter(None, tests))}, place, {size})"
        builder.note("left", text, "places of each row; the end for others'")
        count = f"tl.sum((left < {size}).to(tl.int32), 2)"
        builder.note("most", f"tl.max({count})", "of any slice and row")
        zeros = f"tl.full(({rows}, {slices}, {block}), 0.0, {TRITON_TYPE[self.dtype]})"
        builder.note("sums", zeros)
        builder.note("column", self.column)
        builder.push()
        builder.note("first", "tl.min(left, 2)[:, :, None]")
        builder.note("left", f"tl.where(left == first, {size}, left)")
        tests = [f"(first < {size})", f"{col_mask}[:, None, :]" if col_mask else ""]
        half = TRITON_TYPE[torch.float32] if self.source_dtype in HALF else ""
        offset = f"first.to(tl.int64) * {self.stride} + column[:, None, :]"
        guard = " & ".join(filter(None, tests))
        builder.body.append(Load("x", self.source, offset, guard, half, other="0.0"))
        builder.note("sums", "sums + x")
        steps = builder.pop()
        builder.body.append(Loop("step", "0", "most", "1", steps))
        builder.note("total", "tl.sum(sums, 1)")
