"""A row-wise computation written again for some of its rows.

Every value of a row group has axes of its domain only: rows, columns, both or neither. In normal
form it is [rows or 1, columns or 1], so views disappear, reductions are over dimension 1, and a
range of rows is a slice of what is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autodiff import ops
from autodiff.graph import NodeFacts
from autodiff.rewrite import GraphEdit
from trainfuse.fusion.domains import Domain
from trainfuse.fusion.flow import is_view
from trainfuse.fusion.rewrites.row_sums import fill_of

aten = torch.ops.aten
_REDUCTIONS = {
    aten.sum.dim_IntList: aten.sum.dim_IntList,
    aten.mean.dim: aten.mean.dim,
    aten.amax.default: aten.amax.default,
    aten.amin.default: aten.amin.default,
}
ROW_RESULTS = frozenset({aten.argmax.default, aten.argmin.default})
"""Operators without a kernel of ours that give one element a row: run on each range of rows."""


class NotByRows(Exception):
    """A node that has no normal form; becomes a Refusal."""

    def __init__(self, node: fx.Node, reason: str) -> None:
        super().__init__(reason)
        self.node, self.reason = node, reason


class RowForm:
    """Emits the members of a row domain for ranges of rows, at the edit's insertion point.

    edit: of the graph that the domain's nodes belong to. fact: of every node emitted; mark: called
    with each.
    """

    def __init__(
        self,
        edit: GraphEdit,
        domain: Domain,
        fact: NodeFacts,
        mark: Callable[[fx.Node], None] = lambda node: None,
    ) -> None:
        self.edit, self.domain, self.fact, self.mark = edit, domain, fact, mark
        self.rows, self.width = domain.extent(domain.rows), domain.extent(domain.cols)
        self.whole: dict[fx.Node, fx.Node] = {}

    def emit(self, target: Any, *args: Any, like: fx.Node | None = None, **kwargs: Any) -> fx.Node:
        """A new node; like: one of equal shape and type elsewhere, to save inferring its value."""
        value = None if like is None else like.meta["val"]
        node = self.edit.emit(target, args, kwargs, fact=self.fact, value=value)
        self.mark(node)
        return node

    def spans(self, node: fx.Node) -> tuple[bool, bool]:
        """Whether a value has the rows' axes and the columns'; NotByRows if it has some of them."""
        own = [axis for dim in self.domain.axes[node] for axis in dim]
        found = []
        for axes in (self.domain.rows, self.domain.cols):
            mine = [axis for axis in own if axis in axes]
            if mine and mine != list(axes):
                raise NotByRows(node, "its elements are not in the order of the rows")
            found.append(bool(mine))
        if all(found) and own != [*self.domain.rows, *self.domain.cols]:
            raise NotByRows(node, "its elements are not in the order of the rows")
        return found[0], found[1]

    def outside(self, node: fx.Node) -> fx.Node:
        """A value from outside in normal form, all its rows; emitted once, before any range."""
        found = self.whole.get(node)
        if found is None:
            found = self.edit.mapping[node]
            value = node.meta["val"]
            if node in self.domain.axes and value.dim() > 0:
                found = self._flat(node, found)
            self.whole[node] = found
        return found

    def _flat(self, node: fx.Node, copy: fx.Node) -> fx.Node:
        own = {axis for dim in self.domain.axes[node] for axis in dim}
        partly = own & set(self.domain.rows)
        if partly and partly != set(self.domain.rows):
            raise NotByRows(node, "it has some of the rows' dimensions only")
        by_rows, by_columns = self.spans(node)
        shape = [self.rows if by_rows else 1, self.width if by_columns else 1]
        if by_rows and by_columns and not node.meta["val"].is_contiguous():
            raise NotByRows(node, "it doesn't lie by rows in memory")
        if list(node.meta["val"].shape) == shape:
            return copy
        return self.emit(aten.reshape.default, copy, shape)

    def range(self, node: fx.Node, start: int, stop: int) -> fx.Node:
        """A value from outside for a range of rows."""
        whole = self.outside(node)
        if node not in self.domain.axes or not node.meta["val"].dim() or not self.spans(node)[0]:
            return whole
        return self.emit(aten.slice.Tensor, whole, 0, start, stop)

    def members(
        self, nodes: Sequence[fx.Node], given: Mapping[fx.Node, fx.Node], start: int, stop: int
    ) -> dict[fx.Node, fx.Node]:
        """Every member for a range of rows. given: the values of what is made by row elsewhere."""
        env = dict(given)
        for node in nodes:
            for source in node.all_input_nodes:
                if source not in env:
                    env[source] = self.range(source, start, stop)
            env[node] = self.member(node, env)
        return env

    def member(self, node: fx.Node, env: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """One member from its operands' normal forms."""
        kind = ops.lookup(node.target).kind
        if is_view(node):
            return env[node.args[0]]  # type: ignore[index]  # the viewed tensor
        if kind == "creation":
            return self._creation(node)
        if kind == "pointwise":
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
            made = self.emit(node.target, *args, **kwargs)
        elif node.target in _REDUCTIONS:
            kwargs = {"dtype": node.kwargs["dtype"]} if "dtype" in node.kwargs else {}
            made = self.emit(node.target, self.full(node.args[0], env), [1], True, **kwargs)
        elif node.target is aten.gather.default:
            made = self.emit(node.target, self.full(node.args[0], env), 1, env[node.args[2]])
        elif node.target in ROW_RESULTS:
            source = node.args[0]
            if source in self.domain.axes and self.spans(source) != (True, True):  # type: ignore[arg-type]  # its tensor
                raise NotByRows(node, "it doesn't read whole rows in their order")
            made = self.emit(node.target, self.full(node.args[0], env), 1, True)
        else:
            raise NotByRows(node, f"{ops.op_name(node.target)} has no form by rows")
        if made.meta["val"].dtype != node.meta["val"].dtype:
            raise NotByRows(node, "its type depends on the shape of its operands")
        return made

    def _creation(self, node: fx.Node) -> fx.Node:
        value, number = node.meta["val"], fill_of(node)
        kept = {"dtype": value.dtype, "device": value.device}
        if number is not None:
            return self.emit(aten.full.default, [1, 1] if value.dim() else [], number, **kept)
        if self.spans(node) != (False, True) or value.dim() != 1:
            raise NotByRows(node, "it counts rows")
        if node.all_input_nodes:
            raise NotByRows(node, "it is made like another value")
        copy = self.emit(node.target, *node.args, **node.kwargs)
        return self.emit(aten.view.default, copy, [1, self.width])

    def full(self, node: Any, env: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """A member with all its columns, though it be the same in each."""
        value = env[node]
        shape = list(value.meta["val"].shape) if value.meta["val"].dim() == 2 else [1, 1]
        if shape[1] == self.width:
            return value
        return self.emit(aten.expand.default, value, [shape[0], self.width])
