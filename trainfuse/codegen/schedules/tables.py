"""Sums of long rows by sorted key, most rows with some: every row is written once.

    runs     where in the sorted order each row's run of equal keys begins; and sums of CHUNK
             neighbours, aligned, that have one key: these are few, unless a row occurs often
    level 2  sums of CHUNK such sums that have one key; and so on, until few are left
    rows     programs of neighbouring rows of the table add what their runs have: whole chunks by
             their sums, and entries before and after these one by one

So an element is written when its sum is known, of many entries or none, and what else it is made of
is read then; a row that occurs often costs a program few steps more; and each sum's order follows
from the keys alone.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from trainfuse.codegen.builder import Builder, Group
from trainfuse.codegen.choices import Choice
from trainfuse.codegen.ir import (
    ArgRef,
    Check,
    Kernel,
    Load,
    Loop,
    Module,
    Store,
    Workspace,
    arg_name,
)
from trainfuse.codegen.scalars import HALF, TRITON_TYPE
from trainfuse.codegen.schedules import few
from trainfuse.codegen.schedules.common import (
    constants,
    describe,
    kernel,
    live_tiles,
    long,
    needed,
    preload,
    written_over,
)
from trainfuse.codegen.schedules.sums import Sums, Writer, in_order, parse
from trainfuse.codegen.scope import Value
from trainfuse.codegen.targets import CodegenOptions, Target
from trainfuse.codegen.tile import (
    Segment,
    TileAxis,
    axis_strides,
    divide_up,
    floor_power,
    power_of_two,
    snug,
)

STEP = 2  # entries of a row loaded before the first is added: both loads are on their way
CHUNK = 32  # entries that a row has summed for it, where they are all its own
TOP = 128  # entries, or sums of chunks, that one program may add one by one
CHUNK_TILE = 8192  # elements of a chunk that are loaded at once
# Registers of a thread beside what it loads and sums. Told how many it may take, ptxas has all
# loads of a step on their way; else it takes few, and waits for each.
REGISTERS = 48
PLACES = 128  # rows whose runs a program finds
ELEMENTS, WARPS = 4096, 4  # of a program of the table: a row, or a part of one
INTERPRETED = 32  # times as many in the interpreter


@dataclass(frozen=True, slots=True)
class Level:
    """Sums of SPAN neighbours each that have one key; level 0 is the entries themselves.

    span: sorted entries of each. count: of such sums. sums: where they are; None for level 0.
    """

    number: int
    span: int
    count: int
    sums: ArgRef | None


def build(group: Group, target: Target, options: CodegenOptions, choice: Choice) -> Module:
    """The runs, the levels, then the rows."""
    del options
    spaces: list[Workspace] = []
    kernels: list[Kernel] = []
    sums = in_order(group, target, parse(group), spaces, kernels)
    rows, block, warps = tile = tile_shape(target, sums, choice)
    begins = workspace(spaces, (divide_up(sums.rows, rows) * rows + 1,), torch.int32)
    levels = plan(sums, spaces)
    count = spaces[begins[1]].shape[0]
    kernels.append(build_runs(group, target, sums, begins, count, levels[:2]))
    for below, level in itertools.pairwise(levels[1:]):
        kernels.append(build_level(group, sums, below, level))
    kernels.append(build_rows(group, sums, _Runs(begins, levels), tile))
    return Module(tuple(kernels), tuple(spaces), written_over(group, rows * block, warps))


def build_few(group: Group, target: Target, options: CodegenOptions, choice: Choice) -> Module:
    """The rows alone, of keys that nothing sorts."""
    del options
    sums = parse(group)
    elements = few.ELEMENTS // few.SLICES * (INTERPRETED if target.interpreted else 1)
    block = snug(sums.width, min(power_of_two(sums.width), elements))
    rows, warps = max(2, min(elements // block, power_of_two(sums.rows))), choice.warps or few.WARPS
    kernels = (build_rows(group, sums, _Few(), (rows, block, warps)),)
    return Module(kernels, (), written_over(group, rows * block, warps))


def workspace(spaces: list[Workspace], shape: tuple[int, ...], dtype: torch.dtype) -> ArgRef:
    """One more workspace of the group."""
    spaces.append(Workspace(shape, dtype))
    return "workspace", len(spaces) - 1


def plan(sums: Sums, spaces: list[Workspace]) -> list[Level]:
    """The levels, each of whole chunks of the one below; their sums are added to the workspaces."""
    levels = [Level(0, 1, sums.count, None)]
    while levels[-1].count > TOP:
        below = levels[-1]
        count = below.count // CHUNK
        place = workspace(spaces, (count, sums.width), sums.dtype)
        levels.append(Level(below.number + 1, below.span * CHUNK, count, place))
    return levels


def tile_shape(target: Target, sums: Sums, choice: Choice) -> tuple[int, int, int]:
    """Rows and columns of a program of the table, and its warps."""
    elements = ELEMENTS if sums.vectors else ELEMENTS // 8  # loaded one by one, more of them spill
    block = snug(sums.width, min(power_of_two(sums.width), elements))
    rows = min(max(1, INTERPRETED * ELEMENTS // block), power_of_two(sums.rows))
    return rows if target.interpreted else 1, block, choice.warps or WARPS


# What several kernels say.


@dataclass(frozen=True, slots=True)
class _Writer(Writer):
    """And about chunks of them."""

    def origin(self, name: str, level: Level, place: str) -> None:
        """Where a level has what lies at a place of its order; entries, where they came from."""
        if level.sums is not None:
            self.note(name, f"{place}.to(tl.int64)" if self.builder.wide else place)
        else:
            assert self.sums.order is not None
            cast = "" if isinstance(self.sums.order, fx.Node) else "tl.int64"
            self.builder.body.append(Load(name, self.use(self.sums.order), place, cast=cast))

    def column_of_source(self) -> str:
        """Where in a row of the source the columns at hand are."""
        builder, sums = self.builder, self.sums
        walked = builder.domain.indirect[sums.node][1]
        strides = (sums.source.meta["val"].stride(1),)
        return builder.offset(axis_strides((walked,), strides, builder.domain.sizes), 0)

    def columns(self, name: str, level: Level, origin: str, mask: str) -> None:
        """The columns at hand of what a level has there; zeros where masked."""
        builder, sums = self.builder, self.sums
        if level.sums is not None:
            arg, dtype, stride, column = self.use(level.sums), sums.dtype, "COLS", "col"
        else:
            value = sums.source.meta["val"]
            arg, dtype, stride = self.use(sums.source), value.dtype, str(value.stride(0))
            column = self.column_of_source()
        half = TRITON_TYPE[torch.float32] if dtype in HALF else ""
        offset = f"{origin} * {stride} + {column}"
        builder.body.append(Load(name, arg, offset, mask, half, other="0.0"))

    def chunks(self, below: Level, level: Level, block: int, mask: str) -> None:
        """Sums of whole chunks of the level below: a program has one, and all columns of it."""
        sums = self.sums
        first = f"tl.program_id(0) * {level.span}"
        test = f"(head == tail) & (head != {sums.skip - sums.bias})" if sums.skip >= 0 else ""
        test = test or "head == tail"
        grid_is_longer = level.number == 1
        inside = f"tl.program_id(0) < {level.count}" if grid_is_longer else ""
        places = [(first, "head"), (f"{first} + {level.span - 1}", "tail")]
        for place, name in places:
            arg = self.use(sums.keys)
            self.builder.body.append(Load(name, arg, place, inside, "tl.int32", other="0"))
        tests = " & ".join(filter(None, [inside and f"({inside})", f"({test})"]))
        self.note("whole", f"tl.where({tests}, COLS, 0)", "columns to sum")
        self.builder.push("col")
        column = long(self.builder.group, f"start + tl.arange(0, {block})[None, :]")
        self.note("col", column)
        if mask:
            self.note(mask, "col < COLS")
        self.note("place", f"tl.program_id(0) * {CHUNK} + tl.arange(0, {CHUNK})[:, None]")
        self.origin("origin", below, "place")
        self.columns("x", below, "origin", mask)
        self.note("total", "tl.sum(x, 0)[None, :]")
        at = f"{long(self.builder.group, 'tl.program_id(0)')} * COLS + col"
        assert level.sums is not None
        self.builder.body.append(Store(self.use(level.sums), at, "total", mask, "of one key"))
        body = self.builder.pop()
        self.builder.body.append(Loop("start", "0", "whole", str(block), body))


def chunk_tile(group: Group, sums: Sums) -> tuple[list[TileAxis], int, str]:
    """Axes of a kernel that sums chunks, its columns at a time, and their mask."""
    block = min(power_of_two(sums.width), CHUNK_TILE // CHUNK)
    mask = "col_mask" if sums.width % block else ""
    col = TileAxis("col", group.domain.cols, sums.width, (Segment("col", mask, block),), 1, False)
    return [col], block, mask


def chunk_registers(sums: Sums, below: Level) -> int:
    """Registers of a thread that sums chunks of a level."""
    dtype = sums.source.meta["val"].dtype if below.sums is None else sums.dtype
    return min(REGISTERS + CHUNK_TILE // (32 * WARPS) * dtype.itemsize // 4, 255)


def build_runs(
    group: Group, target: Target, sums: Sums, begins: ArgRef, count: int, levels: list[Level]
) -> Kernel:
    """Where runs begin, a block of rows a program; and sums of chunks of entries.

    count: of `begins`: one for each row, then ends of the last and of none.
    """
    axes, block, mask = chunk_tile(group, sums)
    builder = Builder(group, axes, "col")
    places = min(power_of_two(count), 1 << 15 if target.interpreted else PLACES)
    constants(builder, [("COUNT", sums.count), ("COLS", sums.width)])
    writer = _Writer(builder, sums)
    writer.key("greatest", str(sums.count - 1))
    builder.body.append(Check(f"greatest < {sums.rows - sums.bias}", "index out of range"))
    writer.note("row", f"tl.program_id(0) * {places} + tl.arange(0, {places})")
    keys, span = writer.use(sums.keys), floor_power(sums.count)
    key = f"row - {sums.bias}" if sums.bias else "row"
    writer.note(
        "begin", f"lib.lower_bound({arg_name(keys)}, {key}, COUNT, {span}, {span.bit_length()})"
    )
    builder.body.append(Store(writer.use(begins), "row", "begin", f"row < {count}"))
    programs = divide_up(count, places)
    if len(levels) > 1:
        programs = max(programs, levels[1].count)
        writer.chunks(levels[0], levels[1], block, mask)
    doc = "Where each row's run of equal keys begins; sums of chunks that have one key."
    made = kernel(builder, "runs_kernel", doc, (programs, 1, 1), WARPS)
    return replace(made, max_registers=chunk_registers(sums, levels[0]))


def build_level(group: Group, sums: Sums, below: Level, level: Level) -> Kernel:
    """Sums of chunks of sums."""
    axes, block, mask = chunk_tile(group, sums)
    builder = Builder(group, axes, "col")
    constants(builder, [("COLS", sums.width)])
    _Writer(builder, sums).chunks(below, level, block, mask)
    doc = f"Sums of {level.span} entries that have one key."
    made = kernel(builder, f"level_{level.number}_kernel", doc, (level.count, 1, 1), WARPS)
    return replace(made, max_registers=chunk_registers(sums, below))


@dataclass(frozen=True, slots=True)
class _Runs:
    """Sums of sorted keys: where runs begin, and the levels."""

    begins: ArgRef
    levels: list[Level]
    kernel: ClassVar = "rows_kernel"

    def registers(self, group: Group, sums: Sums, elements: int) -> int | None:
        """That a thread may take, which has so many elements of a tile; None for any."""
        if not sums.vectors:
            return None  # element by element, what a thread loads is not told so easily
        loaded = STEP * sums.source.meta["val"].dtype.itemsize // 4
        return min(REGISTERS + elements * (loaded + live_tiles(group)), 255)

    def start(self, writer: _Writer) -> None:
        """What the first loads wait for."""
        for name, place in (("begin", "row"), ("end", "row + 1")):
            writer.builder.body.append(Load(name, writer.use(self.begins), place))

    def add(self, writer: _Writer, rows: int, block: int, col_mask: str) -> None:
        """Define `total`."""
        sums = writer.sums
        if sums.skip >= 0:
            writer.note("end", f"tl.where(row == {sums.skip}, begin, end)", "its sum is zero")
        shape = f"{rows}, {block}" if rows > 1 else f"{block},"
        writer.note("total", f"tl.full(({shape}), 0.0, {TRITON_TYPE[sums.dtype]})")
        self.add_level(writer, self.levels[0], rows, col_mask)

    def add_level(self, writer: _Writer, level: Level, rows: int, col_mask: str) -> None:
        """What a row's run has of a level and, without that, of the next one: whole chunks."""
        builder, number, top = writer.builder, level.number, level is self.levels[-1]
        begin, end = (f"{name}_{number}" if number else name for name in ("begin", "end"))
        most, skipped, limit = f"most_{number}", f"skipped_{number}", 2 * CHUNK
        more = f"{end} - {begin}"
        if not top:
            after, until = f"begin_{number + 1}", f"end_{number + 1}"
            writer.note(after, f"({begin} + {CHUNK - 1}) // {CHUNK}", "whole chunks of it")
            writer.note(until, f"tl.maximum({end} // {CHUNK}, {after})")
            writer.note(skipped, f"({until} - {after}) * {CHUNK}")
            more = f"tl.where({until} > {after}, {limit}, {more})"
        writer.note(most, more if rows == 1 else f"tl.max({more})")
        builder.push()
        places = range(STEP)
        for place in places:
            at = f"at{number}_{place}"
            text = f"{begin} + (entry + {place})" if place else f"{begin} + entry"
            if not top:
                text += f" + tl.where({text} < begin_{number + 1} * {CHUNK}, 0, {skipped})"
            writer.note(at, text)
            # past the end, too: of masked loads a thread has one for each of its columns
            inside = f"tl.minimum({at}, {level.count - 1})"
            writer.origin(f"from{number}_{place}", level, inside if level.sums is None else at)
        for place in places:
            mask = " & ".join(filter(None, [f"(at{number}_{place} < {end})", col_mask]))
            writer.columns(f"x{number}_{place}", level, f"from{number}_{place}", mask)
        for place in places:
            writer.note("total", f"total + x{number}_{place}")
        steps = builder.pop()
        stop = most if top else f"tl.minimum({most}, {limit - 2})"
        builder.body.append(Loop("entry", "0", stop, str(len(places)), steps))
        if not top:
            builder.push()
            self.add_level(writer, self.levels[number + 1], rows, col_mask)
            deeper = builder.pop()
            what = "once, where a row has whole chunks"
            builder.body.append(Loop("deeper", "0", f"{most} // {limit}", "1", deeper, what))


