"""Emission of a group's values over a tile: on demand, each in the outermost scope that holds it.

A schedule says which tile axes there are and where loops stand; the builder loads, maps, stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx

from autodiff.ops import lookup, op_name
from trainfuse.codegen.ir import ArgRef, Define, Load, Map, Random, Statement, Store
from trainfuse.codegen.scalars import (
    HALF,
    TRITON_TYPE,
    cast,
    compute_dtype,
    literal,
)
from trainfuse.codegen.tile import (
    Segment,
    TileAxis,
    axis_strides,
    first_only,
    needs_int64,
    row_major,
    run_terms,
    value_strides,
)
from trainfuse.codegen.triton_ops import Unsupported, expression
from trainfuse.fusion.domains import Domain, argument

aten = torch.ops.aten


class Group(Protocol):
    """What codegen reads of a fusion group."""

    @property
    def name(self) -> str: ...
    @property
    def nodes(self) -> tuple[fx.Node, ...]: ...
    @property
    def inputs(self) -> tuple[fx.Node, ...]: ...
    @property
    def outputs(self) -> tuple[fx.Node, ...]: ...
    @property
    def domain(self) -> Domain: ...


@dataclass(frozen=True, slots=True)
class Value:
    """A node's value in the text: one name, or one for each segment of `segmented`.

    deps: tile axes that it varies over. depth: scope that defines it. dtype: compute type.
    """

    names: tuple[str, ...]
    deps: frozenset[str]
    depth: int
    dtype: torch.dtype


@dataclass(slots=True)
class Scope:
    """A block of statements, the tile axes whose indices it has, and the values it defines."""

    axes: frozenset[str]
    body: list[Statement] = field(default_factory=list)
    values: dict[fx.Node, Value | tuple[Value, ...]] = field(default_factory=dict)


class Builder:
    """Statements of one kernel under construction.

    segmented: the tile axis that has several segments; values along it have a name for each.
    """

    def __init__(self, group: Group, tile: Sequence[TileAxis], segmented: str) -> None:
        self.group = group
        self.domain = group.domain
        self.members = set(group.nodes)
        self.tile = {axis.name: axis for axis in tile}
        self.segmented = segmented
        self.rank = sum(axis.position is not None for axis in tile)
        self.scopes = [Scope(frozenset())]
        self.args: dict[ArgRef, None] = {}
        self.names: dict[fx.Node, str] = {}
        self.computed = 0
        self.sizes: dict[int, str] = {}
        self.inputs = {node: index for index, node in enumerate(group.inputs)}

    # Scopes.

    @property
    def body(self) -> list[Statement]:
        return self.scopes[-1].body

    def bind(self, *axes: str) -> None:
        """Say that the current scope has the indices of these tile axes."""
        self.scopes[-1].axes |= frozenset(axes)

    def push(self, *axes: str) -> None:
        """Enter a loop body that walks these tile axes."""
        self.scopes.append(Scope(self.scopes[-1].axes | frozenset(axes)))

    def pop(self) -> tuple[Statement, ...]:
        """Leave a loop body: its statements."""
        return tuple(self.scopes.pop().body)

    def depth_of(self, deps: frozenset[str], operands: Sequence[Value]) -> int:
        depth = max((value.depth for value in operands), default=0)
        while not deps <= self.scopes[depth].axes:
            depth += 1
        return depth

    def segments(self, deps: frozenset[str]) -> int:
        """How many names a value with these dependences has."""
        return len(self.tile[self.segmented].segments) if self.segmented in deps else 1

    def segment(self, axis: str, index: int) -> Segment:
        segments = self.tile[axis].segments
        return segments[index if axis == self.segmented else 0]

    def name_of(self, node: fx.Node) -> str:
        """Canonical name: by order of first use, x for what is loaded, t for what is computed."""
        found = self.names.get(node)
        if found is None:
            if node in self.members:
                found = f"t{self.computed}"
                self.computed += 1
            else:
                found = f"x{self.inputs[node]}"
            self.names[node] = found
        return found

    def define(
        self, node: fx.Node, deps: frozenset[str], operands: Sequence[Value]
    ) -> tuple[list[str], int]:
        """Names for a new value, and its depth."""
        count = self.segments(deps)
        base = self.name_of(node)
        names = [base] if count == 1 else [f"{base}_{index}" for index in range(count)]
        return names, self.depth_of(deps, operands)

    def put(self, node: fx.Node, value: Value) -> Value:
        self.scopes[value.depth].values[node] = value
        return value

    # Values.

    def find(self, node: fx.Node) -> Value | tuple[Value, ...] | None:
        for scope in reversed(self.scopes):
            if node in scope.values:
                return scope.values[node]
        return None

    def value(self, node: fx.Node) -> Value:
        """The value of a node, emitted where it is not there yet."""
        found = self.find(node)
        if found is not None:
            if isinstance(found, tuple):
                raise Unsupported(node, "a tuple is used as a tensor")
            return found
        if node not in self.members:
            return self.load(node)
        kind = lookup(node.target).kind
        if op_name(node.target) == "getitem":
            return self.item(node)
        if kind == "view":
            return self.value(node.args[0])  # type: ignore[arg-type]  # a view's source
        if kind == "pointwise":
            return self.map(node)
        if kind == "creation":
            return self.create(node)
        if op_name(node.target) == "trainfuse.keep_mask.default":
            return self.random(node)
        if node in self.domain.reduced and not self.domain.reduced[node]:
            return self.unreduced(node)
        raise Unsupported(node, "this kernel does not have its value")

    def unreduced(self, node: fx.Node) -> Value:
        """A reduction over dims of one element: the element itself."""
        if op_name(node.target).split(".")[1] not in ("sum", "mean", "amax", "amin"):
            raise Unsupported(node, "this reduction of single elements has no code")
        source = self.value(node.args[0])  # type: ignore[arg-type]  # the reduced tensor
        dtype = compute_dtype(node.meta["val"].dtype)
        names, depth = self.define(node, source.deps, (source,))
        for index, name in enumerate(names):
            text = cast(self.text(source, index), source.dtype, dtype)
            self.scopes[depth].body.append(Map(name, text, op_name(node.target)))
        return self.put(node, Value(tuple(names), source.deps, depth, dtype))

    def item(self, node: fx.Node) -> Value:
        found = self.find(node.args[0])  # type: ignore[arg-type]  # getitem's tuple
        if not isinstance(found, tuple):
            raise Unsupported(node, "this kernel does not have its value")
        return found[node.args[1]]  # type: ignore[index]  # getitem's index

    def load(self, node: fx.Node) -> Value:
        """An external value, cast to its compute type."""
        if node not in self.inputs:
            raise Unsupported(node, "it is read but is no input of the group")
        dtype = node.meta["val"].dtype
        if dtype not in TRITON_TYPE:
            raise Unsupported(node, f"{dtype} has no kernels")
        strides = value_strides(self.domain, node)
        deps = self.dependences(strides)
        names, depth = self.define(node, deps, ())
        arg: ArgRef = ("input", self.inputs[node])
        self.args[arg] = None
        kind = "x".join(map(str, node.meta["val"].shape)) or "scalar"
        for index, name in enumerate(names):
            self.scopes[depth].body.append(
                Load(
                    name,
                    arg,
                    self.offset(strides, index),
                    self.mask(deps, index),
                    TRITON_TYPE[torch.float32] if dtype in HALF else "",
                    f"{str(dtype).removeprefix('torch.')}[{kind}]",
                )
            )
        return self.put(node, Value(tuple(names), deps, depth, compute_dtype(dtype)))

    def map(self, node: fx.Node) -> Value:
        used: dict[fx.Node, None] = {}

        def note(operand: fx.Node) -> str:
            used[operand] = None
            return "x"

        expression(node, note)
        operands = {operand: self.value(operand) for operand in used}
        deps = frozenset[str]().union(*(value.deps for value in operands.values()))
        names, depth = self.define(node, deps, list(operands.values()))
        for index, name in enumerate(names):
            text = expression(node, lambda operand, i=index: self.text(operands[operand], i))
            self.scopes[depth].body.append(Map(name, text, op_name(node.target)))
        dtype = compute_dtype(node.meta["val"].dtype)
        return self.put(node, Value(tuple(names), deps, depth, dtype))

    def text(self, value: Value, index: int) -> str:
        """Name of a value in a segment."""
        return value.names[index if len(value.names) > 1 else 0]

    def create(self, node: fx.Node) -> Value:
        """Constants and ranges."""
        dtype = node.meta["val"].dtype
        if dtype not in TRITON_TYPE:
            raise Unsupported(node, f"{dtype} has no kernels")
        held = compute_dtype(dtype)
        name = op_name(node.target)
        constant = _constant(node, name)
        if constant is not None:
            names, depth = self.define(node, frozenset(), ())
            text = literal(constant, held)
            text = text[1:-1] if text.startswith("(") else text
            full = text if held == torch.bool else f"tl.full([], {text}, {TRITON_TYPE[held]})"
            self.scopes[depth].body.append(Map(names[0], full, name))
            return self.put(node, Value(tuple(names), frozenset(), depth, held))
        start, step = _range(node, name)
        strides = axis_strides(self.domain.axes[node], (1,), self.domain.sizes)
        deps = self.dependences(strides)
        names, depth = self.define(node, deps, ())
        for index, target in enumerate(names):
            text = self.offset(strides, index)
            text = f"({text})" if step == 1 else f"({text}) * {step}"
            text = f"({text} + {start})" if start else text
            if not deps:
                text = f"tl.full([], {start}, tl.int64)"
            self.scopes[depth].body.append(Map(target, f"{text}.to({TRITON_TYPE[held]})", name))
        return self.put(node, Value(tuple(names), deps, depth, held))

    def random(self, node: fx.Node) -> Value:
        """trainfuse.keep_mask: by fours where the flat index runs along the tile's inner axis."""
        seed = self.value(node.args[0])  # type: ignore[arg-type]  # the seed tensor
        offset, p = argument(node, "offset"), argument(node, "p")
        shape = row_major(node.meta["val"].shape)
        strides = axis_strides(self.domain.axes[node], shape, self.domain.sizes)
        deps = self.dependences(strides)
        names, depth = self.define(node, deps, (seed,))
        for index, name in enumerate(names):
            quads = self.quads(strides, deps, index)
            function = "lib.keep"
            if quads:
                function = "lib.keep_vector" if self.rank == 1 else "lib.keep_rows"
            text = quads or self.offset(strides, index)
            if not deps:
                text = "tl.zeros((1,), tl.int32)"
            self.scopes[depth].body.append(
                Random(
                    name,
                    f"{function}({seed.names[0]}, {offset & 0xFFFFFFFF}, {text}, {p!r})",
                    op_name(node.target),
                )
            )
        return self.put(node, Value(tuple(names), deps, depth, torch.bool))

    def quads(self, strides: dict[int, int], deps: frozenset[str], index: int) -> str:
        """Flat positions / 4 of the tile's groups of four neighbours; "" when it has none."""
        inner = max(
            (axis for axis in self.tile.values() if axis.position is not None),
            key=lambda axis: axis.position or 0,
        )
        segment = self.segment(inner.name, index)
        blocks = [axis.name for axis in self.tile.values() if axis.position is not None]
        terms = run_terms(inner.axes, "i", strides, self.domain.sizes, {})
        if terms != ["i"] or segment.width % 4 or segment.quad is None:
            return ""
        if not frozenset(blocks) <= deps and self.rank > 1:
            return ""
        others = {axis: step for axis, step in strides.items() if axis not in inner.axes}
        if any(step % 4 for step in others.values()):
            return ""
        quarter = {axis: step // 4 for axis, step in others.items()}
        rest = [
            term
            for axis in self.tile.values()
            if axis is not inner
            for term in run_terms(
                axis.axes, self.segment(axis.name, index).index, quarter, self.domain.sizes, {}
            )
        ]
        lanes = f"tl.arange(0, {segment.width // 4})"
        if self.rank > 1:
            lanes += "[None, :]"
        if segment.quad != "0":
            rest.append(segment.quad)
        return " + ".join([*rest, lanes])

    # Memory.

    def dependences(self, strides: dict[int, int]) -> frozenset[str]:
        return frozenset(
            axis.name for axis in self.tile.values() if any(strides.get(a, 0) for a in axis.axes)
        )

    def offset(self, strides: dict[int, int], index: int) -> str:
        terms = [
            term
            for axis in self.tile.values()
            for term in run_terms(
                axis.axes,
                self.segment(axis.name, index).index,
                strides,
                self.domain.sizes,
                self.sizes,
            )
        ]
        return " + ".join(terms) or "0"

    def mask(self, deps: frozenset[str], index: int) -> str:
        masks = [
            self.segment(axis.name, index).mask for axis in self.tile.values() if axis.name in deps
        ]
        return " & ".join(mask for mask in masks if mask)

    def store(self, node: fx.Node) -> None:
        """Write an output, once, with the strides of its meta["val"]."""
        value = self.value(node)
        arg: ArgRef = ("output", self.group.outputs.index(node))
        self.args[arg] = None
        strides = value_strides(self.domain, node)
        own = {axis for dim in self.domain.axes[node] for axis in dim}
        deps = self.dependences(strides)
        conditions: list[tuple[str, str]] = []
        for axis in self.tile.values():
            partly = any(a in own for a in axis.axes)
            if axis.shared or partly:
                texts = first_only(axis.axes, "{index}", own, self.domain.sizes)
                conditions.extend((axis.name, text) for text in texts)
        depth = self.depth_of(deps | {name for name, _ in conditions}, (value,))
        held = {name for name, _ in conditions} - deps
        for index in range(self.segments(deps | value.deps)):
            offset = self.offset(strides, index)
            offset = " + ".join(
                [offset, *(f"{self.segment(name, index).index} * 0" for name in sorted(held))]
            )
            if not deps and not held and self.rank == 2:
                offset = "tl.zeros((1, 1), tl.int32)"
            tests = [
                text.replace("{index}", self.segment(name, index).index)
                for name, text in conditions
            ]
            mask = " & ".join(filter(None, [self.mask(deps, index), *tests]))
            text = self.text(value, index)
            dtype = node.meta["val"].dtype
            self.scopes[depth].body.append(
                Store(arg, offset, cast(text, value.dtype, compute_dtype(dtype)), mask)
            )

    def note(self, name: str, expr: str, why: str = "") -> None:
        """Define an index, mask or accumulator in the current scope."""
        self.body.append(Define(name, expr, why))


def wide(group: Group) -> bool:
    """Whether the group's offsets need 64 bits."""
    values = [node.meta["val"] for node in (*group.inputs, *group.outputs)]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return needs_int64(tensors, group.domain.extent(range(len(group.domain.sizes))))


def _constant(node: fx.Node, name: str) -> Any:
    """The number that a creation fills with; None for a range."""
    base = name.split(".")[1]
    if base in ("zeros", "zeros_like", "new_zeros"):
        return 0
    if base in ("ones", "ones_like", "new_ones"):
        return 1
    if base in ("full", "full_like", "new_full"):
        value = argument(node, "fill_value")
    elif base == "scalar_tensor":
        value = argument(node, "s")
    elif base in ("arange", "iota"):
        return None
    else:
        raise Unsupported(node, "this creation has no code")
    if not isinstance(value, bool | int | float):
        raise Unsupported(node, "it fills with a value that is no number")
    return value


def _range(node: fx.Node, name: str) -> tuple[Any, Any]:
    """(start, step) of an arange or iota."""
    start, step = argument(node, "start"), argument(node, "step")
    start, step = 0 if start is None else start, 1 if step is None else step
    if not isinstance(start, int) or not isinstance(step, int):
        raise Unsupported(node, "a range of floating steps has no code")
    return start, step
