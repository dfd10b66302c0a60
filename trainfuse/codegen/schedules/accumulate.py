"""Reductions over rows: programs walk rows and keep column accumulators; a tail adds them up.

The order of every sum is fixed by the grid, so results are deterministic; there are no atomics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from trainfuse.codegen import reductions
from trainfuse.codegen.builder import Builder, Group
from trainfuse.codegen.held_reductions import reduce_held, reduce_parts
from trainfuse.codegen.ir import ArgRef, Barrier, Kernel, Load, Loop, Module, Store, Workspace
from trainfuse.codegen.reductions import Accumulator, Reduction
from trainfuse.codegen.schedules import kept
from trainfuse.codegen.schedules.ahead import Walk, ahead
from trainfuse.codegen.schedules.common import (
    constants,
    describe,
    inside,
    kernel,
    lanes,
    levels,
    long,
    needed,
    own_axes,
    preload,
)
from trainfuse.codegen.schedules.phases import Phases
from trainfuse.codegen.scope import Value
from trainfuse.codegen.targets import Target
from trainfuse.codegen.tile import Segment, TileAxis, divide_up, power_of_two

MAX_PROGRAMS = 1024  # partial results that one tail tile holds
TAIL_TILE = 8192
TAIL_COLUMNS = 8  # of a tail's tile at least: a sector of fp32


@dataclass(frozen=True, slots=True)
class Plan:
    """How rows are divided.

    programs: how many share the rows. block: rows a step. name, doc: of the main kernel.
    grid_cols: programs along the columns. ahead: whether a step's rows are loaded during the one
    before. walked: one row at a time, read segment by segment, anew
    for each level of its reductions: only accumulators are held. kept: inputs whose walked rows
    are held, too, as they are read. max_registers: that a thread of the main kernel may take,
    where several programs are to share a multiprocessor. extents: of the domain's axes as they are
    walked, if not their sizes. phases: of rows that begin anywhere; a program's begin alike.
    """

    programs: int
    block: int
    name: str
    doc: str
    warps: int
    grid_cols: int = 1
    ahead: bool = False
    walked: bool = False
    kept: tuple[fx.Node, ...] = ()
    max_registers: int | None = None
    extents: tuple[int, ...] | None = None
    phases: Phases | None = None


def late_nodes(group: Group) -> tuple[list[fx.Node], list[fx.Node]]:
    """Nodes that the row loop needs, and those that follow a reduction over rows."""
    domain = group.domain
    rows = frozenset(domain.rows)
    late: set[fx.Node] = set()
    for node in group.nodes:
        if domain.reduced.get(node, frozenset()) & rows or late & set(node.all_input_nodes):
            late.add(node)
    looped: set[fx.Node] = set(group.outputs) - late
    for node in reversed(group.nodes):
        if node in looped or domain.reduced.get(node, frozenset()) & rows:
            looped.update(operand for operand in node.all_input_nodes if operand not in late)
    nodes = needed(group)
    return [n for n in nodes if n in looped and n not in late], [n for n in nodes if n in late]


def accumulators(group: Group, tile: Sequence[TileAxis], late: list[fx.Node]) -> list[Accumulator]:
    """The reductions over rows, with the tile axes that they sum over and keep."""
    domain = group.domain
    found: list[Accumulator] = []
    for node in late:
        reduced = domain.reduced.get(node, frozenset())
        if not reduced:
            continue
        red = reductions.parse(node, domain)
        own = own_axes(domain, red.source)
        deps = frozenset(axis.name for axis in tile if own & frozenset(axis.axes))
        axes = tuple(axis.name for axis in tile if reduced & frozenset(axis.axes))
        found.append(Accumulator(red, axes, deps))
    return found


def row_loop(
    builder: Builder, group: Group, plan: Plan, early: list[fx.Node], accs: list[Accumulator]
) -> None:
    """The loop over blocks of rows: row reductions, stores, accumulation."""
    domain = group.domain
    row = builder.tile["row"]
    for acc in accs:
        reductions.start(builder, acc)
    builder.push("row")
    start = long(group, "start")
    if row.position is None:
        builder.note("row", start)
    else:
        builder.note("row", f"{start} + {_row_lanes(builder, plan)}")
    if row.segments[0].mask:
        builder.note("row_mask", inside(builder, row, "row", "ROWS"))
    preload(builder, [*early, *(acc.red.node for acc in accs)])
    reds = [reductions.parse(node, domain) for node in early if domain.reduced.get(node)]
    for node in early:
        if domain.reduced.get(node):
            reduce_held(builder, reductions.parse(node, domain), "col", reds)
        if node in group.outputs:
            builder.store(node)
    step = plan.programs * plan.block
    seen = f"start // {step} + 1" if builder.extents == group.domain.sizes else ""
    for acc in accs:
        reductions.accumulate(builder, acc, seen)
    body = builder.pop()
    first = "tl.program_id(0)" if plan.block == 1 else f"tl.program_id(0) * {plan.block}"
    if plan.phases is not None:
        first = plan.phases.first(plan.block)
    if plan.programs == 1:
        first = "0"  # known when it is compiled, and with it how many steps there are
    loop = Loop("start", first, "ROWS", str(step), body)
    rows = first if row.position is None else f"{first} + {_row_lanes(builder, plan)}"
    walk = Walk("row", long(group, rows), str(step), "{} < ROWS")
    builder.body.extend(ahead(loop, walk) if plan.ahead else (loop,))


def _row_lanes(builder: Builder, plan: Plan) -> str:
    """A step's rows, from its first one."""
    text = lanes(builder.tile["row"], builder.rank)
    return text if plan.phases is None else f"{plan.phases.period} * {text}"


