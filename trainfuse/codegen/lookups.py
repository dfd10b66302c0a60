"""Loads at computed places: addresses that come from an index, or from a map of the coordinates.

An index out of range stops the program, as ATen's kernels do on a GPU. No lane ever reads outside
the tensor: should the check be compiled out, as in Triton's interpreter, such an element is NaN
(0 where there is none).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import fx

from autodiff.ops import op_name
from trainfuse.codegen.ir import ArgRef, Check, Define, Load
from trainfuse.codegen.op_text import Unsupported
from trainfuse.codegen.scalars import HALF, TRITON_TYPE, compute_dtype, unrounded
from trainfuse.codegen.scope import Value
from trainfuse.codegen.tile import axis_strides
from trainfuse.fusion.indirect import Lookup, Place, parse
from trainfuse.fusion.ranges import bounds_of

if TYPE_CHECKING:
    from trainfuse.codegen.builder import Builder


@dataclass(frozen=True, slots=True)
class _Where:
    """Index texts along one dim of the source and their conditions ("" when always inside).

    One of each, or one for each segment.
    """

    texts: Sequence[str]
    inside: Sequence[str]
    deps: frozenset[str]
    depth: int

    def at(self, index: int) -> tuple[str, str]:
        place = index if len(self.texts) > 1 else 0
        return self.texts[place], self.inside[place]


def load(builder: Builder, node: fx.Node) -> Value:
    """The value of a node that reads at computed places."""
    found = parse(node)
    assert isinstance(found, Lookup)
    source = found.source
    if source not in builder.inputs:
        raise Unsupported(node, "what it reads is no input of the group")
    meta = source.meta["val"]
    if meta.dtype not in TRITON_TYPE:
        raise Unsupported(node, f"{meta.dtype} has no kernels")
    walked, sizes = builder.domain.indirect[node], builder.domain.sizes
    plain = [dim for dim in range(meta.dim()) if dim not in found.places]
    strides = axis_strides([walked[d] for d in plain], [meta.stride(d) for d in plain], sizes)
    wheres = {dim: _where(builder, node, dim, found) for dim in found.places}
    deps = builder.dependences(strides).union(*(where.deps for where in wheres.values()))
    names, depth = builder.define(node, deps, ())
    depth = max([depth, *(where.depth for where in wheres.values())])
    arg: ArgRef = ("input", builder.inputs[source])
    builder.args[arg] = None
    fills = any(place.kind == "pad" for place in found.places.values())
    for index, name in enumerate(names):
        terms = [builder.offset(strides, index)]
        masks = [builder.mask(deps, index)]
        for dim, where in wheres.items():
            text, inside = where.at(index)
            stride = meta.stride(dim)
            terms.append(text if stride == 1 else f"{text} * {stride}")
            masks.append(inside)
        offset = " + ".join(term for term in terms if term != "0") or "0"
        guarded = any(where.at(index)[1] for where in wheres.values())
        builder.scopes[depth].body.append(
            Load(
                name,
                arg,
                offset,
                " & ".join(filter(None, masks)),
                TRITON_TYPE[torch.float32] if meta.dtype in HALF else "",
                op_name(node.target),
                _missing(meta.dtype, found.fill if fills else None) if guarded else "",
            )
        )
    return builder.put(node, Value(tuple(names), deps, depth, compute_dtype(meta.dtype)))


def _missing(dtype: torch.dtype, fill: float | None) -> str:
    """What lanes outside the source hold: the padding, or a number that can't go unseen."""
    if fill is not None:
        if dtype == torch.bool:
            return str(int(bool(fill)))
        return unrounded(fill, dtype)
    return 'float("nan")' if dtype.is_floating_point else "0"


def _where(builder: Builder, node: fx.Node, dim: int, found: Lookup) -> _Where:
    """The index along one dim, defined in the outermost scope that has what it depends on."""
    place = found.places[dim]
    size = found.source.meta["val"].shape[dim]
    base = f"{builder.name_of(node)}{builder.suffix}_at{dim if len(found.places) > 1 else ''}"
    if place.index is not None:
        return _picked(builder, place, place.index, size, base)
    axes = builder.domain.indirect[node][dim]
    strides = axis_strides((axes,), (1,), builder.domain.sizes)
    deps = builder.dependences(strides)
    depth = builder.depth_of(deps, ())
    texts, inside = [], []
    parts, count = builder.segments(deps), builder.domain.extent(axes)
    for index in range(parts):
        name = base if parts == 1 else f"{base}_{index}"
        text, condition = _mapped(place, builder.offset(strides, index), name, size, count)
        builder.scopes[depth].body.append(Define(name, text, place.kind))
        texts.append(name)
        inside.append(condition)
    return _Where(texts, inside, deps, depth)


def _mapped(place: Place, coordinate: str, name: str, size: int, count: int) -> tuple[str, str]:
    """(index text, condition that it is inside) of a map of one of `count` coordinates."""
    match place.kind:
        case "pad":
            low, high = -place.amount, count - place.amount
            tests = [f"({name} >= 0)"] * (low < 0) + [f"({name} < {size})"] * (high > size)
            sign = f" {'-' if low < 0 else '+'} {abs(low)}" if low else ""
            return f"{coordinate}{sign}", " & ".join(tests)
        case "roll":
            return f"({coordinate} + {size - place.amount}) % {size}", ""
        case "repeat":
            return f"({coordinate}) % {size}", ""
        case _:
            return f"{size - 1} - ({coordinate})", ""


def _picked(builder: Builder, place: Place, index: fx.Node, size: int, base: str) -> _Where:
    """The index that a tensor holds, checked before it is narrowed to what offsets need."""
    value, wide = builder.value(index), builder.wide
    body = builder.scopes[value.depth].body
    known = bounds_of(index)
    if known is not None and 0 <= known[0] and known[1] < size:
        return _Where(value.names, [""] * len(value.names), value.deps, value.depth)
    texts, inside = [], []
    for number, held in enumerate(value.names):
        name = base if len(value.names) == 1 else f"{base}_{number}"
        text = f"tl.where({held} < 0, {held} + {size}, {held})"
        body.append(Define(name, text if place.kind == "wrapping pick" else held, "the index"))
        body.append(Define(f"{name}_ok", f"({name} >= 0) & ({name} < {size})"))
        mask = builder.mask(value.deps, number)
        condition = f"{name}_ok | ~({mask})" if mask else f"{name}_ok"
        body.append(Check(condition, "index out of range"))
        narrow = value.dtype == torch.int64 and not wide
        texts.append(f"{name}.to(tl.{'int32' if narrow else 'int64'})" if narrow or wide else name)
        inside.append(f"{name}_ok")
    return _Where(texts, inside, value.deps, value.depth)
