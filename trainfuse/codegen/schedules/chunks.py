"""Sums of rows by sorted key, most rows empty, such as an embedding's gradient.

    rank     few keys are sorted first, by their ranks (ranks.py); many come sorted
    fill     every row of the table, as if its sum were zero
    level 1  programs of CHUNK neighbours in the sorted order add each run of equal keys. A run that
             lies inside is finished, and its row is written. The first run and the last may go on
             next door: their sums, and their keys, go to a list of two entries a program.
    level 2  the same of that list, which is sorted, too; and so on, until one program holds it all
             and finishes every run.

So work is even however often a key occurs, each sum's order follows from the keys alone, and a
row's last write is its own sum: launches run in order, and one run is finished once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import fx

from trainfuse.codegen.builder import Builder, Group
from trainfuse.codegen.choices import MODEL, Choice
from trainfuse.codegen.ir import ArgRef, Check, Define, Kernel, Load, Loop, Module, Store, Workspace
from trainfuse.codegen.scalars import HALF, TRITON_TYPE
from trainfuse.codegen.schedules import pointwise
from trainfuse.codegen.schedules.common import (
    constants,
    describe,
    kernel,
    long,
    needed,
    preload,
)
from trainfuse.codegen.schedules.sums import Sums, Writer, in_order, parse
from trainfuse.codegen.scope import Value
from trainfuse.codegen.targets import CodegenOptions, Target
from trainfuse.codegen.tile import (
    VECTOR_BYTES,
    Segment,
    TileAxis,
    axis_strides,
    divide_up,
    floor_power,
    power_of_two,
)

STEP = 8  # rows loaded before the first is added: as many loads are on their way at once
LAST = 64  # entries that one program takes
CHUNKS = (32, 256)  # fewest and most entries of a program
PROGRAMS_PER_SM = 8
REGISTERS = 160  # a thread may take for what is loaded and summed; the rest is addresses


@dataclass(frozen=True, slots=True)
class Level:
    """One pass: `count` entries in chunks, from the source or from the list of the level before.

    sums, keys: that list. results: the list for the next level; None when it finishes every run.
    """

    number: int
    count: int
    chunk: int
    sums: ArgRef | None
    keys: ArgRef | None
    results: tuple[ArgRef, ArgRef] | None

    @property
    def programs(self) -> int:
        """Chunks."""
        return divide_up(self.count, self.chunk)


def build(group: Group, target: Target, options: CodegenOptions, choice: Choice) -> Module:
    """The fill, then the levels."""
    spaces: list[Workspace] = []
    kernels: list[Kernel] = []
    sums = in_order(group, target, parse(group), spaces, kernels)
    block = columns(group, sums, choice)
    tiles = divide_up(sums.width, block)
    levels = plan(sums, target, tiles, choice, spaces)
    fill = pointwise.build(group, target, options, MODEL, absent=sums.node)
    kernels += [replace(part, name="fill_kernel") for part in fill.kernels]
    kernels += [build_level(group, sums, level, block, choice) for level in levels]
    return Module(tuple(kernels), tuple(spaces))


def columns(group: Group, sums: Sums, choice: Choice) -> int:
    """Columns of a program: one warp, a vector a thread, or as few as its registers hold."""
    block = 32 * VECTOR_BYTES // sums.source.meta["val"].dtype.itemsize
    read = sum(node in group.domain.axes for node in group.inputs)
    while block > 32 and block // 32 * (STEP * (1 + read) + 3) > REGISTERS:
        block //= 2
    return min(choice.block or block, power_of_two(sums.width))


def plan(
    sums: Sums, target: Target, tiles: int, choice: Choice, spaces: list[Workspace]
) -> list[Level]:
    """The levels; the lists between them are added to the workspaces."""
    levels: list[Level] = []
    count = sums.count
    lists: tuple[ArgRef, ArgRef] | tuple[None, None] = (None, None)
    while count > LAST:
        even = floor_power(max(1, count * tiles // (PROGRAMS_PER_SM * target.num_sms)))
        chunk = choice.rows or min(max(even, CHUNKS[0]), CHUNKS[1])
        places: tuple[ArgRef, ArgRef] = ("workspace", len(spaces)), ("workspace", len(spaces) + 1)
        levels.append(Level(len(levels) + 1, count, chunk, *lists, places))
        count = 2 * levels[-1].programs
        spaces.append(Workspace((count, sums.width), sums.dtype))
        spaces.append(Workspace((count,), torch.int32))
        lists = places
    levels.append(Level(len(levels) + 1, count, count, *lists, None))
    return levels


def build_level(group: Group, sums: Sums, level: Level, block: int, choice: Choice) -> Kernel:
    """One level's kernel: a program walks its chunk in steps, and keeps up to three sums."""
    domain = group.domain
    mask = "" if sums.width % block == 0 else "col_mask"
    axes = [
        TileAxis("row", domain.rows, sums.rows, (Segment("key", "", 1),), None, False),
        TileAxis("col", domain.cols, sums.width, (Segment("col", mask, block),), 0, False),
    ]
    builder = Builder(group, axes, "col")
    names = [("COUNT", level.count), ("CHUNK", level.chunk), ("COLS", sums.width)]
    constants(builder, names)
    builder.note("col", long(group, f"tl.program_id(1) * {block} + tl.arange(0, {block})"))
    if mask:
        builder.note(mask, "col < COLS")
    builder.bind("col")
    writer = _Writer(builder, sums, level, block, mask)
    writer.prologue()
    builder.push()
    for place in range(STEP):
        writer.load(place)
    ends = [
        writer.end(f"_{place}", before, f"key_{place} != {before}")
        for place, before in enumerate(["key", *(f"key_{i}" for i in range(STEP - 1))])
    ]
    for place, end in enumerate(ends):
        writer.add(place, end)
    writer.note("key", f"key_{STEP - 1}")
    steps = builder.pop()
    builder.body.append(Loop("start", "first", "first + CHUNK", str(STEP), steps))
    writer.epilogue()
    what = "every run" if level.results is None else "runs inside a chunk"
    doc = f"Sums of {what} of equal keys: {describe(group, needed(group))}."
    grid = (level.programs, divide_up(sums.width, block), 1)
    return kernel(builder, f"level_{level.number}_kernel", doc, grid, choice.warps or 1)


