"""From merged units to a plan: what is alive, what is stored, and the execution order."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from autodiff import ops
from autodiff.accumulation import ACCUMULATING
from autodiff.exact import made_once
from autodiff.graph import Refusal
from autodiff.philox import KEEP_MASK
from trainfuse.fusion.alone import outruns_aten
from trainfuse.fusion.domains import infer
from trainfuse.fusion.flow import Flow, is_view, sources
from trainfuse.fusion.plan import FusionGroup, FusionOptions, FusionPlan
from trainfuse.fusion.schedule import topological
from trainfuse.fusion.segment_ops import ROW_KEYS, SEGMENT_SUM

# One of these alone is worth a kernel: ATen has none for it.
OURS = frozenset({KEEP_MASK, ROW_KEYS, SEGMENT_SUM})
PIECES = "trainfuse_pieces"
"""Set in the meta of a `cat` of pieces that are made one after the other."""
Item = FusionGroup | fx.Node


@dataclass(frozen=True, slots=True)
class Unit:
    """Nodes that grouping wants in one kernel, and copies of other units' nodes."""

    members: tuple[fx.Node, ...]
    borrowed: tuple[fx.Node, ...] = ()


def assemble(
    flow: Flow, units: Sequence[Unit], free: frozenset[fx.Node], options: FusionOptions
) -> FusionPlan:
    """The plan of the given units; a unit of one operation returns to ATen.

    free: constants that a kernel can make itself.
    """
    assembly = _Assembly(flow, units, free, options)
    items, refusals = assembly.live_items(frozenset())
    order = assembly.execution_order(items)
    if options.fuse_first is not None:
        groups = [item for item in order if isinstance(item, FusionGroup)]
        barred = {node for group in groups[options.fuse_first :] for node in group.nodes}
        kept = {node for group in groups[: options.fuse_first] for node in group.nodes}
        items, refusals = assembly.live_items(frozenset(barred - kept))
        order = assembly.execution_order(items)
    order = _named(order)
    groups = tuple(item for item in order if isinstance(item, FusionGroup))
    aten = tuple(item for item in order if isinstance(item, fx.Node))
    return FusionPlan(groups, aten, tuple(order), tuple(refusals))


def _named(order: Sequence[Item]) -> list[Item]:
    """Groups named by phase and place."""
    count: dict[str, int] = {}
    named: list[Item] = []
    for item in order:
        if isinstance(item, FusionGroup):
            number = count.get(item.phase, 0)
            count[item.phase] = number + 1
            item = replace(item, name=f"{item.phase}_{number}")
        named.append(item)
    return named


def _upstream(index: int, before: Sequence[set[int]]) -> set[int]:
    """An item and all that must come before it."""
    found, pending = {index}, [index]
    while pending:
        new = before[pending.pop()] - found
        found |= new
        pending += new
    return found


