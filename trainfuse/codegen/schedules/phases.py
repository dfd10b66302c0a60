"""Rows that begin anywhere, walked by programs whose rows all begin alike.

A row of 4099 halves begins up to seven elements past a 16-byte vector: at its *phase*, which comes
round every eight rows. A program that walks such rows alone has every element at one place of one
vector in all of them: rows are moved in whole vectors, and what varies along the columns alone,
weights or sums, is laid out once, before its loop. A few elements at a row's ends share vectors
with its neighbours: they are a segment of their own, moved one by one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainfuse.codegen.builder import Group, masks
from trainfuse.codegen.schedules import vectors
from trainfuse.codegen.schedules.common import long, own_axes
from trainfuse.codegen.tile import (
    VECTOR_BYTES,
    Segment,
    Vectors,
    cover,
    divide_up,
    value_strides,
)

LONG = 1024
"""Elements of a row that is worth it: shorter ones share programs."""
DRAWN = 2.0
"""Tiles of registers that drawing a mask takes."""


@dataclass(frozen=True, slots=True)
class Phases:
    """Rows of `width` elements, of which `count` are a vector, that begin alike every `period`."""

    width: int
    count: int
    period: int

    @property
    def padded(self) -> int:
        """Elements from one program's partial row to the next, laid out as its rows are."""
        return divide_up(self.width + self.count - 1, self.count) * self.count

    @property
    def lead(self) -> str:
        """Elements from an aligned address to a program's rows: text."""
        return f"tl.program_id(0) % {self.period} * COLS % {self.count}"

    @property
    def vectors(self) -> tuple[int, int]:
        """Fewest and most elements from the first whole vector of any row to the last's end.

        Before it comes a vector that holds the row's first element, whole or not.
        """
        leads = range(0, self.count, self.count // self.period)
        ends = [(lead + self.width) // self.count * self.count for lead in leads]
        return min(ends) - self.count, max(ends) - self.count

    def programs(self, wanted: int, rows: int) -> int:
        """About so many programs: of one row each, or of rows that begin alike."""
        return rows if wanted >= rows else max(wanted // self.period * self.period, self.period)

    def segments(self, warps: int) -> tuple[Segment, ...]:
        """Blocks of whole vectors, one a thread where that divides them, then both ends."""
        least, most = self.vectors
        block = max(LONG, 32 * warps * self.count)
        blocks = cover(most)
        if most % block == 0:
            blocks = [(start, block) for start in range(0, most, block)]
        found = [
            Segment(
                f"col_{i}",
                f"col_{i}_mask" if start + width > least else "",
                width,
                vectors=Vectors(
                    element=f"row * COLS + col_{i}",
                    offset=f"row * COLS // {self.count} * {self.count} + place_{i}",
                    index=f"place_{i}",
                    before=self.count - 1,
                    first=f"{self.count + start} - lead",
                ),
            )
            for i, (start, width) in enumerate(blocks)
        ]
        last = f"col_{len(found)}"
        return (*found, Segment(last, f"{last}_mask", 2 * self.count))

    def block(self, width: int, lanes: str) -> tuple[Segment, list[tuple[str, str]]]:
        """One of several blocks of whole vectors, with what those have of other rows.

        lanes: text of its places. Also (name, expression) of its index and masks.
        """
        ends = vectors.has_ends(f"tl.program_id(1) * {width}", width, self.count)
        moved = Vectors(
            element="row * COLS + col",
            offset=f"row * COLS // {self.count} * {self.count} + place",
            index="place",
            before=self.count - 1,
            load="place, row_stop",
            store=f"place, lead, row_stop, {self.count}, {ends}",
        )
        definitions = [
            ("lead", self.lead),
            ("row_stop", "lead + COLS"),
            ("place", lanes),
            ("col", "place - lead"),
            ("col_mask", "(col >= 0) & (col < COLS)"),
        ]
        return Segment("col", "col_mask", width, vectors=moved), definitions

    def first(self, rows: int) -> str:
        """A program's first row, of steps of so many rows that begin alike: text."""
        if rows == 1:
            return "tl.program_id(0)"
        number, period = "tl.program_id(0)", self.period
        return f"{number} // {period} * {period * rows} + {number} % {period}"

    def definitions(self, group: Group, segments: Sequence[Segment]) -> list[tuple[str, str]]:
        """(name, expression) of the index tensors and masks of a row's segments."""
        count = self.count
        found = [
            ("lead", self.lead),
            ("whole", f"(lead + COLS) // {count} * {count}"),
        ]
        start = count
        for segment in segments[:-1]:
            assert segment.vectors is not None
            place = segment.vectors.index
            found.append((place, long(group, f"{start} + tl.arange(0, {segment.width})")))
            found.append((segment.index, f"{place} - lead"))
            if segment.mask:
                found.append((segment.mask, f"{place} < whole"))
            start += segment.width
        ends = segments[-1]
        lane = f"tl.arange(0, {ends.width})"
        place = f"tl.where({lane} < {count}, {lane}, whole - {count} + {lane})"
        found.append((ends.index, long(group, place) + " - lead"))
        found.append((ends.mask, f"({ends.index} >= 0) & ({ends.index} < COLS)"))
        return found


def find(
    group: Group, rows: Sequence[int] | None = None, cols: Sequence[int] | None = None
) -> Phases | None:
    """How a group's rows begin; None where vectors divide them, or nothing can be moved so.

    All whole operands lie row by row without gaps. rows, cols: axes, if not the domain's own.
    """
    domain = group.domain
    rows, cols = rows or domain.rows, cols or domain.cols
    width = domain.extent(cols)
    nodes = [n for n in (*group.inputs, *group.outputs) if n in domain.axes]
    whole = [node for node in nodes if len(own_axes(domain, node)) == len(domain.sizes)]
    if not whole or domain.indirect or width < LONG:
        return None
    along = frozenset(axis for axis in cols if domain.sizes[axis] > 1)
    if any(own_axes(domain, node) & along not in (frozenset(), along) for node in nodes):
        return None  # some are read element by element, and take more registers than that saves
    dense = 1
    for axis in reversed((*rows, *cols)):
        if domain.sizes[axis] > 1 and any(value_strides(domain, n)[axis] != dense for n in whole):
            return None
        dense *= domain.sizes[axis]
    # of the narrowest, so that every operand's vectors are masked alike
    count = VECTOR_BYTES // min(node.meta["val"].dtype.itemsize for node in whole)
    period = count // math.gcd(width, count)
    return Phases(width, count, period) if period > 1 else None


def of_tiles(
    group: Group,
    rows: int,
    block: int,
    *,
    axes: tuple[Sequence[int], Sequence[int]] | None = None,
) -> Phases | None:
    """The same where programs walk tiles of so many rows and columns.

    A step's rows begin alike, and none of them lies past the last. axes: rows and columns.
    """
    row_axes, col_axes = axes or (group.domain.rows, group.domain.cols)
    found = find(group, row_axes, col_axes)
    if found is None or block % found.count or masks(group):
        return None
    return None if group.domain.extent(row_axes) % (rows * found.period) else found


def columns(group: Group) -> int:
    """Values that vary along the columns alone: a program has them in registers all along."""
    domain = group.domain
    owns = [own_axes(domain, n) for n in group.inputs if n in domain.axes]
    return sum(bool(own) and own <= frozenset(domain.cols) for own in owns)


def registers(group: Group) -> float:
    """What a program's loop needs beside its rows, in tiles as long as those."""
    return columns(group) + DRAWN * len(masks(group))
