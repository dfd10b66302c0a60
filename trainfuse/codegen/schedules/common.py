"""What schedules share: the needed nodes in order, register estimates, index definitions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from torch import fx

from autodiff.ops import lookup, op_name
from autodiff.philox import BLOCK
from trainfuse.codegen.builder import Builder, Group, masks, wide
from trainfuse.codegen.ir import Constant, Kernel
from trainfuse.codegen.tile import (
    VECTOR_BYTES,
    Segment,
    TileAxis,
    cover,
    run_terms,
    value_strides,
    word_strides,
)
from trainfuse.fusion.domains import Domain
from trainfuse.fusion.indirect import source_of

THREADS = 32


def needed(group: Group) -> list[fx.Node]:
    """Nodes that the outputs depend on, in order."""
    members = set(group.nodes)
    wanted: set[fx.Node] = set(group.outputs)
    for node in reversed(group.nodes):
        if node in wanted:
            wanted.update(operand for operand in node.all_input_nodes if operand in members)
    return [node for node in group.nodes if node in wanted]


def own_axes(domain: Domain, node: fx.Node) -> frozenset[int]:
    """Domain axes that a value has."""
    return frozenset(axis for dim in domain.axes[node] for axis in dim)


def aligned(group: Group) -> frozenset[tuple[int, int]]:
    """(output, input) numbers of whole values that walk the group's axes alike."""
    axes = group.domain.axes
    every = frozenset(range(len(group.domain.sizes)))
    return frozenset(
        (o, i)
        for o, output in enumerate(group.outputs)
        for i, source in enumerate(group.inputs)
        if axes.get(source) == axes[output] and own_axes(group.domain, output) == every
    )


def written_over(group: Group, elements: int, warps: int) -> frozenset[tuple[int, int]]:
    """(output, input) numbers for programs that load a tile's elements before they store any.

    An element that a result is made of is in registers by the time that the result is, whichever
    thread loaded it; of one that it isn't made of, another thread might be late. elements: of a
    tile; with more threads than those several hold one, and none waits until all have read it.
    """
    if elements < THREADS * warps:
        return frozenset()
    looked_up = {source_of(node) for node in group.domain.indirect}
    return frozenset(
        (o, i)
        for o, i in aligned(group)
        if group.inputs[i] not in looked_up
        and group.inputs[i] in read_by(group, [group.outputs[o]])
    )