class _Assembly:
    """Units and lone nodes in execution order, and what of them is needed."""

    def __init__(
        self,
        flow: Flow,
        units: Sequence[Unit],
        free: frozenset[fx.Node],
        options: FusionOptions,
    ) -> None:
        self.flow = flow
        self.free = free
        self.options = options
        self.once = made_once(flow.tg)
        taken = {node for unit in units for node in unit.members}
        lone = [Unit((node,)) for node in flow.compute if node not in taken]
        # Lone nodes are told from units of one node by standing after them.
        self.units = [*units, *lone]
        self.num_fusible = len(units)

    def unit_order(self) -> list[int]:
        """Every unit, after the units that it depends on."""
        home = {node: index for index, unit in enumerate(self.units) for node in unit.members}
        before: list[set[int]] = [set() for _ in self.units]
        for node, earlier in zip(self.flow.compute, self.flow.predecessors(), strict=True):
            before[home[node]].update(home[self.flow.compute[place]] for place in earlier)
        for index, units in enumerate(before):
            units.discard(index)
        keys = [max(self.flow.position[node] for node in unit.members) for unit in self.units]
        return topological(keys, before)

    def live_items(self, barred: frozenset[fx.Node]) -> tuple[list[Item], list[Refusal]]:
        """Groups and nodes that must run, from the last to the first; views come with readers.

        barred: a unit that holds one of these isn't fused.
        """
        stored = set(self.flow.escapes)  # what must be in memory
        items: list[Item] = []
        refusals: list[Refusal] = []
        for index in reversed(self.unit_order()):
            unit = self.units[index]
            outputs = [node for node in unit.members if node in stored]
            if index < self.num_fusible and outputs:
                group = self.group(unit, outputs)
                if not isinstance(group, Refusal) and not barred.intersection(unit.members):
                    items.append(group)
                    stored.update(s for source in group.inputs for s in sources(source))
                    continue
                if isinstance(group, Refusal):
                    refusals.append(group)
            for node in sorted(unit.members, key=self.flow.position.__getitem__, reverse=True):
                if node in stored or ops.is_kept(node):
                    items.append(node)
                    stored.update(self.flow.reads[node])
        views = self.needed_views(items)
        return [*items, *views], refusals

    def group(self, unit: Unit, outputs: Iterable[fx.Node]) -> FusionGroup | Refusal:
        """The kernel of what the outputs need of a unit, or why ATen is as good."""
        inside = {*unit.members, *unit.borrowed}
        alive: set[fx.Node] = set()
        pending = list(outputs)
        while pending:
            node = pending.pop()
            if node in inside and node not in alive:
                alive.add(node)
                pending.extend(self.flow.reads[node])
        nodes, inputs = self.flow.close(alive, self.free)
        operations = [node for node in alive if node.target is not operator.getitem]
        tg, last = self.flow.tg, nodes[-1]
        ours = any(ops.op_name(node.target) in OURS for node in operations)
        enough = len(operations) > 1 or ours or self.options.single_node
        if not enough and not outruns_aten(operations[0]):
            return tg.refuse("fusion", operations[0], "alone: it is one kernel in ATen, too")
        domain = infer(nodes)
        if isinstance(domain, Refusal):
            return tg.refuse("fusion", last, domain.reason)
        written = sorted(outputs, key=self.flow.position.__getitem__)
        phase = tg.phase(unit.members[0])
        exact = not self.once.isdisjoint(nodes)
        return FusionGroup("", phase, tuple(nodes), tuple(inputs), tuple(written), domain, exact)

    def needed_views(self, items: Iterable[Item]) -> list[fx.Node]:
        """Views that something outside the group of their tensor reads."""
        found: dict[fx.Node, None] = {}
        pending = list(self.flow.tg.graph.output_node().all_input_nodes)
        for item in items:
            pending.extend(item.inputs if isinstance(item, FusionGroup) else item.all_input_nodes)
        while pending:
            node = pending.pop()
            if is_view(node) and node not in found:
                found[node] = None
                pending += node.all_input_nodes
        return list(found)

    def execution_order(self, items: Sequence[Item]) -> list[Item]:
        """All items, each after what it reads, effects and random draws where they were."""
        place = self.flow.place
        home: dict[fx.Node, int] = {}
        keys: list[int] = []
        for index, item in enumerate(items):
            made = item.outputs if isinstance(item, FusionGroup) else (item,)
            home.update((node, index) for node in made)
            last = item.nodes[-1] if isinstance(item, FusionGroup) else item
            keys.append(place[last])
        before: list[set[int]] = []
        for item in items:
            read = item.inputs if isinstance(item, FusionGroup) else item.all_input_nodes
            before.append({home[node] for node in read if node in home})
        self.keep_in_place(items, keys, before)
        self.keep_apart(items, home, before)
        return [items[index] for index in topological(keys, before)]

    def keep_apart(
        self, items: Sequence[Item], home: Mapping[fx.Node, int], before: Sequence[set[int]]
    ) -> None:
        """Pieces made one after the other: nothing of one before all of the last is done.

        What is ready early would else run early, and hold in memory what pieces are there to save.
        """
        nodes = [item for item in items if isinstance(item, fx.Node)]
        for node in sorted(nodes, key=self.flow.place.__getitem__):
            made: Any = node.args[0] if node.args else None
            if node.target in ACCUMULATING and made is not None:
                pairs = [(made, node)]
            else:
                pairs = itertools.pairwise(made) if node.meta.get(PIECES) else ()
            for first, second in pairs:
                last, this = home.get(first), home.get(second)
                if last is None or this is None or last == this:
                    continue
                for index in _upstream(this, before) - _upstream(last, before):
                    before[index].add(last)

    def keep_in_place(
        self, items: Sequence[Item], keys: Sequence[int], before: Sequence[set[int]]
    ) -> None:
        """Order that data flow doesn't show: draws among themselves, an effect against all."""
        by_place = sorted(range(len(items)), key=keys.__getitem__)
        effect: int | None = None
        draw: int | None = None
        earlier: list[int] = []
        for index in by_place:
            item = items[index]
            if effect is not None:
                before[index].add(effect)
            if isinstance(item, fx.Node) and ops.is_effect(item):
                before[index].update(earlier)
                effect = index
            elif isinstance(item, fx.Node) and ops.draws_randomness(item):
                if draw is not None:
                    before[index].add(draw)
                draw = index
            earlier.append(index)
