"""Emission of a group's values over a tile: on demand, each in the outermost scope that holds it.

A schedule says which tile axes there are and where loops stand; the builder loads, maps, stores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import fx

from autodiff.ops import lookup, op_name
from autodiff.philox import KEEP_MASK, word_shape
from trainfuse.codegen import lookups, sources
from trainfuse.codegen.chosen import Chosen
from trainfuse.codegen.coarse import coarse_nodes
from trainfuse.codegen.idioms import idiom
from trainfuse.codegen.ir import ArgRef, Define, Load, Map, Statement, Store
from trainfuse.codegen.scalars import (
    HALF,
    TRITON_TYPE,
    cast,
    compute_dtype,
)
from trainfuse.codegen.scope import Scope, Value
from trainfuse.codegen.tile import (
    VECTOR_BYTES,
    Segment,
    TileAxis,
    Vectors,
    first_only,
    needs_int64,
    run_terms,
    value_strides,
)
from trainfuse.codegen.triton_ops import Unsupported, expression
from trainfuse.fusion.domains import Domain

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


class Builder:
    """Statements of one kernel under construction.

    segmented: the tile axis that has several segments; values along it have a name for each.
    extents: how far the tile walks each axis of the domain, where masks have it walk beyond some.
    suffix: of new names, where values are emitted a second time at other places of the tile, along
    the axis `moved`. kept: names of rows that are held as they were read, by input and index.
    """

    def __init__(
        self,
        group: Group,
        tile: Sequence[TileAxis],
        segmented: str,
        extents: Sequence[int] | None = None,
    ) -> None:
        self.group = group
        self.domain = group.domain
        self.extents = group.domain.sizes if extents is None else tuple(extents)
        self.members = set(group.nodes)
        self.tile = {axis.name: axis for axis in tile}
        self.segmented = self.moved = segmented
        self.rank = sum(axis.position is not None for axis in tile)
        self.scopes = [Scope(frozenset())]
        self.args: dict[ArgRef, None] = {}
        self.names: dict[fx.Node, str] = {}
        self.computed = 0
        self.suffix = ""
        self.sizes: dict[int, str] = {}
        self.inputs = {node: index for index, node in enumerate(group.inputs)}
        self.wide = wide(group)
        self.coarse = coarse_nodes(group.nodes, group.outputs)
        self.chosen = Chosen(group)
        self.kept: dict[tuple[fx.Node, str], str] = {}
        self.shared_halves = shared_halves(group)

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
        base = self.name_of(node) + (self.suffix if self.moved in deps else "")
        names = [base] if count == 1 else [f"{base}_{index}" for index in range(count)]
        return names, self.depth_of(deps, operands)

    def forget(self, axis: str) -> dict[fx.Node, Value | tuple[Value, ...]]:
        """Take out what the current scope holds along a tile axis: to be emitted anew."""
        values = self.scopes[-1].values
        gone: dict[fx.Node, Value | tuple[Value, ...]] = {
            node: v for node, v in values.items() if isinstance(v, Value) and axis in v.deps
        }
        for node in gone:
            del values[node]
        return gone

    def put(self, node: fx.Node, value: Value) -> Value:
        if node in self.shared_halves and value.dtype == torch.float32:
            value = self.as_stored(node, value)
        self.scopes[value.depth].values[node] = value
        return value

    def as_stored(self, node: fx.Node, value: Value) -> Value:
        """A value rounded to its type."""
        half = TRITON_TYPE[node.meta["val"].dtype]
        names = tuple(f"{name}_rounded" for name in value.names)
        for name, text in zip(names, value.names, strict=True):
            text = f"{text}.to({half}).to(tl.float32)"
            self.scopes[value.depth].body.append(Map(name, text, "as other kernels read it"))
        return replace(value, names=names)

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
        if self.keeps(node):
            return self.widened(node)
        kind = lookup(node.target).kind
        if op_name(node.target) == "getitem":
            return self.item(node)
        if kind == "view":
            return self.value(node.args[0])  # type: ignore[arg-type]  # a view's source
        if kind == "pointwise":
            return self.map(node)
        if node in self.domain.indirect:
            return lookups.load(self, node)
        if kind == "creation":
            return sources.create(self, node)
        if op_name(node.target) == KEEP_MASK:
            return sources.random(self, node)
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

    def zero(self, node: fx.Node) -> Value:
        """Zero, in place of a node's value."""
        dtype = compute_dtype(node.meta["val"].dtype)
        names, depth = self.define(node, frozenset(), ())
        self.note(names[0], f"tl.full([], 0, {TRITON_TYPE[dtype]})", op_name(node.target))
        return self.put(node, Value(tuple(names), frozenset(), depth, dtype))

    def load(self, node: fx.Node) -> Value:
        """An external value, cast to its compute type."""
        if node not in self.inputs:
            raise Unsupported(node, "it is read but is no input of the group")
        dtype = node.meta["val"].dtype
        if dtype not in TRITON_TYPE:
            raise Unsupported(node, f"{dtype} has no kernels")
        strides = value_strides(self.domain, node)
        deps = self.dependences(strides)
        where = [(self.value(test), holds) for test, holds in self.chosen.of(node)]
        where = [(test, holds) for test, holds in where if test.deps and test.deps <= deps]
        names, depth = self.define(node, deps, ())
        arg: ArgRef = ("input", self.inputs[node])
        self.args[arg] = None
        kind = "x".join(map(str, node.meta["val"].shape)) or "scalar"
        for index, name in enumerate(names):
            at = self.segment(self.segmented, index).index
            if (raw := self.kept.get((node, at))) is not None:
                self.scopes[depth].body.append(Map(name, f"lib.widen({raw})", "widened again"))
                continue
            tests = [("" if holds else "~") + self.text(test, index) for test, holds in where]
            offset, row = self.offset(strides, index), ""
            mask = " & ".join(filter(None, [self.mask(deps, index), *tests]))
            vectors = self.vectors(offset, index)
            if vectors and not vectors.load:
                offset = vectors.offset
            elif vectors and not tests:
                # its own vectors: of others, more than these might lie past its last element
                offset, mask = vectors.offset, ""
                row = f"{vectors.load}, {VECTOR_BYTES // dtype.itemsize}"
            note = f"{str(dtype).removeprefix('torch.')}[{kind}]"
            wide = TRITON_TYPE[torch.float32] if dtype in HALF else ""
            self.scopes[depth].body.append(Load(name, arg, offset, mask, wide, note, row=row))
        return self.put(node, Value(tuple(names), deps, depth, compute_dtype(dtype)))

    def keeps(self, node: fx.Node) -> bool:
        """Whether a value is held as it was read or rounded, at the tile's place."""
        return bool(self.kept) and (node, self.segment(self.segmented, 0).index) in self.kept

    def widened(self, node: fx.Node) -> Value:
        """A computed value that is held in a half type, made wide again."""
        deps = frozenset(axis.name for axis in self.tile.values())
        names, depth = self.define(node, deps, ())
        for index, name in enumerate(names):
            raw = self.kept[node, self.segment(self.segmented, index).index]
            self.scopes[depth].body.append(Map(name, f"lib.widen({raw})", "widened again"))
        return self.put(
            node, Value(tuple(names), deps, depth, compute_dtype(node.meta["val"].dtype))
        )

    def map(self, node: fx.Node) -> Value:
        used: dict[fx.Node, None] = {}

        def note(operand: fx.Node) -> str:
            used[operand] = None
            return "x"

        coarse = node in self.coarse
        if (found := idiom(node, self.members, coarse=coarse)) is not None:
            return self.together(node, *found)
        expression(node, note, coarse=coarse)
        operands = {operand: self.value(operand) for operand in used}
        deps = frozenset[str]().union(*(value.deps for value in operands.values()))
        dtype = compute_dtype(node.meta["val"].dtype)
        texts = [
            expression(
                node, lambda operand, i=index: self.text(operands[operand], i), coarse=coarse
            )
            for index in range(self.segments(deps))
        ]
        if len(operands) == 1:
            (source,) = operands.values()
            if tuple(texts) == source.names and source.dtype == dtype:
                # A cast to the type that the value is held in, or a clone: nothing to compute.
                return self.put(node, source)
        names, depth = self.define(node, deps, list(operands.values()))
        for name, text in zip(names, texts, strict=True):
            self.scopes[depth].body.append(Map(name, text, op_name(node.target)))
        return self.put(node, Value(tuple(names), deps, depth, dtype))

    def together(self, node: fx.Node, operands: Sequence[fx.Node], template: str) -> Value:
        """An fp32 value of what its operands are made of."""
        values = [self.value(operand) for operand in operands]
        deps = frozenset[str]().union(*(value.deps for value in values))
        names, depth = self.define(node, deps, values)
        for index, name in enumerate(names):
            text = template.format(*(self.text(value, index) for value in values))
            self.scopes[depth].body.append(Map(name, text, op_name(node.target)))
        return self.put(node, Value(tuple(names), deps, depth, torch.float32))

    def text(self, value: Value, index: int) -> str:
        """Name of a value in a segment."""
        return value.names[index if len(value.names) > 1 else 0]

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
                self.extents,
                self.sizes,
            )
        ]
        return " + ".join(terms) or "0"

    def vectors(self, offset: str, index: int) -> Vectors | None:
        """How a value at this offset is moved, where its rows begin at any address."""
        vectors = self.segment(self.segmented, index).vectors
        return vectors if vectors is not None and vectors.element == offset else None

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
                texts = first_only(axis.axes, "{index}", own, self.extents)
                conditions.extend((axis.name, text) for text in texts)
        depth = self.depth_of(deps | {name for name, _ in conditions}, (value,))
        held = {name for name, _ in conditions} - deps
        for index in range(self.segments(deps | value.deps)):
            offset = self.offset(strides, index)
            offset = " + ".join(
                [offset, *(f"{self.segment(name, index).index} * 0" for name in sorted(held))]
            )
            if self.rank == 2 and all(self.tile[a].position is None for a in deps | held):
                zeros = "tl.zeros((1, 1), tl.int32)"  # the value has dimensions, all of them 1
                offset = f"{offset} + {zeros}" if deps or held else zeros
            tests = [
                text.replace("{index}", self.segment(name, index).index)
                for name, text in conditions
            ]
            mask, row = " & ".join(filter(None, [self.mask(deps, index), *tests])), ""
            vectors = self.vectors(offset, index)
            if vectors and not vectors.store:
                offset = vectors.offset
            elif vectors and not tests:
                offset, mask, row = vectors.offset, "", vectors.store
            text = self.text(value, index)
            text = cast(text, value.dtype, compute_dtype(node.meta["val"].dtype))
            self.scopes[depth].body.append(Store(arg, offset, text, mask, row=row))

    def note(self, name: str, expr: str, why: str = "") -> None:
        """Define an index, mask or accumulator in the current scope."""
        self.body.append(Define(name, expr, why))


def wide(group: Group) -> bool:
    """Whether the group's offsets need 64 bits."""
    values = [node.meta["val"] for node in (*group.inputs, *group.outputs)]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    words = [math.prod(word_shape(node.meta["val"].shape)) for node in masks(group)]
    return needs_int64(tensors, max([group.domain.extent(range(len(group.domain.sizes))), *words]))


def shared_halves(group: Group) -> set[fx.Node]:
    """Values of half types and few axes that the group writes, and reads itself.

    Other kernels, the backward's say, read them rounded. Errors of single elements are as eager's;
    those of a number that all elements of a row have in common are not: a norm takes the number out
    again, and leaves nothing of eager's error, but all of the difference between two of its values.
    """
    every, members = set(range(len(group.domain.sizes))), set(group.nodes)
    return {
        node
        for node in group.outputs
        if isinstance(value := node.meta["val"], torch.Tensor)
        and value.dtype in HALF
        and {axis for dim in group.domain.axes[node] for axis in dim} != every
        and any(user in members for user in node.users)
    }


def masks(group: Group) -> list[fx.Node]:
    """The random masks that a group draws."""
    return [node for node in group.nodes if op_name(node.target) == KEEP_MASK]
