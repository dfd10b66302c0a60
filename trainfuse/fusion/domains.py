"""The iteration domain of a group of nodes: axes, who reads which, and what is reduced.

Every tensor dim gets its axes by unification (axes.py): pointwise operands walk together, reshapes
split, permutations reorder, expansions and creations bring axes of their own. Axes are then
divided in rows and columns, from which the code generator picks a schedule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autodiff.graph import Refusal
from autodiff.ops import lookup, op_name
from autodiff.rewrite import known_equal
from trainfuse.fusion import indirect
from trainfuse.fusion.arguments import argument
from trainfuse.fusion.axes import Axis, DimMap, Misfit, fresh_dims, leaves, regroup, unify
from trainfuse.fusion.classify import DomainKind, classify, inner_of
from trainfuse.fusion.segment_ops import SEGMENT_SUM

aten = torch.ops.aten
# Views that keep the row-major order of elements: a reshape to the output's shape.
RESHAPES = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.alias.default,
        aten.detach.default,
        aten.flatten.using_ints,
        aten.unflatten.int,
    }
)
_ELEMENTWISE = frozenset({"pointwise", "view", "creation"})
# Reductions whose first argument alone decides the map; every other reduction is refused.
REDUCTIONS = frozenset(
    {
        aten.sum.default,
        aten.sum.dim_IntList,
        aten.mean.default,
        aten.mean.dim,
        aten.amax.default,
        aten.amin.default,
        aten.max.default,
        aten.min.default,
        aten.prod.default,
        aten.prod.dim_int,
        aten.any.default,
        aten.any.dim,
        aten.any.dims,
        aten.all.default,
        aten.all.dim,
        aten.all.dims,
        aten.var.correction,
        aten.var_mean.correction,
        aten.linalg_vector_norm.default,
    }
)


@dataclass(frozen=True, slots=True)
class Domain:
    """Iteration space of a group.

    sizes: elements of each axis, none of them 1.
    axes: for each value, internal or external, and each of its dims, the axes that make it up,
    outermost first; () for a dim of one element.
    reduced: the axes that each reduction node sums over.
    rows, cols: ordered partition of the axes, outermost first. Row reductions reduce cols, column
    reductions reduce rows. Of sums by key: the axes of the table's two dims.
    indirect: for each node that reads at computed places, the axes along each dim of what it reads;
    () where an index decides.
    """

    sizes: tuple[int, ...]
    axes: Mapping[fx.Node, tuple[tuple[int, ...], ...]]
    reduced: Mapping[fx.Node, frozenset[int]]
    rows: tuple[int, ...]
    cols: tuple[int, ...]
    kind: DomainKind
    indirect: Mapping[fx.Node, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    @property
    def middle(self) -> tuple[int, ...]:
        """Axes along which the parts of a nested group's rows lie, outermost first."""
        return self.cols[: len(self.cols) - len(inner_of(frozenset(self.cols), self.reduced))]

    def extent(self, axes: Iterable[int]) -> int:
        """Number of elements that a set of axes spans."""
        return math.prod(self.sizes[axis] for axis in axes)


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Shape of a node's (first) tensor value; Misfit unless it is static."""
    value = node.meta.get("val")
    if isinstance(value, tuple | list):
        value = value[0]
    if not isinstance(value, torch.Tensor):
        raise Misfit(node, "its value is not a tensor")
    shape = tuple(value.shape)
    for size in shape:
        if type(size) is not int:
            raise Misfit(node, "its shape is dynamic; plans are static")
        if size == 0:
            raise Misfit(node, "it has no elements")
    return shape


def infer(nodes: Sequence[fx.Node]) -> Domain | Refusal:
    """The domain of `nodes` (in topological order), or why they share none.

    Pure and linear in the number of nodes: reads targets, arguments and meta["val"] only.
    Everything read by `nodes` and not among them is an external value.
    """
    try:
        inference = _Inference(nodes)
        return inference.domain()
    except Misfit as misfit:
        return Refusal("fusion", misfit.reason, f"{misfit.node.name}: {misfit.node.target}")


