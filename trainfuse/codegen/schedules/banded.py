"""Pointwise groups with values a channel or a row: tiles of rows, so that those are read once.

Walked flat, every element would load its channel's mean, deviation, weight and sums again, and
compute again what follows from them. In a tile what varies along rows alone is a number a row, and
what varies along columns alone stays in registers while a program walks down its columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from trainfuse.codegen.builder import Builder, Group
from trainfuse.codegen.choices import Choice
from trainfuse.codegen.ir import Loop, Module
from trainfuse.codegen.schedules import phases, vectors
from trainfuse.codegen.schedules.common import (
    constants,
    describe,
    kernel,
    live_tiles,
    long,
    needed,
    own_axes,
    preload,
    written_over,
)
from trainfuse.codegen.targets import Target
from trainfuse.codegen.tile import Segment, TileAxis, divide_up, power_of_two, snug

SMALL_OPERANDS = 3
"""With fewer a flat walk loads them again at little cost."""
ELEMENTS = 2048
WIDTHS = (1024, 512, 256)
WARPS = 4
PROGRAMS_PER_SM = 8
TILE_REGISTERS = 96
MAX_TILES = 65535  # of a grid's second dimension


@dataclass(frozen=True, slots=True)
class Division:
    """Axes as rows and columns, outermost first. walks: whether anything varies by column alone."""

    rows: tuple[int, ...]
    cols: tuple[int, ...]
    walks: bool

    @property
    def axes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.rows, self.cols


def division(group: Group, order: Sequence[int]) -> Division | None:
    """Where to cut the axes, as they lie in memory, so that small operands are read least often."""
    domain = group.domain
    every = frozenset(order)
    small = [own_axes(domain, n) for n in group.inputs if n in domain.axes]
    small = [own for own in small if own and own != every]
    if len(small) < SMALL_OPERANDS:
        return None
    found: list[tuple[float, int]] = []
    for cut in range(1, len(order)):
        rows, cols = frozenset(order[:cut]), frozenset(order[cut:])
        row_cost, col_cost = 1 / domain.extent(cols), 1 / domain.extent(rows)
        costs = [row_cost if own <= rows else col_cost if own <= cols else 1.0 for own in small]
        found.append((sum(costs), cut))
    cost, cut = min(found)
    if cost > len(small) / 4:
        return None
    cols = frozenset(order[cut:])
    walks = any(own <= cols for own in small)
    return Division(tuple(order[:cut]), tuple(order[cut:]), walks)


def build(group: Group, target: Target, choice: Choice, parts: Division) -> Module | None:
    """Programs of [rows, columns] tiles; None when the grid can't hold them."""
    domain = group.domain
    total, width = domain.extent(parts.rows), domain.extent(parts.cols)
    rows, block = tile_shape(group, target, choice, parts)
    vector = vector_elements(group, parts)
    tiles, strips = divide_up(width + vector - 1, block), divide_up(total, rows)
    if tiles > MAX_TILES:
        return None
    programs = strips
    if parts.walks:
        wanted = (choice.per_sm or PROGRAMS_PER_SM) * target.num_sms
        programs = min(strips, max(1, wanted // tiles))
    phase = phases.of_tiles(group, rows, block, axes=parts.axes) if parts.walks else None
    if phase is not None:
        tiles = divide_up(width + phase.count - 1, block)
        alike = strips // phase.period
        steps = max(1, alike // max(1, programs // phase.period))
        programs = phase.period * divide_up(alike, steps)
    row_mask = "row_mask" if total % rows else ""
    col_mask = "col_mask" if width % block else ""
    quad = f"tl.program_id(1) * {block // 4}" if block % 4 == 0 else None
    segment = Segment("col", col_mask, block, quad)
    if vector > 1:
        segment = vectors.segment(segment, vector, first=f"tl.program_id(1) * {block}")
    lanes = f"tl.arange(0, {block}){'[None, :]' if rows > 1 else ''}"
    columns = long(group, f"tl.program_id(1) * {block} + {lanes}" if tiles > 1 else lanes)
    definitions = [("col", columns), ("col_mask", "col < COLS")]
    if phase is not None:
        segment, definitions = phase.block(block, columns)
    place = None if rows == 1 else 0
    row = TileAxis("row", parts.rows, total, (Segment("row", row_mask, rows),), place, True)
    col = TileAxis("col", parts.cols, width, (segment,), 0 if rows == 1 else 1, True)
    builder = Builder(group, [row, col], "col")
    constants(builder, [("ROWS", total), ("COLS", width)])
    if vector == 1:
        for name, text in definitions:
            if name != "col_mask" or segment.mask:
                builder.note(name, text)
        builder.bind("col")
    nodes = needed(group)
    strip = "tl.program_id(0)" if rows == 1 else f"tl.program_id(0) * {rows}"
    strip = strip if phase is None else phase.first(rows)
    apart = 1 if phase is None else phase.period
    if programs < strips:
        builder.push("row")
        define_rows(builder, rows, "start", apart)
        emit(builder, nodes)
        body = builder.pop()
        builder.body.append(Loop("start", strip, "ROWS", str(programs * rows), body))
    else:
        builder.bind("row")
        define_rows(builder, rows, strip, apart)
        if vector > 1:
            vectors.begin(builder, vector)
            vectors.place(builder, columns)
            builder.bind("col")
        emit(builder, nodes)
    doc = f"Banded: {describe(group, nodes)}."
    warps = choice.warps or WARPS
    launch = kernel(builder, "banded_kernel", doc, (programs, tiles, 1), warps)
    in_place = written_over(group, rows * block, warps)
    whole = vector > 1 or phase is not None
    return Module((launch,), in_place=in_place, whole_vectors=whole)


def define_rows(builder: Builder, rows: int, first: str, apart: int) -> None:
    """The rows of a tile, from its first one. apart: rows from one to the next."""
    lanes = f"tl.arange(0, {rows})[:, None]"
    lanes = lanes if apart == 1 else f"{apart} * {lanes}"
    text = first if rows == 1 else f"{first} + {lanes}"
    builder.note("row", long(builder.group, text))
    if builder.segment("row", 0).mask:
        builder.note("row_mask", "row < ROWS")


def emit(builder: Builder, nodes: list[fx.Node]) -> None:
    """A tile's loads, then its results."""
    preload(builder, nodes)
    for node in nodes:
        if node in builder.group.outputs:
            builder.store(node)


def vector_elements(group: Group, parts: Division) -> int:
    """Elements of a vector where rows are moved in such from any address, else 1: long ones are.

    Programs have one each: of a tile of several, Triton has each thread load what they have of
    their own once for each of its columns.
    """
    long_enough = group.domain.extent(parts.cols) > WIDTHS[0]
    return vectors.elements(group, parts.rows, parts.cols) if long_enough else 1


def tile_shape(group: Group, target: Target, choice: Choice, parts: Division) -> tuple[int, int]:
    """(rows, columns) of a tile: short rows whole, long ones in blocks that waste few lanes.

    Where programs walk down their columns narrow blocks cost no more loads.
    """
    total, width = group.domain.extent(parts.rows), group.domain.extent(parts.cols)
    single = vector_elements(group, parts) > 1
    if target.interpreted:
        block = min(power_of_two(width), 2048)
        return 1 if single else min(max(1, 16384 // block), power_of_two(total)), block
    elements = choice.block or ELEMENTS
    warps = choice.warps or WARPS
    while elements > 256 and elements * live_tiles(group) / (32 * warps) > TILE_REGISTERS:
        elements //= 2
    if single:
        return 1, min(elements, power_of_two(width))
    if width <= min(WIDTHS[0], elements):
        block = snug(width, power_of_two(width)) if parts.walks else power_of_two(width)
    else:
        fitting = [w for w in WIDTHS if w <= elements] or [elements]
        block = min(fitting, key=lambda w: (math.ceil(width / w) * w, -w))
    return min(max(1, elements // block), power_of_two(total)), block
