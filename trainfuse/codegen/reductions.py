"""Reductions: what each is made of, and accumulation over a loop, finished after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx

from autodiff.ops import op_name
from trainfuse.codegen.builder import Builder, Value
from trainfuse.codegen.ir import Map, Reduce
from trainfuse.codegen.scalars import (
    TRITON_TYPE,
    cast,
    compute_dtype,
    highest,
    literal,
    lowest,
)
from trainfuse.codegen.tile import Segment, TileAxis
from trainfuse.codegen.triton_ops import Unsupported
from trainfuse.fusion.arguments import argument
from trainfuse.fusion.domains import Domain

Op = Literal["sum", "mean", "max", "min", "var", "var_mean", "pick"]
# One row a reduction.
OPS: dict[str, Op] = {
    "aten.sum": "sum",
    "aten.mean": "mean",
    "aten.amax": "max",
    "aten.amin": "min",
    "aten.var": "var",
    "aten.var_mean": "var_mean",
    "aten.gather": "pick",
}


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduction node: what it does, of which value, over how many elements.

    dtype: compute type of the accumulation. partials: how many numbers a partial result has.
    """

    node: fx.Node
    op: Op
    source: fx.Node
    count: int
    dtype: torch.dtype

    @property
    def moments(self) -> bool:
        return self.op in ("var", "var_mean")

    @property
    def exact_zero(self) -> bool:
        """Whether the variance of equal values must be 0, and not what rounding leaves of it.

        Eager's is (Welford's method). A root's slope, or whether a deviation is 0, tells the
        difference; what adds an epsilon first, as norms do, doesn't.
        """
        return self.moments and _told_from_zero(self.node, self.op == "var_mean")

    @property
    def states(self) -> tuple[str, ...]:
        """Suffixes of the accumulators."""
        return ("count", "mean", "m2") if self.moments else ("acc",)

    @property
    def identity(self) -> str:
        if self.op == "max":
            return literal(lowest(self.dtype), self.dtype)
        if self.op == "min":
            return literal(highest(self.dtype), self.dtype)
        return "0" if not self.dtype.is_floating_point else "0.0"

    @property
    def correction(self) -> float:
        given = argument(self.node, "correction")
        return 1 if given is None else given


_TELLING = frozenset("sqrt rsqrt reciprocal log log2 log10 pow div eq ne gt ge lt le sign".split())
_SCALING = frozenset("view permute squeeze unsqueeze expand clone mul neg abs".split())
_CASTS = frozenset({"_to_copy", "convert_element_type"})


def _told_from_zero(node: fx.Node, paired: bool) -> bool:
    """Whether a reader is not smooth at 0, but for factors; paired: it has a mean, too."""
    pending = [node]
    if paired:
        pending = [user for user in node.users if user.args[1] == 0]
    while pending:
        for user in pending.pop().users:
            name = op_name(user.target).partition(".")[2].partition(".")[0]
            if name in _TELLING:
                return True
            if name in _SCALING | _CASTS:
                pending.append(user)
    return False


def parse(node: fx.Node, domain: Domain) -> Reduction:
    """The reduction that a node is; Unsupported when it has no code."""
    name = ".".join(op_name(node.target).split(".")[:2])
    op = OPS.get(name)
    value = node.meta["val"]
    dtype = (value[0] if isinstance(value, tuple | list) else value).dtype
    if op is None or dtype not in TRITON_TYPE:
        raise Unsupported(node, "this reduction has no code")
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if op in ("mean", "var", "var_mean") and not dtype.is_floating_point:
        raise Unsupported(node, "a mean of integers")
    if dtype == torch.bool and op != "pick":
        raise Unsupported(node, "a reduction of booleans to a boolean")
    return Reduction(node, op, source, domain.extent(domain.reduced[node]), compute_dtype(dtype))


