"""Row groups: reductions over columns, whose results the row's own elements read back.

Where rows, not their elements, lie side by side in memory, a program takes a strip of them, so that
whole sectors are read.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace

from torch import fx

from trainfuse.codegen import reductions
from trainfuse.codegen.builder import Builder, Group, masks
from trainfuse.codegen.choices import Choice, products
from trainfuse.codegen.held_reductions import reduce_held
from trainfuse.codegen.ir import Module
from trainfuse.codegen.reductions import Reduction
from trainfuse.codegen.schedules import (
    accumulate,
    kept,
    online,
    passes,
    phases,
    row_column,
    split,
    vectors,
)
from trainfuse.codegen.schedules.common import (
    aligned,
    column_definitions,
    column_segments,
    constants,
    describe,
    kernel,
    lanes,
    levels,
    live_tiles,
    long,
    needed,
    own_axes,
    preload,
    read_by,
    rows_are_neighbours,
    spanning,
)
from trainfuse.codegen.schedules.passes import ROW
from trainfuse.codegen.targets import CodegenOptions, Target
from trainfuse.codegen.tile import (
    Segment,
    TileAxis,
    cover,
    divide_up,
    floor_power,
    power_of_two,
)
from trainfuse.codegen.triton_ops import Unsupported
from trainfuse.fusion.classify import in_odd_pieces

MAX_WARPS = 16
CHUNK_WARPS = 8
# Elements of a program of short rows. One warp, while its registers hold them: a reduction within
# a warp needs no barrier, and programs are many enough to fill the machine. Of masks that are drawn
# words, too, are held.
ROW_ELEMENTS, DRAWN_ELEMENTS = 1024, 512
# Registers a thread that live tiles may take, of 255; the rest is addresses and partial results.
TILE_REGISTERS = 128
# Beyond this much a kernel spills whatever the compiler does, for which it takes half a minute.
SPILLING = 2 * TILE_REGISTERS
# Warps that share the addresses of a short row in odd pieces, where programs are few, and elements
# that a thread keeps at least.
PIECES_WARPS, PIECE_ELEMENTS = 4, 4
# A thread of programs in chunks, where two share a multiprocessor: one loads while the other waits.
SHARED_REGISTERS = 128
# Rows of a strip, and the fewest: sectors of 32 bytes, of halves too, are read whole.
STRIP, NARROW_STRIP = 32, 16
# Warps that run at once on a multiprocessor, of kernels that take 64 registers a thread.
RESIDENT_WARPS = 32
# Times the lanes that a chunk may have of one half as long; elements of a thread's load of halves.
WASTED, VECTOR = 1.05, 8


LIKELY = (
    Choice(warps=8, held=True),
    Choice(warps=1, rows=1, held=True),
    Choice(warps=4, rows=2, held=True),
    Choice(warps=8, block=kept.ELEMENTS * 32 * 8, held=True),
    Choice(held=False),
    Choice(held=False, ahead=False),
    Choice(warps=4, block=4096, held=False),
    Choice(warps=8, block=8192, held=False),
    Choice(warps=16, block=8192, held=False),
    Choice(warps=16, block=16384, held=False),
    Choice(warps=32, block=8192, held=False),
)
OTHERS = (
    *products(warps=(1, 2, 4, 8, 16), rows=(1, 2, 4), held=(True,)),
    *products(warps=(4, 8, 16, 32), block=(1024, 2048, 4096, 8192), held=(False,)),
)


def build(group: Group, target: Target, options: CodegenOptions, choice: Choice) -> Module:
    """Rows held in registers, kept as they are read, or walked in chunks when they are too long."""
    domain = group.domain
    held = sum(block for _, block in cover(domain.extent(domain.cols)))
    if choice.held and choice.block and kept.why_not(group, choice.warps or kept.WARPS) is None:
        return kept.build(group, choice)
    strip, live = narrowest(group), live_tiles(group)
    fits = strip * held <= options.max_row_in_registers * (2 if strip > 1 else 1)
    fits = fits and strip * held * live / (32 * MAX_WARPS) <= TILE_REGISTERS
    wide = strip * (choice.rows or 1) if strip > 1 else 1
    if choice.held and wide * held * live / (32 * (choice.warps or MAX_WARPS)) > SPILLING:
        raise Unsupported(group.nodes[-1], "its rows are too long for so few threads to hold")
    if fits if choice.held is None else choice.held:
        return in_registers(group, target, choice)
    if choice.held is None and kept.why_not(group, kept.WARPS) is None and kept.pays(group):
        return kept.build(group, choice)
    plan = passes.plan(group, needed(group), online=True)
    if split.why_not(group, plan) is None:
        return split.build(group, target, choice, plan)
    return chunked(group, target, options, choice)


def narrowest(group: Group) -> int:
    """Rows that a program takes at least."""
    domain = group.domain
    if not rows_are_neighbours(domain):
        return 1
    return min(NARROW_STRIP, power_of_two(domain.extent(domain.rows)))


def tile_axes(
    group: Group, rows: int, segments: tuple[Segment, ...]
) -> tuple[TileAxis, TileAxis, int]:
    """The axis that programs share, the columns' axis, and the rank of their tile.

    What is dense in memory is the tile's last dimension.
    """
    domain = group.domain
    total, width = domain.extent(domain.rows), domain.extent(domain.cols)
    along = rows_are_neighbours(domain) and rows > 1
    mask = "row_mask" if total % rows else ""
    quad = f"tl.program_id(0) * {rows // 4}" if along and rows % 4 == 0 else None
    place = None if rows == 1 else 1 if along else 0
    row = TileAxis("row", domain.rows, total, (Segment("row", mask, rows, quad),), place, True)
    col = TileAxis("col", domain.cols, width, segments, 0 if along or rows == 1 else 1, False)
    return row, col, 1 if rows == 1 else 2


def define_rows(builder: Builder, rank: int) -> None:
    """Which rows a program has."""
    row = builder.tile["row"]
    first = long(builder.group, "tl.program_id(0)")
    if row.position is None:
        builder.note("row", first)
    else:
        builder.note("row", f"{first} * {row.segments[0].width} + {lanes(row, rank)}")
    if row.segments[0].mask:
        builder.note("row_mask", "row < ROWS")
    builder.bind("row")


def rows_and_warps(
    group: Group, target: Target, held: int, live: int, choice: Choice
) -> tuple[int, int]:
    """Rows a program, and warps: short rows share a program, long ones take more threads."""
    domain = group.domain
    total = domain.extent(domain.rows)
    if target.interpreted:
        return min(power_of_two(total), floor_power(max(1, (1 << 15) // held))), 4
    least = narrowest(group)
    elements = DRAWN_ELEMENTS if masks(group) else ROW_ELEMENTS
    rows = min(floor_power(max(1, elements // held)), power_of_two(total))
    while rows > least and divide_up(total, rows) < 2 * target.num_sms:
        rows //= 2
    if least > 1:
        wide = min(STRIP, power_of_two(total))
        fits = wide * held * live / (32 * MAX_WARPS) <= TILE_REGISTERS
        rows = max(rows, wide if fits else least)
    rows = choice.rows * least if choice.rows else rows
    if choice.warps:
        return rows, choice.warps
    warps = 1
    while warps < MAX_WARPS and rows * held * live / (32 * warps) > TILE_REGISTERS:
        warps *= 2
    if divide_up(total, rows) < target.num_sms and in_odd_pieces(domain.sizes, domain.cols):
        # a multiprocessor has one program at most: nothing else hides what addresses take
        while warps < PIECES_WARPS and rows * held >= PIECE_ELEMENTS * 32 * 2 * warps:
            warps *= 2
    return rows, warps


def in_registers(group: Group, target: Target, choice: Choice) -> Module:
    """Every value of a row is held at once; each reduction is one tree."""
    domain = group.domain
    width, total = domain.extent(domain.cols), domain.extent(domain.rows)
    phase = phases.find(group) if choice.rows in (None, 1) else None
    if phase is not None:
        return phased(group, target, choice, phase)
    held = sum(block for _, block in cover(width))
    rows, warps = rows_and_warps(group, target, held, live_tiles(group), choice)
    row, col, rank = tile_axes(group, rows, tuple(column_segments(width)))
    builder = Builder(group, [row, col], "col")
    constants(builder, [("ROWS", total), ("COLS", width)])
    define_rows(builder, rank)
    for name, text in column_definitions(group, col, rank):
        builder.note(name, text)
    builder.bind("col")
    nodes = needed(group)
    preload(builder, nodes)
    picked = {red.node: red for red in picks(group, nodes)} if rows == 1 else {}
    ready = {
        node: reductions.read_picked(builder, red, "col", picked_inputs(group, red))
        for node, red in picked.items()
    }
    reds = [reductions.parse(node, domain) for node in nodes if domain.reduced.get(node)]
    for node in nodes:
        if node in picked:
            reductions.pick(builder, picked[node], "col", ready[node])
        elif domain.reduced.get(node):
            reduce_held(builder, reductions.parse(node, domain), "col", reds)
        if node in group.outputs:
            builder.store(node)
    doc = f"A row in registers: {describe(group, nodes)}."
    launch = kernel(builder, "row_kernel", doc, (divide_up(total, rows), 1, 1), warps)
    # with more threads than elements several hold one, and none waits until all have read it
    alone = all(rows * block >= 32 * warps for _, block in cover(width))
    if picked:  # an element is read by all of them, and at a reduction they wait for one another
        others = frozenset(n for n in nodes if domain.reduced.get(n) and n not in picked)
        level = levels(nodes, others)
        alone = alone and all(level[node] for node in group.outputs)
    return Module((launch,), in_place=aligned(group) if alone else frozenset())


def picks(group: Group, nodes: list[fx.Node]) -> list[Reduction]:
    """Gathers of an element a row whose column is known before anything is reduced."""
    domain = group.domain
    found = [reductions.parse(node, domain) for node in nodes if domain.reduced.get(node)]
    known = levels(nodes, frozenset(red.node for red in found))
    index = {red.node: red.node.args[2] for red in found if red.op == "pick"}
    return [red for red in found if red.op == "pick" and not known.get(index[red.node], 0)]


def picked_inputs(group: Group, red: Reduction) -> list[fx.Node]:
    """What is read at a gather's column."""
    domain, cols = group.domain, frozenset(group.domain.cols)
    read = read_by(group, [red.source])
    own = (n for n in group.inputs if n in read and n in domain.axes)  # not read by an index
    return [n for n in own if own_axes(domain, n) & cols]


