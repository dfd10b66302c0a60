"""Column groups: sums over rows, such as bias gradients. A column tile by a slab of rows."""

from __future__ import annotations

from dataclasses import replace

from trainfuse.codegen.builder import Group
from trainfuse.codegen.choices import Choice, products
from trainfuse.codegen.ir import Module
from trainfuse.codegen.schedules import accumulate, phases
from trainfuse.codegen.schedules.common import (
    describe,
    live_tiles,
    long,
    needed,
    read_by,
    spanning,
    widest,
    written_over,
)
from trainfuse.codegen.targets import CodegenOptions, Target
from trainfuse.codegen.tile import VECTOR_BYTES, Segment, TileAxis, divide_up, power_of_two, snug

COLUMNS = 64
ROWS = 32
WARPS = 8
PROGRAMS_PER_SM = 4
STEPS = 4
"""Row steps that a program takes at least: fewer leave the tail more to add than they save."""
# So few rows are one slab, of tall and narrow tiles: a tail would cost more than the steps saved.
FEW_ROWS, TALL, SECTOR = 1024, 128, 16
# Columns of a tile when neighbours in memory are neighbours of a column: whole sectors of it.
FEW_COLUMNS = 4
TILE_REGISTERS = 160
# A thread's, for what is read and summed at once, that leave room for four programs.
LIGHT_REGISTERS = 32


LIKELY = (
    Choice(warps=4, rows=64, block=128, per_sm=4),
    Choice(warps=4, rows=16, block=128, per_sm=4),
    Choice(warps=8, rows=32, block=128, per_sm=4),
)
OTHERS = tuple(
    products(warps=(4, 8), rows=(16, 32, 64), block=(32, 64, 128, 256), per_sm=(2, 4, 8))
)


def build(group: Group, target: Target, options: CodegenOptions, choice: Choice) -> Module:
    """Programs of [ROWS, COLUMNS] tiles walk the rows in strides; a tail adds their partials."""
    del options
    domain = group.domain
    width, total = domain.extent(domain.cols), domain.extent(domain.rows)
    rows, block = tile_shape(group, target, choice)
    tiles = divide_up(width, block)
    wanted = max(1, (choice.per_sm or PROGRAMS_PER_SM) * target.num_sms // tiles)
    steps = divide_up(FEW_ROWS, rows) if total <= FEW_ROWS else STEPS
    slabs = min(wanted, divide_up(total, steps * rows), accumulate.MAX_PROGRAMS)
    row_mask = "row_mask" if total % rows else ""
    col_mask = "col_mask" if width % block else ""
    segment = Segment("col", col_mask, block, f"tl.program_id(1) * {block} // 4")
    lanes = long(group, f"tl.program_id(1) * {block} + tl.arange(0, {block})[None, :]")
    prologue = [("col", lanes)]
    if col_mask:
        prologue.append(("col_mask", "col < COLS"))
    phase = phases.of_tiles(group, rows, block) if slabs > 1 and light(group) else None
    if phase is not None:
        segment, prologue = phase.block(block, lanes)
        slabs = max(slabs // phase.period, 1) * phase.period
        tiles = divide_up(width + phase.count - 1, block)
    tile = [
        TileAxis("row", domain.rows, total, (Segment("row", row_mask, rows),), 0, slabs > 1),
        TileAxis("col", domain.cols, width, (segment,), 1, True),
    ]
    doc = f"Sums over rows: {describe(group, needed(group))}."
    warps = choice.warps or num_warps(rows * block)
    plan = accumulate.Plan(slabs, rows, "column_kernel", doc, warps, tiles, phases=phase)
    module = accumulate.build(group, target, tile, plan, prologue)
    _, late = accumulate.late_nodes(group)
    again = read_by(group, [node for node in late if not domain.reduced.get(node)])
    over = written_over(group, rows * block, warps)
    over = frozenset(p for p in over if group.inputs[p[1]] not in again)
    return replace(module, in_place=over, whole_vectors=phase is not None)


def light(group: Group) -> bool:
    """Whether memory bounds a group, not arithmetic: it computes little of what it sums."""
    live = live_tiles(group) + len(group.domain.reduced)
    return 2 * ROWS * COLUMNS * live / (32 * WARPS) <= LIGHT_REGISTERS


def num_warps(elements: int) -> int:
    """Warps of a program: each thread has a few elements of a step."""
    return min(WARPS, max(1, elements // (4 * 32)))


def tile_shape(group: Group, target: Target, choice: Choice) -> tuple[int, int]:
    """(rows, columns) of a tile: wide along the axis that is dense in memory."""
    domain = group.domain
    width, total = domain.extent(domain.cols), domain.extent(domain.rows)
    # Axes are numbered as the operands lie in memory, so the last one is the dense one.
    dense_rows = len(domain.sizes) - 1 in domain.rows
    columns = choice.block or (FEW_COLUMNS if dense_rows else COLUMNS)
    block = min(power_of_two(width), columns)
    if not choice.block and not dense_rows:
        block = snug(width, block)
    few = total <= FEW_ROWS and not dense_rows
    while few and not choice.block and block > SECTOR and divide_up(width, block) < target.num_sms:
        block //= 2
    if target.interpreted:
        block = min(power_of_two(width), 2048)
        return min(max(1, 16384 // block), power_of_two(total)), block
    if choice.rows:
        return min(choice.rows, power_of_two(total)), block
    # Few columns idle the multiprocessors: take more slabs of rows, and taller tiles.
    rows = min(ROWS * max(1, COLUMNS // block), power_of_two(total))
    if few:
        rows = min(TALL, power_of_two(total))
    live = live_tiles(group) + len(domain.reduced)
    odd = not dense_rows and width % max(1, VECTOR_BYTES // widest(group)) != 0
    if odd and not few and light(group):
        rows *= 2  # not unrolled: as much again on its way at once
    tiles = PROGRAMS_PER_SM * target.num_sms // divide_up(width, block)
    plenty = block == COLUMNS and total >= 2 * rows * STEPS * max(1, tiles)
    if plenty and not odd and len(domain.reduced) == 1 and len(spanning(group, group.inputs)) > 1:
        rows *= 2  # a sum of several operands' elements: two loads of each on their way
    while rows > 8 and rows * block * live / (32 * WARPS) > TILE_REGISTERS:
        rows //= 2
    return rows, block