def operand(
    builder: Builder, red: Reduction, axis: str, *, poisons: bool = False
) -> tuple[Value, list[str]]:
    """The reduced value and its text in each segment, cast, and selected for a gather.

    poisons: what a gather leaves out is NaN where its index is out of range, so that sums tell.
    """
    value = builder.value(red.source)
    count = builder.segments(value.deps | {axis})
    texts = [cast(builder.text(value, index), value.dtype, red.dtype) for index in range(count)]
    if red.op == "pick":
        picked = builder.value(red.node.args[2])  # type: ignore[arg-type]  # gather's index
        column = [builder.segment(axis, index).index for index in range(count)]
        others = [red.identity] * count
        if poisons:
            others = [_other(builder, red, axis, i, builder.text(picked, i)) for i in range(count)]
        texts = [
            f"tl.where({at} == {builder.text(picked, i)}, {text}, {others[i]})"
            for i, (at, text) in enumerate(zip(column, texts, strict=True))
        ]
        deps = value.deps | picked.deps | {axis}
        value = Value(value.names, deps, max(value.depth, picked.depth), red.dtype)
    return value, texts


def _other(builder: Builder, red: Reduction, axis: str, index: int, at: str) -> str:
    """What the elements hold that a gather doesn't pick: 0, or NaN where it could pick none."""
    name = f"{builder.name_of(red.node)}{builder.suffix}_other{index or ''}"
    builder.note(name, f'tl.where({inside_row(builder, axis, at)}, {red.identity}, float("nan"))')
    return name


def inside_row(builder: Builder, axis: str, at: str) -> str:
    """Whether a gather's index is a column: where it is none ATen would stop the program."""
    width = builder.sizes.get(builder.tile[axis].size, builder.tile[axis].size)
    return f"({at} >= 0) & ({at} < {width})"


def shape_text(builder: Builder, index: int, deps: frozenset[str]) -> str:
    """Shape, in a segment, of the tile of a value that varies over `deps`."""
    blocks = sorted(
        (axis for axis in builder.tile.values() if axis.position is not None),
        key=lambda axis: axis.position or 0,
    )
    widths = [
        str(builder.segment(axis.name, index).width if axis.name in deps else 1) for axis in blocks
    ]
    if len(widths) == 1 and not deps & {blocks[0].name}:
        return "[]"
    return f"({', '.join(widths)}{',' if len(widths) == 1 else ''})"


def lanes(builder: Builder, red: Reduction, text: str, position: int) -> str:
    """A tile reduced along one dimension; in two-dimensional tiles the dimension stays, as 1."""
    kind = red.op if red.op in ("max", "min") else "sum"
    return f"lib.reduce_{kind}({text}, {position}, {builder.rank > 1})"


def guarded(builder: Builder, axes: Sequence[str], index: int, text: str, identity: str) -> str:
    """`text` with the identity in the lanes that lie outside the reduced axes."""
    masks = [builder.segment(axis, index).mask for axis in axes]
    mask = " & ".join(mask for mask in masks if mask)
    return f"tl.where({mask}, {text}, {identity})" if mask else text


def spread(builder: Builder, value: Value, axis: str, index: int, text: str) -> str:
    """A value that lacks the reduced axis, repeated along it."""
    if axis in value.deps:
        return text
    return f"tl.broadcast_to({text}, {shape_text(builder, index, value.deps | {axis})})"


def join_parts(red: Reduction, parts: Sequence[str]) -> str:
    """The partial results of a row's segments, combined in order."""
    if red.op in ("max", "min"):
        text = parts[0]
        for part in parts[1:]:
            text = f"lib.{red.op}imum({text}, {part})"
        return text
    return " + ".join(parts)


def put_moments(builder: Builder, red: Reduction, mean: str, m2: str, deps: frozenset[str]) -> None:
    """The node's values from a mean and a sum of squared deviations."""
    base = builder.name_of(red.node)
    freedom = max(red.count - red.correction, 0)
    divided = f"{m2} / {float(freedom)!r}" if freedom else f'{m2} * float("nan")'
    builder.body.append(Map(f"{base}_var", divided, op_name(red.node.target)))
    depth = len(builder.scopes) - 1
    var = Value((f"{base}_var",), deps, depth, red.dtype)
    builder.scopes[depth].values[red.node] = (
        var if red.op == "var" else (var, Value((mean,), deps, depth, red.dtype))
    )