def spanning(group: Group, nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Those that have an element for each of the domain's."""
    domain = group.domain
    every = frozenset(range(len(domain.sizes)))
    return [n for n in nodes if n in domain.axes and own_axes(domain, n) == every]


def read_by(group: Group, nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Inputs whose elements these values are computed of, down to reductions made before."""
    members, found = set(group.nodes), set[fx.Node]()
    pending, seen = list(nodes), set[fx.Node]()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node not in members:
            found.add(node)
        elif not group.domain.reduced.get(node):
            pending += [operand for operand in node.all_input_nodes if reads(node, operand)]
    return found


def reductions_read_by(group: Group, nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Reductions that values are made of, none by way of another."""
    members, found = set(group.nodes), set[fx.Node]()
    pending, seen = list(nodes), set[fx.Node]()
    while pending:
        node = pending.pop()
        if node in seen or node not in members:
            continue
        seen.add(node)
        if group.domain.reduced.get(node):
            found.add(node)
        else:
            pending += node.all_input_nodes
    return found


def levels(nodes: list[fx.Node], reduced: frozenset[fx.Node]) -> dict[fx.Node, int]:
    """How many reductions in a row each node waits for."""
    found: dict[fx.Node, int] = {}
    for node in nodes:
        found[node] = max(
            (found[n] + (n in reduced) for n in node.all_input_nodes if n in found), default=0
        )
    return found


def preload(builder: Builder, nodes: Iterable[fx.Node]) -> None:
    """Emit all loads first: they overlap, and no store comes before a load.

    Nothing else may move a load over a store or a reduction: the compiler can't tell that they
    don't alias.
    """
    for node in nodes:
        for operand in node.all_input_nodes:
            if operand in builder.inputs and operand in builder.domain.axes:
                if reads(node, operand) and not builder.keeps(operand):
                    builder.value(operand)
    waiting: set[fx.Node] = set()
    for node in needed(builder.group):
        if builder.domain.reduced.get(node) or waiting.intersection(node.all_input_nodes):
            waiting.add(node)
    for node in nodes:
        if node in builder.domain.indirect and node not in waiting:
            builder.value(node)


def row_extents(group: Group, order: Sequence[int]) -> tuple[int, ...]:
    """Sizes of the axes as a flat walk in an order takes them, so that masks are drawn by fours.

    Where a mask's rows end within a block of words the innermost axis goes on to the block's end.
    """
    domain = group.domain
    if not order:
        return domain.sizes
    inner = order[-1]
    for mask in masks(group):
        strides = word_strides(domain, mask)
        beyond = -domain.sizes[inner] % BLOCK
        extents = (*domain.sizes[:inner], domain.sizes[inner] + beyond, *domain.sizes[inner + 1 :])
        for sizes in (domain.sizes, extents):
            if run_terms(order, "i", strides, sizes, {}) == ["i"]:
                return sizes
    return domain.sizes


def inside(builder: Builder, axis: TileAxis, index: str, limit: str) -> str:
    """The condition that lanes of a flat walk are elements; limit: text of the walk's length."""
    tests = [f"{index} < {limit}"] if axis.size % axis.segments[0].width else []
    inner = axis.axes[-1]
    extent, size = builder.extents[inner], builder.domain.sizes[inner]
    if extent != size:
        tests.append(f"{index} % {extent} < {size}")
    return " & ".join(f"({test})" for test in tests) if len(tests) > 1 else "".join(tests)


def reads(node: fx.Node, operand: fx.Node) -> bool:
    """Whether a node reads an operand's elements, not only its shape."""
    name = str(node.target)
    return (
        "_like" not in name
        and "new_" not in name
        and not ("copy.default" in name and "_to_" not in name and operand is node.args[0])
    )


def live_tiles(group: Group) -> int:
    """Most values that span every axis alive at one point, in program order: register pressure."""
    domain = group.domain
    every = frozenset(range(len(domain.sizes)))
    full = {node for node in domain.axes if own_axes(domain, node) == every}
    order = [n for n in needed(group) if lookup(n.target).kind != "view"]
    reads = [{root(group, operand) for operand in node.all_input_nodes} for node in order]
    last: dict[fx.Node, int] = {}
    for place, operands in enumerate(reads):
        last.update(dict.fromkeys(operands, place))
    alive: set[fx.Node] = set()
    most = 1
    for place, (node, operands) in enumerate(zip(order, reads, strict=True)):
        alive |= operands & full
        alive |= {node} & full
        most = max(most, len(alive))
        alive = {n for n in alive if last.get(n, -1) > place}
    return most


def root(group: Group, node: fx.Node) -> fx.Node:
    """The value behind a chain of views of a group."""
    while (
        node.op == "call_function"
        and lookup(node.target).kind == "view"
        and op_name(node.target) != "getitem"
        and node in group.nodes
    ):
        node = node.args[0]  # type: ignore[assignment]  # a view's source
    return node


def widest(group: Group) -> int:
    """Bytes of the widest element read or written, of values as large as the domain."""
    domain = group.domain
    nodes = [
        node for node in (*group.inputs, *domain.indirect, *group.outputs) if node in domain.axes
    ]
    whole = [node for node in nodes if len(own_axes(domain, node)) == len(domain.sizes)]
    return max(node.meta["val"].dtype.itemsize for node in whole or nodes)


def rows_are_neighbours(domain: Domain) -> bool:
    """Whether rows lie side by side in memory: axes are numbered as the operands lie in it."""
    return len(domain.sizes) - 1 in domain.rows


def lanes(axis: TileAxis, rank: int, segment: int = 0) -> str:
    """The lanes of a tile axis, along its own dimension of a tile."""
    shape = "" if rank < 2 else "[:, None]" if axis.position == 0 else "[None, :]"
    return f"tl.arange(0, {axis.segments[segment].width}){shape}"


def column_segments(size: int) -> list[Segment]:
    """Segments that cover a whole row held in registers."""
    blocks = cover(size)
    names = ["col"] if len(blocks) == 1 else [f"col_{index}" for index in range(len(blocks))]
    return [
        Segment(
            name,
            f"{name}_mask" if start + width > size else "",
            width,
            str(start // 4) if start % 4 == 0 else None,
        )
        for name, (start, width) in zip(names, blocks, strict=True)
    ]


def column_definitions(group: Group, col: TileAxis, rank: int) -> list[tuple[str, str]]:
    """(name, expression) of the index tensors and masks of a row's segments."""
    found: list[tuple[str, str]] = []
    start = 0
    for index, segment in enumerate(col.segments):
        text = lanes(col, rank, index)
        text = columns(group, col, rank, f"{start} + {text}" if start else text)
        found.append((segment.index, text))
        if segment.mask:
            found.append((segment.mask, f"{segment.index} < COLS"))
        start += segment.width
    return found


def columns(group: Group, col: TileAxis, rank: int, text: str) -> str:
    """A column index, of which a thread has as many neighbours as can be moved at once.

    Triton has it hold what any operand allows: eight of a row of weights, and then of rows that
    begin at odd addresses, too, each lane 16 bytes from the next. Lane by lane these are read whole
    sectors at a time, and what a block holds past a row's end is no code. Or sixteen of a mask of
    bytes, and of halves two vectors that lie side by side: a warp's load or store of one of them
    then has half of each sector, or the values are moved between threads.
    """
    text, together = long(group, text), neighbours(group) or beside_narrow(group)
    if together is None:
        return text
    hint = f"[{together}, 1]" if col.position == 0 else f"[1, {together}]"
    return f"tl.max_contiguous({text}, {hint if rank > 1 else together})"


def neighbours(group: Group) -> int | None:
    """Elements of a row that can be moved at once, where threads would hold more of something else.

    That is an operand or partial sums along the columns alone, or a mask. None where rows are moved
    in whole vectors, or their elements lie apart.
    """
    domain = group.domain
    rows, cols = frozenset(domain.rows), frozenset(domain.cols)
    owns = [own_axes(domain, node) for node in group.inputs if node in domain.axes]
    summed = any(axes & rows for axes in domain.reduced.values())
    if not (summed or masks(group) or any(own and own <= cols for own in owns)):
        return None
    found: list[int] = []
    for node in (*group.inputs, *group.outputs):
        if node in domain.axes and len(own_axes(domain, node)) == len(domain.sizes):
            strides = value_strides(domain, node)
            apart = math.gcd(*(step for axis, step in strides.items() if axis != domain.cols[-1]))
            if strides[domain.cols[-1]] != 1 or apart == 0:
                return None
            found.append(apart & -apart)
            if found[-1] * node.meta["val"].dtype.itemsize >= VECTOR_BYTES:
                return None
    return max(found, default=None)


def beside_narrow(group: Group) -> int | None:
    """Elements of a vector of the widest whole values, where rows of something narrower are read.

    None where a row's elements lie apart.
    """
    domain = group.domain
    values = [node for node in (*group.inputs, *group.outputs) if node in domain.axes]
    dense = [node for node in values if value_strides(domain, node).get(domain.cols[-1]) == 1]
    wide = widest(group)
    if rows_are_neighbours(domain) or not any(
        node.meta["val"].dtype.itemsize < wide for node in dense
    ):
        return None
    whole = [node for node in values if len(own_axes(domain, node)) == len(domain.sizes)]
    return VECTOR_BYTES // wide if set(whole) <= set(dense) else None


def constants(builder: Builder, pairs: Iterable[tuple[str, int]]) -> None:
    """Named sizes at the head of a kernel; strides equal to the row's length print as COLS."""
    for name, value in pairs:
        builder.body.append(Constant(name, value))
        if name == "COLS" and value > 1:
            builder.sizes[value] = name


def long(group: Group, text: str) -> str:
    """An index as int64 when the group's offsets need it."""
    return f"tl.cast({text}, tl.int64)" if wide(group) else text


def describe(group: Group, nodes: Sequence[fx.Node]) -> str:
    """ATen ops of a kernel, for its docstring."""
    names = [
        op_name(node.target).split(".")[1] for node in nodes if lookup(node.target).kind != "view"
    ]
    text = ", ".join(dict.fromkeys(names))
    return text if len(text) <= 80 else text[:77] + "..."


def kernel(
    builder: Builder, name: str, doc: str, grid: tuple[int, int, int], num_warps: int
) -> Kernel:
    """The finished kernel."""
    assert len(builder.scopes) == 1
    order = {"input": 0, "output": 1, "workspace": 2}
    args = tuple(sorted(builder.args, key=lambda arg: (order[arg[0]], arg[1])))
    words = set(re.findall(r"\w+", repr([s for s in builder.body if not isinstance(s, Constant)])))
    body = tuple(s for s in builder.body if not isinstance(s, Constant) or s.name in words)
    return Kernel(name, doc, args, body, grid, num_warps)
