"""Strips of rows that lie side by side in memory, cut in parts: what is built of them.

Tiles are [columns, rows]: the rows are dense in memory. Programs leave partial results of parts of
the columns, others merge them and leave the values of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from trainfuse.codegen import reductions
from trainfuse.codegen.builder import Builder, Group
from trainfuse.codegen.ir import ArgRef, Load, Store, Workspace
from trainfuse.codegen.reductions import Reduction
from trainfuse.codegen.schedules import online
from trainfuse.codegen.schedules.common import (
    constants,
    describe,
    lanes,
    long,
    reductions_read_by,
)
from trainfuse.codegen.schedules.passes import ROW, Pass
from trainfuse.codegen.scope import Value
from trainfuse.codegen.tile import Segment, TileAxis, divide_up, power_of_two


@dataclass(slots=True)
class Left:
    """Workspaces of [parts, rows] that a level's partial results were left in."""

    single: list[tuple[Reduction, list[ArgRef]]]
    both: list[tuple[online.Pair, list[ArgRef]]]

    @property
    def reds(self) -> list[Reduction]:
        pairs = [red for pair, _ in self.both for red in pair]
        return [*(red for red, _ in self.single), *pairs]


@dataclass(slots=True)
class Strips:
    """How a group's rows are cut, and what is where.

    rows, block: of a tile. parts: of each row. strip, place: text of a program's strip, and of its
    number among the strip's. known: for each reduction the workspaces of its results, and their
    type.
    """

    group: Group
    rows: int
    block: int
    parts: int
    strip: str
    place: str
    workspaces: list[Workspace] = field(default_factory=list)
    known: dict[fx.Node, tuple[list[ArgRef], torch.dtype]] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return self.group.domain.extent(self.group.domain.rows)

    @property
    def width(self) -> int:
        return self.group.domain.extent(self.group.domain.cols)

    @property
    def count(self) -> int:
        """Strips of all rows."""
        return divide_up(self.total, self.rows)

    @property
    def tiles(self) -> int:
        """Tiles of a strip."""
        return divide_up(self.width, self.block)

    def builder(self) -> Builder:
        """Something of tiles under construction: its rows are defined."""
        domain = self.group.domain
        quad = f"{self.strip} * {self.rows // 4}" if self.rows % 4 == 0 else None
        row_mask = "row_mask" if self.total % self.rows else ""
        col_mask = "col_mask" if self.width % self.block else ""
        row_segment = Segment("row", row_mask, self.rows, quad)
        col_segment = Segment("col", col_mask, self.block, None)
        row = TileAxis("row", domain.rows, self.total, (row_segment,), 1, True)
        col = TileAxis("col", domain.cols, self.width, (col_segment,), 0, True)
        builder = Builder(self.group, [row, col], "col")
        constants(builder, [("ROWS", self.total), ("COLS", self.width)])
        self.define_rows(builder, self.strip)
        builder.bind("row")
        return builder

    def define_rows(self, builder: Builder, number: str) -> None:
        """The tile's rows; number: text of how many tiles of rows come before."""
        row = builder.tile["row"]
        segment = row.segments[0]
        first = long(self.group, number)
        builder.note("row", f"{first} * {segment.width} + {lanes(row, 2)}")
        if segment.mask:
            builder.note(segment.mask, "row < ROWS")

    def define_columns(self, builder: Builder, start: str) -> None:
        """The tile's columns, from the first one."""
        text = lanes(builder.tile["col"], 2)
        builder.note("col", long(self.group, f"{start} + {text}"))
        if mask := builder.segment("col", 0).mask:
            builder.note(mask, "col < COLS")

    # Partial results.

    def leave(
        self,
        builder: Builder,
        step: Pass,
        single: Sequence[Sequence[str]],
        pairs: Sequence[Sequence[str]],
    ) -> Left:
        """Write what a part leaves of a level's reductions: names of the states of each, in order.

        pairs: of those that are a maximum with its sum.
        """
        reds = [acc.red for acc in step.accs]
        return Left(
            [(r, self._write(builder, r, names)) for r, names in zip(reds, single, strict=True)],
            [
                (p, self._write(builder, p[1], names))
                for p, names in zip(step.both, pairs, strict=True)
            ],
        )

    def _write(self, builder: Builder, red: Reduction, names: Sequence[str]) -> list[ArgRef]:
        mask = builder.segment("row", 0).mask
        args: list[ArgRef] = []
        for name in names:
            args.append(arg := self._workspace(builder, self.parts, red.dtype))
            builder.body.append(Store(arg, f"{self.place} * ROWS + row", name, mask, "partial"))
        return args

    def _workspace(self, builder: Builder, parts: int, dtype: torch.dtype) -> ArgRef:
        """A new one, for what is under construction to write."""
        arg: ArgRef = ("workspace", len(self.workspaces))
        self.workspaces.append(Workspace((parts, self.total), dtype))
        builder.args[arg] = None
        return arg

    # Values of rows.

    def recall(self, builder: Builder, nodes: Sequence[fx.Node]) -> None:
        """Load the results of earlier reductions that some values are made of."""
        wanted = reductions_read_by(self.group, nodes)
        mask = builder.segment("row", 0).mask
        for node, (args, dtype) in self.known.items():
            if node not in wanted:
                continue
            names = [builder.name_of(node) + (f"_{i}" if i else "") for i in range(len(args))]
            for name, arg in zip(names, args, strict=True):
                builder.args[arg] = None
                builder.body.append(Load(name, arg, "row", mask, "", "of the row"))
            first, *more = (Value((name,), ROW, 0, dtype) for name in names)
            builder.scopes[0].values[node] = (first, *more) if more else first

    def merger(self, rows: int, number: str) -> Builder:
        """What is to merge the parts of some rows; number: of tiles of so many rows before."""
        held = power_of_two(self.parts)
        part_mask = "part_mask" if held > self.parts else ""
        row_mask = "row_mask" if self.total % rows else ""
        part = TileAxis("part", (), self.parts, (Segment("part", part_mask, held),), 0, False)
        row_segment = Segment("row", row_mask, rows)
        row = TileAxis("row", self.group.domain.rows, self.total, (row_segment,), 1, True)
        builder = Builder(self.group, [part, row], "part")
        constants(builder, [("ROWS", self.total), ("PARTS", self.parts)])
        builder.note("part", lanes(part, 2))
        if part_mask:
            builder.note(part_mask, "part < PARTS")
        self.define_rows(builder, number)
        builder.bind("part", "row")
        return builder

    def merge(self, builder: Builder, left: Left, after: Sequence[fx.Node]) -> str:
        """Merge the parts in a fixed order, keep and store what they allow; says what it does."""
        self.recall(builder, after)
        for red, args in left.single:
            names = [f"{builder.name_of(red.node)}_{state}" for state in red.states]
            others = [red.identity if state == "acc" else "0.0" for state in red.states]
            self._read(builder, names, args, others)
            reductions.settle(builder, red, [reductions.merge(builder, red, names, 0)], ROW)
        for pair, args in left.both:
            names = [f"{builder.name_of(red.node)}_part" for red in pair]
            self._read(builder, names, args, ['float("-inf")', "0.0"])
            online.merge(builder, pair, names)
        for red in left.reds:
            self._keep(builder, red)
            if red.node in self.group.outputs:
                builder.store(red.node)
        for node in after:
            builder.store(node)
        ops = describe(self.group, [red.node for red in left.reds])
        return f"Merges the parts in order: {ops}."

    def _read(
        self,
        builder: Builder,
        names: Sequence[str],
        args: Sequence[ArgRef],
        others: Sequence[str],
    ) -> None:
        masks = (builder.segment(axis, 0).mask for axis in ("part", "row"))
        mask = " & ".join(filter(None, masks))
        for name, arg, other in zip(names, args, others, strict=True):
            builder.args[arg] = None
            builder.body.append(Load(name, arg, "part * ROWS + row", mask, "", "partial", other))

    def _keep(self, builder: Builder, red: Reduction) -> None:
        """Write a reduction's results where others find them."""
        found = builder.find(red.node)
        assert found is not None
        args: list[ArgRef] = []
        for value in found if isinstance(found, tuple) else (found,):
            args.append(arg := self._workspace(builder, 1, red.dtype))
            mask = builder.segment("row", 0).mask
            builder.body.append(Store(arg, "row", value.names[0], mask, "of the row"))
        self.known[red.node] = args, red.dtype


def ready_after(plan: Sequence[Pass], number: int) -> list[fx.Node]:
    """Outputs of one element a row that a level's reductions allow, and no earlier one's."""
    found: list[fx.Node] = []
    for step in plan[number + 1 :]:
        found += step.thin
        if step.accs or step.both:
            break
    return found
