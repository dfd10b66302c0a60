"""Reductions of values that are held whole: each at once, sums two at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from autodiff.ops import op_name
from trainfuse.codegen.builder import Builder, Value
from trainfuse.codegen.ir import Define, Reduce
from trainfuse.codegen.reductions import (
    Reduction,
    guarded,
    inside_row,
    join_parts,
    lanes,
    operand,
    put_moments,
    spread,
)


def reduce_held(
    builder: Builder, red: Reduction, axis: str, others: Sequence[Reduction] = ()
) -> None:
    """Reduce a value whose whole extent along `axis` is held in registers, if that isn't done yet.

    others: reductions along it that will be wanted, of which a sum takes one that is ready along.
    """
    if builder.find(red.node) is not None:
        return
    value, texts = _spread_out(builder, red, axis)
    deps = value.deps - {axis}
    if red.moments:
        held_moments(builder, red, axis, texts, deps)
        return
    parts = [guarded(builder, (axis,), i, text, red.identity) for i, text in enumerate(texts)]
    if _sums(red) and _one_width(builder, axis, parts):
        for other in others:
            if other.node is red.node or not (_sums(other) and _ready(builder, other)):
                continue
            beside, texts = _spread_out(builder, other, axis)
            if beside.deps == value.deps:
                found = [guarded(builder, (axis,), i, t, "0.0") for i, t in enumerate(texts)]
                reduce_both(builder, (red, other), axis, (parts, found), deps)
                return
    reduce_parts(builder, red, axis, parts, deps)


def _spread_out(builder: Builder, red: Reduction, axis: str) -> tuple[Value, list[str]]:
    """What is reduced, and its text in each segment."""
    value, texts = operand(builder, red, axis)
    return value, [spread(builder, value, axis, i, text) for i, text in enumerate(texts)]


def _sums(red: Reduction) -> bool:
    return red.op in ("sum", "mean") and red.dtype == torch.float32


def _one_width(builder: Builder, axis: str, parts: Sequence[str]) -> bool:
    """Whether segments are as wide as each other: they are combined before lanes are."""
    return len({builder.segment(axis, index).width for index in range(len(parts))}) == 1


def _ready(builder: Builder, red: Reduction) -> bool:
    """Whether a reduction isn't made yet, but all that it is made of is."""
    if builder.find(red.node) is not None:
        return False
    pending, seen = list(red.node.all_input_nodes), set[fx.Node]()
    while pending:
        node = pending.pop()
        if node in seen or node not in builder.members or builder.find(node) is not None:
            continue
        if builder.domain.reduced.get(node):
            return False
        seen.add(node)
        pending += node.all_input_nodes
    return True


def reduce_both(
    builder: Builder,
    reds: tuple[Reduction, Reduction],
    axis: str,
    parts: tuple[Sequence[str], Sequence[str]],
    deps: frozenset[str],
) -> None:
    """Two sums over a row at once: a program's warps wait for each other half as often."""
    position = builder.tile[axis].position
    names = [builder.name_of(red.node) for red in reds]
    texts = ", ".join(join_parts(red, each) for red, each in zip(reds, parts, strict=True))
    sums = [
        f"{name}_sum" if red.op == "mean" else name for name, red in zip(names, reds, strict=True)
    ]
    text = f"lib.reduce_sums({texts}, {position}, {builder.rank > 1})"
    note = ", ".join(dict.fromkeys(op_name(red.node.target) for red in reds))
    builder.body.append(Reduce(", ".join(sums), text, note))
    for name, made, red in zip(names, sums, reds, strict=True):
        if made != name:
            builder.note(name, f"{made} / {red.count}")
        builder.put(red.node, Value((name,), deps, len(builder.scopes) - 1, red.dtype))


def reduce_parts(
    builder: Builder,
    red: Reduction,
    axis: str,
    parts: Sequence[str],
    deps: frozenset[str] = frozenset({"row"}),
) -> None:
    """Give a sum, mean or extremum its value from its segments' operands; deps: what it keeps."""
    base = builder.name_of(red.node)
    total = whole_row(builder, red, axis, parts)
    if red.op == "pick":
        total = checked_pick(builder, red, axis, total)
    if red.op == "mean":
        total = f"({total}) / {red.count}"
    builder.body.append(Reduce(base, total, op_name(red.node.target)))
    builder.put(red.node, Value((base,), deps, len(builder.scopes) - 1, red.dtype))


def whole_row(builder: Builder, red: Reduction, axis: str, parts: Sequence[str]) -> str:
    """All segments of a row, reduced. Equal ones are combined lane by lane first.

    Each reduction over lanes costs the warps of a program two barriers.
    """
    position = builder.tile[axis].position
    assert position is not None
    alike: dict[int, list[str]] = {}
    for index, part in enumerate(parts):
        alike.setdefault(builder.segment(axis, index).width, []).append(part)
    joined = [join_parts(red, same) for same in alike.values()]
    return join_parts(red, [lanes(builder, red, text, position) for text in joined])


def checked_pick(builder: Builder, red: Reduction, axis: str, text: str) -> str:
    """A picked element, NaN where the index is no column."""
    at = builder.value(red.node.args[2]).names[0]  # type: ignore[arg-type]  # gather's index
    return f'tl.where({inside_row(builder, axis, at)}, {text}, float("nan"))'


def held_moments(
    builder: Builder, red: Reduction, axis: str, texts: Sequence[str], deps: frozenset[str]
) -> None:
    """Variance in two passes over registers: never E[x^2] - E[x]^2."""
    note = op_name(red.node.target)
    base = builder.name_of(red.node)
    parts = [guarded(builder, (axis,), i, text, "0.0") for i, text in enumerate(texts)]
    mean = f"{base}_mean"
    total = whole_row(builder, red, axis, parts)
    builder.body.append(Reduce(mean, f"({total}) / {red.count}", note))
    center = mean
    if red.exact_zero:
        # equal values deviate alike from their rounded mean: with that added, not at all
        parts = [
            guarded(builder, (axis,), i, f"{text} - {mean}", "0.0") for i, text in enumerate(texts)
        ]
        center = f"{base}_center"
        total = whole_row(builder, red, axis, parts)
        builder.body.append(Reduce(center, f"{mean} + ({total}) / {red.count}", note))
    squares: list[str] = []
    for index, text in enumerate(texts):
        name = f"{base}_d" if len(texts) == 1 else f"{base}_d{index}"
        builder.body.append(
            Define(name, guarded(builder, (axis,), index, f"{text} - {center}", "0.0"))
        )
        squares.append(f"{name} * {name}")
    m2 = f"{base}_m2"
    total = whole_row(builder, red, axis, squares)
    builder.body.append(Reduce(m2, total, "sum of squared deviations"))
    put_moments(builder, red, mean, m2, deps)