def walked_loop(
    builder: Builder, group: Group, plan: Plan, early: list[fx.Node], accs: list[Accumulator]
) -> None:
    """The loop over rows that don't fit into registers beside the accumulators.

    Those that do as they lie in memory are read once, each row whole; the second reading of others
    finds them in the cache. Segments are emitted one after
    the other, and the next one's loads before the stores of the one at hand.
    """
    whole = builder.tile["col"]
    into = {acc: [acc.names(builder, i) for i in range(len(whole.segments))] for acc in accs}
    for acc in accs:
        reductions.start(builder, acc)
    builder.push("row", "col")
    builder.note("row", long(group, "start"))
    for node in plan.kept:
        kept.keep(builder, node, len(whole.segments))
    rows = frozenset(n for n in early if group.domain.reduced.get(n))
    level = levels([*early, *(acc.red.node for acc in accs)], rows)
    for current in range(max(level.values()) + 1):
        if current:
            builder.body.append(Barrier("the row is read again"))
        step = Level(
            current,
            plan.programs,
            [reductions.parse(n, group.domain) for n in early if n in rows and level[n] == current],
            [n for n in early if n in group.outputs and n not in rows and level[n] == current],
            [acc for acc in accs if level[acc.red.node] == current],
        )
        step.emit(builder, whole, into)
        for red in step.reds:
            if red.node in group.outputs:
                builder.store(red.node)
    body = builder.pop()
    builder.body.append(Loop("start", "tl.program_id(0)", "ROWS", str(plan.programs), body))


@dataclass(frozen=True, slots=True)
class Level:
    """What one reading of a row does: reductions of it, stores, and sums over rows.

    stride: rows from one that a program walks to its next.
    """

    number: int
    stride: int
    reds: list[Reduction]
    stored: list[fx.Node]
    accs: list[Accumulator]

    def emit(
        self,
        builder: Builder,
        whole: TileAxis,
        into: Mapping[Accumulator, Sequence[Sequence[str]]],
    ) -> None:
        """Segment by segment; afterwards the builder has the reductions, and nothing along them."""
        parts: dict[fx.Node, list[str]] = {red.node: [] for red in self.reds}
        wanted = [*self.stored, *(acc.red.node for acc in self.accs), *parts]
        ready = self.load(builder, whole, 0, wanted)
        for index in range(len(whole.segments)):
            following = None
            if index + 1 < len(whole.segments):
                following = self.load(builder, whole, index + 1, wanted)
            self.enter(builder, whole, index)
            builder.scopes[-1].values.update(ready)
            for red in self.reds:
                part = f"{builder.name_of(red.node)}_part{index}"
                _, texts = reductions.operand(builder, red, "col")
                builder.note(part, reductions.guarded(builder, ("col",), 0, texts[0], red.identity))
                parts[red.node].append(part)
            for node in self.stored:
                builder.store(node)
            for acc in self.accs:
                wide = "col" in acc.deps - set(acc.axes)
                names = [into[acc][index if wide else 0]]
                reductions.accumulate(builder, acc, f"start // {self.stride} + 1", names)
            builder.forget("col")
            ready = following or {}
        builder.tile["col"], builder.suffix = whole, ""
        for red in self.reds:
            reduce_parts(builder, red, "col", parts[red.node])

    def enter(self, builder: Builder, whole: TileAxis, index: int) -> None:
        builder.tile["col"] = replace(whole, segments=(whole.segments[index],))
        builder.suffix = f"_r{self.number}s{index}"  # the reading, the segment

    def load(
        self, builder: Builder, whole: TileAxis, index: int, wanted: list[fx.Node]
    ) -> dict[fx.Node, Value | tuple[Value, ...]]:
        """The loads of a segment, emitted now for later."""
        self.enter(builder, whole, index)
        preload(builder, ancestors(builder.group, wanted))
        return builder.forget("col")


