"""Rows that lie side by side in memory and are too long for a program each, in one launch.

The work is pieces of one tile, in phases: the parts of a level of reductions, their merging, and so
on, and what the last level allows. Strip by strip, and each phase some strips behind the one before
it, so that what is read again is still in the L2 cache. One strip behind, that is

    part(0)  merge(0) part(1)  row(0) merge(1) part(2)  row(1) merge(2) part(3)  ...

Programs take pieces from a counter, in this order, and wait for the phase before theirs to be done
with the strip. A program that waits has others before it only: they run, whatever part of the grid
does, and the first of them that isn't done waits for none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from trainfuse.codegen import reductions
from trainfuse.codegen.builder import Builder, Group
from trainfuse.codegen.choices import Choice
from trainfuse.codegen.ir import (
    ArgRef,
    Branch,
    Call,
    Constant,
    Define,
    Function,
    Kernel,
    Module,
    Signal,
    Statement,
    Take,
    Wait,
    While,
    Workspace,
)
from trainfuse.codegen.schedules import online, passes
from trainfuse.codegen.schedules.common import (
    describe,
    in_order,
    kernel,
    needed,
    own_axes,
    read_by,
    widest,
)
from trainfuse.codegen.schedules.passes import ROW_AND_COL, Pass
from trainfuse.codegen.schedules.strips import Strips, ready_after
from trainfuse.codegen.targets import Target
from trainfuse.codegen.tile import divide_up, floor_power, power_of_two

ROW_BYTES = 128  # of a strip, in a row of memory
TILE_BYTES = 16384  # read for a piece: enough to hide what taking it costs, and waiting
WARPS = 4
PROGRAMS_PER_SM = 5
MAX_PARTS, MERGED = 512, 2048  # parts, and elements, of a tile that is merged
FIRST_SIGNAL = 32  # the counter of pieces has a line of the cache for itself
CACHED = 0.6  # of the L2 cache, that everything between two readings of a strip may take
COUNTERS: ArgRef = ("workspace", 0)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the work is cut in.

    rows, block: of a tile. merged: rows that are merged at once. tiles: of a strip. turn: pieces of
    all phases, of a strip each. behind: strips that a phase is behind the one before it; at so many
    those who wait for a strip come a whole grid of programs after those who work on it. distance:
    bytes read and written between the first phase's reading of a strip and the last one's.
    """

    rows: int
    block: int
    strips: int
    tiles: int
    merged: int
    phases: int
    turn: int
    programs: int
    behind: int
    distance: int

    @property
    def merges(self) -> int:
        """Pieces of a strip whose parts are merged."""
        return self.rows // self.merged

    @property
    def turns(self) -> int:
        return self.strips + (self.phases - 1) * self.behind