@dataclass(frozen=True, slots=True)
class _End:
    """A place where a run may end: suffix of its names, key of the run, values read there."""

    suffix: str
    key: str
    values: dict[fx.Node, Value | tuple[Value, ...]]


@dataclass(frozen=True, slots=True)
class _Writer(Writer):
    """And about a level."""

    level: Level
    block: int
    mask: str

    def key(self, name: str, place: str) -> None:
        """The key of an entry, or of a list's."""
        if self.level.keys is not None:
            self.builder.body.append(Load(name, self.use(self.level.keys), place))
        else:
            Writer.key(self, name, place)  # super() finds no class in one that slots made anew

    @property
    def even(self) -> bool:
        """Whether every chunk is full, so that nothing need be masked."""
        return self.level.count % self.level.chunk == 0 and self.level.chunk % STEP == 0

    def prologue(self) -> None:
        """The chunk, its first and last key, and sums of nothing."""
        self.note("first", "tl.program_id(0) * CHUNK")
        self.note("last", "tl.minimum(first + CHUNK, COUNT) - 1")
        self.key("head", "first")
        self.key("tail", "last")
        if self.level.number == 1:
            check = Check(f"tail < {self.sums.rows - self.sums.bias}", "index out of range")
            self.builder.body.append(check)
        zero = f"tl.full(({self.block},), 0.0, {TRITON_TYPE[self.sums.dtype]})"
        self.note("run", zero, "the run of the key at hand")
        if self.level.results is not None:
            self.note("head_sum", zero)
            self.note("tail_sum", zero)
        self.note("key", "head")

    def load(self, place: int) -> None:
        """An entry: its key and its row; zeros past the end, where the last key is repeated."""
        builder, sums = self.builder, self.sums
        at, row = f"at_{place}", f"from_{place}"
        here = f"start + {place}" if place else "start"
        self.note(at, here if self.even else f"tl.minimum({here}, last)")
        self.key(f"key_{place}", at)
        if self.level.sums is not None:
            builder.body.append(Define(row, self.long(at)))
            arg, dtype, stride, inner = self.use(self.level.sums), sums.dtype, "COLS", "col"
        else:
            assert sums.order is not None
            cast = "" if isinstance(sums.order, fx.Node) else "tl.int64"
            builder.body.append(Load(row, self.use(sums.order), at, cast=cast))
            value = sums.source.meta["val"]
            arg, dtype, stride = self.use(sums.source), value.dtype, str(value.stride(0))
            walked = builder.domain.indirect[sums.node][1]
            steps = axis_strides((walked,), (value.stride(1),), builder.domain.sizes)
            inner = builder.offset(steps, 0)
        tests = [] if self.even else [f"({here} <= last)"]
        mask = " & ".join(filter(None, [*tests, self.mask]))
        half = TRITON_TYPE[torch.float32] if dtype in HALF else ""
        load = Load(f"x_{place}", arg, f"{row} * {stride} + {inner}", mask, half, other="0.0")
        builder.body.append(load)

    def long(self, text: str) -> str:
        return f"{text}.to(tl.int64)" if self.builder.wide else text

    def add(self, place: int, end: _End) -> None:
        """One entry into the sums that it belongs to, once the run before is finished."""
        key, x = f"key_{place}", f"x_{place}"
        self.finish(end)
        self.note("run", f"tl.where({key} == {end.key}, run, 0.0) + {x}")
        if self.level.results is not None:
            self.note("head_sum", f"head_sum + tl.where({key} == head, {x}, 0.0)")
            self.note("tail_sum", f"tail_sum + tl.where({key} == tail, {x}, 0.0)")

    def end(self, suffix: str, key: str, condition: str) -> _End:
        """Where the run of `key` may end: whether it does, its row, and what is read there.

        Read here, before any run is finished: no store comes between these loads.
        """
        builder, sums = self.builder, self.sums
        tests = [f"({condition})"] if condition else []
        tests.append(f"({key} < {sums.rows - self.sums.bias})")  # the last key means no row
        if sums.skip >= 0:
            tests.append(f"({key} != {sums.skip - self.sums.bias})")
        if self.level.results is not None:
            tests += [f"({key} != head)", f"({key} != tail)"]
        self.note(f"done{suffix}", " & ".join(tests))
        row = self.long(key)
        self.note(f"row{suffix}", f"{row} + {self.sums.bias}" if self.sums.bias else row)
        end = _End(suffix, key, {})
        with self.at(end):
            preload(builder, [n for n in needed(builder.group) if n is not sums.node])
        return end

    @contextmanager
    def at(self, end: _End) -> Iterator[None]:
        """Within the block values are those of the row where a run ends."""
        builder = self.builder
        whole, moved = builder.tile["row"], builder.moved
        place = Segment(f"row{end.suffix}", f"done{end.suffix}", 1)
        builder.tile["row"] = TileAxis("row", whole.axes, whole.size, (place,), None, False)
        builder.suffix, builder.moved = end.suffix, "row"
        builder.push("row")
        builder.scopes[-1].values = end.values
        yield
        body = builder.pop()
        builder.body.extend(body)
        builder.tile["row"], builder.suffix, builder.moved = whole, "", moved

    def finish(self, end: _End) -> None:
        """Write the row of the run at hand, where it is complete."""
        with self.at(end):
            deps, depth = frozenset({"row", "col"}), len(self.builder.scopes) - 1
            run = Value(("run",), deps, depth, self.sums.dtype)
            self.builder.put(self.sums.node, run)
            for node in self.sums.outputs:
                self.builder.store(node)

    def epilogue(self) -> None:
        """Finish the last run, or leave both ends to the next level."""
        if self.level.results is None:
            self.finish(self.end("_end", "key", ""))
            return
        totals, keys = map(self.use, self.level.results)
        entry = self.long("2 * tl.program_id(0)")
        # one run is the chunk's first and last: it must be counted once
        self.note("tail_sum", "tl.where(head == tail, 0.0, tail_sum)")
        for place, end in enumerate(("head", "tail")):
            offset = f"({entry} + {place})" if place else entry
            totals_at = f"{offset} * COLS + col"
            first_tile = "tl.program_id(1) == 0"
            self.builder.body.append(Store(totals, totals_at, f"{end}_sum", self.mask, "partial"))
            self.builder.body.append(Store(keys, offset, end, first_tile, "its key"))
