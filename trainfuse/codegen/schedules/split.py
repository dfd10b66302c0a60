"""Rows that lie side by side in memory and are too long for a program each, cut in parts.

A level of reductions takes two kernels: programs of [columns, rows] tiles leave partial results of
their part of the columns, and a small one merges them. What the last level allows is computed by a
kernel that goes over everything again, backwards: what was read last is still in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from trainfuse.codegen import reductions
from trainfuse.codegen.builder import Builder, Group
from trainfuse.codegen.choices import Choice
from trainfuse.codegen.ir import ArgRef, Kernel, Load, Loop, Module, Store, Workspace
from trainfuse.codegen.reductions import Reduction
from trainfuse.codegen.schedules import online, passes
from trainfuse.codegen.schedules.ahead import Walk, ahead
from trainfuse.codegen.schedules.common import (
    constants,
    describe,
    kernel,
    lanes,
    long,
    needed,
    reductions_read_by,
    rows_are_neighbours,
)
from trainfuse.codegen.schedules.passes import ROW, Pass
from trainfuse.codegen.scope import Value
from trainfuse.codegen.targets import Target
from trainfuse.codegen.tile import Segment, TileAxis, divide_up, power_of_two

STRIP = 64  # rows of a tile: 128 bytes of halves in a row
ELEMENTS = 4096  # of a tile
WARPS = 4
PARTS = 32  # several times the programs that run at once: the last of them leave little idle
PROGRAMS_PER_SM = 2  # at least, of few strips
MAX_PARTS, MERGED = 512, 8192  # parts, and elements, of a tile of the merging kernel
MERGED_ROWS = 32  # of that tile at most
MERGE_WARPS = 4
MAX_TILES = 65535  # of a grid's second dimension


def why_not(group: Group, plan: Sequence[Pass]) -> str | None:
    """Why a group's rows can't be cut in parts, or None."""
    if not rows_are_neighbours(group.domain):
        return "its rows don't lie side by side in memory"
    if any(step.picks for step in plan):
        return "it picks single elements of its rows"
    if divide_up(group.domain.extent(group.domain.cols), ELEMENTS // STRIP) > MAX_TILES:
        return "its rows are too long for a grid"
    return None


def build(group: Group, target: Target, choice: Choice, plan: Sequence[Pass]) -> Module:
    """The kernels of each level in turn; row values go from one to the next through memory."""
    split = _Split(group, target, choice)
    for number, step in enumerate(plan):
        if step.accs or step.both:
            split.reduce(step, [] if split.kernels else step.thin, ready_after(plan, number))
        elif step.wide:
            split.apply(step)
    in_place = passes.overwritable(group, list(plan))
    return Module(tuple(split.kernels), tuple(split.workspaces), in_place)


def ready_after(plan: Sequence[Pass], number: int) -> list[fx.Node]:
    """Outputs of one element a row that a level's reductions allow, and no earlier one's."""
    found: list[fx.Node] = []
    for step in plan[number + 1 :]:
        found += step.thin
        if step.accs or step.both:
            break
    return found


class _Split:
    """The kernels as they are made, and where they leave the values of rows.

    known: for each reduction the workspaces of its results, and their type.
    """

    def __init__(self, group: Group, target: Target, choice: Choice) -> None:
        domain = group.domain
        self.group = group
        self.total, self.width = domain.extent(domain.rows), domain.extent(domain.cols)
        self.warps = choice.warps or WARPS
        self.rows = min(power_of_two(self.total), choice.rows or STRIP)
        elements = 1 << 15 if target.interpreted else choice.block or ELEMENTS
        self.block = min(max(1, elements // self.rows), power_of_two(self.width))
        self.strips = divide_up(self.total, self.rows)
        wanted = divide_up((choice.per_sm or PROGRAMS_PER_SM) * target.num_sms, self.strips)
        wanted = wanted if choice.per_sm else max(wanted, PARTS)
        self.parts = min(wanted, MAX_PARTS, divide_up(self.width, self.block))
        self.kernels: list[Kernel] = []
        self.workspaces: list[Workspace] = []
        self.known: dict[fx.Node, tuple[list[ArgRef], torch.dtype]] = {}

    # Kernels over everything.

    def builder(self, wanted: Sequence[fx.Node]) -> Builder:
        """A kernel of tiles under construction, with what it needs of earlier reductions."""
        domain = self.group.domain
        quad = f"tl.program_id(0) * {self.rows // 4}" if self.rows % 4 == 0 else None
        row_mask = "row_mask" if self.total % self.rows else ""
        col_mask = "col_mask" if self.width % self.block else ""
        row_segment = Segment("row", row_mask, self.rows, quad)
        col_segment = Segment("col", col_mask, self.block, None)
        row = TileAxis("row", domain.rows, self.total, (row_segment,), 1, True)
        col = TileAxis("col", domain.cols, self.width, (col_segment,), 0, True)
        builder = Builder(self.group, [row, col], "col")
        constants(builder, [("ROWS", self.total), ("COLS", self.width)])
        first = long(self.group, "tl.program_id(0)")
        builder.note("row", f"{first} * {self.rows} + {lanes(row, 2)}")
        if row_mask:
            builder.note(row_mask, "row < ROWS")
        builder.bind("row")
        self.recall(builder, wanted)
        return builder

    def column(self, builder: Builder, start: str) -> None:
        """The tile's columns, from the first one."""
        text = lanes(builder.tile["col"], 2)
        builder.note("col", long(self.group, f"{start} + {text}"))
        if mask := builder.segment("col", 0).mask:
            builder.note(mask, "col < COLS")

    def reduce(self, step: Pass, thin: Sequence[fx.Node], after: Sequence[fx.Node]) -> None:
        """Programs that walk their parts of the rows, then the kernel that merges the parts.

        thin, after: outputs of one element a row, before the reductions and after them.
        """
        builder = self.builder([*step.read(), *thin])
        for acc in step.accs:
            reductions.start(builder, acc)
        for pair in step.both:
            online.start(builder, pair, lanes=True)
        builder.push("col")
        self.column(builder, "start")
        stride = self.parts * self.block
        for acc in step.accs:
            reductions.accumulate(builder, acc, f"start // {stride} + 1")
        for pair in step.both:
            online.accumulate(builder, pair, lanes=True)
        for node in (*thin, *step.wide):
            builder.store(node)
        first = f"tl.program_id(1) * {self.block}"
        loop = Loop("start", first, "COLS", str(stride), builder.pop())
        text = long(self.group, f"{first} + {lanes(builder.tile['col'], 2)}")
        builder.body.extend(ahead(loop, Walk("col", text, str(stride), "{0} < COLS")))
        partial = [
            (acc.red, self.leave(builder, acc.red, *reductions.finish(builder, acc)))
            for acc in step.accs
        ]
        both = [
            (pair, self.leave(builder, pair[1], online.partial(builder, pair)))
            for pair in step.both
        ]
        reds = [*(acc.red for acc in step.accs), *(red for pair in step.both for red in pair)]
        doc = f"Parts of rows: {describe(self.group, [red.node for red in reds])}."
        self.finish(builder, "part", doc, (self.strips, self.parts, 1), self.warps)
        self.merge(partial, both, after)

    def apply(self, step: Pass) -> None:
        """Programs of a tile each, the last columns first."""
        builder = self.builder(step.wide)
        tiles = divide_up(self.width, self.block)
        self.column(builder, f"({tiles - 1} - tl.program_id(1)) * {self.block}")
        builder.bind("col")
        for node in step.wide:
            builder.store(node)
        doc = f"Rows again: {describe(self.group, needed(self.group))}."
        self.finish(builder, "row", doc, (self.strips, tiles, 1), self.warps)

    # Values of rows.

    def leave(self, builder: Builder, red: Reduction, names: Sequence[str]) -> list[ArgRef]:
        """Write a part's states to workspaces of [parts, rows]."""
        mask = builder.segment("row", 0).mask
        args: list[ArgRef] = []
        for name in names:
            args.append(arg := self.workspace(builder, self.parts, red.dtype))
            builder.body.append(Store(arg, "tl.program_id(1) * ROWS + row", name, mask, "partial"))
        return args

    def workspace(self, builder: Builder, parts: int, dtype: torch.dtype) -> ArgRef:
        """A new one, for the kernel under construction to write."""
        arg: ArgRef = ("workspace", len(self.workspaces))
        self.workspaces.append(Workspace((parts, self.total), dtype))
        builder.args[arg] = None
        return arg

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

    def merge(
        self,
        partial: Sequence[tuple[Reduction, Sequence[ArgRef]]],
        both: Sequence[tuple[online.Pair, Sequence[ArgRef]]],
        after: Sequence[fx.Node],
    ) -> None:
        """The kernel that merges the parts, in a fixed order, and stores what they allow."""
        held = power_of_two(self.parts)
        rows = min(MERGED_ROWS, max(1, MERGED // held), power_of_two(self.total))
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
        first = long(self.group, "tl.program_id(0)")
        builder.note("row", f"{first} * {rows} + {lanes(row, 2)}")
        if row_mask:
            builder.note(row_mask, "row < ROWS")
        builder.bind("part", "row")
        self.recall(builder, after)
        for red, args in partial:
            names = [f"{builder.name_of(red.node)}_{state}" for state in red.states]
            others = [red.identity if state == "acc" else "0.0" for state in red.states]
            self.load_parts(builder, names, args, others)
            reductions.settle(builder, red, [reductions.merge(builder, red, names, 0)], ROW)
        for pair, args in both:
            names = [f"{builder.name_of(red.node)}_part" for red in pair]
            self.load_parts(builder, names, args, ['float("-inf")', "0.0"])
            online.merge(builder, pair, names)
        reds = [*(red for red, _ in partial), *(red for pair, _ in both for red in pair)]
        for red in reds:
            self.keep(builder, red)
            if red.node in self.group.outputs:
                builder.store(red.node)
        for node in after:
            builder.store(node)
        doc = f"Merges the parts in order: {describe(self.group, [red.node for red in reds])}."
        self.finish(builder, "merge", doc, (divide_up(self.total, rows), 1, 1), MERGE_WARPS)

    def load_parts(
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

    def keep(self, builder: Builder, red: Reduction) -> None:
        """Write a reduction's results where later kernels find them."""
        found = builder.find(red.node)
        assert found is not None
        args: list[ArgRef] = []
        for value in found if isinstance(found, tuple) else (found,):
            args.append(arg := self.workspace(builder, 1, red.dtype))
            mask = builder.segment("row", 0).mask
            builder.body.append(Store(arg, "row", value.names[0], mask, "of the row"))
        self.known[red.node] = args, red.dtype

    def finish(
        self, builder: Builder, name: str, doc: str, grid: tuple[int, int, int], warps: int
    ) -> None:
        """The kernel, under a name that no other of the group has."""
        taken = sum(kernel.name.startswith(name) for kernel in self.kernels)
        name = f"{name}_{taken}_kernel" if taken else f"{name}_kernel"
        self.kernels.append(kernel(builder, name, doc, grid, warps))
