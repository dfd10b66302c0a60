"""Column groups: sums over rows, such as bias gradients. A column tile by a slab of rows."""

from __future__ import annotations

from trainfuse.codegen.builder import Group
from trainfuse.codegen.ir import Module
from trainfuse.codegen.schedules import accumulate
from trainfuse.codegen.schedules.common import describe, long, needed
from trainfuse.codegen.targets import CodegenOptions, Target
from trainfuse.codegen.tile import Segment, TileAxis, divide_up, power_of_two

COLUMNS = 128
ROWS = 32
WARPS = 4
PROGRAMS_PER_SM = 4


def build(group: Group, target: Target, options: CodegenOptions) -> Module:
    """Programs of [ROWS, COLUMNS] tiles walk the rows in strides; a tail adds their partials."""
    del options
    domain = group.domain
    width, total = domain.extent(domain.cols), domain.extent(domain.rows)
    block = min(power_of_two(width), 2048 if target.interpreted else COLUMNS)
    tiles = divide_up(width, block)
    # Few columns idle the multiprocessors: take more slabs of rows, and taller tiles.
    rows = ROWS * max(1, COLUMNS // block) if not target.interpreted else max(1, 16384 // block)
    rows = min(rows, power_of_two(total))
    wanted = max(1, PROGRAMS_PER_SM * target.num_sms // tiles)
    slabs = min(wanted, divide_up(total, rows), accumulate.MAX_PROGRAMS)
    row_mask = "row_mask" if total % rows else ""
    col_mask = "col_mask" if width % block else ""
    tile = [
        TileAxis("row", domain.rows, total, (Segment("row", row_mask, rows),), 0, slabs > 1),
        TileAxis(
            "col",
            domain.cols,
            width,
            (Segment("col", col_mask, block, f"tl.program_id(1) * {block} // 4"),),
            1,
            True,
        ),
    ]
    lanes = f"tl.program_id(1) * {block} + tl.arange(0, {block})[None, :]"
    prologue = [("col", long(group, lanes))]
    if col_mask:
        prologue.append(("col_mask", "col < COLS"))
    doc = f"Sums over rows: {describe(group, needed(group))}."
    plan = accumulate.Plan(slabs, rows, "column_kernel", doc, WARPS, tiles)
    return accumulate.build(group, target, tile, plan, prologue)
