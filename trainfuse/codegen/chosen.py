"""Loads that a selection needs at some places only: its condition becomes their mask.

Pieces that are joined are each read where they stand; what a masked lane would read costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx

from autodiff.ops import lookup, op_name

if TYPE_CHECKING:
    from trainfuse.codegen.builder import Group

aten = torch.ops.aten
Tests = tuple[tuple[fx.Node, bool], ...]
_SELECTIONS = (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf)
_COORDINATES = frozenset({"pointwise", "view", "creation"})


class Chosen:
    """For each value of a group the conditions, of coordinates alone, under which it is used."""

    def __init__(self, group: Group) -> None:
        self.members = set(group.nodes)
        self.outputs = set(group.outputs)
        self.inputs = set(group.inputs)
        self.found: dict[fx.Node, Tests] = {}

    def of(self, node: fx.Node) -> Tests:
        """(condition, whether it holds) wherever anything uses a value; () if it is all used."""
        if node not in self.found:
            self.found[node] = () if node in self.outputs else self._common(node)
        return self.found[node]

    def _common(self, node: fx.Node) -> Tests:
        common: Tests | None = None
        for user in node.users:
            if user in self.members:
                tests = self._by(user, node)
                common = tests if common is None else tuple(t for t in common if t in tests)
        return common or ()

    def _by(self, user: fx.Node, node: fx.Node) -> Tests:
        kind = lookup(user.target).kind
        if kind not in ("pointwise", "view") or op_name(user.target) == "getitem":
            return ()
        tests = self.of(user)
        if user.target not in _SELECTIONS:
            return tests
        condition, first, second = user.args
        if condition is node or first is second or not isinstance(condition, fx.Node):
            return ()
        return (*tests, (condition, first is node)) if self._known(condition) else tests

    def _known(self, node: fx.Node) -> bool:
        """Whether a value is made of coordinates alone: nothing is loaded for it."""
        pending, seen = [node], {node}
        while pending:
            node = pending.pop()
            if node not in self.members or lookup(node.target).kind not in _COORDINATES:
                return False
            if lookup(node.target).kind != "creation":
                new = [n for n in node.all_input_nodes if n not in seen]
                seen.update(new)
                pending.extend(new)
        return True
