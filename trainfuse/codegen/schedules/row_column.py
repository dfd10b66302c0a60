"""Row-and-column groups, such as norm backwards: one pass over persistent programs."""

from __future__ import annotations

from torch import fx

from trainfuse.codegen import reductions
from trainfuse.codegen.builder import Group
from trainfuse.codegen.choices import MODEL, Choice, products
from trainfuse.codegen.ir import Module
from trainfuse.codegen.reductions import Reduction
from trainfuse.codegen.scalars import HALF
from trainfuse.codegen.schedules import accumulate, kept, phases
from trainfuse.codegen.schedules.common import (
    column_definitions,
    column_segments,
    describe,
    live_tiles,
    needed,
    neighbours,
    rows_are_neighbours,
    spanning,
)
from trainfuse.codegen.targets import CodegenOptions, Target
from trainfuse.codegen.tile import Segment, TileAxis, divide_up, floor_power, power_of_two
from trainfuse.codegen.triton_ops import Unsupported

ELEMENTS_A_STEP = 512
WARPS = 2
MAX_WARPS = 16
# Elements of a row that a thread holds: a 16-byte load or two of bf16, and accumulators for each.
ELEMENTS_A_THREAD = 16
FEW_WARPS = 8
MOST_PER_SM = 8
# Elements of rows that twice the warps take two at a time, the next two loaded ahead: barriers are
# waited for half as often, with something in flight.
PAIRED = 1024
STRIP = 32  # rows of a step that lie side by side in memory: whole sectors of each operand
FILE = 65536  # registers of a multiprocessor
ALLOCATED = 8  # registers a thread that are taken together
SQUEEZED = 0.75  # of the registers that the fit below gives, without a spill
ELEMENTS_A_SEGMENT = 8  # of a walked row, a thread
WALKED_REGISTERS = 56  # beside the accumulators
KEPT_SHARE = 8  # of those, what a row that is held needs no longer for the next segment's loads
# Registers of a kernel, by the tiles that are alive: most are freed as soon as they are used.
BASE_REGISTERS, TILE_SHARE = 20, 0.7
LANES_APART = 1.6  # times as many where each element of a row has an address of its own
DOUBTED = 16  # what the fit may be short of: closer to the limit than that rows spilled


LIKELY = (
    Choice(warps=8, rows=1, per_sm=1, ahead=True),
    Choice(warps=4, rows=1, per_sm=2),
    Choice(warps=8, rows=1, per_sm=2),
    Choice(warps=4, rows=1, per_sm=2, ahead=True),
    Choice(warps=4, rows=2, per_sm=3, ahead=True),
    Choice(warps=16, rows=2, per_sm=1, ahead=True),
    Choice(held=False),
    Choice(warps=8, per_sm=2, held=False),
)
OTHERS = (
    *products(warps=(2, 4, 8, 16), rows=(1, 2, 4), per_sm=(1, 2, 4, 8)),
    *products(warps=(2, 4, 8, 16), rows=(1, 2), per_sm=(1, 2, 4), ahead=(True,)),
    *products(warps=(8, 16), block=(1024, 2048, 4096), held=(False,)),
)


