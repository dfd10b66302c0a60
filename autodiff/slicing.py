"""Differentiable subgraphs: the sets of forward nodes that we take, with their derived backward.

TorchScript's algorithm on a training graph: producers are merged into consumers, latest first,
to a fixpoint, never across a barrier; siblings that only share an input are never merged.
Source: torch/csrc/jit/passes/create_autodiff_subgraphs.cpp.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from . import ops
from .graph import Refusal, TrainingGraph
from .inlining import large_enough
from .subgraphs import TRANSPARENT, UNSLICED, Slices, Subgraph, producers

_MAX_RANK = 8


def slice_graph(
    tg: TrainingGraph,
    threshold: int = 2,
    skip_ops: Collection[str] = frozenset(),
    *,
    barriers: Collection[fx.Node] = (),
    horizontal: bool = True,
    allow_complex: bool = False,
    device_types: Collection[str] = ("cuda", "cpu"),
) -> Slices:
    """Slice the forward phase, and let each backward node follow the node it derives from.

    threshold: executed nodes that a subgraph needs (min_subgraph_nodes). skip_ops: names such as
    "aten.add" that stay ATen, with what was decomposed from them. barriers: nodes that nothing
    is moved across. horizontal: siblings that share a tensor read count together. A graph in
    which nothing is derived isn't sliced: its candidates are all UNSLICED.
    """
    rules = Rules(frozenset(map(_spelled, skip_ops)), allow_complex, frozenset(device_types))
    refusals: list[Refusal] = []
    candidates: set[fx.Node] = set()
    for node in tg.nodes():
        if ops.lookup(node.target).kind in TRANSPARENT:
            continue
        reason = rules.refuse(node)
        if reason is None:
            candidates.add(node)
        elif tg.phase(node) == "forward":
            refusals.append(tg.refuse("slicing", node, reason))
    forward, backward = tg.nodes("forward"), tg.nodes("backward")
    if not forward or not backward:
        owner = dict.fromkeys(candidates, UNSLICED)
        return Slices((), _with_views(tg, owner, tg.nodes()), tuple(refusals))
    groups: list[list[fx.Node]] = []
    for block in _blocks(tg, forward, frozenset(barriers)):
        if sum(node in candidates for node in block) >= threshold:
            groups += _Block(block, candidates).merge()
    kept = large_enough(_in_order(groups, forward), threshold, horizontal=horizontal)
    owner = {node: index for index, group in enumerate(kept) for node in group}
    for node in candidates:
        if tg.phase(node) == "update":
            owner[node] = UNSLICED
        elif tg.phase(node) == "forward" and node not in owner:
            reason = f"its subgraph has fewer than {threshold} executed nodes"
            refusals.append(tg.refuse("slicing", node, reason))
    owner = _with_views(tg, owner, forward)
    refusals += _follow(tg, owner, backward)
    owner = _with_views(tg, owner, tg.nodes("update"))
    return Slices(_describe(tg, owner, len(kept)), owner, tuple(refusals))


def _spelled(name: str) -> str:
    return name.replace("::", ".")


@dataclass(frozen=True, slots=True)
class Rules:
    """What may be a member of a subgraph."""

    skip_ops: frozenset[str]
    allow_complex: bool
    device_types: frozenset[str]

    def refuse(self, node: fx.Node) -> str | None:
        """Why a node stays ATen, or None for a candidate."""
        row = ops.lookup(node.target)
        if row.kind == "effect":
            return "a side effect is never moved"
        if self._skipped(node, row.name):
            return "skip_ops names it"
        if row.kind == "opaque":
            return f"{row.name} has no fusible row in the operator table"
        values = [
            value
            for holder in (node, *node.all_input_nodes)
            for value in tree_leaves(holder.meta.get("val"))
            if isinstance(value, torch.Tensor)
        ]
        return self._refuse_values(values)

    def _refuse_values(self, values: Iterable[torch.Tensor]) -> str | None:
        devices: set[torch.device] = set()
        for value in values:
            if value.layout != torch.strided:
                return f"a {value.layout} tensor"
            if value.dtype.is_complex and not self.allow_complex:
                return "complex numbers are off"
            if value.dim() > _MAX_RANK:
                return f"rank {value.dim()} is above {_MAX_RANK}"
            if value.device.type not in self.device_types:
                return f"no generator for device {value.device}"
            if value.dim() > 0 or value.device.type != "cpu":
                devices.add(value.device)
        return "tensors on several devices" if len(devices) > 1 else None

    def _skipped(self, node: fx.Node, name: str) -> bool:
        if not self.skip_ops:
            return False
        origin = node.meta.get("original_aten")
        names = {name, name.rpartition(".")[0]}
        if origin is not None:
            names |= {str(origin), str(origin).rpartition(".")[0]}
        return not names.isdisjoint(self.skip_ops)


def _blocks(
    tg: TrainingGraph, forward: list[fx.Node], barriers: frozenset[fx.Node]
) -> list[list[fx.Node]]:
    """The forward's working nodes, cut at barriers.

    A checkpointed region is no barrier: recompute has already made what its tags ask for.
    """
    blocks: list[list[fx.Node]] = [[]]
    for node in forward:
        if node in barriers or ops.is_effect(node) or ops.is_collective(node):
            blocks.append([])
            continue
        if ops.lookup(node.target).kind in TRANSPARENT:
            continue
        blocks[-1].append(node)
    return blocks


class _Block:
    """One work block: its units, single nodes or subgraphs under construction, in order."""

    def __init__(self, nodes: list[fx.Node], candidates: set[fx.Node]) -> None:
        self.order = list(range(len(nodes)))
        self.position = list(range(len(nodes)))
        self.members: list[list[fx.Node]] = [[node] for node in nodes]
        self.mergeable = [node in candidates for node in nodes]
        self.reads: list[set[int]] = [set() for _ in nodes]
        self.read_by: list[set[int]] = [set() for _ in nodes]
        unit_of = {node: unit for unit, node in enumerate(nodes)}
        draws: int | None = None
        for unit, node in enumerate(nodes):
            before = {unit_of[parent] for parent in producers(node) if parent in unit_of}
            if ops.draws_randomness(node):
                # Random nodes keep their order: each depends on the one before it.
                if draws is not None:
                    before.add(draws)
                draws = unit
            self.reads[unit] = before
            for other in before:
                self.read_by[other].add(unit)

    def merge(self) -> list[list[fx.Node]]:
        """Merge to a fixpoint; every candidate ends in exactly one group."""
        changed = True
        while changed:
            changed = False
            place = len(self.order) - 1
            while place >= 0:
                consumer = self.order[place]
                if self.mergeable[consumer] and self._absorb_one(consumer):
                    changed = True
                    place = self.position[consumer]
                else:
                    place -= 1
        return [self.members[unit] for unit in self.order if self.mergeable[unit]]

    def _absorb_one(self, consumer: int) -> bool:
        latest_first = sorted(self.reads[consumer], key=self.position.__getitem__, reverse=True)
        return any(
            self.mergeable[producer] and self._absorb(consumer, producer)
            for producer in latest_first
        )

    def _absorb(self, consumer: int, producer: int) -> bool:
        """Move producer to just before consumer, its other readers past it, and merge the two.

        Fails when consumer depends on producer also through a unit outside: that would be a cycle.
        """
        first, last = self.position[producer], self.position[consumer]
        moving = {producer}
        staying: list[int] = []
        dragged: list[int] = []
        for unit in self.order[first + 1 : last]:
            if self.reads[unit].isdisjoint(moving):
                staying.append(unit)
            else:
                moving.add(unit)
                dragged.append(unit)
        if not self.reads[consumer].isdisjoint(dragged):
            return False
        self.order[first : last + 1] = [*staying, consumer, *dragged]
        for place in range(first, len(self.order)):
            self.position[self.order[place]] = place
        self.members[consumer] = self.members[producer] + self.members[consumer]
        self._redirect(producer, consumer)
        return True

    def _redirect(self, producer: int, consumer: int) -> None:
        for unit in self.read_by[producer]:
            self.reads[unit].discard(producer)
            if unit != consumer:
                self.reads[unit].add(consumer)
                self.read_by[consumer].add(unit)
        for unit in self.reads[producer]:
            self.read_by[unit].discard(producer)
            self.read_by[unit].add(consumer)
            self.reads[consumer].add(unit)
        self.mergeable[producer] = False


def _in_order(groups: list[list[fx.Node]], forward: list[fx.Node]) -> list[list[fx.Node]]:
    """Groups by their first node, each in graph order."""
    position = {node: i for i, node in enumerate(forward)}
    ordered = [sorted(group, key=position.__getitem__) for group in groups]
    return sorted(ordered, key=lambda group: position[group[0]])


def _with_views(
    tg: TrainingGraph, owner: dict[fx.Node, int], nodes: list[fx.Node]
) -> dict[fx.Node, int]:
    """Give views and tuple parts the owner of their base, and constants that of their readers.

    A view of an outside value belongs to none: it runs as a free ATen view.
    """
    result = dict(owner)
    for node in nodes:
        if ops.lookup(node.target).kind == "view" and node not in result:
            base = node.args[0]
            if isinstance(base, fx.Node) and base in result:
                result[node] = result[base]
    for node in reversed(nodes):
        if ops.lookup(node.target).kind == "creation" and node not in result:
            owners = {result.get(user) for user in node.users}
            if len(owners) == 1 and (only := owners.pop()) is not None:
                result[node] = only
    return result


def _follow(tg: TrainingGraph, owner: dict[fx.Node, int], backward: list[fx.Node]) -> list[Refusal]:
    """Give each backward node the owner of what it derives from; returns why some have none.

    A node without link, such as a sum of cotangents, belongs to the subgraph that made the value:
    the one whose backward reads the sum. A sum for a graph input belongs to none.
    """
    by_name = {node.name: node for node in tg.nodes("forward")}
    unlinked: list[fx.Node] = []
    refusals: list[Refusal] = []
    for node in backward:
        link = tg.facts[node].forward_of
        if link is None:
            unlinked.append(node)
            continue
        source = by_name[link]
        if source in owner:
            owner[node] = owner[source]
        elif ops.lookup(node.target).kind not in TRANSPARENT:
            refusals.append(tg.refuse("slicing", node, f"it derives from {link}, which is outside"))
    for node in reversed(unlinked):
        owners = {owner.get(user) for user in _through_views(node) if user.op == "call_function"}
        if len(owners) == 1 and (only := owners.pop()) is not None and only != UNSLICED:
            owner[node] = only
        elif ops.lookup(node.target).kind not in TRANSPARENT:
            refusals.append(tg.refuse("slicing", node, "its readers belong to no one subgraph"))
    return refusals


def _through_views(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    pending = list(node.users)
    while pending:
        user = pending.pop()
        if user.op == "call_function" and ops.lookup(user.target).kind == "view":
            pending.extend(user.users)
        else:
            found.add(user)
    return found


def _describe(tg: TrainingGraph, owner: Mapping[fx.Node, int], count: int) -> tuple[Subgraph, ...]:
    nodes: list[list[fx.Node]] = [[] for _ in range(count)]
    backward: list[list[fx.Node]] = [[] for _ in range(count)]
    for node in tg.nodes():
        index = owner.get(node, UNSLICED)
        if index != UNSLICED:
            (nodes if tg.phase(node) == "forward" else backward)[index].append(node)
    return tuple(
        Subgraph(
            index=index,
            nodes=tuple(members),
            backward=tuple(backward[index]),
            executed=sum(ops.lookup(n.target).kind not in TRANSPARENT for n in members),
            inputs=_reads(members),
            outputs=_leaves(members, backward[index]),
        )
        for index, members in enumerate(nodes)
    )


def _reads(members: list[fx.Node]) -> tuple[fx.Node, ...]:
    inside = set(members)
    found: dict[fx.Node, None] = {}
    for node in members:
        for parent in node.all_input_nodes:
            if parent not in inside:
                found[parent] = None
    return tuple(found)


def _leaves(members: list[fx.Node], backward: list[fx.Node]) -> tuple[fx.Node, ...]:
    """Values read outside both phases; for a view, its base: a view is rebuilt outside."""
    inside = set(members)
    own = inside.union(backward)
    found: dict[fx.Node, None] = {}
    for node in members:
        if all(user in own for user in node.users):
            continue
        base = node
        while (
            base.target is not operator.getitem
            and ops.lookup(base.target).kind == "view"
            and base.args[0] in inside
        ):
            base = base.args[0]  # type: ignore[assignment]  # in inside, so a node
        found[base] = None
    return tuple(found)
