"""Rows of half types too long to hold in fp32: read once, kept as they are, widened at each use.

A program of few warps has so long a row in half its registers; two of them share a multiprocessor,
and one loads while the other computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from autodiff.ops import lookup
from trainfuse.codegen import reductions
from trainfuse.codegen.builder import Builder, Group
from trainfuse.codegen.choices import Choice
from trainfuse.codegen.ir import ArgRef, Load, Module
from trainfuse.codegen.scalars import HALF, TRITON_TYPE
from trainfuse.codegen.schedules import passes
from trainfuse.codegen.schedules.common import (
    column_definitions,
    constants,
    describe,
    kernel,
    long,
    needed,
    rows_are_neighbours,
    spanning,
)
from trainfuse.codegen.schedules.passes import ROW, Pass
from trainfuse.codegen.tile import Segment, TileAxis, divide_up, power_of_two, value_strides
from trainfuse.codegen.triton_ops import Unsupported

WARPS = 8
ELEMENTS = 16  # of a segment, a thread: two 16-byte loads
REGISTERS = 56  # a thread, of what is kept; two programs of 8 warps leave 72 for everything else
LEAST_KEPT = 0.75  # of a row; the rest is read again in each pass, mostly from the L2 cache
VECTOR = 8  # elements of a 16-byte load
PROGRAMS_PER_SM = 2
FILE = 65536  # registers of a multiprocessor
SHORTEST = 8192  # elements of a row that is worth it
AHEAD = 4  # segments that are loaded before their use, of rows that are not kept


def why_not(group: Group, warps: int) -> str | None:
    """Why a group's rows can't be kept, or None."""
    domain = group.domain
    width = domain.extent(domain.cols)
    whole = spanning(group, group.inputs)
    if rows_are_neighbours(domain) or width < SHORTEST:
        return "its rows are short, or lie side by side in memory"
    if domain.indirect or not whole or any(n.meta["val"].dtype not in HALF for n in whole):
        return "it reads more than rows of half types"
    if width % VECTOR:
        return "its rows begin at odd addresses"
    if _segments_kept(len(whole)) * ELEMENTS * 32 * warps < LEAST_KEPT * width:
        return "its rows are too long for the registers"
    return None


def _segments_kept(inputs: int) -> int:
    """How many segments of each of several rows are held."""
    return REGISTERS // (inputs * ELEMENTS // 2)


def pays(group: Group) -> bool:
    """Whether a row is gone over more than once, and cheaply: what isn't kept is computed anew."""
    plan = passes.plan(group, needed(group), online=False)
    drawn = any(lookup(node.target).kind == "rng" for node in group.nodes)
    return sum(step.walks for step in plan) > 1 and not drawn


def build(group: Group, choice: Choice) -> Module:
    """One program a row: all loads, then a pass over the segments for each level of reductions."""
    domain = group.domain
    width, total = domain.extent(domain.cols), domain.extent(domain.rows)
    warps = choice.warps or WARPS
    if (reason := why_not(group, warps)) is not None:
        raise Unsupported(group.nodes[-1], reason)
    block = min(ELEMENTS * 32 * warps, power_of_two(width))
    row = TileAxis("row", domain.rows, total, (Segment("row", "", 1),), None, True)
    col = TileAxis("col", domain.cols, width, _segments(width, block), 0, False)
    builder = Builder(group, [row, col], "col")
    constants(builder, [("ROWS", total), ("COLS", width)])
    builder.note("row", long(group, "tl.program_id(0)"))
    for name, text in column_definitions(group, col, 1):
        builder.note(name, text)
    builder.bind("row")
    whole = spanning(group, group.inputs)
    for node in whole:
        keep(builder, node, _segments_kept(len(whole)))
    nodes = needed(group)
    plan = passes.plan(group, nodes, online=False)
    for number, step in enumerate(plan):
        step.begin(builder)
        walk(builder, col, step, number)
        for acc in step.accs:
            reductions.settle(builder, acc.red, reductions.finish(builder, acc), ROW)
    for node in nodes:
        if domain.reduced.get(node) and node in group.outputs:
            builder.store(node)
    doc = f"A row kept as it is read: {describe(group, nodes)}."
    launch = kernel(builder, "row_kernel", doc, (total, 1, 1), warps)
    launch = replace(launch, max_registers=FILE // (PROGRAMS_PER_SM * 32 * warps))
    return Module((launch,), in_place=passes.overwritable(group, plan))


def _segments(width: int, block: int) -> tuple[Segment, ...]:
    return tuple(
        Segment(
            f"col_{index}",
            f"col_{index}_mask" if (index + 1) * block > width else "",
            block,
            str(index * block // 4),
        )
        for index in range(divide_up(width, block))
    )


def keep(builder: Builder, node: fx.Node, count: int, first: int = 0, suffix: str = "") -> None:
    """Load segments of an input's row, before the one numbered count."""
    arg: ArgRef = ("input", builder.inputs[node])
    builder.args[arg] = None
    strides = value_strides(builder.domain, node)
    deps = builder.dependences(strides)
    value = node.meta["val"]
    note = f"{str(value.dtype).removeprefix('torch.')}[{'x'.join(map(str, value.shape))}]"
    segments = builder.tile["col"].segments
    for index in range(first, min(count, len(segments))):
        name = f"{builder.name_of(node)}{suffix}_{index}"
        mask = builder.mask(deps, index)
        builder.body.append(Load(name, arg, builder.offset(strides, index), mask, "", note))
        builder.kept[node, segments[index].index] = name


def walk(
    builder: Builder,
    col: TileAxis,
    step: Pass,
    number: int,
    later: Sequence[fx.Node] = (),
    passing: Sequence[fx.Node] = (),
) -> None:
    """One pass over the segments: accumulate, and store what is ready.

    later: values of half types that it computes, kept for later passes. passing: inputs that are
    not kept, of which each segment is loaded some segments before its use.
    """
    if not step.walks:
        return
    builder.tile["col"] = col
    for node in passing:
        keep(builder, node, AHEAD, suffix=f"_r{number}")
    builder.tile["col"] = replace(col, segments=col.segments[:1])
    for acc in step.accs:
        reductions.start(builder, acc)
    for index, segment in enumerate(col.segments):
        builder.tile["col"] = col
        for node in passing:
            keep(builder, node, index + AHEAD + 1, index + AHEAD, f"_r{number}")
        builder.tile["col"] = replace(col, segments=(segment,))
        builder.suffix = f"_r{number}s{index}"  # the pass, the segment
        builder.push("col")
        for acc in step.accs:
            reductions.accumulate(builder, acc, str(index + 1))
        for node in step.wide:
            builder.store(node)
        for node in later:
            (text,) = builder.value(node).names
            name = f"{builder.name_of(node)}_{index}"
            builder.note(name, f"{text}.to({TRITON_TYPE[node.meta['val'].dtype]})", "kept")
        body = builder.pop()
        builder.body.extend(body)
        for node in later:
            builder.kept[node, segment.index] = f"{builder.name_of(node)}_{index}"
        for node in passing:
            del builder.kept[node, segment.index]
    builder.suffix = ""