class _Inference:
    """One run of `infer`: dims of every value, then numbering, then classification."""

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self.nodes = nodes
        self.members = set(nodes)
        self.dims: dict[fx.Node, DimMap] = {}
        self.reduced_dims: dict[fx.Node, tuple[Axis, ...]] = {}
        self.picked_dims: dict[fx.Node, tuple[Axis, ...]] = {}
        self.indirect_dims: dict[fx.Node, DimMap] = {}
        self.table: fx.Node | None = None
        for node in nodes:
            self.dims[node] = self.visit(node)

    # Unification.

    def read(self, node: fx.Node) -> DimMap:
        """Dims of an operand; a fresh map at an external value's first use."""
        found = self.dims.get(node)
        if found is None:
            found = self.dims[node] = fresh_dims(shape_of(node))
        return found

    def visit(self, node: fx.Node) -> DimMap:
        target = node.target
        if node.op != "call_function":
            raise Misfit(node, "it is not an operation")
        if getattr(target, "__name__", "") == "getitem":
            return self.read(node.args[0])  # type: ignore[arg-type]  # getitem's first argument
        kind = lookup(target).kind
        if kind == "pointwise":
            return self.pointwise(node)
        if kind == "view":
            return self.view(node)
        if kind == "reduction":
            return self.reduction(node)
        if kind in ("creation", "rng"):
            return self.creation(node)
        if target in indirect.TARGETS:
            return self.lookup(node)
        if op_name(target) == SEGMENT_SUM:
            return self.segments(node)
        raise Misfit(node, f"{kind} operations are not fused")

    def pointwise(self, node: fx.Node) -> DimMap:
        operands = [self.read(operand) for operand in node.all_input_nodes]
        return self.together(node, operands, len(shape_of(node)) - 1)

    def together(self, node: fx.Node, operands: Iterable[DimMap], last: int) -> DimMap:
        """Dims of a node whose operands walk together, their last dims at its dim `last`."""
        shape = shape_of(node)
        dims: list[tuple[Axis, ...] | None] = [None if size > 1 else () for size in shape]
        for walk in operands:
            for index, axes in enumerate(walk, last + 1 - len(walk)):
                if axes:
                    known = dims[index]
                    if known is None:
                        dims[index] = axes
                    elif not unify(known, axes):
                        raise Misfit(node, "its operands divide a dim in ways that don't fit")
        return tuple((Axis(shape[i]),) if dim is None else dim for i, dim in enumerate(dims))

    def creation(self, node: fx.Node) -> DimMap:
        for operand in node.all_input_nodes:
            # The seed of a mask is read; the model of a full_like is not, but it is an input.
            value = operand.meta["val"]
            if not isinstance(value, torch.Tensor):
                raise Misfit(node, "a symbolic number decides it")
            if operand in self.members or known_equal(value.numel(), 1):
                self.read(operand)
        return fresh_dims(shape_of(node))

    def view(self, node: fx.Node) -> DimMap:
        source: Any = node.args[0]
        walk, target = self.read(source), node.target
        if target in RESHAPES:
            dims = regroup([axis for dim in walk for axis in dim], shape_of(node))
            if dims is None:
                raise Misfit(node, "this reshape does not split axes evenly")
            return dims
        rank = len(walk)
        if target is aten.permute.default:
            return tuple(walk[dim % rank] for dim in argument(node, "dims"))
        if target is aten.t.default:
            return walk[::-1]
        if target is aten.transpose.int and rank:
            order = list(range(rank))
            first, second = argument(node, "dim0") % rank, argument(node, "dim1") % rank
            order[first], order[second] = second, first
            return tuple(walk[dim] for dim in order)
        if target is aten.expand.default:
            shape = shape_of(node)
            walk = ((),) * (len(shape) - rank) + walk
            return tuple(
                (Axis(size),) if not axes and size > 1 else axes
                for size, axes in zip(shape, walk, strict=True)
            )
        raise Misfit(node, "this view is no map of whole axes")

    def reduction(self, node: fx.Node) -> DimMap:
        if node.target not in REDUCTIONS:
            raise Misfit(node, "this reduction has no kernel")
        walk = self.read(node.args[0])  # type: ignore[arg-type]  # the reduced tensor
        rank = len(walk)
        dims = argument(node, "dim")
        if dims is None or dims == []:
            chosen = frozenset(range(rank))
        else:
            dims = [dims] if isinstance(dims, int) else dims
            chosen = frozenset(dim % rank for dim in dims) if rank else frozenset()
        self.reduced_dims[node] = tuple(axis for dim in chosen for axis in walk[dim])
        if argument(node, "keepdim"):
            return tuple(() if dim in chosen else axes for dim, axes in enumerate(walk))
        return tuple(axes for dim, axes in enumerate(walk) if dim not in chosen)

    def lookup(self, node: fx.Node) -> DimMap:
        """A read of a tensor in memory: only its indices, if any, walk with the result."""
        found = indirect.parse(node)
        if isinstance(found, str):
            raise Misfit(node, found)
        if found.source in self.members:
            if node.target is aten.gather.default:
                return self.gather(node)
            raise Misfit(node, "what it reads from is computed in the same kernel")
        shape_of(found.source)
        dims = self.together(node, [self.read(index) for index in found.indices], found.last)
        self.indirect_dims[node] = tuple(() if dim is None else dims[dim] for dim in found.walk)
        return dims

    def segments(self, node: fx.Node) -> DimMap:
        """Sums of rows by key: a table, whose rows programs know by the keys that they read."""
        if not self.members.isdisjoint(node.all_input_nodes):
            raise Misfit(node, "what it sums is computed in the same kernel")
        if self.table is not None:
            raise Misfit(node, "two sums by key are two kernels")
        for operand in node.all_input_nodes:
            shape_of(operand)
        self.table = node
        dims = fresh_dims(shape_of(node))
        self.indirect_dims[node] = ((), dims[1])
        return dims

    def gather(self, node: fx.Node) -> DimMap:
        """One element of each row: a reduction that selects where the column is the index."""
        source, dim, index = node.args[:3]
        walk = self.read(source)  # type: ignore[arg-type]  # gather's first argument
        picked = self.read(index)  # type: ignore[arg-type]  # gather's index
        if not walk or dim.__class__ is not int:
            raise Misfit(node, "gather from a scalar")
        dim = dim % len(walk)  # type: ignore[operator]  # an int, as just checked
        outer_match = shape_of(source)[:dim] + shape_of(source)[dim + 1 :]  # type: ignore[arg-type]
        if picked[dim] or outer_match != shape_of(node)[:dim] + shape_of(node)[dim + 1 :]:
            raise Misfit(node, "only a gather of one element a row is fused")
        for position, axes in enumerate(walk):
            if position != dim and not unify(axes, picked[position]):
                raise Misfit(node, "its operands divide a dim in ways that don't fit")
        self.reduced_dims[node] = self.picked_dims[node] = walk[dim]
        return tuple(() if position == dim else axes for position, axes in enumerate(walk))

    # Numbering.

    def domain(self) -> Domain:
        resolved = self.resolve()
        everything = {axis for dims in resolved.values() for dim in dims for axis in dim}
        covers = [node for node, dims in resolved.items() if _spans(dims, everything)]
        if not covers and self.unify_shapes(resolved):
            resolved = self.resolve()
            everything = {axis for dims in resolved.values() for dim in dims for axis in dim}
            covers = [node for node, dims in resolved.items() if _spans(dims, everything)]
        if not covers:
            raise Misfit(self.nodes[-1], "its values share no single iteration space")
        order = _memory_order(covers, resolved)
        number = {axis: index for index, axis in enumerate(order)}
        axes = _numbered(resolved, number)
        walked = _numbered(_leaves(self.indirect_dims), number)
        for node, dims in axes.items():
            flat = [axis for dim in dims for axis in dim]
            if len(set(flat)) != len(flat):
                raise Misfit(node, "it would be read by two different maps")
        reduced = {
            node: frozenset(number[axis] for axis in leaves(dims))
            for node, dims in self.reduced_dims.items()
        }
        for node, walk in self.picked_dims.items():
            places = [number[axis] for axis in leaves(walk)]
            if places != sorted(places):
                raise Misfit(
                    node, "its index counts elements in another order than memory has them"
                )
        sizes = tuple(axis.size for axis in order)
        own = {node: frozenset(axis for dim in dims for axis in dim) for node, dims in axes.items()}
        rows, cols, kind = classify(self.nodes, sizes, own, reduced)
        if self.table is not None:
            rows, cols = axes[self.table]
            kind = self.segment_kind(self.table, len(rows) + len(cols) == len(sizes))
        return Domain(sizes, axes, reduced, rows, cols, kind, walked)

    def segment_kind(self, table: fx.Node, spans: bool) -> DomainKind:
        """Beside the sums there may be what is done with each element of them."""
        for node in self.nodes:
            if node is not table and lookup(node.target).kind not in _ELEMENTWISE:
                raise Misfit(node, "it isn't elementwise, beside sums by key")
        if not spans:
            raise Misfit(table, "what is done with its sums has more elements")
        return "segment"

    def resolve(self) -> dict[fx.Node, DimMap]:
        return _leaves(self.dims)

    def unify_shapes(self, resolved: Mapping[fx.Node, DimMap]) -> bool:
        """Join parts that have the largest value's shape but not its axes, as siblings do."""
        largest = max(resolved, key=lambda node: len([a for dim in resolved[node] for a in dim]))
        shape, model = shape_of(largest), resolved[largest]
        joined = False
        for node, dims in resolved.items():
            if dims != model and shape_of(node) == shape:
                joined = all(unify(a, b) for a, b in zip(model, dims, strict=True))
                if not joined:
                    return False
        return joined


