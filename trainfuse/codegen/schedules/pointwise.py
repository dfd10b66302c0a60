"""Pointwise groups: flat where operands are dense in one order, tiled where they are permuted.

With several operands a row or a column: in bands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from trainfuse.codegen.builder import Builder, Group
from trainfuse.codegen.choices import Choice, products
from trainfuse.codegen.ir import Module
from trainfuse.codegen.schedules import banded, phases
from trainfuse.codegen.schedules.common import (
    constants,
    describe,
    inside,
    kernel,
    live_tiles,
    long,
    needed,
    own_axes,
    preload,
    row_extents,
    widest,
    written_over,
)
from trainfuse.codegen.targets import CodegenOptions, Target
from trainfuse.codegen.tile import (
    VECTOR_BYTES,
    Segment,
    TileAxis,
    divide_up,
    power_of_two,
    value_strides,
)
from trainfuse.fusion.indirect import Lookup, parse

TILE_REGISTERS = 96
SMALLEST = 256  # elements a program, where there are fewer blocks than multiprocessors
# Sides (y, x) and warps of a transposing tile: whole 32-byte sectors both ways, even for bytes. The
# large one moves more a program, where programs are many and a thread has registers for it.
TILE, LARGE_TILE = (32, 64, 8), (64, 128, 4)
LARGE_PROGRAMS = 4  # a multiprocessor
LARGE_REGISTERS = 256  # by live tiles; a thread takes a third of that
MIN_RUN = 16  # elements that lie together at each place; fewer don't pay for a tile's masked lanes


# Operands along the columns alone that are loaded one by one in a flat walk: fewer cost less than
# bands do.
COLUMN_OPERANDS = 2


# With rows: sides of a tile. Without: elements of a flat or banded program.
LIKELY = (
    Choice(warps=4, block=512),
    Choice(warps=4, block=2048),
    Choice(warps=8, block=2048),
    Choice(warps=4, rows=32, block=32),
    Choice(warps=4, rows=64, block=64),
    Choice(warps=8, rows=32, block=128),
    Choice(warps=8, rows=64, block=128),
    Choice(warps=8, rows=128, block=128),
)
OTHERS = (
    *products(warps=(4, 8), block=(512, 1024, 2048, 4096, 8192)),
    *products(warps=(4, 8), rows=(16, 32, 64, 128), block=(16, 32, 64, 128)),
)


def build(
    group: Group,
    target: Target,
    options: CodegenOptions,
    choice: Choice,
    absent: fx.Node | None = None,
) -> Module:
    """One program a block of elements, a block of tiles, or a band of rows.

    absent: a node whose value counts as zero.
    """
    del options
    order = memory_order(group, group.outputs)
    other = permuted_axis(group, order)
    if (other is None) != (choice.rows is None):
        choice = replace(choice, rows=None, block=None)  # sizes of the other kind of program
    if other is not None:
        return tiled(group, target, order, other, choice, absent)
    parts = None
    if absent is None:
        parts = lookups(group, order) or banded.division(group, order)
        parts = parts or odd_rows(group, target, order) or odd_columns(group, order)
    bands = None if parts is None else banded.build(group, target, choice, parts)
    return bands or flat(group, target, order, choice, absent)


def memory_order(group: Group, values: Sequence[fx.Node]) -> list[int]:
    """All axes, outermost first, as the first of `values` that spans them lies in memory."""
    domain = group.domain
    every = list(range(len(domain.sizes)))
    for node in values:
        strides = value_strides(domain, node)
        if len(own_axes(domain, node)) == len(every) and all(strides[axis] for axis in every):
            return sorted(every, key=lambda axis: -strides[axis])
    return every


def permuted_axis(group: Group, order: Sequence[int]) -> int | None:
    """The axis along which a large operand is dense, when the outputs are dense along another."""
    domain = group.domain
    if not order:
        return None
    inner = order[-1]
    for node in (*group.inputs, *group.outputs):
        if node not in domain.axes:
            continue
        strides = value_strides(domain, node)
        dense = [axis for axis, stride in strides.items() if stride == 1]
        if dense and inner not in dense and strides.get(inner, 0) > 1:
            axis = dense[0]
            if min(domain.sizes[axis], domain.sizes[inner]) >= 8:
                return axis
    return None


def lookups(group: Group, order: Sequence[int]) -> banded.Division | None:
    """Bands whose columns no index depends on: it is read once a row, and columns vectorise."""
    domain = group.domain
    picked: set[int] = set()
    for node in domain.indirect:
        found = parse(node)
        if isinstance(found, Lookup):
            for index in found.indices:
                picked |= own_axes(domain, index)
    cut = 1 + max((place for place, axis in enumerate(order) if axis in picked), default=-1)
    rows, cols = tuple(order[:cut]), tuple(order[cut:])
    return banded.Division(rows, cols, False) if rows and domain.extent(cols) >= MIN_RUN else None


def odd_rows(group: Group, target: Target, order: Sequence[int]) -> banded.Division | None:
    """Bands where joins of several tensors fill many long rows that no vectors divide.

    Walked flat, a thread writes neighbours at once and reads each at an address of its own, its
    warp's lanes a vector apart: four times the cache lines a load, and two divisions an element.
    In a band lanes are neighbours, but are written one by one: it pays where more is read than
    written.
    """
    domain = group.domain
    rows, cols = tuple(order[:-1]), tuple(order[-1:])
    enough = 4 * banded.ELEMENTS * target.num_sms
    if len(domain.indirect) <= len(group.outputs) or domain.extent(order) < enough:
        return None
    width, vector = domain.extent(cols), max(1, VECTOR_BYTES // widest(group))
    odd = width >= banded.WIDTHS[-1] and width % vector != 0
    return banded.Division(rows, cols, False) if rows and odd else None


def odd_columns(group: Group, order: Sequence[int]) -> banded.Division | None:
    """Bands of rows that begin anywhere, where several operands vary along the columns alone.

    Walked flat, their elements are loaded one by one for each vector; in a program whose rows begin
    alike, once.
    """
    domain = group.domain
    owns = [own_axes(domain, n) for n in group.inputs if n in domain.axes]
    for cut in range(len(order) - 1, 0, -1):
        rows, cols = tuple(order[:cut]), tuple(order[cut:])
        if sum(bool(own) and own <= frozenset(cols) for own in owns) >= COLUMN_OPERANDS:
            found = phases.find(group, rows, cols)
            return None if found is None else banded.Division(rows, cols, True)
    return None


def flat(
    group: Group,
    target: Target,
    order: Sequence[int],
    choice: Choice,
    absent: fx.Node | None = None,
) -> Module:
    """A flat range of elements; no mask when blocks divide it, and no row is walked beyond."""
    extents = row_extents(group, order)
    size = math.prod(extents[axis] for axis in order)
    block, num_warps = flat_block(group, target, size, choice)
    mask = "i_mask" if size % block or extents != group.domain.sizes else ""
    inner = size if mask else period(group, target, order, block)
    quad = _first("tl.program_id(0)", size // inner, inner // 4, block // 4)
    quad = None if block % 4 else quad
    axis = TileAxis("i", tuple(order), size, (Segment("i", mask, block, quad),), 0, True)
    builder = Builder(group, [axis], "i", extents)
    constants(builder, [("SIZE", size)])
    base = _first(long(group, "tl.program_id(0)"), size // inner, inner, block)
    why = "neighbours share what has no outer dims" if inner < size else ""
    builder.note("i", f"{base} + tl.arange(0, {block})", why)
    if mask:
        builder.note(mask, inside(builder, axis, "i", "SIZE"))
    builder.bind("i")
    if absent is not None:
        builder.zero(absent)
    nodes = needed(group)
    preload(builder, nodes)
    for node in nodes:
        if node in group.outputs:
            builder.store(node)
    doc = f"Flat: {describe(group, nodes)}."
    launch = kernel(builder, "pointwise_kernel", doc, (divide_up(size, block), 1, 1), num_warps)
    return Module((launch,), in_place=written_over(group, block, num_warps))


def period(group: Group, target: Target, order: Sequence[int], block: int) -> int:
    """Elements after which a flat walk reads operands without outer axes from their start again.

    The walk's length, where the L2 cache holds them until then, or where blocks divide no period.
    Else programs take every period's first block, then every one's second: rotary angles of 32768
    positions would come from memory for each head.
    """
    domain = group.domain
    size, whole = domain.extent(tuple(order)), 0
    parts: list[tuple[frozenset[int], int]] = []
    for node in (*group.inputs, *group.outputs):
        if node in domain.axes:
            value, own = node.meta["val"], own_axes(domain, node)
            whole += value.dtype.itemsize if len(own) == len(order) else 0
            parts.append((own, value.numel() * value.dtype.itemsize))
    for cut in range(len(order) - 1, 0, -1):
        cols = tuple(order[cut:])
        again = sum(held for own, held in parts if order[cut] in own and own <= frozenset(cols))
        inner = domain.extent(cols)
        if again and again + inner * whole > target.l2_bytes // 2:
            return size if inner % block else inner
    return size


def _first(program: str, periods: int, inner: int, block: int) -> str:
    """A program's first element: of blocks in a row, or of each period's in turn."""
    if periods == 1:
        return f"{program} * {block}"
    return f"{program} % {periods} * {inner} + {program} // {periods} * {block}"


def flat_block(group: Group, target: Target, size: int, choice: Choice) -> tuple[int, int]:
    """Elements a program, and its warps: 16 bytes of the widest operand a thread, or twice that."""
    if target.interpreted:
        return min(power_of_two(size), 1 << 15), 4
    if choice.block:
        return min(power_of_two(size), choice.block), choice.warps or 4
    per_thread = max(16 // widest(group), 4)
    few = len(group.inputs) + len(group.outputs) <= 4
    double = few and 2 * per_thread * live_tiles(group) <= TILE_REGISTERS
    block = 128 * per_thread * (2 if double else 1)
    # Small tensors: rather more programs than longer ones.
    while block > 128 * per_thread and size < block * target.num_sms * 4:
        block //= 2
    while block > SMALLEST and size < block * target.num_sms:
        block //= 2
    return max(min(block, power_of_two(size)), 1), 4


def tiled(
    group: Group,
    target: Target,
    order: Sequence[int],
    other: int,
    choice: Choice,
    absent: fx.Node | None = None,
) -> Module:
    """Tiles over the inner axes of both layouts: each tensor is read along its own inner axis."""
    domain = group.domain
    inner = order[-1]
    rest = tuple(axis for axis in order if axis not in (inner, other))
    height, width, warps = tile_sides(group, target, domain.sizes[other], domain.sizes[inner])
    x_block = min(choice.block or width, power_of_two(domain.sizes[inner]))
    y_block = min(choice.rows or height, power_of_two(domain.sizes[other]))
    x_mask = "x_mask" if domain.sizes[inner] % x_block else ""
    y_mask = "y_mask" if domain.sizes[other] % y_block else ""
    quad = f"tl.program_id(1) * {x_block // 4}" if x_block % 4 == 0 else None
    axes = [
        TileAxis("z", rest, domain.extent(rest), (Segment("z", "", 1),), None, True),
        TileAxis("y", (other,), domain.sizes[other], (Segment("y", y_mask, y_block),), 0, True),
        TileAxis(
            "x", (inner,), domain.sizes[inner], (Segment("x", x_mask, x_block, quad),), 1, True
        ),
    ]
    builder = Builder(group, axes, "x")
    x_tiles = divide_up(domain.sizes[inner], x_block)
    y_tiles = divide_up(domain.sizes[other], y_block)
    constants(builder, [("Y_TILES", y_tiles), ("X_SIZE", axes[2].size), ("Y_SIZE", axes[1].size)])
    # Grid dimensions other than the first stop at 65535, so the tiles of y and z share that one.
    builder.note("z", long(group, "tl.program_id(0) // Y_TILES"))
    y_lanes = f"(tl.program_id(0) % Y_TILES) * {y_block} + tl.arange(0, {y_block})[:, None]"
    builder.note("y", long(group, y_lanes))
    x_lanes = f"tl.program_id(1) * {x_block} + tl.arange(0, {x_block})[None, :]"
    builder.note("x", long(group, x_lanes))
    for name, mask in (("y", y_mask), ("x", x_mask)):
        if mask:
            builder.note(mask, f"{name} < {name.upper()}_SIZE")
    builder.bind("x", "y", "z")
    if absent is not None:
        builder.zero(absent)
    nodes = needed(group)
    preload(builder, nodes)
    for node in nodes:
        if node in group.outputs:
            builder.store(node)
    doc = f"Tiled: {describe(group, nodes)}."
    grid = (y_tiles * axes[0].size, x_tiles, 1)
    warps = choice.warps or warps
    launch = kernel(builder, "tiled_kernel", doc, grid, warps)
    return Module((launch,), in_place=written_over(group, x_block * y_block, warps))


def tile_sides(group: Group, target: Target, y_size: int, x_size: int) -> tuple[int, int, int]:
    """(y, x) of a transposing tile, and its warps."""
    if target.interpreted:
        return 128, 128, 4
    height, width, warps = LARGE_TILE
    rest = math.prod(group.domain.sizes) // (y_size * x_size)
    programs = rest * divide_up(y_size, height) * divide_up(x_size, width)
    registers = live_tiles(group) * height * width // (32 * warps)
    large = programs >= LARGE_PROGRAMS * target.num_sms and registers <= LARGE_REGISTERS
    return LARGE_TILE if large else TILE
