"""Row-and-column groups, such as norm backwards: one pass over persistent programs."""

from __future__ import annotations

from trainfuse.codegen.builder import Group
from trainfuse.codegen.choices import Choice
from trainfuse.codegen.ir import Module
from trainfuse.codegen.schedules import accumulate
from trainfuse.codegen.schedules.common import (
    column_definitions,
    column_segments,
    describe,
    live_tiles,
    needed,
)
from trainfuse.codegen.targets import CodegenOptions, Target
from trainfuse.codegen.tile import Segment, TileAxis, divide_up, floor_power, power_of_two
from trainfuse.codegen.triton_ops import Unsupported

WARPS_PER_SM = 16
ELEMENTS_A_STEP = 512
WARPS = 2
TILE_REGISTERS = 160


def build(group: Group, target: Target, options: CodegenOptions, choice: Choice) -> Module:
    """Each program keeps whole rows and its column accumulators in registers."""
    del options
    domain = group.domain
    width, total = domain.extent(domain.cols), domain.extent(domain.rows)
    segments = tuple(column_segments(width))
    held = sum(segment.width for segment in segments)
    sums = sum(bool(reduced & frozenset(domain.rows)) for reduced in domain.reduced.values())
    live = live_tiles(group) + sums
    warps = choice.warps or num_warps(held, live)
    if held * live / (32 * warps) > TILE_REGISTERS:
        raise Unsupported(group.nodes[-1], "its columns are too many to accumulate in registers")
    budget = 8192 if target.interpreted else ELEMENTS_A_STEP
    rows = min(floor_power(max(1, budget // held)), power_of_two(total))
    rows = choice.rows or rows
    per_sm = choice.per_sm or max(1, WARPS_PER_SM // warps)
    programs = min(per_sm * target.num_sms, divide_up(total, rows), accumulate.MAX_PROGRAMS)
    row_mask = "row_mask" if total % rows else ""
    tile = [
        TileAxis(
            "row",
            domain.rows,
            total,
            (Segment("row", row_mask, rows),),
            None if rows == 1 else 0,
            programs > 1,
        ),
        TileAxis("col", domain.cols, width, segments, 0 if rows == 1 else 1, False),
    ]
    prologue = column_definitions(group, segments, rows > 1)
    doc = f"Rows and their columns: {describe(group, needed(group))}."
    plan = accumulate.Plan(programs, rows, "row_column_kernel", doc, warps)
    return accumulate.build(group, target, tile, plan, prologue)


def num_warps(held: int, live: int) -> int:
    """Warps that keep half the registers free, but 8 elements a thread: a 16-byte load of bf16."""
    warps = WARPS
    while warps < 16:
        each = held / (32 * warps)
        if each * live <= TILE_REGISTERS / 2 or (each < 16 and each * live <= TILE_REGISTERS):
            break
        warps *= 2
    return warps