class _Few:
    """Sums of keys as they come."""

    kernel = "few_kernel"

    def registers(self, group: Group, sums: Sums, elements: int) -> None:
        """As many as ptxas likes: what a thread loads at once is little."""

    def start(self, writer: _Writer) -> None:
        """Nothing waits for anything."""

    def add(self, writer: _Writer, rows: int, block: int, col_mask: str) -> None:
        """Define `total`."""
        sums, source = writer.sums, writer.sums.source.meta["val"]
        assert isinstance(sums.keys, fx.Node)
        few.Matches(
            writer.use(sums.keys),
            sums.keys.meta["val"].dtype,
            sums.count,
            -sums.bias,
            sums.rows - sums.bias,
            sums.skip - sums.bias if sums.skip >= 0 else None,
            writer.use(sums.source),
            source.dtype,
            source.stride(0),
            writer.column_of_source(),
            sums.dtype,
        ).add(writer.builder, rows, block, col_mask)


def build_rows(group: Group, sums: Sums, how: _Runs | _Few, tile: tuple[int, int, int]) -> Kernel:
    """The table: a tile a program."""
    domain, (rows, block, warps) = group.domain, tile
    row_mask = "row_mask" if sums.rows % rows else ""
    col_mask = "col_mask" if sums.width % block else ""
    row, col = Segment("row", row_mask, rows), Segment("col", col_mask, block)
    row_place, col_place = (None, 0) if rows == 1 else (0, 1)
    axes = [
        TileAxis("row", domain.rows, sums.rows, (row,), row_place, True),
        TileAxis("col", domain.cols, sums.width, (col,), col_place, True),
    ]
    builder = Builder(group, axes, "col")
    constants(builder, [("ROWS", sums.rows), ("COLS", sums.width)])
    across, down = ("", "") if rows == 1 else ("[None, :]", f" + tl.arange(0, {rows})[:, None]")
    column = f"tl.program_id(1) * {block} + tl.arange(0, {block}){across}"
    builder.note("col", long(group, column))
    if col_mask:
        builder.note(col_mask, "col < COLS")
    first = "tl.program_id(0)" if rows == 1 else f"tl.program_id(0) * {rows}"
    builder.note("row", long(group, f"{first}{down}"))
    if row_mask:
        builder.note(row_mask, "row < ROWS")
    builder.bind("row", "col")
    writer = _Writer(builder, sums)
    how.start(writer)
    nodes = needed(group)
    preload(builder, [n for n in nodes if n is not sums.node])
    how.add(writer, rows, block, col_mask)
    value = Value(("total",), frozenset({"row", "col"}), 0, sums.dtype)
    builder.put(sums.node, value)
    for node in nodes:
        if node in group.outputs:
            builder.store(node)
    doc = f"Sums of each row: {describe(group, nodes)}."
    grid = (divide_up(sums.rows, rows), divide_up(sums.width, block), 1)
    made = kernel(builder, how.kernel, doc, grid, warps)
    return replace(made, max_registers=how.registers(group, sums, rows * block // (32 * warps)))