def _leaves(dims: Mapping[fx.Node, DimMap]) -> dict[fx.Node, DimMap]:
    return {node: tuple(tuple(leaves(dim)) for dim in walk) for node, walk in dims.items()}


def _numbered(
    dims: Mapping[fx.Node, DimMap], number: Mapping[Axis, int]
) -> dict[fx.Node, tuple[tuple[int, ...], ...]]:
    return {
        node: tuple(tuple(number[axis] for axis in dim) for dim in walk)
        for node, walk in dims.items()
    }


def _spans(dims: DimMap, everything: set[Axis]) -> bool:
    return len({axis for dim in dims for axis in dim}) == len(everything)


def _memory_order(covers: Sequence[fx.Node], resolved: Mapping[fx.Node, DimMap]) -> list[Axis]:
    """All axes, outermost first, as the first dense value that spans them lies in memory."""
    best: list[tuple[int, int, Axis]] = []
    for node in covers:
        value = node.meta["val"]
        strides = (value[0] if isinstance(value, tuple | list) else value).stride()
        best = []
        position = 0
        for stride, dim in zip(strides, resolved[node], strict=True):
            inner = 1
            for axis in reversed(dim):
                best.append((-stride * inner, position, axis))
                inner *= axis.size
            position += 1
        if all(stride for stride, _, _ in best):
            break
    return [axis for _, _, axis in sorted(best, key=lambda entry: entry[:2])]