Values = dict[fx.Node, Value | tuple[Value, ...]]


def pick(builder: Builder, red: Reduction, axis: str, ready: Values | None = None) -> None:
    """A gather of one element a row: its value computed anew at the one column.

    ready: what `read_picked` loaded there, if it was called before.
    """
    base = builder.name_of(red.node)
    if ready is None:
        ready = read_picked(builder, red, axis, ())
    picked = builder.value(red.node.args[2])  # type: ignore[arg-type]  # gather's index
    (value,), _ = _at_column(builder, red, axis, [red.source], ready)
    text = cast(value.names[0], value.dtype, red.dtype)
    text = f'tl.where({base}_at_mask, {text}, float("nan"))'  # as checked_pick
    builder.body.append(Reduce(base, text, op_name(red.node.target)))
    deps = (value.deps | picked.deps) - {axis}
    builder.put(red.node, Value((base,), deps, len(builder.scopes) - 1, red.dtype))


def read_picked(builder: Builder, red: Reduction, axis: str, inputs: Sequence[fx.Node]) -> Values:
    """Inputs at a gather's column, loaded long before its value can be computed."""
    at = f"{builder.name_of(red.node)}_at"
    picked = builder.value(red.node.args[2])  # type: ignore[arg-type]  # gather's index
    builder.note(at, picked.names[0], "the picked column")
    builder.note(f"{at}_mask", f"({at} >= 0) & ({at} < COLS)")
    return _at_column(builder, red, axis, inputs, {})[1]


def _at_column(
    builder: Builder, red: Reduction, axis: str, nodes: Sequence[fx.Node], ready: Values
) -> tuple[list[Value], Values]:
    """Values of nodes at a gather's column, and all that was made there for them."""
    base, whole, suffix = builder.name_of(red.node), builder.tile[axis], builder.suffix
    place = Segment(f"{base}_at", f"{base}_at_mask", 1)
    builder.tile[axis] = TileAxis(axis, whole.axes, whole.size, (place,), None, whole.shared)
    builder.suffix = f"_{base}"
    held = builder.forget(axis)  # of the whole row
    builder.push(axis)
    builder.scopes[-1].values.update(ready)
    found = [builder.value(node) for node in nodes]
    made = builder.scopes[-1].values
    body = builder.pop()
    builder.body.extend(body)
    made |= builder.forget(axis)  # where the row's indices are of this scope, so are its values
    builder.scopes[-1].values.update(held)
    builder.tile[axis], builder.suffix = whole, suffix
    return found, made


# Accumulation over a loop: one accumulator a lane, lanes combined once, after the loop.


@dataclass(frozen=True, slots=True)
class Accumulator:
    """A reduction spread over a loop.

    axes: tile axes that it sums over. deps: tile axes of the accumulated tile.
    """

    red: Reduction
    axes: tuple[str, ...]
    deps: frozenset[str]

    def names(self, builder: Builder, index: int) -> list[str]:
        """Accumulators of a segment."""
        base = builder.name_of(self.red.node)
        suffix = "" if builder.segments(self.deps) == 1 else f"_{index}"
        return [f"{base}_{state}{suffix}" for state in self.red.states]


def start(builder: Builder, acc: Accumulator) -> None:
    """Accumulators, empty; values are counted along the reduced axes alone."""
    kind = TRITON_TYPE[acc.red.dtype]
    for index in range(builder.segments(acc.deps)):
        for name, state in zip(acc.names(builder, index), acc.red.states, strict=True):
            deps = acc.deps & frozenset(acc.axes) if state == "count" else acc.deps
            shape = shape_text(builder, index, deps)
            identity = acc.red.identity if state == "acc" else "0.0"
            identity = identity[1:-1] if identity.startswith("(") else identity
            builder.note(name, f"tl.full({shape}, {identity}, {kind})")