def phased(group: Group, target: Target, choice: Choice, phase: phases.Phases) -> Module:
    """Rows that begin anywhere, in whole vectors, held at once.

    Programs stay for many rows where something varies along the columns alone: it begins at no
    vector of theirs, and is loaded element by element, once.
    """
    domain = group.domain
    total = domain.extent(domain.rows)
    fixed = phases.columns(group)
    live = live_tiles(group) + phases.registers(group)
    ahead = bool(fixed) and choice.ahead is not False
    live += len(group.inputs) / 2 if ahead else 0  # as they lie in memory
    warps = choice.warps or row_column.num_warps(phase.width, live)
    segments = phase.segments(warps)
    held = sum(segment.width for segment in segments)
    taken = row_column.registers(held, live, warps)
    if taken > row_column.register_limit(target, warps):
        raise Unsupported(group.nodes[-1], "its rows are too long for so few threads to hold")
    resident = int(row_column.FILE / (32 * warps * taken))
    per_sm = choice.per_sm or max(1, min(resident, row_column.MOST_PER_SM))
    programs = phase.programs(per_sm * target.num_sms, total) if fixed else total
    row = TileAxis("row", domain.rows, total, (Segment("row", "", 1),), None, True)
    col = TileAxis("col", domain.cols, domain.extent(domain.cols), segments, 0, False)
    doc = f"Rows in registers, in whole vectors: {describe(group, needed(group))}."
    plan = accumulate.Plan(
        programs,
        1,
        "row_kernel",
        doc,
        warps,
        ahead=ahead and programs < total,
        max_registers=row_column.shared_registers(target, warps, per_sm, taken),
        phases=phase,
    )
    return accumulate.build(group, target, (row, col), plan, phase.definitions(group, segments))