def sizes(group: Group, target: Target, choice: Choice, plan: Sequence[Pass]) -> Sizes:
    """Tiles of as much as a program should read, and phases as close as they can be."""
    domain = group.domain
    total, width = domain.extent(domain.rows), domain.extent(domain.cols)
    every = frozenset(range(len(domain.sizes)))
    read, written = (
        sum(n.meta["val"].dtype.itemsize for n in nodes if own_axes(domain, n) == every)
        for nodes in ([n for n in group.inputs if n in domain.axes], group.outputs)
    )
    rows = min(power_of_two(total), choice.rows or max(1, ROW_BYTES // widest(group)))
    elements = choice.block or floor_power(TILE_BYTES // max(read, 1))
    elements = 1 << 15 if target.interpreted else elements
    block = min(max(1, elements // rows), power_of_two(width))
    strips, tiles = divide_up(total, rows), divide_up(width, block)
    merged = min(rows, max(1, MERGED // power_of_two(tiles)))
    levels = sum(bool(step.accs or step.both) for step in plan)
    again = len(plan) > levels and bool(plan[-1].wide)
    turn = levels * (tiles + rows // merged) + again * tiles
    phases = 2 * levels + again
    programs = (choice.per_sm or PROGRAMS_PER_SM) * target.num_sms
    behind = min(divide_up(programs, turn), strips)
    between = min((phases - 1) * behind, strips)
    distance = between * rows * width * (read + written)
    return Sizes(rows, block, strips, tiles, merged, phases, turn, programs, behind, distance)


def why_not(group: Group, target: Target, choice: Choice, plan: Sequence[Pass]) -> str | None:
    """Why passes over rows that can be cut in parts can't, or shouldn't, be one launch; or None."""
    cut = sizes(group, target, choice, plan)
    if cut.tiles > MAX_PARTS:
        return "its rows are in too many parts to be merged at once"
    if choice.phased is None and cut.distance > CACHED * target.l2_bytes:
        return "what is read again would not be in the cache"
    return None


def build(group: Group, target: Target, choice: Choice, plan: Sequence[Pass]) -> Module:
    """One kernel and its phases; the first workspace counts the pieces, and those that are done."""
    cut = sizes(group, target, choice, plan)
    phased = _Phased(group, cut)
    for number, step in enumerate(plan):
        if step.accs or step.both:
            phased.reduce(step, [] if number else step.thin, ready_after(plan, number))
        elif step.wide:
            phased.apply(step)
    launch = phased.launch(choice.warps or WARPS)
    in_place = passes.overwritable(group, list(plan))
    return Module((launch,), tuple(phased.strips.workspaces), in_place)


class _Phased:
    """The phases as they are made: each a function, and how many pieces a strip has for it."""

    def __init__(self, group: Group, cut: Sizes) -> None:
        self.group, self.cut = group, cut
        self.strips = Strips(group, cut.rows, cut.block, cut.tiles, "strip", "place")
        signals = (cut.phases - 1) * cut.strips
        self.strips.workspaces.append(
            Workspace((FIRST_SIGNAL + signals,), torch.int32, zeroed=True)
        )
        self.phases: list[tuple[Function, int]] = []

    def reduce(self, step: Pass, thin: Sequence[fx.Node], after: Sequence[fx.Node]) -> None:
        """The phase that leaves parts, and the one that merges them.

        thin, after: outputs of one element a row, before the reductions and after them.
        """
        strips = self.strips
        builder = self.tile([*step.read(), *thin])
        single = [reductions.held_states(builder, a.red, "col", ROW_AND_COL) for a in step.accs]
        both = [online.held_states(builder, pair) for pair in step.both]
        for node in (*thin, *step.wide):
            builder.store(node)
        left = strips.leave(builder, step, single, both)
        ops = describe(self.group, [red.node for red in left.reds])
        self.finish(builder, "part", f"A part of rows: {ops}.", self.cut.tiles)
        number = f"(strip * {self.cut.merges} + place)" if self.cut.merges > 1 else "strip"
        builder = strips.merger(self.cut.merged, number)
        self.wait(builder)
        doc = strips.merge(builder, left, after)
        self.finish(builder, "merge", doc, self.cut.merges)

    def apply(self, step: Pass) -> None:
        """The phase that goes over the rows again."""
        builder = self.tile(step.wide)
        for node in step.wide:
            builder.store(node)
        doc = f"Rows again: {describe(self.group, needed(self.group))}."
        self.finish(builder, "row", doc, self.cut.tiles)

    def tile(self, wanted: Sequence[fx.Node]) -> Builder:
        """A piece of a strip, and what it needs of earlier reductions.

        What the group was given is loaded before anything is waited for.
        """
        builder = self.strips.builder()
        self.strips.define_columns(builder, f"place * {self.strips.block}")
        builder.bind("col")
        if self.phases:
            every, given = frozenset(range(len(builder.domain.sizes))), read_by(self.group, wanted)
            for node in self.group.inputs:
                if node in given and own_axes(builder.domain, node) == every:
                    builder.value(node)
            self.wait(builder)
        self.strips.recall(builder, wanted)
        return builder

    def wait(self, builder: Builder) -> None:
        """Stand until the phase before is done with the strip."""
        pieces = self.phases[-1][1]
        builder.args[COUNTERS] = None
        builder.body.append(Wait(COUNTERS, self.signal(len(self.phases) - 1), pieces))

    def signal(self, phase: int) -> str:
        """Where the pieces of a phase that are done with a strip are counted."""
        return f"{FIRST_SIGNAL + phase * self.cut.strips} + strip"

    def finish(self, builder: Builder, name: str, doc: str, pieces: int) -> None:
        """The function of a phase, under a name that no other has."""
        number = len(self.phases)
        if number < self.cut.phases - 1:
            builder.args[COUNTERS] = None
            builder.body.append(Signal(COUNTERS, self.signal(number)))
        taken = sum(function.name.startswith(name) for function, _ in self.phases)
        name = f"{name}_{taken}_phase" if taken else f"{name}_phase"
        made = kernel(builder, name, doc, (1, 1, 1), 1)
        function = Function(name, doc, made.args, ("strip", "place"), made.body)
        self.phases.append((function, pieces))

    def launch(self, warps: int) -> Kernel:
        """The programs that take the pieces, of each turn the last phase's first."""
        cut = self.cut
        assert len(self.phases) == cut.phases
        assert sum(pieces for _, pieces in self.phases) == cut.turn
        calls: list[Statement] = []
        first = 0
        for number in reversed(range(cut.phases)):
            function, pieces = self.phases[number]
            behind, last = number * cut.behind, first + pieces
            here = _within("turn", behind, behind + cut.strips, cut.turns)
            here += _within("place", first, last, cut.turn)
            given = (_less("turn", behind), _less("place", first))
            calls.append(Branch(" & ".join(here), (Call(function, given),)))
            first = last
        take = Take("piece", COUNTERS)
        body = (
            Constant("PIECES", cut.turns * cut.turn),
            take,
            While(
                "piece < PIECES",
                (
                    Define("turn", f"piece // {cut.turn}"),
                    Define("place", f"piece % {cut.turn}"),
                    *calls,
                    take,
                ),
            ),
        )
        functions = tuple(function for function, _ in self.phases)
        args = in_order({arg for function in functions for arg in function.args})
        doc = f"Phases over strips of {cut.rows} rows: {describe(self.group, needed(self.group))}."
        return Kernel(
            "strips_kernel",
            doc,
            args,
            body,
            (min(cut.programs, cut.turns * cut.turn), 1, 1),
            warps,
            functions=functions,
        )


def _within(name: str, first: int, last: int, end: int) -> list[str]:
    """Conditions that a number below `end` is of first .. last - 1."""
    lower = [f"({name} >= {first})"] if first else []
    return [*lower, f"({name} < {last})"] if last < end else lower


def _less(name: str, number: int) -> str:
    return f"{name} - {number}" if number else name
