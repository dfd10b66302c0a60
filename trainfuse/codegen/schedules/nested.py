"""Rows in parts: reductions of each part, reductions of their results, and what reads both back.

As a group norm's backward: two sums a channel, from them two a group, from those every element. A
program has one row, in tiles of all its parts and a chunk of each, and goes over it once for each
level of reductions that spans it. A row of half types that fits is read once and kept as it is;
where later passes need a value that was rounded to a half type, rather than what it was made of,
that is kept instead. Where it alone is kept, and inputs are read again from the cache, two programs
share a multiprocessor, and one loads while the other computes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from torch import fx

from autodiff.ops import lookup
from trainfuse.codegen import reductions
from trainfuse.codegen.builder import Builder, Group
from trainfuse.codegen.choices import Choice, products
from trainfuse.codegen.held_reductions import reduce_held
from trainfuse.codegen.ir import Module
from trainfuse.codegen.reductions import Accumulator, Reduction
from trainfuse.codegen.scalars import HALF
from trainfuse.codegen.schedules import kept, passes
from trainfuse.codegen.schedules.common import (
    column_definitions,
    constants,
    describe,
    kernel,
    lanes,
    levels,
    long,
    needed,
    own_axes,
    spanning,
)
from trainfuse.codegen.schedules.passes import Pass
from trainfuse.codegen.targets import CodegenOptions, Target
from trainfuse.codegen.tile import Segment, TileAxis, divide_up, power_of_two
from trainfuse.codegen.triton_ops import Unsupported

ELEMENTS = 2048  # of a tile
WARPS = 8
WHOLE = frozenset({"row", "mid", "col"})
ELEMENTS_A_THREAD = 4  # of a tile of a kept row
KEPT_WARPS = 16  # at most: they have all registers of a multiprocessor
REGISTERS = 128  # a thread; kept.REGISTERS of them hold rows that are kept


LIKELY = (
    Choice(held=True, per_sm=2),
    Choice(held=False),
    Choice(held=False, warps=16),
    Choice(held=False, warps=4, block=1024),
)
OTHERS = tuple(products(held=(False,), warps=(4, 8, 16), block=(1024, 2048, 4096, 8192)))


@dataclass(frozen=True, slots=True)
class Level:
    """What the reductions before it allow.

    parts: reductions of parts' results. walk: what goes over the whole row. small: outputs of one
    element a part or a row.
    """

    parts: list[Reduction]
    walk: Pass
    small: list[fx.Node]

    def begin(self, builder: Builder) -> None:
        """What needs no walk."""
        for red in self.parts:
            reduce_held(builder, red, "mid")
        for node in self.small:
            builder.store(node)

    def end(self, builder: Builder) -> None:
        """Give what was accumulated its values."""
        for acc in self.walk.accs:
            states = reductions.finish(builder, acc)
            reductions.settle(builder, acc.red, states, acc.deps - set(acc.axes))


def build(group: Group, target: Target, options: CodegenOptions, choice: Choice) -> Module:
    """One program a row."""
    del options
    steps = plan(group)
    warps = kept_warps(group)
    keeps = choice.held if choice.held is not None else not target.interpreted
    if choice.held and choice.per_sm:
        warps = KEPT_WARPS // choice.per_sm
        made = sum(len(rounded(group, steps, number)) for number in range(len(steps)))
        if not (made and keepable(group) and fits(group, made, warps)):
            raise Unsupported(group.nodes[-1], "nothing that it makes can be kept")
        return in_registers(group, steps, warps, passing=True)
    if keeps and warps is not None:
        return in_registers(group, steps, warps)
    if choice.held:
        raise Unsupported(group.nodes[-1], "its rows can't be kept")
    count, width = shape(group)
    held = power_of_two(count)
    elements = 1 << 15 if target.interpreted else choice.block or ELEMENTS
    block = min(max(1, elements // held), power_of_two(width))
    col_mask = "col_mask" if width % block else ""
    builder = start(group, (Segment("col", col_mask, block, "start // 4"),))
    back = False
    for step in steps:
        step.begin(builder)
        if step.walk.walks:
            passes.walk(builder, step.walk, back, early=choice.ahead is not False)
            back = not back
        step.end(builder)
    return finish(builder, steps, choice.warps or WARPS)


def in_registers(
    group: Group, steps: Sequence[Level], warps: int, *, passing: bool = False
) -> Module:
    """A row whose tiles are emitted one after the other.

    passing: what is made of it is kept alone, inputs are read in each pass that needs them.
    """
    count, width = shape(group)
    block = tile_width(count, width, warps)
    segments = tuple(
        Segment(f"col_{i}", f"col_{i}_mask" if (i + 1) * block > width else "", block, None)
        for i in range(divide_up(width, block))
    )
    builder = start(group, segments)
    col = builder.tile["col"]
    for name, text in column_definitions(group, col, 2):
        builder.note(name, text)
    whole = spanning(group, group.inputs)
    for node in whole if not passing else ():
        kept.keep(builder, node, len(segments))
    made: list[fx.Node] = []
    for number, step in enumerate(steps):
        step.begin(builder)
        later = rounded(group, steps, number)
        read = reached(group, step.walk.read(), made)[1] if passing else ()
        kept.walk(builder, col, step.walk, number, later, [node for node in whole if node in read])
        made += later
        step.end(builder)
    return finish(builder, steps, warps)


def shape(group: Group) -> tuple[int, int]:
    """Parts of a row, and elements of each."""
    domain = group.domain
    count = domain.extent(domain.middle)
    return count, domain.extent(domain.cols) // count


def start(group: Group, segments: tuple[Segment, ...]) -> Builder:
    """The kernel, with its row and the parts of it."""
    domain = group.domain
    total = domain.extent(domain.rows)
    count, width = shape(group)
    held = power_of_two(count)
    mid_mask = "mid_mask" if held > count else ""
    inner = domain.cols[len(domain.middle) :]
    tile = [
        TileAxis("row", domain.rows, total, (Segment("row", "", 1),), None, True),
        TileAxis("mid", domain.middle, count, (Segment("mid", mid_mask, held),), 0, False),
        TileAxis("col", inner, width, segments, 1, False),
    ]
    builder = Builder(group, tile, "col")
    constants(builder, [("ROWS", total), ("PARTS", count), ("COLS", width)])
    builder.note("row", long(group, "tl.program_id(0)"))
    builder.note("mid", long(group, lanes(tile[1], 2)))
    if mid_mask:
        builder.note(mid_mask, "mid < PARTS")
    builder.bind("row", "mid")
    return builder


def finish(builder: Builder, steps: Sequence[Level], warps: int) -> Module:
    """The module, once every pass is emitted."""
    group = builder.group
    nodes = needed(group)
    for node in nodes:
        if group.domain.reduced.get(node) and node in group.outputs:
            builder.store(node)
    doc = f"Rows in parts: {describe(group, nodes)}."
    grid = (builder.tile["row"].size, 1, 1)
    launch = kernel(builder, "nested_kernel", doc, grid, warps)
    launch = replace(launch, max_registers=REGISTERS)
    return Module((launch,), in_place=passes.overwritable(group, [step.walk for step in steps]))


def plan(group: Group) -> list[Level]:
    """The levels of reductions, in order."""
    domain = group.domain
    nodes = needed(group)
    level = levels(nodes, frozenset(n for n in nodes if domain.reduced.get(n)))
    every, middle = frozenset(range(len(domain.sizes))), frozenset(domain.middle)
    found: list[Level] = []
    for current in range(max(level.values()) + 1):
        here = [node for node in nodes if level[node] == current]
        parts: list[Reduction] = []
        accs: list[Accumulator] = []
        for node in here:
            if not domain.reduced.get(node):
                continue
            red = reductions.parse(node, domain)
            if domain.reduced[node] == middle:
                parts.append(red)
            elif domain.reduced[node] == frozenset(domain.cols):
                accs.append(Accumulator(red, ("mid", "col"), WHOLE))
            else:
                accs.append(Accumulator(red, ("col",), WHOLE))
        stored = [n for n in here if n in group.outputs and not domain.reduced.get(n)]
        wide = [node for node in stored if own_axes(domain, node) == every]
        small = [node for node in stored if node not in wide]
        found.append(Level(parts, Pass(accs, [], [], [], wide), small))
    return found


# Kept rows.


def tile_width(count: int, width: int, warps: int) -> int:
    """Elements of a part in a tile."""
    elements = ELEMENTS_A_THREAD * 32 * warps
    return min(max(1, elements // power_of_two(count)), power_of_two(width))


def kept_warps(group: Group) -> int | None:
    """Warps that can keep a row, None where none can or should."""
    if not keepable(group):
        return None
    many = (1 << n for n in range(KEPT_WARPS.bit_length()))
    count = len(spanning(group, group.inputs))
    return next((warps for warps in many if fits(group, count, warps)), None)


def keepable(group: Group) -> bool:
    """Whether its rows are of half types, in whole vectors, and cheap to go over again."""
    whole = spanning(group, group.inputs)
    if not whole or any(node.meta["val"].dtype not in HALF for node in whole):
        return False
    if group.domain.indirect or shape(group)[1] % kept.VECTOR:
        return False
    # a mask would be drawn in every pass
    return not any(lookup(node.target).kind == "rng" for node in group.nodes)


def fits(group: Group, rows: int, warps: int) -> bool:
    """Whether so many rows of half types fit into the registers of a program."""
    count, width = shape(group)
    block = tile_width(count, width, warps)
    held = power_of_two(count) * divide_up(width, block) * block * rows
    return held <= kept.REGISTERS * 2 * 32 * warps


def rounded(group: Group, steps: Sequence[Level], number: int) -> list[fx.Node]:
    """Half values that a pass computes and later passes need, if these then keep no more rows."""
    later = [node for step in steps[number + 1 :] for node in step.walk.read()]
    made, _ = reached(group, steps[number].walk.read(), ())
    domain = group.domain
    every = frozenset(range(len(domain.sizes)))
    halves = {
        node
        for node in made
        if lookup(node.target).kind == "pointwise"
        and node.meta["val"].dtype in HALF
        and own_axes(domain, node) == every
    }
    before, met = reached(group, later, ()), reached(group, later, halves)
    whole = set(spanning(group, group.inputs))
    kept_instead = [node for node in group.nodes if node in halves and node in met[0]]
    gone = (before[1] - met[1]) & whole
    return kept_instead if len(kept_instead) <= len(gone) else []


def reached(
    group: Group, nodes: Sequence[fx.Node], ends: Collection[fx.Node]
) -> tuple[set[fx.Node], set[fx.Node]]:
    """(members, inputs) that values are made of, down to reductions and to `ends`."""
    members = set(group.nodes)
    found, inputs = set[fx.Node](), set[fx.Node]()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in members:
            inputs.add(node)
        elif node not in found:
            found.add(node)
            if node not in ends and not group.domain.reduced.get(node):
                pending += node.all_input_nodes
    return found, inputs
