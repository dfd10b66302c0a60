"""Sums along rows that need no pass over the row, and sums of everything that begin with rows.

The backward of a softmax sums its cotangent along each row. A cross-entropy's cotangent has one
element a row (and, with label smoothing, a constant beside it), so the sum is known without
looking at the row: for rows too long for registers, one pass over memory less. A sum over a whole
loss, on the other hand, keeps what it sums out of the row's kernel; a sum of rows' sums doesn't.

Obligations. A sum is replaced when each term of what it sums is constant along the row, or is a
selection of the one column that equals an index which is itself constant along the row: a row's
sum is then the constant times the width, or the selected element, 0 where the index is no column.
Terms are scaled by values constant along the row and cast alone only. A sum of everything is split
where what it sums is computed from a reduction over the same last dimension; half types are summed
in fp32 until the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autodiff import ops
from autodiff.graph import NodeFacts, TrainingGraph
from autodiff.rewrite import GraphEdit
from trainfuse.fusion.domains import argument
from trainfuse.fusion.flow import root

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
_SUM = aten.sum.dim_IntList
_TOTALS = (aten.sum.default, aten.mean.default, aten.sum.dim_IntList, aten.mean.dim)
_CASTS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)
# What constant tensors are filled with: a number, or the argument that says it.
_FILLS: dict[str, int | str] = {
    "full": "fill_value",
    "full_like": "fill_value",
    "new_full": "fill_value",
    "scalar_tensor": "s",
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), 0),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), 1),
}
_FUSED = ("pointwise", "reduction")
_RANGES = ("aten.arange", "prims.iota")
_BOTH = (aten.bitwise_and.Tensor, aten.logical_and.default)


def simplify_sums(tg: TrainingGraph) -> TrainingGraph:
    """Replace sums along rows by closed forms, and let sums of row losses begin with rows.

    Requires decomposed composites and static shapes where it acts; ensures equal values up to the
    rounding of a sum.
    """
    edit: GraphEdit | None = None
    for node in tg.nodes():
        if node.target is _SUM and _Row.of(node) is not None:
            edit = edit or GraphEdit(tg)
            _close(edit, edit.mapping[node])
        elif node.target in _TOTALS and _follows_rows(node):
            edit = edit or GraphEdit(tg)
            _split(edit, edit.mapping[node])
    if edit is None:
        return tg
    edit.eliminate_dead()
    return edit.finish()


def _shape(node: fx.Node) -> tuple[int, ...] | None:
    """Static shape of a floating or integer value; None when it has none."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    shape = tuple(value.shape)
    return shape if all(type(size) is int and size > 0 for size in shape) else None


# Closed forms.


