"""Maximum and sum of exponentials of a long row in one pass, as a softmax needs them.

Source: Milakov and Gimelshein, arXiv:1805.02867.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autodiff.ops import op_name
from trainfuse.codegen import reductions
from trainfuse.codegen.builder import Builder, Group
from trainfuse.codegen.ir import Define, Reduce
from trainfuse.codegen.reductions import Reduction
from trainfuse.codegen.schedules.common import root
from trainfuse.codegen.scope import Value

Pair = tuple[Reduction, Reduction]
GROUP = 8
"""Neighbours that share a running maximum: a thread's, of a 16-byte load of halves."""


def grouped(builder: Builder) -> bool:
    """Whether a chunk's maxima are kept by groups of neighbours, of a single row."""
    return builder.rank == 1 and GROUP > 1 and builder.segment("col", 0).width % GROUP == 0


def pairs(group: Group, reds: Sequence[Reduction]) -> list[Pair]:
    """(maximum, sum) of reductions where the sum is of exp(x - maximum of x)."""
    largest = {red.node: red for red in reds if red.op == "max"}
    found: list[Pair] = []
    for red in reds:
        if red.op != "sum" or not red.dtype.is_floating_point:
            continue
        shifted = _operand(group, red.source, "aten.exp.default")
        shift = _operands(group, shifted, "aten.sub.Tensor")
        if shift is None:
            continue
        top = largest.pop(root(group, shift[1]), None)
        if top is not None and root(group, top.source) is root(group, shift[0]):
            found.append((top, red))
    return found


def _operands(group: Group, node: fx.Node | None, name: str) -> tuple[fx.Node, fx.Node] | None:
    """The two tensors of a binary node of this op inside the group."""
    node = None if node is None else root(group, node)
    if node is None or node not in group.nodes or op_name(node.target) != name:
        return None
    first, second = node.args[:2]
    if isinstance(first, fx.Node) and isinstance(second, fx.Node) and "alpha" not in node.kwargs:
        return first, second
    return None


def _operand(group: Group, node: fx.Node, name: str) -> fx.Node | None:
    """The tensor of a unary node of this op inside the group."""
    node = root(group, node)
    if node not in group.nodes or op_name(node.target) != name:
        return None
    operand = node.args[0]
    return operand if isinstance(operand, fx.Node) else None


def start(builder: Builder, pair: Pair, *, lanes: bool = False) -> None:
    """Running maximum of the row, or of each lane, and sums of exp(x - maximum), a lane each."""
    top, total = (builder.name_of(red.node) for red in pair)
    shape = reductions.shape_text(builder, 0, frozenset({"row", "col"}))
    row = shape if lanes else reductions.shape_text(builder, 0, frozenset({"row"}))
    if not lanes and grouped(builder):
        row = shape = f"({builder.segment('col', 0).width // GROUP},)"
    builder.note(f"{top}_run", f'tl.full({row}, float("-inf"), tl.float32)', "running maximum")
    builder.note(f"{total}_run", f"tl.full({shape}, 0.0, tl.float32)", "sums of exp(x - maximum)")


def accumulate(builder: Builder, pair: Pair, *, lanes: bool = False) -> None:
    """One chunk: one exponential an element. lanes: each has a maximum of its own."""
    top, total = (builder.name_of(red.node) for red in pair)
    _, texts = reductions.operand(builder, pair[0], "col")
    text = reductions.guarded(builder, ("col",), 0, texts[0], 'float("-inf")')
    coarse = root(builder.group, pair[1].source) in builder.coarse
    function = "online_softmax_lanes" if lanes else "online_softmax"
    more = "" if lanes else keeping(builder)
    if not lanes and grouped(builder):
        function, more = "online_softmax_groups", f", {GROUP}"
    builder.body.append(
        Define(
            f"{top}_run, {total}_run",
            f"lib.{function}({top}_run, {total}_run, {text}, {coarse}{more})",
            "online softmax",
        )
    )


def keeping(builder: Builder) -> str:
    """Further arguments where a program has several rows: their dimension stays."""
    return ", True" if builder.rank > 1 else ""


def partial(builder: Builder, pair: Pair) -> list[str]:
    """Names of what a part of a row leaves, from its lanes: its maximum, and its sum."""
    names = [f"{builder.name_of(red.node)}_all" for red in pair]
    runs = ", ".join(f"{builder.name_of(red.node)}_run" for red in pair)
    text = f"lib.join_softmax({runs}{keeping(builder)})"
    builder.body.append(Reduce(", ".join(names), text, "join the lanes"))
    return names


def merge(builder: Builder, pair: Pair, parts: Sequence[str]) -> None:
    """Give both nodes their values from those of a row's parts."""
    top, total = (builder.name_of(red.node) for red in pair)
    text = f"lib.join_softmax({', '.join(parts)}{keeping(builder)})"
    builder.body.append(Reduce(f"{top}, {total}_all", text, "merge the parts"))
    builder.body.append(Reduce(total, f"lib.nan_if_empty({top}, {total}_all)"))
    settle(builder, pair, [top, total])


def finish(builder: Builder, pair: Pair) -> None:
    """Give both nodes their values."""
    names = [builder.name_of(red.node) for red in pair]
    top, total = names
    if grouped(builder):
        merge(builder, pair, [f"{name}_run" for name in names])
        return
    builder.body.append(Reduce(top, f"{top}_run", op_name(pair[0].node.target)))
    builder.body.append(
        Reduce(
            total,
            f"lib.finish_softmax({top}, {total}_run{keeping(builder)})",
            op_name(pair[1].node.target),
        )
    )
    settle(builder, pair, names)


def settle(builder: Builder, pair: Pair, names: Sequence[str]) -> None:
    """Say that both nodes' values have these names."""
    depth = len(builder.scopes) - 1
    for red, name in zip(pair, names, strict=True):
        builder.put(red.node, Value((name,), frozenset({"row"}), depth, red.dtype))