def ancestors(group: Group, wanted: Sequence[fx.Node]) -> list[fx.Node]:
    """Members that some nodes are made of, as far as reductions of earlier readings; in order."""
    reached: set[fx.Node] = set()
    members = set(group.nodes)
    pending = list(wanted)
    while pending:
        node = pending.pop()
        if node in members and node not in reached:
            reached.add(node)
            pending += [
                n for n in node.all_input_nodes if not group.domain.reduced.get(n, frozenset())
            ]
    return [node for node in group.nodes if node in reached]


def build(
    group: Group,
    target: Target,
    tile: Sequence[TileAxis],
    plan: Plan,
    prologue: Sequence[tuple[str, str]],
) -> Module:
    """Main kernel and, when several programs share the rows, the tail.

    tile: the row axis, and the column axis if there are columns. prologue: definitions of the
    columns' indices and masks, (name, expression).
    """
    early, late = late_nodes(group)
    builder = Builder(group, tile, "col" if len(tile) > 1 else "row", plan.extents)
    accs = accumulators(group, tile, late)
    sizes = [("ROWS", tile[0].size), *(("COLS", axis.size) for axis in tile[1:])]
    constants(builder, sizes)
    for name, text in prologue:
        builder.note(name, text)
    if plan.walked:
        walked_loop(builder, group, plan, early, accs)
    else:
        builder.bind(*(axis.name for axis in tile[1:]))
        row_loop(builder, group, plan, early, accs)
    builder.bind(*(axis.name for axis in tile[1:]))
    finished = [(acc, reductions.finish(builder, acc)) for acc in accs]
    grid = (plan.programs, plan.grid_cols, 1)
    if plan.programs == 1:
        for acc, states in finished:
            reductions.settle(builder, acc.red, states, acc.deps - set(acc.axes))
        for node in late:
            if node in group.outputs:
                builder.store(node)
        return Module((kernel(builder, plan.name, plan.doc, grid, plan.warps),))
    if not accs:
        only = kernel(builder, plan.name, plan.doc, grid, plan.warps)
        return Module((replace(only, max_registers=plan.max_registers),))
    parts = Parts(group, plan)
    for acc, states in finished:
        parts.store(builder, acc, states)
    main = kernel(builder, plan.name, plan.doc, grid, plan.warps)
    main = replace(main, max_registers=plan.max_registers)
    return Module((main, tail(group, target, parts, late)), tuple(parts.workspaces))