@dataclass(frozen=True, slots=True)
class _Row:
    """A sum over one dimension: of what, which dimension counted from the last (-1), how wide."""

    source: fx.Node
    dim: int
    width: int
    rank: int

    @classmethod
    def of(cls, node: fx.Node) -> _Row | None:
        """The row that a node sums, if it has a closed form."""
        source, dims = node.args[0], argument(node, "dim")
        assert isinstance(source, fx.Node)
        shape = _shape(source)
        if not shape or not isinstance(dims, Sequence) or len(dims) != 1:
            return None  # a scalar has a dim 0 to sum over, and no rows
        dim = dims[0] % len(shape) - len(shape)
        row = cls(source, dim, shape[dim], len(shape))
        good = node.meta["val"].dtype.is_floating_point and row.width > 1
        return row if good and row.closed(source) else None

    def constant(self, value: Any) -> bool:
        """Whether a value is the same in the whole row."""
        if not isinstance(value, fx.Node):
            return isinstance(value, int | float)
        shape = _shape(value)
        if shape is None:
            return False
        if len(shape) < -self.dim or shape[self.dim] == 1:
            return True
        if value.op == "call_function" and value.target is aten.expand.default:
            return self.constant(value.args[0])
        return fill_of(value) is not None

    def closed(self, value: Any) -> bool:
        """Whether a value's sum along the row is known without a pass over the row."""
        if self.constant(value):
            return True
        if not isinstance(value, fx.Node) or value.op != "call_function":
            return False
        args = value.args
        match value.target:
            case aten.where.self:
                return self.selection(value) is not None
            case aten.neg.default:
                return self.closed(args[0])
            case aten.mul.Tensor | aten.mul.Scalar:
                return (self.closed(args[0]) and self.constant(args[1])) or (
                    self.constant(args[0]) and self.closed(args[1])
                )
            case aten.div.Tensor | aten.div.Scalar:
                return self.closed(args[0]) and self.constant(args[1])
            case aten.add.Tensor | aten.sub.Tensor:
                return "alpha" not in value.kwargs and self.closed(args[0]) and self.closed(args[1])
            case target if target in _CASTS:
                return self.single(args[0]) and _is_float(value)
            case _:
                return False

    def single(self, value: Any) -> bool:
        """Whether a closed value has one term, which may be rounded."""
        value = _without_zero(value)
        while isinstance(value, fx.Node) and value.target in (*_CASTS, aten.neg.default):
            if not _is_float(value):
                return False
            value = _without_zero(value.args[0])
        return isinstance(value, fx.Node) and self.selection(value) is not None

    def selection(self, node: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
        """(index, other conditions) of where(column == index & conditions, value, 0)."""
        if node.target is not aten.where.self or not _is_zero(node.args[2]):
            return None
        index: list[fx.Node] = []
        conditions: list[fx.Node] = []
        pending: list[Any] = [node.args[0]]
        while pending:
            part = pending.pop()
            if self.constant(part):
                conditions.append(part)
            elif part.target in _BOTH:
                pending.extend(part.args)
            elif part.target is aten.eq.Tensor:
                first, second = part.args
                sides = [(first, second), (second, first)]
                index += [b for a, b in sides if self.is_column(a) and self.constant(b)]
            else:
                return None
        return (index[0], conditions) if len(index) == 1 else None

    def is_column(self, node: Any) -> bool:
        """Whether a value is 0, 1, .. along the row and has no other dimension."""
        if not isinstance(node, fx.Node):
            return False
        shape = _shape(node)
        if shape is None or len(shape) < -self.dim or shape[self.dim] != self.width:
            return False
        if node.meta["val"].numel() != self.width:
            return False
        while node.target in _CASTS or (
            node.op == "call_function" and ops.lookup(node.target).kind == "view"
        ):
            node = node.args[0]
        name = ops.op_name(node.target)
        start, step = argument_of(node, "start"), argument_of(node, "step")
        return (
            name.startswith(_RANGES)
            and node.meta["val"].dtype in (torch.int32, torch.int64)
            and start in (None, 0)
            and step in (None, 1)
        )


def argument_of(node: fx.Node, name: str) -> Any:
    """An operator's argument by name; None for what is no operator."""
    return argument(node, name) if isinstance(node.target, torch._ops.OpOverload) else None


def _is_float(node: fx.Node) -> bool:
    return node.meta["val"].dtype.is_floating_point


def fill_of(node: fx.Node) -> int | float | None:
    """The number that a constant tensor is filled with; None for any other value."""
    if node.op != "call_function":
        return None
    name = ops.op_name(node.target).split(".")[1:2]
    given = _FILLS.get(name[0]) if name else None
    number = argument(node, given) if isinstance(given, str) else given
    return number if isinstance(number, int | float) else None


def _is_zero(value: Any) -> bool:
    number = fill_of(value) if isinstance(value, fx.Node) else value
    return isinstance(number, int | float) and number == 0


def _without_zero(value: Any) -> Any:
    """What is added to zeros, as the backward of a gather does."""
    while isinstance(value, fx.Node) and value.target is aten.add.Tensor and not value.kwargs:
        if not _is_zero(value.args[0]):
            break
        value = value.args[1]
    return value


class _Closing:
    """Emits the closed form of one sum, before it and in its phase."""

    def __init__(self, edit: GraphEdit, node: fx.Node, row: _Row) -> None:
        self.edit, self.row = edit, row
        self.fact: NodeFacts = edit.facts[node]
        self.origin = node

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.edit.emit(target, args, kwargs, fact=self.fact, origin=self.origin)

    def thin(self, value: Any) -> Any:
        """A value that is constant along the row, with at most one element there."""
        if not isinstance(value, fx.Node):
            return value
        shape = _shape(value)
        assert shape is not None
        if len(shape) < -self.row.dim or shape[self.row.dim] == 1:
            return value
        if value.target is aten.expand.default:
            return self.thin(value.args[0])
        slim = list(shape)
        slim[self.row.dim] = 1
        like = value.meta["val"]
        return self.emit(
            aten.full.default, slim, fill_of(value), dtype=like.dtype, device=like.device
        )

    def terms(self, value: Any) -> list[tuple[Any, int]]:
        """(value without the row, how often it counts) of each term of a row's sum."""
        row, value = self.row, _without_zero(value)
        if row.constant(value):
            return [(self.thin(value), row.width)]
        args, target = value.args, value.target
        if target is aten.where.self:
            return [(self.selected(value), 1)]
        if target in (aten.add.Tensor, aten.sub.Tensor):
            second = self.terms(args[1])
            if target is aten.sub.Tensor:
                second = [(self.scaled(aten.mul.Tensor, v, -1.0), n) for v, n in second]
            return self.terms(args[0]) + second
        if target in (aten.mul.Tensor, aten.mul.Scalar) and row.constant(args[0]):
            args, target = (args[1], args[0]), aten.mul.Tensor
        if target is aten.neg.default or target in _CASTS:
            rest, keywords = args[1:], dict(value.kwargs)
        else:
            rest, keywords = (self.thin(args[1]),), {}
        return [
            (self.emit(target, v, *rest, **keywords), n)
            if isinstance(v, fx.Node)
            else (self.scaled(target, v, *rest), n)
            for v, n in self.terms(args[0])
        ]

    def scaled(self, target: Any, value: Any, *rest: Any) -> fx.Node:
        """An operation on a term, which may be a number."""
        if not isinstance(value, fx.Node):
            source = self.row.source.meta["val"]
            value = self.emit(
                aten.full.default, [], value, dtype=source.dtype, device=source.device
            )
        return self.emit(target, value, *rest)

    def selected(self, node: fx.Node) -> fx.Node:
        """The one element that a selection leaves of each row, 0 where it leaves none."""
        row = self.row
        found = row.selection(node)
        assert found is not None
        index, conditions = self.thin(found[0]), [self.thin(c) for c in found[1]]
        inside = self.emit(aten.ge.Scalar, index, 0)
        for condition in (self.emit(aten.lt.Scalar, index, row.width), *conditions):
            inside = self.emit(aten.bitwise_and.Tensor, inside, condition)
        value = node.args[1]
        if row.constant(value):
            picked = self.thin(value)
        else:
            picked = self.pick(node, value, index, inside)
        zero = self.emit(
            aten.scalar_tensor.default, 0.0, dtype=picked.meta["val"].dtype,
            device=picked.meta["val"].device,
        )  # fmt: skip
        return self.emit(aten.where.self, inside, picked, zero)

    def pick(self, node: fx.Node, value: fx.Node, index: fx.Node, inside: fx.Node) -> fx.Node:
        """A gather by an index that is valid in every row."""
        shape = list(_shape(node) or ())
        thin = [*shape]
        thin[self.row.dim] = 1
        place = self.emit(aten._to_copy.default, index, dtype=torch.int64)
        nought = self.emit(
            aten.scalar_tensor.default, 0, dtype=torch.int64, device=index.meta["val"].device
        )
        place = self.emit(aten.where.self, inside, place, nought)
        place = self.emit(aten.expand.default, place, thin)
        if list(_shape(value) or ()) != shape:
            value = self.emit(aten.expand.default, value, shape)
        return self.emit(aten.gather.default, value, len(shape) + self.row.dim, place)


def _close(edit: GraphEdit, node: fx.Node) -> None:
    """Put the closed form in a sum's place."""
    row = _Row.of(node)
    assert row is not None
    wanted = node.meta["val"]
    with edit.graph.inserting_before(node):
        closing = _Closing(edit, node, row)
        total: fx.Node | None = None
        for value, count in closing.terms(row.source):
            if count > 1 or not isinstance(value, fx.Node):
                value = closing.scaled(aten.mul.Tensor, value, float(count))
            total = value if total is None else closing.emit(aten.add.Tensor, total, value)
        assert total is not None
        if total.meta["val"].dtype != wanted.dtype:
            total = closing.emit(aten._to_copy.default, total, dtype=wanted.dtype)
        kept = list(row.source.meta["val"].shape)
        kept[row.dim] = 1
        if list(total.meta["val"].shape) != kept:
            total = closing.emit(aten.expand.default, total, kept)
        if not argument(node, "keepdim"):
            total = closing.emit(aten.squeeze.dim, total, row.dim)
        if wanted.is_contiguous() and not all(map(_fuses, node.users)):
            # ATen's kernels, of norms say, sum a repeated element less exactly than a tensor
            total = closing.emit(aten.clone.default, total, memory_format=torch.contiguous_format)
    edit.replace(node, total)


def _fuses(user: fx.Node) -> bool:
    """Whether a user's kernel may be ours."""
    return user.op == "call_function" and ops.lookup(user.target).kind in _FUSED


# Sums of everything.


def _follows_rows(node: fx.Node) -> bool:
    """Whether a full sum or mean adds values that were computed from sums over the same rows."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    shape = _shape(source)
    if shape is None or len(shape) < 2 or shape[-1] == 1 or node.meta["val"].numel() != 1:
        return False
    if not _is_float(node) or not _is_float(source):
        return False
    dims = argument(node, "dim")
    if argument(node, "keepdim") or not (dims in (None, []) or len(set(dims)) == len(shape)):
        return False
    pending, seen = [source], {source}
    while pending:
        value = root(pending.pop())
        if value.op != "call_function":
            continue
        if ops.lookup(value.target).kind == "reduction":
            read = value.args[0]
            dims = argument(value, "dim")
            own = _shape(read) if isinstance(read, fx.Node) else None
            # a loss may flatten its rows before it sums
            if not own or not dims or [dim % len(own) for dim in dims] != [len(own) - 1]:
                continue  # of no rows, as a tensor without dimensions has none
            # a loss may flatten its rows before it sums
            if own[-1] == shape[-1] and math.prod(own) == math.prod(shape):
                return True
        elif ops.lookup(value.target).kind == "pointwise":
            pending += [read for read in value.all_input_nodes if read not in seen]
            seen.update(value.all_input_nodes)
    return False


def _split(edit: GraphEdit, node: fx.Node) -> None:
    """Sum rows first, then their sums, in the type that a sum of half values is made in."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    wanted, fact = node.meta["val"].dtype, edit.facts[node]
    work = torch.float32 if wanted in HALF else wanted
    with edit.graph.inserting_before(node):
        rows = edit.emit(_SUM, (source, [-1]), {"dtype": work}, fact=fact, origin=node)
        total = edit.emit(aten.sum.default, (rows,), fact=fact, origin=node)
        if node.target in (aten.mean.default, aten.mean.dim):
            count = float(source.meta["val"].numel())
            total = edit.emit(aten.div.Tensor, (total, count), fact=fact, origin=node)
        if work != wanted:
            total = edit.emit(
                aten._to_copy.default, (total,), {"dtype": wanted}, fact=fact, origin=node
            )
    edit.replace(node, total)
