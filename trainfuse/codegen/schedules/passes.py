"""A long row gone over several times: what each pass does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import fx

from trainfuse.codegen import reductions
from trainfuse.codegen.builder import Builder, Group
from trainfuse.codegen.ir import ArgRef, Barrier, Load, Loop, Statement, Store
from trainfuse.codegen.reductions import Accumulator, Reduction
from trainfuse.codegen.schedules import online, vectors
from trainfuse.codegen.schedules.ahead import Walk, ahead
from trainfuse.codegen.schedules.common import (
    aligned,
    columns,
    lanes,
    levels,
    long,
    own_axes,
    read_by,
    spanning,
)
from trainfuse.codegen.schedules.online import Pair, pairs

ROW = frozenset({"row"})
ROW_AND_COL = frozenset({"row", "col"})


@dataclass(frozen=True, slots=True)
class Pass:
    """One level of a row in chunks: reductions of values that are ready, then what they allow.

    picks: single elements, read first: a gradient may be written over its logits. accs, both:
    reductions made in a loop over the chunks, both: a maximum with its sum. thin, wide: outputs of
    one element a row, and of the whole row.
    """

    accs: list[Accumulator]
    both: list[Pair]
    picks: list[Reduction]
    thin: list[fx.Node]
    wide: list[fx.Node]

    @property
    def walks(self) -> bool:
        """Whether it goes over the row at all."""
        return bool(self.accs or self.both or self.wide)

    def begin(self, builder: Builder) -> None:
        """What comes before the walk: rows' own values, and single elements."""
        for node in self.thin:
            builder.store(node)
        for red in self.picks:
            reductions.pick(builder, red, "col")
        if self.picks:
            builder.body.append(Barrier("every warp has its element: it may be written over"))

    def read(self) -> list[fx.Node]:
        """Values that are computed in it."""
        reds = [*(acc.red for acc in self.accs), *(red for pair in self.both for red in pair)]
        found = [node for red in (*reds, *self.picks) for node in red.node.all_input_nodes]
        return [*found, *self.thin, *self.wide]


def plan(group: Group, nodes: list[fx.Node], *, online: bool) -> list[Pass]:
    """What each pass over a row does, one for each level of reductions.

    online: a maximum and the sum of exponentials that it shifts are made in one.
    """
    domain = group.domain
    level = levels(nodes, frozenset(n for n in nodes if domain.reduced.get(n)))
    reds = [reductions.parse(node, domain) for node in nodes if domain.reduced.get(node)]
    fused = pairs(group, reds) if online else []
    paired = {red.node for pair in fused for red in pair}
    found: list[Pass] = []
    for current in range(max(level.values()) + 1):
        here = [node for node in nodes if level[node] == current]
        single = [red for red in reds if red.node in here and red.node not in paired]
        stored = [n for n in here if n in group.outputs and not domain.reduced.get(n)]
        wide = [n for n in stored if own_axes(domain, n) & frozenset(domain.cols)]
        found.append(
            Pass(
                [Accumulator(red, ("col",), ROW_AND_COL) for red in single if red.op != "pick"],
                [pair for pair in fused if pair[0].node in here],
                [red for red in single if red.op == "pick"],
                [node for node in stored if node not in wide],
                wide,
            )
        )
    return found


def overwritable(group: Group, plan: list[Pass]) -> frozenset[tuple[int, int]]:
    """(output, input) numbers where no later pass reads what the output would be written over."""
    found = aligned(group)
    for number, step in enumerate(plan):
        late = read_by(group, [node for later in plan[number + 1 :] for node in later.read()])
        outputs = {group.outputs.index(node) for node in step.wide}
        found -= {(o, i) for o in outputs for i, node in enumerate(group.inputs) if node in late}
    return found


def hinted(
    body: Sequence[Statement], before: set[ArgRef], later: set[ArgRef], *, streams: bool
) -> tuple[Statement, ...]:
    """A pass with what the L2 cache is told: keep what a later one reads again, and then drop it.

    before, later: inputs that passes before and after read. streams: what is written makes way.
    """
    told: list[Statement] = []
    for statement in body:
        if isinstance(statement, Load) and statement.arg in before | later:
            evict = "last" if statement.arg in later else "first"
            told.append(replace(statement, evict=evict))
        elif isinstance(statement, Store) and streams:
            told.append(replace(statement, evict="first"))
        else:
            told.append(statement)
    return tuple(told)


def read_again(group: Group, plan: Sequence[Pass], number: int) -> tuple[set[ArgRef], set[ArgRef]]:
    """Inputs of whole rows that the passes before and after one read."""
    whole = spanning(group, group.inputs)
    found: list[set[ArgRef]] = []
    for part in (plan[:number], plan[number + 1 :]):
        read = read_by(group, [node for step in part for node in step.read()])
        found.append({("input", group.inputs.index(n)) for n in whole if n in read})
    return found[0], found[1]


def walk(
    builder: Builder,
    step: Pass,
    back: bool,
    *,
    early: bool,
    tell: Callable[[Sequence[Statement]], tuple[Statement, ...]] = tuple,
) -> None:
    """One pass over the chunks: accumulate, and store what is ready.

    back: from the last chunk to the first: what the pass before read last is still in the cache.
    early: a chunk is loaded while the one before it is computed. tell: adds what caches are told.
    """
    for acc in step.accs:
        reductions.start(builder, acc)
    for pair in step.both:
        online.start(builder, pair)
    segment, col = builder.segment("col", 0), builder.tile["col"]
    width, vector = segment.width, segment.vectors
    length = col.size + (vector.before if vector else 0)
    builder.push("col")
    last = 0
    if back:
        last = (length - 1) // width * width
        builder.note("start", f"{last} - done", "backwards: the last chunks are in the cache")
    text = lanes(col, builder.rank)
    if vector:
        vectors.place(builder, long(builder.group, f"start + {text}"))
    else:
        builder.note("col", columns(builder.group, col, builder.rank, f"start + {text}"))
        if segment.mask:
            builder.note(segment.mask, "col < COLS")
    # the first block may have lanes outside, backwards or in vectors: their counts lag behind
    late = segment.mask and (back or vector)
    seen = "" if late else f"{'done' if back else 'start'} // {width} + 1"
    for acc in step.accs:
        reductions.accumulate(builder, acc, seen)
    for pair in step.both:
        online.accumulate(builder, pair)
    for node in step.wide:
        builder.store(node)
    stop = str(length) if vector else "COLS"
    loop = Loop("done" if back else "start", "0", stop, str(width), tell(builder.pop()))
    text = f"{last} + {text}" if last else text
    if vector:
        first, index, end = long(builder.group, text), vector.index, vector.stop
    else:
        first, index, end = columns(builder.group, col, builder.rank, text), "col", "COLS"
    inside = f"({{0}} >= 0) & ({{0}} < {end})" if back else f"{{0}} < {end}"
    way = Walk(index, first, str(-width if back else width), inside)
    builder.body.extend(ahead(loop, way) if early else (loop,))
    if vector and step.wide:
        vectors.store_ends(builder, step.wide, vector.before + 1)