def accumulate(
    builder: Builder, acc: Accumulator, seen: str, into: Sequence[Sequence[str]] | None = None
) -> None:
    """One block into the accumulators.

    seen: how many blocks a lane has seen, this one included; "" when masks make lanes differ in
    other blocks than the last. into: names of the accumulators, one list a segment, if not their
    own.
    """
    red = acc.red
    value, texts = operand(builder, red, acc.axes[-1], poisons=True)
    for index in range(builder.segments(acc.deps)):
        text = texts[index if len(texts) > 1 else 0]
        names = acc.names(builder, index) if into is None else into[index]
        masks = [builder.segment(axis, index).mask for axis in acc.axes]
        mask = " & ".join(mask for mask in masks if mask)
        if red.moments:
            accumulate_moments(builder, red, text, mask, names, seen)
            continue
        text = f"tl.where({mask}, {text}, {red.identity})" if mask else text
        match red.op:
            case "max" | "min":
                builder.note(names[0], f"lib.{red.op}imum({names[0]}, {text})")
            case _:
                builder.note(names[0], f"{names[0]} + {text}")
    assert value.deps - acc.deps <= frozenset(acc.axes)


def accumulate_moments(
    builder: Builder, red: Reduction, text: str, mask: str, names: Sequence[str], seen: str
) -> None:
    """Welford's update, a lane at a time; the loop mostly knows how many values a lane has seen."""
    count, mean, m2 = names
    kind = TRITON_TYPE[red.dtype]
    part, delta, change = f"{mean}_part", f"{mean}_delta", f"{mean}_step"
    builder.note(count, f"{count} + ({mask}).to({kind})" if mask else f"{count} + 1.0")
    divisor = f"tl.cast({seen}, {kind})" if seen else f"tl.maximum({count}, 1.0)"
    builder.note(part, f"1.0 / {divisor}", "Welford")
    builder.note(delta, f"tl.where({mask}, {text} - {mean}, 0.0)" if mask else f"{text} - {mean}")
    builder.note(change, f"{delta} * {part}")
    builder.note(m2, f"{m2} + {delta} * ({delta} - {change})")
    builder.note(mean, f"{mean} + {change}")


def finish(builder: Builder, acc: Accumulator) -> list[list[str]]:
    """Combine the lanes along the reduced axes: the states, one list for each segment left."""
    red = acc.red
    segments = builder.segments(acc.deps)
    states = [acc.names(builder, index) for index in range(segments)]
    for axis in acc.axes:
        position = builder.tile[axis].position
        if position is not None and axis in acc.deps:
            states = [merge(builder, red, names, position) for names in states]
    if builder.segmented in acc.axes and len(states) > 1:
        if red.moments:
            raise Unsupported(red.node, "moments over several segments of a row and all rows")
        name = f"{builder.name_of(red.node)}_total"
        builder.body.append(Reduce(name, join_parts(red, [names[0] for names in states])))
        return [[name]]
    return states


def merge(builder: Builder, red: Reduction, names: Sequence[str], position: int) -> list[str]:
    """States reduced along one dimension of the tile."""
    done = [f"{name}_all" for name in names]
    if red.moments:
        merging = "merge_equal_moments" if red.exact_zero else "merge_moments"
        text = f"lib.{merging}({', '.join(names)}, {position}, {builder.rank > 1})"
        builder.body.append(Reduce(", ".join(done), text, "merge the lanes"))
    else:
        builder.body.append(Reduce(done[0], lanes(builder, red, names[0], position)))
    return done


def settle(
    builder: Builder, red: Reduction, states: Sequence[Sequence[str]], deps: frozenset[str]
) -> None:
    """Give the node its value from fully combined states."""
    if red.moments:
        if len(states) > 1:
            raise Unsupported(red.node, "moments of several segments")
        put_moments(builder, red, states[0][1], states[0][2], deps)
        return
    base = builder.name_of(red.node)
    names = [base] if len(states) == 1 else [f"{base}_{index}" for index in range(len(states))]
    for name, (state,) in zip(names, states, strict=True):
        text = f"{state} / {red.count}" if red.op == "mean" else state
        builder.body.append(Reduce(name, text, op_name(red.node.target)))
    builder.put(red.node, Value(tuple(names), deps, len(builder.scopes) - 1, red.dtype))