class Parts:
    """Partial results of programs: where the main kernel leaves them and the tail finds them."""

    def __init__(self, group: Group, plan: Plan) -> None:
        self.group = group
        self.programs = plan.programs
        self.phases = plan.phases
        self.workspaces: list[Workspace] = []
        self.places: list[tuple[Accumulator, list[ArgRef], bool]] = []

    def store(self, builder: Builder, acc: Accumulator, states: list[list[str]]) -> None:
        """Write a program's partial states to workspaces of [programs, columns]."""
        kept = acc.deps - set(acc.axes)
        wide = "col" in kept
        width = builder.tile["col"].size if wide else 1
        width = self.phases.padded if wide and self.phases else width
        args: list[ArgRef] = []
        for place in range(len(acc.red.states)):
            arg: ArgRef = ("workspace", len(self.workspaces))
            self.workspaces.append(Workspace((self.programs, width), acc.red.dtype))
            args.append(arg)
            builder.args[arg] = None
            for index, names in enumerate(states):
                offset, mask = self.place(builder, wide, index)
                builder.body.append(Store(arg, offset, names[place], mask, "partial"))
        self.places.append((acc, args, wide))

    def place(self, builder: Builder, wide: bool, index: int) -> tuple[str, str]:
        if wide:
            segment = builder.segment("col", index)
            if self.phases is None:
                return f"tl.program_id(0) * COLS + {segment.index}", segment.mask
            place = segment.vectors.index if segment.vectors else f"lead + {segment.index}"
            return f"tl.program_id(0) * {self.phases.padded} + {place}", segment.mask
        offset = "tl.program_id(0)"
        if builder.rank > 1:
            offset += " + tl.zeros((1, 1), tl.int32)"
        shared = "col" in builder.tile and builder.tile["col"].shared
        return offset, "tl.program_id(1) == 0" if shared else ""

    def offset(self, wide: bool) -> str:
        """Where the tail finds them."""
        if not wide:
            return "part"
        if self.phases is None:
            return "part * COLS + col"
        lead = f"part % {self.phases.period} * COLS % {self.phases.count}"
        return f"part * {self.phases.padded} + {lead} + col"


def tail(group: Group, target: Target, parts: Parts, late: list[fx.Node]) -> Kernel:
    """Adds the partial results in a fixed order, then what follows on the totals."""
    domain = group.domain
    programs = parts.programs
    held = power_of_two(programs)
    wide = any(own_axes(domain, node) for node in late)
    part_mask = "" if held == programs else "part_mask"
    part = TileAxis("part", (), programs, (Segment("part", part_mask, held),), 0, False)
    col = tail_columns(group, target, held)
    block = col.segments[0].width
    builder = Builder(group, [part, col] if wide else [part], "part")
    constants(builder, [("PARTS", programs), ("COLS", col.size)])
    builder.note("part", f"tl.arange(0, {held}){'[:, None]' if wide else ''}")
    if part_mask:
        builder.note(part_mask, "part < PARTS")
    if wide:
        text = f"tl.program_id(0) * {block} + {lanes(col, 2)}"
        builder.note("col", long(group, text))
        if col.segments[0].mask:
            builder.note("col_mask", "col < COLS")
    builder.bind("part", "col")
    for acc, args, by_column in parts.places:
        combine(builder, acc.red, args, parts.offset(by_column))
    for node in late:
        if node in group.outputs:
            builder.store(node)
    doc = f"Adds the partial results in order: {describe(group, late)}."
    grid = divide_up(col.size, block) if wide else 1
    return kernel(builder, "tail_kernel", doc, (grid, 1, 1), 4)


def tail_columns(group: Group, target: Target, held: int) -> TileAxis:
    """The tail's column axis: as many columns a program as its tile of partials leaves room for."""
    domain = group.domain
    width = domain.extent(domain.cols)
    # few partials: rather a program on every multiprocessor than long ones on some
    spread = power_of_two(divide_up(width, target.num_sms))
    block = 4096 if target.interpreted else max(TAIL_COLUMNS, min(TAIL_TILE // held, spread))
    block = min(power_of_two(width), block)
    mask = "" if width % block == 0 else "col_mask"
    return TileAxis("col", domain.cols, width, (Segment("col", mask, block),), 1, True)


def combine(builder: Builder, red: Reduction, args: Sequence[ArgRef], offset: str) -> None:
    """One reduction's partial states, loaded from an offset and merged."""
    wide = offset != "part"
    names: list[str] = []
    for state, arg in zip(red.states, args, strict=True):
        name = f"{builder.name_of(red.node)}_{state}"
        names.append(name)
        builder.args[arg] = None
        other = red.identity if state == "acc" else "0.0"
        masks = [builder.segment("part", 0).mask]
        if wide:
            masks.append(builder.segment("col", 0).mask)
        mask = " & ".join(filter(None, masks))
        builder.body.append(Load(name, arg, offset, mask, "", "partial", other))
    deps = frozenset({"part", "col"} if wide else {"part"})
    acc = Accumulator(red, ("part",), deps)
    merged = reductions.merge(builder, red, names, 0)
    reductions.settle(builder, acc.red, [merged], deps - {"part"})
