"""Move slices, paddings, rolls and lookups up, to where values are in memory.

A kernel can't read at another place what it computes itself: a slice of a product makes its kernel
write the product. Indexing commutes with what is elementwise: the slice of a product is the
product of slices, which are strided inputs; a padding of a sum is a sum of paddings, which are
masked loads. So a rotary embedding's backward, or a table that is cast before it is looked up, is
one kernel.

Obligations: what is climbed over is elementwise, or a view that only orders dims, of one phase with
no effect in between; all that is read instead is in memory anyway, or has a single element along
the indexed dims; no more bytes are read than writing the value and reading its parts takes; and
what is compared with something made of it (autodiff/exact.py) stays one value.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autodiff import ops
from autodiff.exact import made_once
from autodiff.graph import TrainingGraph
from autodiff.reads import is_fusible, readers_of, takes_registers
from autodiff.rewrite import GraphEdit
from trainfuse.fusion.arguments import argument
from trainfuse.fusion.domains import RESHAPES
from trainfuse.fusion.flow import root, value_bytes
from trainfuse.fusion.rewrites.index_layouts import layouts_after
from trainfuse.fusion.rewrites.index_regions import seen
from trainfuse.fusion.rewrites.index_specs import INDEXINGS, Spec, composed, counted, parse, through

aten = torch.ops.aten

MAX_CHAIN = 6
"""Nodes that are climbed over at once."""
MAX_ROUNDS = 4
_NOT_CLIMBED = frozenset({"aten.copy.default", "trainfuse.row_keys.default"})
_JOINS = frozenset({aten.cat.default, aten.slice_scatter.default, aten.select_scatter.default})
_INDEXINGS = _JOINS | INDEXINGS
_LAYOUTS = (None, torch.preserve_format, torch.contiguous_format)


def move_indexing_up(tg: TrainingGraph) -> TrainingGraph:
    """Let indexing nodes read what their elementwise operands are made of, where that pays."""
    if not any(parse(node) for node in tg.nodes()):
        return tg
    edit = GraphEdit(tg)
    mover = _Mover(edit)
    rounds = 0
    # what stands below a slice can move once the slice has
    while rounds < MAX_ROUNDS and mover.round():
        rounds += 1
        edit.eliminate_dead()
    return edit.finish() if rounds else tg


def nested_joins(tg: TrainingGraph) -> set[fx.Node]:
    """Joins of whose result, or of what is made of it, a part is joined, padded or read again.

    Written by coordinates, rather than as a dimension of its own, they let those move up.
    """
    reached: dict[fx.Node, bool] = {}
    for node in reversed(tg.nodes()):
        reached[node] = any(
            user.op == "call_function"
            and tg.phase(user) == tg.phase(node)
            and (user.target in _INDEXINGS or (_passes(user) and reached[user]))
            for user in node.users
        )
    return {node for node in tg.nodes() if node.target in _JOINS and reached[node]}


def _passes(node: fx.Node) -> bool:
    return _elementwise(node) or _is_view(node)


def _elementwise(node: fx.Node) -> bool:
    """Whether a node computes each element from the same element of its operands."""
    if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    row = ops.lookup(node.target)
    if row.kind != "pointwise" or row.name in _NOT_CLIMBED:
        return False
    return node.kwargs.get("memory_format") in _LAYOUTS


def _constant(node: fx.Node) -> float | int | bool | None:
    """The number that a whole tensor holds."""
    if node.op == "call_function" and node.target is aten.full.default:
        fill = node.args[1]
        return fill if isinstance(fill, bool | int | float) else None
    return None


@dataclass(frozen=True, slots=True)
class _Move:
    """One indexing node and what it does."""

    user: fx.Node
    spec: Spec


class _Mover:
    """Clears values of their indexing readers, the last value first."""

    def __init__(self, edit: GraphEdit) -> None:
        self.edit = edit
        self.once = made_once(edit.tg)
        self.effects: dict[fx.Node, int] = {}
        seen = 0
        for node in edit.graph.nodes:
            seen += ops.is_effect(node)
            self.effects[node] = seen

    def round(self) -> bool:
        """Clear every value once; whether anything moved."""
        return sum(self.clear(node) for node in reversed(list(self.edit.graph.nodes))) > 0

    def clear(self, value: fx.Node) -> bool:
        """Move every indexing of a value above it, when all can be and it pays."""
        padding = value.target is aten.constant_pad_nd.default
        if value in self.once or not (padding or _elementwise(value)):
            return False
        specs = {user: parse(user) for user in value.users}
        moves = [_Move(user, spec) for user, spec in specs.items() if spec is not None]
        moves = [m for m in moves if m.user.args[0] is value and self._beside(value, m.user)]
        if padding:
            return sum(self._compose(value, move) for move in moves) > 0
        moves = [m for m in moves if not _widens(value, m.spec)]
        if not moves or not self._pays(value, moves):
            return False
        return sum(self._move(value, move) for move in moves) > 0

    def _move(self, value: fx.Node, move: _Move) -> bool:
        with self.edit.graph.inserting_before(move.user):
            made = self._indexed(value, move.spec, value)
            if move.spec.pads:
                made = self._padded(made, move.user, move.spec, argument(move.user, "value"))
        return self._take_over(move.user, made)

    def _compose(self, padding: fx.Node, move: _Move) -> bool:
        """Read what was padded, by one padding; a cut, where nothing is padded."""
        amounts = composed(move.spec, padding)
        if amounts is None:
            return False
        with self.edit.graph.inserting_before(move.user):
            made = self._repadded(padding, amounts, padding)
            if move.spec.pads and _differ(argument(padding, "value"), move.user):
                made = self._padded(made, move.user, move.spec, argument(move.user, "value"))
        return self._take_over(move.user, made)

    def _take_over(self, user: fx.Node, made: fx.Node) -> bool:
        """Let a value stand for an indexing, if what reads that can read this as it lies."""
        assert made.meta["val"].shape == user.meta["val"].shape, user.format_node()
        views = layouts_after(user, made)
        if views is None:
            return False
        for view, value in views.items():
            view.meta["val"] = value
        self.edit.replace(user, made)
        self.clear(made)
        return True

    # May it be moved?

    def _beside(self, value: fx.Node, user: fx.Node) -> bool:
        """Whether a user runs in the value's phase, with nothing written between, and stays inside.

        A view that leaves the graph shares the value's memory, and as_strided sees how it lies
        there; one that a product reads would have to be written, where it is there for nothing.
        """
        same = self.edit.facts[value].phase == self.edit.facts[user].phase
        if not same or self.effects[value] != self.effects[user]:
            return False
        return not _is_view(user) or (
            all(reader.op == "call_function" and is_fusible(reader) for reader in readers_of(user))
            and not any(u.target is aten.as_strided.default for u in user.users)
        )

    def _pays(self, value: fx.Node, moves: list[_Move]) -> bool:
        """Whether no more is read than by writing the value and reading its parts."""
        moved = {move.user for move in moves}
        others = [user for user in value.users if user not in moved]
        phase = self.edit.facts[value].phase
        for other in others:
            readers = readers_of(other) if _is_view(other) else [other]
            if any(
                reader.op != "call_function"
                or not takes_registers(reader)
                or self.edit.facts[reader].phase != phase
                for reader in readers
            ):
                return False  # it is written anyway, and read in one piece
        read = 0
        for move in moves:
            share = move.user.meta["val"].numel() / value.meta["val"].numel()
            found: dict[fx.Node, int] = {}
            if not self._reads(value, move.spec, min(share, 1.0), found, MAX_CHAIN):
                return False
            read += _together(found)
        parts = sum(value_bytes(move.user) for move in moves)
        # parts of constants would be one value, and join the kernels of all that read it
        return 0 < read <= parts + value_bytes(value)

    def _reads(
        self, value: fx.Node, spec: Spec, share: float, found: dict[fx.Node, int], left: int
    ) -> bool:
        """Collect what a value is made of and the bytes read of it; False if it can't be indexed.

        share: of the value's elements that are read.
        """
        if left == 0:
            return False
        for operand in value.all_input_nodes:
            if spec.misses(operand) or spec.squeezes(operand) or _constant(operand) is not None:
                continue
            if counted(spec, operand) is not None:
                continue
            inner = through(spec, operand)
            if operand in self.once and not self._in_memory(operand, value):
                return False
            if self._in_memory(operand, value):
                found[operand] = int(value_bytes(operand) * share)
            elif composed(spec, operand) is not None:
                source = operand.all_input_nodes[0]
                found[source] = value_bytes(source)
            elif not _elementwise(operand) and inner is None:
                return False
            elif not self._reads(operand, inner or spec, share, found, left - 1):
                return False
        return True

    def _in_memory(self, operand: fx.Node, at: fx.Node) -> bool:
        """Whether a value is there before any kernel that computes `at`: no write is passed."""
        base = root(operand)
        if base.op != "call_function" or self.effects[base] != self.effects[at]:
            return True
        if self.edit.facts[base].phase != self.edit.facts[at].phase:
            return True
        if base.target is operator.getitem:
            base = base.args[0]  # type: ignore[assignment]  # the parts of a multiple result
        assert isinstance(base, fx.Node)
        return not is_fusible(base)

    # Moving.

    def _indexed(self, value: fx.Node, spec: Spec, origin: fx.Node) -> fx.Node:
        """A value at the places that an indexing reads, computed from its operands there."""
        made: dict[fx.Node, fx.Node] = {}
        for operand in value.all_input_nodes:
            made[operand] = self._operand(operand, spec, origin)
        args, kwargs = fx.map_arg((value.args, value.kwargs), made.__getitem__)
        return self._emit(origin, value.target, args, kwargs)

    def _viewed(self, view: fx.Node, spec: Spec, inner: Spec, origin: fx.Node) -> fx.Node:
        """A view at the places that an indexing reads. inner: the same of what it shows."""
        source = view.args[0]
        assert isinstance(source, fx.Node)
        made, shape = self._operand(source, inner, origin), list(spec.shape_of(view))
        if view.target in RESHAPES:
            return self._emit(origin, aten.view.default, (made, shape))
        if view.target is aten.expand.default:
            return self._emit(origin, view.target, (made, shape))
        return self._emit(origin, view.target, (made, *view.args[1:]), view.kwargs)

    def _repadded(self, padding: fx.Node, amounts: tuple[int, ...], origin: fx.Node) -> fx.Node:
        """A padding's source, padded by other amounts; sliced, where it is only cut."""
        source, fill = padding.args[0], argument(padding, "value")
        assert isinstance(source, fx.Node)
        if any(amount > 0 for amount in amounts):
            return self._emit(origin, padding.target, (source, list(amounts), fill))
        shape = source.meta["val"].shape
        for place, size in enumerate(reversed(shape)):
            before, after = amounts[2 * place : 2 * place + 2]
            if before or after:
                ends = (len(shape) - 1 - place, -before, size + after)
                source = self._emit(origin, aten.slice.Tensor, (source, *ends))
        return source

    def _operand(self, operand: fx.Node, spec: Spec, origin: fx.Node) -> fx.Node:
        if spec.misses(operand):
            return operand
        if spec.squeezes(operand):
            return self._emit(origin, *spec.squeeze(operand))
        number = _constant(operand)
        if number is not None:
            shape = list(spec.shape_of(operand))
            return self._emit(origin, aten.full.default, (shape, number), operand.kwargs)
        counts = counted(spec, operand)
        if counts is not None:
            first, step, count = counts
            value = operand.meta["val"]
            options = {"dtype": value.dtype, "device": value.device}
            ends = (first, first + step * count, step)
            return self._emit(origin, aten.arange.start_step, ends, options)
        inner = through(spec, operand)
        amounts = composed(spec, operand)
        if not self._in_memory(operand, origin):
            if amounts is not None:
                return self._repadded(operand, amounts, origin)
            if inner is not None:
                return self._viewed(operand, spec, inner, origin)
            if _elementwise(operand):
                return self._indexed(operand, spec, origin)
        return self._emit(origin, *spec.call(operand))

    def _padded(self, made: fx.Node, user: fx.Node, spec: Spec, fill: Any) -> fx.Node:
        """The padding's fill outside: what is computed from the operands' zeros is no matter."""
        value, origin = user.meta["val"], user
        if not value.dtype.is_floating_point:
            fill = bool(fill) if value.dtype == torch.bool else int(fill)
        inside: fx.Node | None = None
        for dim, low, high in spec.bounds(user):
            looked = seen(user, dim - value.dim())
            low, high = (
                low if looked[0] < low else 0,
                high if looked[1] > high else value.shape[dim],
            )
            shape = [1] * value.dim()
            shape[dim] = value.shape[dim]
            options = {"dtype": torch.int64, "device": value.device}
            place = self._emit(origin, aten.arange.default, (value.shape[dim],), options)
            place = self._emit(origin, aten.view.default, (place, shape))
            for target, bound, needed in (
                (aten.ge.Scalar, low, low > 0),
                (aten.lt.Scalar, high, high < value.shape[dim]),
            ):
                if not needed:
                    continue
                test = self._emit(origin, target, (place, bound))
                both = aten.bitwise_and.Tensor
                inside = test if inside is None else self._emit(origin, both, (inside, test))
        if inside is None:
            return made
        return self._emit(origin, aten.where.ScalarOther, (inside, made, fill))

    def _emit(
        self,
        origin: fx.Node,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
    ) -> fx.Node:
        fact = self.edit.facts[origin]
        made = self.edit.emit(target, args, dict(kwargs or {}), fact=fact, origin=origin)
        self.effects[made] = self.effects[origin]
        return made


def _together(found: dict[fx.Node, int]) -> int:
    """Bytes of what is read; of views of one tensor no more than it has."""
    total: dict[fx.Node, int] = {}
    for node, size in found.items():
        total[root(node)] = total.get(root(node), 0) + size
    return sum(min(size, value_bytes(base)) for base, size in total.items())


def _widens(value: fx.Node, spec: Spec) -> bool:
    """Whether a dim of one element comes to have more: no operand would show how many."""
    shape = value.meta["val"].shape
    longer = spec.pads or spec.picks
    return longer and any(-dim <= len(shape) and shape[dim] == 1 for dim in spec.dims)


def _differ(fill: Any, user: fx.Node) -> bool:
    """Whether two paddings fill with different numbers, or signs of zero."""
    return repr(float(fill)) != repr(float(argument(user, "value")))


def _is_view(node: fx.Node) -> bool:
    return node.op == "call_function" and ops.lookup(node.target).kind == "view"