def build(group: Group, target: Target, options: CodegenOptions, choice: Choice) -> Module:
    """Each program keeps whole rows and its column accumulators in registers."""
    del options
    domain = group.domain
    width, total = domain.extent(domain.cols), domain.extent(domain.rows)
    phase = phases.find(group) if choice.rows in (None, 1) else None
    segments = tuple(column_segments(width))
    if phase is not None:
        segments = phase.segments(choice.warps or FEW_WARPS)
    held = sum(segment.width for segment in segments)
    sums = sum(bool(reduced & frozenset(domain.rows)) for reduced in domain.reduced.values())
    live = live_tiles(group) + sums + (phases.registers(group) if phase else 0)
    least = strip_rows(group, target, held, live)
    if phase is None and choice == MODEL and least == 1 and pairs(group, target, held, live):
        choice = Choice(warps=2 * num_warps(held, live), rows=2, ahead=True)
    warps = choice.warps or num_warps(least * held, live)
    fits = registers(least * held, live, warps) <= register_limit(target, warps) - DOUBTED
    if choice.held and choice.block and kept_rows(group, target, choice.warps or MAX_WARPS):
        return walked(group, target, choice)
    if not (fits if choice.held is None else choice.held):
        return walked(group, target, choice)
    if not fits:
        raise Unsupported(group.nodes[-1], "its columns are too many to accumulate in registers")
    budget = 8192 if target.interpreted else ELEMENTS_A_STEP
    rows = max(least, min(floor_power(max(1, budget // held)), power_of_two(total)))
    rows = choice.rows * least if choice.rows else rows
    rows = rows if phase is None else 1
    early = bool(choice.ahead) or (phase is not None and choice.ahead is None)
    alive = live + (len(group.inputs) / 2 if early else 0)  # as they lie in memory
    if choice.rows and registers(rows * held, alive, warps) > register_limit(target, warps):
        raise Unsupported(group.nodes[-1], "its rows are too long for so few threads to hold")
    share = 1.0 if phase is not None or neighbours(group) is None else LANES_APART
    step = rows if choice.rows or phase is not None else least
    resident = int(FILE / (32 * warps * share * registers(step * held, alive, warps)))
    per_sm = choice.per_sm or max(1, min(resident, MOST_PER_SM // (choice.rows or 1)))
    programs = min(per_sm * target.num_sms, divide_up(total, rows), accumulate.MAX_PROGRAMS)
    programs = programs if phase is None else phase.programs(programs, total)
    row_mask = "row_mask" if total % rows else ""
    place, rank = None if rows == 1 else 1 if least > 1 else 0, 1 if rows == 1 else 2
    block = (Segment("row", row_mask, rows),)
    tile = [
        TileAxis("row", domain.rows, total, block, place, programs > 1),
        TileAxis("col", domain.cols, width, segments, 1 if place == 0 else 0, False),
    ]
    prologue = column_definitions(group, tile[1], rank)
    if phase is not None:
        prologue = phase.definitions(group, segments)
    doc = f"Rows and their columns: {describe(group, needed(group))}."
    ahead = early and programs * rows < total
    plan = accumulate.Plan(
        programs,
        rows,
        "row_column_kernel",
        doc,
        warps,
        ahead=ahead,
        max_registers=shared_registers(
            target, warps, per_sm, share * registers(rows * held, live, warps)
        ),
        phases=phase,
    )
    return accumulate.build(group, target, tile, plan, prologue)


def pairs(group: Group, target: Target, held: int, live: float) -> bool:
    """Whether a step takes two rows: there are many, and registers for those of the next step."""
    if target.interpreted or held != PAIRED or neighbours(group) is not None:
        return False
    total, warps = group.domain.extent(group.domain.rows), 2 * num_warps(held, live)
    wanted = registers(2 * held, live + len(group.inputs) / 2, warps)
    many = total >= 2 * MOST_PER_SM * target.num_sms
    return many and wanted <= register_limit(target, warps) - DOUBTED


def strip_rows(group: Group, target: Target, held: int, live: int) -> int:
    """Rows that a step takes at least: those that lie side by side in memory share sectors."""
    domain = group.domain
    if not rows_are_neighbours(domain):
        return 1
    most = min(STRIP, power_of_two(domain.extent(domain.rows)))
    for rows in (most, most // 2, most // 4):
        warps = num_warps(rows * held, live)
        if rows > 1 and registers(rows * held, live, warps) <= register_limit(target, warps):
            return rows
    return 1


def register_limit(target: Target, warps: int) -> int:
    """Registers a thread that a program of so many warps may take."""
    return min(target.max_registers, FILE // (32 * warps))


def shared_registers(target: Target, warps: int, per_sm: int, wanted: float) -> int | None:
    """Registers a thread that leave room for so many programs; None where they needn't be told.

    The compiler takes what it can get, though it could do with less: programs that are meant to
    run side by side would take turns. Those that need far more than their share do.
    """
    limit = FILE // (32 * warps * per_sm) // ALLOCATED * ALLOCATED
    return limit if SQUEEZED * wanted <= limit < target.max_registers else None


def walked(group: Group, target: Target, choice: Choice) -> Module:
    """Rows too wide to be held beside their accumulators: read once for each level of reductions.

    A program's warps hold the accumulators, the row as it is read, where there is room, and one
    segment; else the row comes back from the cache.
    """
    domain = group.domain
    width, total = domain.extent(domain.cols), domain.extent(domain.rows)
    for node, reduced in domain.reduced.items():
        if reduced & frozenset(domain.cols) and not plain(reductions.parse(node, domain)):
            raise Unsupported(node, "it needs a row whole that is too wide for registers")
    warps = choice.warps or MAX_WARPS
    if warps < FEW_WARPS:  # it would spill, after compiling for many seconds
        raise Unsupported(group.nodes[-1], "its rows are too long for so few threads to walk")
    block = min(choice.block or ELEMENTS_A_SEGMENT * 32 * warps, power_of_two(width))
    if room(group, target, warps) < 0:
        raise Unsupported(group.nodes[-1], "its columns are too many to accumulate in registers")
    count = divide_up(width, block)
    segments = tuple(
        Segment(
            f"col_{i}",
            f"col_{i}_mask" if (i + 1) * block > width else "",
            block,
            str(i * block // 4) if block % 4 == 0 else None,
        )
        for i in range(count)
    )
    programs = min((choice.per_sm or 1) * target.num_sms, total, accumulate.MAX_PROGRAMS)
    tile = [
        TileAxis("row", domain.rows, total, (Segment("row", "", 1),), None, programs > 1),
        TileAxis("col", domain.cols, width, segments, 0, False),
    ]
    doc = f"Wide rows and their columns: {describe(group, needed(group))}."
    held = () if choice.held is False else tuple(kept_rows(group, target, warps))
    plan = accumulate.Plan(programs, 1, "row_column_kernel", doc, warps, walked=True, kept=held)
    return accumulate.build(group, target, tile, plan, column_definitions(group, tile[1], 1))


def room(group: Group, target: Target, warps: int) -> float:
    """Registers a thread that a walked row's accumulators and segments leave free."""
    domain = group.domain
    sums = sum(bool(reduced & frozenset(domain.rows)) for reduced in domain.reduced.values())
    accumulators = sums * domain.extent(domain.cols) / (32 * warps)
    return register_limit(target, warps) - WALKED_REGISTERS - accumulators


def kept_rows(group: Group, target: Target, warps: int) -> list[fx.Node]:
    """Inputs of half types whose walked rows fit into the registers as they lie in memory."""
    width = group.domain.extent(group.domain.cols)
    whole = spanning(group, group.inputs)
    halves = all(node.meta["val"].dtype in HALF for node in whole)
    taken = len(whole) * width / (64 * warps)
    fits = halves and taken <= room(group, target, warps) + KEPT_SHARE
    return whole if fits and width % kept.VECTOR == 0 else []


def plain(red: Reduction) -> bool:
    """Whether a reduction's segments can be combined lane by lane."""
    return red.op in ("sum", "mean", "max", "min")


def num_warps(held: int, live: int) -> int:
    """Warps that leave each thread a few loads of a row; more, when registers would not do."""
    warps = min(max(WARPS, power_of_two(divide_up(held, 32 * ELEMENTS_A_THREAD))), FEW_WARPS)
    while warps < MAX_WARPS and registers(held, live, warps) > FILE // (32 * warps):
        warps *= 2
    return warps


def registers(held: int, live: float, warps: int) -> float:
    """Registers a thread: a fit to what Triton's compiler took for norm backwards."""
    return BASE_REGISTERS + TILE_SHARE * live * held / (32 * warps)