def strip_rows(group: Group) -> int:
    """Rows of a program that walks chunks."""
    domain = group.domain
    if not rows_are_neighbours(domain):
        return 1
    return min(STRIP, power_of_two(domain.extent(domain.rows)))


def chunk_and_warps(
    group: Group, target: Target, options: CodegenOptions, choice: Choice, walks: int
) -> tuple[int, int]:
    """Elements of a chunk, and warps: few rows at a time where later passes read the row again.

    What they read is in the L2 cache while the rows under work fit there, so such rows get more
    warps each.
    """
    domain = group.domain
    width = domain.extent(domain.cols)
    live = live_tiles(group)
    rows = strip_rows(group)
    block = min(options.chunk, power_of_two(width * rows))
    if lanes_of(width * rows, block) > WASTED * lanes_of(width * rows, block // 2):
        block //= 2
    while block > 1024 and block * live / (32 * CHUNK_WARPS) > TILE_REGISTERS / 2:
        block //= 2
    warps = choice.warps or max(4, min(CHUNK_WARPS, (choice.block or block) // 512))
    if walks == 1 or target.interpreted or choice.warps or choice.block:
        return choice.block or block, warps
    # what is written passes through the cache, too
    taken = rows * row_bytes(group, (*group.inputs, *group.outputs))
    while warps < 2 * MAX_WARPS and taken * resident(target, warps) > target.l2_bytes // 2:
        wide = min(options.chunk, power_of_two(width * rows))
        wider = block < wide and lanes_of(width * rows, 2 * block) <= WASTED * lanes_of(
            width * rows, block
        )
        if not wider and block < VECTOR * 32 * 2 * warps:
            break
        warps, block = 2 * warps, 2 * block if wider else block
    return block, warps


def row_bytes(group: Group, nodes: Iterable[fx.Node]) -> int:
    """Bytes of a row of those values that have an element for each of the domain's."""
    width = group.domain.extent(group.domain.cols)
    return width * sum(n.meta["val"].dtype.itemsize for n in spanning(group, nodes))


def resident(target: Target, warps: int) -> int:
    """Programs of so many warps that run at once."""
    return target.num_sms * RESIDENT_WARPS // warps


def lanes_of(size: int, block: int) -> int:
    """Lanes of the blocks that cover so many elements."""
    return divide_up(size, block) * block


def chunked(group: Group, target: Target, options: CodegenOptions, choice: Choice) -> Module:
    """A pass over the row's chunks for each level of reductions; values are recomputed in each."""
    domain = group.domain
    width, total = domain.extent(domain.cols), domain.extent(domain.rows)
    nodes = needed(group)
    plan = passes.plan(group, nodes, online=True)
    elements, warps = chunk_and_warps(group, target, options, choice, sum(p.walks for p in plan))
    rows = strip_rows(group)
    block = max(1, elements // rows)
    mask = "" if width % block == 0 else "col_mask"
    segment, vector = Segment("col", mask, block, "start // 4"), 1
    if rows == 1:
        vector = vectors.elements(group, domain.rows, domain.cols)
    if vector > 1:
        segment = vectors.segment(segment, vector)
    row, col, rank = tile_axes(group, rows, (segment,))
    builder = Builder(group, [row, col], "col")
    constants(builder, [("ROWS", total), ("COLS", width)])
    define_rows(builder, rank)
    if vector > 1:
        vectors.begin(builder, vector)
    back = False
    streams = rows * row_bytes(group, group.inputs) * resident(target, warps) > target.l2_bytes
    for number, step in enumerate(plan):
        step.begin(builder)
        if step.walks:
            before, later = passes.read_again(group, plan, number)
            tell = functools.partial(
                passes.hinted, before=before, later=later, streams=bool(before) and streams
            )
            passes.walk(builder, step, back, early=choice.ahead is not False, tell=tell)
            back = not back
        for acc in step.accs:
            reductions.settle(builder, acc.red, reductions.finish(builder, acc), ROW)
        for pair in step.both:
            online.finish(builder, pair)
    for node in nodes:
        if domain.reduced.get(node) and node in group.outputs:
            builder.store(node)
    doc = f"A row in chunks: {describe(group, nodes)}."
    launch = kernel(builder, "row_kernel", doc, (divide_up(total, rows), 1, 1), warps)
    if (registers := kept.FILE // (kept.PROGRAMS_PER_SM * 32 * warps)) >= SHARED_REGISTERS:
        launch = replace(launch, max_registers=min(registers, 255))
    return Module((launch,), in_place=passes.overwritable(group, plan), whole_vectors=vector > 1)
