"""Rows that lie side by side in memory and are too long for a program each, cut in parts.

A level of reductions takes two kernels: programs of [columns, rows] tiles leave partial results of
their part of the columns, and a small one merges them. What the last level allows is computed by a
kernel that goes over everything again, backwards: what was read last is still in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from trainfuse.codegen import reductions
from trainfuse.codegen.builder import Builder, Group
from trainfuse.codegen.choices import Choice
from trainfuse.codegen.ir import Kernel, Loop, Module
from trainfuse.codegen.schedules import online, passes
from trainfuse.codegen.schedules.ahead import Walk, ahead
from trainfuse.codegen.schedules.common import (
    describe,
    kernel,
    lanes,
    long,
    needed,
    rows_are_neighbours,
)
from trainfuse.codegen.schedules.passes import Pass
from trainfuse.codegen.schedules.strips import Strips, ready_after
from trainfuse.codegen.targets import Target
from trainfuse.codegen.tile import divide_up, power_of_two

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
    return Module(tuple(split.kernels), tuple(split.strips.workspaces), in_place)


class _Split:
    """The kernels as they are made."""

    def __init__(self, group: Group, target: Target, choice: Choice) -> None:
        domain = group.domain
        total, width = domain.extent(domain.rows), domain.extent(domain.cols)
        self.group = group
        self.warps = choice.warps or WARPS
        rows = min(power_of_two(total), choice.rows or STRIP)
        elements = 1 << 15 if target.interpreted else choice.block or ELEMENTS
        block = min(max(1, elements // rows), power_of_two(width))
        wanted = divide_up(
            (choice.per_sm or PROGRAMS_PER_SM) * target.num_sms, divide_up(total, rows)
        )
        wanted = wanted if choice.per_sm else max(wanted, PARTS)
        parts = min(wanted, MAX_PARTS, divide_up(width, block))
        self.strips = Strips(group, rows, block, parts, "tl.program_id(0)", "tl.program_id(1)")
        self.kernels: list[Kernel] = []

    def reduce(self, step: Pass, thin: Sequence[fx.Node], after: Sequence[fx.Node]) -> None:
        """Programs that walk their parts of the rows, then the kernel that merges the parts.

        thin, after: outputs of one element a row, before the reductions and after them.
        """
        strips = self.strips
        builder = strips.builder()
        strips.recall(builder, [*step.read(), *thin])
        for acc in step.accs:
            reductions.start(builder, acc)
        for pair in step.both:
            online.start(builder, pair, lanes=True)
        builder.push("col")
        strips.define_columns(builder, "start")
        stride = strips.parts * strips.block
        for acc in step.accs:
            reductions.accumulate(builder, acc, f"start // {stride} + 1")
        for pair in step.both:
            online.accumulate(builder, pair, lanes=True)
        for node in (*thin, *step.wide):
            builder.store(node)
        first = f"{strips.place} * {strips.block}"
        loop = Loop("start", first, "COLS", str(stride), builder.pop())
        text = long(self.group, f"{first} + {lanes(builder.tile['col'], 2)}")
        builder.body.extend(ahead(loop, Walk("col", text, str(stride), "{0} < COLS")))
        single = [reductions.finish(builder, acc)[0] for acc in step.accs]
        both = [online.partial(builder, pair) for pair in step.both]
        left = strips.leave(builder, step, single, both)
        doc = f"Parts of rows: {describe(self.group, [red.node for red in left.reds])}."
        self.finish(builder, "part", doc, (strips.count, strips.parts, 1), self.warps)
        rows = min(MERGED_ROWS, max(1, MERGED // power_of_two(strips.parts)))
        rows = min(rows, power_of_two(strips.total))
        builder = strips.merger(rows, strips.strip)
        doc = strips.merge(builder, left, after)
        self.finish(builder, "merge", doc, (divide_up(strips.total, rows), 1, 1), MERGE_WARPS)

    def apply(self, step: Pass) -> None:
        """Programs of a tile each, the last columns first."""
        strips = self.strips
        builder = strips.builder()
        strips.recall(builder, step.wide)
        strips.define_columns(builder, f"({strips.tiles - 1} - {strips.place}) * {strips.block}")
        builder.bind("col")
        for node in step.wide:
            builder.store(node)
        doc = f"Rows again: {describe(self.group, needed(self.group))}."
        self.finish(builder, "row", doc, (strips.count, strips.tiles, 1), self.warps)

    def finish(
        self, builder: Builder, name: str, doc: str, grid: tuple[int, int, int], warps: int
    ) -> None:
        """The kernel, under a name that no other of the group has."""
        taken = sum(kernel.name.startswith(name) for kernel in self.kernels)
        name = f"{name}_{taken}_kernel" if taken else f"{name}_kernel"
        self.kernels.append(kernel(builder, name, doc, grid, warps))
