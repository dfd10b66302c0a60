"""Which nodes become one kernel: greedy merging by the bytes that it saves.

Producers are merged into consumers first, then (if `horizontal`) siblings that share a read. A
merge must make no cycle, stay in one phase, and leave a group with one iteration domain whose
outputs one kernel can store. What ends up alone stays ATen: it is one kernel there, too.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autodiff import ops
from autodiff.graph import Refusal, TrainingGraph
from trainfuse.fusion.assemble import Unit, assemble
from trainfuse.fusion.borrowing import Units, borrow
from trainfuse.fusion.domains import Domain, infer
from trainfuse.fusion.flow import Flow, is_creation, looked_up, root, value_bytes
from trainfuse.fusion.plan import FusionOptions, FusionPlan
from trainfuse.fusion.reach import Reach
from trainfuse.fusion.segment_ops import ROW_KEYS, SEGMENT_SUM

Supports = Callable[[fx.Node], str | None]

# A read that siblings share must be this part of what the smaller one moves; less doesn't pay for
# the registers that the other one takes.
SIBLING_SHARE = 1 / 8
# Bytes that move in the time of a launch more in a CUDA graph: what joining siblings saves, too.
LAUNCH_BYTES = 2 << 20
# Siblings further apart than this are left alone: one of the results would have to wait, in
# memory, for what the other one needs.
SIBLING_DISTANCE = 64
# Bytes that take no longer than the launch of the kernel that moves them.
LAUNCH_BOUND = 1 << 16
_FUSIBLE_KINDS = frozenset({"pointwise", "reduction", "rng", "gather"})


def plan_fusion(
    tg: TrainingGraph,
    owner: Mapping[fx.Node, int] | None = None,
    *,
    supports: Supports,
    options: FusionOptions | None = None,
) -> FusionPlan:
    """Group the nodes of a training graph, and order everything that runs.

    owner: the slice of each node that slicing took; what it left out stays ATen, but for the
    update. None: no gradient is needed, everything may be fused.
    supports: why the code generator can't build a node, or None.
    """
    grouping = _Grouping(tg, owner, supports, options or FusionOptions())
    grouping.strict = True
    grouping.merge_producers()
    grouping.strict = False
    grouping.merge_producers()
    if grouping.options.horizontal:
        grouping.merge_siblings()
        grouping.merge_producers()
    borrow(
        Units(
            grouping.flow,
            grouping.members,
            grouping.borrowed,
            grouping.unit,
            grouping.fits,
            grouping.free,
        )
    )
    units = [
        Unit(tuple(grouping.members[unit]), tuple(grouping.borrowed[unit]))
        for unit in grouping.members
    ]
    plan = assemble(grouping.flow, units, grouping.free, grouping.options)
    refusals = (*grouping.refusals, *grouping.remaining_crossings(plan), *plan.refusals)
    return replace(plan, refusals=refusals)


class Unstorable(str):
    """Why a group can't write what is read outside it; it may once it holds the readers, too."""


class _Grouping:
    """The units while they grow. A unit is known by the index that `Reach` knows it by."""

    def __init__(
        self,
        tg: TrainingGraph,
        owner: Mapping[fx.Node, int] | None,
        supports: Supports,
        options: FusionOptions,
    ) -> None:
        self.tg = tg
        self.options = options
        self.flow = Flow(tg)
        self.reach = Reach(self.flow.predecessors())
        self.refusals: list[Refusal] = []
        self.crossings: dict[tuple[fx.Node, fx.Node], str] = {}
        self.free = frozenset(
            node for node in self.flow.compute if is_creation(node) and supports(node) is None
        )
        self.members: dict[int, list[fx.Node]] = {}
        self.borrowed: dict[int, list[fx.Node]] = {}
        self.failed: dict[int, set[int]] = {}
        # what units read, until they grow: each pair of neighbours asks again
        self._reads: dict[int, frozenset[fx.Node]] = {}
        self._whole_reads: dict[int, frozenset[fx.Node]] = {}
        self.tried: set[tuple[Any, ...]] = set()
        # First what is computed once, such as 1 / sqrt(var + eps) by what sums the variance; only
        # then may a kernel make a small value again in each of its elements.
        self.strict = False
        for index, node in enumerate(self.flow.compute):
            name = ops.op_name(node.target)
            if ops.lookup(node.target).kind not in _FUSIBLE_KINDS and name != SEGMENT_SUM:
                continue
            reason = self.barred(node, owner, supports)
            if reason is None:
                self.members[index] = [node]
                self.borrowed[index] = []
                self.failed[index] = set()
            else:
                self.refusals.append(tg.refuse("fusion", node, reason))
        self.glue_getitems(supports)

    # Units.

    def barred(
        self, node: fx.Node, owner: Mapping[fx.Node, int] | None, supports: Supports
    ) -> str | None:
        """Why a node can be in no group."""
        origin = node.meta.get("original_aten")  # torch's note of what it decomposed
        for name in (ops.op_name(node.target), str(origin)):
            if not self.options.skip_ops.isdisjoint({name, name.rpartition(".")[0]}):
                return "the operator is skipped"
        sliced = owner is None or node in owner or self.tg.phase(node) == "update"
        if not sliced and ops.op_name(node.target) not in (ROW_KEYS, SEGMENT_SUM):
            return "slicing left it outside every differentiable subgraph"
        reason = supports(node)
        if reason is not None:
            return reason
        devices = {value.device for value in _tensors((node, *node.all_input_nodes))}
        if len(devices) > 1:
            return "its operands are on several devices"
        domain = infer([node])
        return domain.reason if isinstance(domain, Refusal) else None

    def glue_getitems(self, supports: Supports) -> None:
        """Join the parts of a multiple result to the operation that makes them."""
        for index, node in enumerate(self.flow.compute):
            if node.target is not operator.getitem or supports(node) is not None:
                continue
            source = self.unit(self.flow.reads[node][0])
            if source is not None:
                self.members[index], self.borrowed[index] = [node], []
                self.failed[index] = set()
                self.join(source, index)

    def unit(self, node: fx.Node) -> int | None:
        """The unit that computes a value, None for graph inputs and for what stays ATen."""
        index = self.flow.position.get(node)
        if index is None:
            return None
        found = self.reach.find(index)
        return found if found in self.members else None

    def reads(self, unit: int) -> frozenset[fx.Node]:
        """Roots that a unit reads from outside; constants cost nothing."""
        if unit not in self._reads:
            own = set(self.members[unit])
            found = {source for member in own for source in self.flow.reads[member]}
            self._reads[unit] = frozenset(found - own - self.free)
        return self._reads[unit]

    def whole_reads(self, unit: int) -> frozenset[fx.Node]:
        """Those of the reads that aren't only indexed: two lookups needn't touch the same rows."""
        if unit not in self._whole_reads:
            indexed = {root(node) for node in looked_up(self.members[unit])}
            self._whole_reads[unit] = self.reads(unit) - indexed
        return self._whole_reads[unit]

    def join(self, first: int, second: int) -> int:
        """Make one unit of two."""
        kept = self.reach.merge(first, second)
        gone = second if kept == first else first
        for known in (self._reads, self._whole_reads):
            known.pop(kept, None)
            known.pop(gone, None)
        self.members[kept] = self.members[kept] + self.members.pop(gone)
        self.borrowed[kept] = self.borrowed[kept] + self.borrowed.pop(gone)
        self.failed[kept] |= self.failed.pop(gone)
        return kept

    # Is it a kernel?

    def shape(
        self, members: Collection[fx.Node], stored: set[fx.Node], strict: bool = False
    ) -> Domain | str:
        """The domain of the group that `members` would be, or why they are none.

        stored: members that would be its outputs. strict: no member may be made more than once.
        """
        nodes, inputs = self.flow.close(members, self.free)
        if len(nodes) > self.options.max_nodes:
            return f"the group would have more than {self.options.max_nodes} nodes"
        if len(inputs) + len(stored) > self.options.max_pointers:
            return f"the group would touch more than {self.options.max_pointers} tensors"
        domain = infer(nodes)
        if isinstance(domain, Refusal):
            return domain.reason
        if strict:
            stored = stored | {n for n in members if ops.lookup(n.target).kind == "pointwise"}
        reason = _unstorable(nodes, stored, domain)
        return domain if reason is None else Unstorable(reason)

    def stored(self, unit_members: set[fx.Node]) -> set[fx.Node]:
        """Members that something outside them reads."""
        return {
            member
            for member in unit_members
            if member in self.flow.escapes
            or any(reader not in unit_members for reader in self.flow.readers.get(member, ()))
        }

    def try_merge(self, first: int, second: int) -> bool | None:
        """Merge if the result is one kernel, with all that stands between the two.

        None: not now, what stands between can't come along.
        """
        if second in self.failed[first] or first in self.failed[second]:
            return False
        between = self.reach.between(first, second)
        if not all(unit in self.members and self.same_phase(first, unit) for unit in between):
            return None
        units = [first, *between, second]
        as_they_are = (self.strict, *((unit, len(self.members[unit])) for unit in units))
        if as_they_are in self.tried:
            return None if between else False
        members = {member for unit in units for member in self.members[unit]}
        shape = self.shape(members, self.stored(members), self.strict)
        if not isinstance(shape, str):
            self.join_all(units)
            return True
        self.tried.add(as_they_are)
        if between:
            return None
        if not isinstance(shape, Unstorable):
            self.failed[first].add(second)
            self.failed[second].add(first)
        self.note_crossing(first, second, shape)
        return False

    def join_all(self, units: Sequence[int]) -> None:
        """Join two units and what stands between them, from the upper one down."""
        if self.reach.above[units[0]] & self.reach.bits[units[-1]]:
            units = [units[-1], *units[1:-1], units[0]]
        kept = units[0]
        for unit in units[1:]:
            kept = self.join(kept, unit)

    def note_crossing(self, first: int, second: int, reason: str) -> None:
        """Remember why a value still goes through memory between two units."""
        for source, target in ((first, second), (second, first)):
            own = set(self.members[source])
            for reader in self.members[target]:
                for value in self.flow.reads[reader]:
                    if value in own:
                        self.crossings.setdefault((value, reader), reason)

    def remaining_crossings(self, plan: FusionPlan) -> list[Refusal]:
        """Why values still go through memory between operations that could be fused."""
        home: dict[fx.Node, set[str]] = {node: {node.name} for node in plan.aten}
        for group in plan.groups:
            for node in group.nodes:
                home.setdefault(node, set()).add(group.name)
        return [
            self.tg.refuse("fusion", reader, f"not in one kernel with {value.name}: {reason}")
            for (value, reader), reason in self.crossings.items()
            if value in home and reader in home and not home[value] & home[reader]
        ]

    # Merging.

    def saved_bytes(self, first: int, second: int) -> int:
        """Bytes that needn't be moved once two units are one."""
        saved = 0
        one, other = set(self.members[first]), set(self.members[second])
        read_by_one, read_by_other = self.reads(first), self.reads(second)
        passed = (read_by_one & other) | (read_by_other & one)
        stored = self.stored(one | other) if passed else set()
        for value in passed:
            saved += value_bytes(value) * (1 if value in stored else 2)
        shared = self.whole_reads(first) & self.whole_reads(second)
        return saved + sum(map(value_bytes, shared))

    def producers(self, unit: int) -> set[int]:
        """Units of the same phase that a unit reads from."""
        found = {self.unit(value) for value in self.reads(unit)}
        return {other for other in found if other is not None and self.same_phase(other, unit)}

    def consumers(self, unit: int) -> set[int]:
        """Units of the same phase that read from a unit."""
        readers = (
            reader for member in self.members[unit] for reader in self.flow.readers.get(member, ())
        )
        found = {self.unit(reader) for reader in readers} - {unit}
        return {other for other in found if other is not None and self.same_phase(other, unit)}

    def siblings(self, unit: int) -> set[int]:
        """Units of the same phase, not too far away, that share a read worth saving."""
        found: set[int] = set()
        spot = self.flow.position[self.members[unit][0]]
        for value in self.whole_reads(unit):
            if value_bytes(value) < 64:
                continue
            for reader in self.flow.readers[value]:
                if abs(self.flow.position[reader] - spot) > SIBLING_DISTANCE:
                    continue
                other = self.unit(reader)
                if other is not None and other != unit and self.same_phase(other, unit):
                    found.add(other)
        return {o for o in found if self.shares_enough(unit, o)} | self.small_siblings(unit)

    def small_siblings(self, unit: int) -> set[int]:
        """Units that read results of the same unit, when both are hardly more than a launch."""
        if self.traffic(unit) > LAUNCH_BOUND:
            return set()
        others = {other for made in self.producers(unit) for other in self.consumers(made)}
        return {o for o in others - {unit} if self.traffic(o) <= LAUNCH_BOUND}

    def shares_enough(self, first: int, second: int) -> bool:
        shared = sum(map(value_bytes, self.whole_reads(first) & self.whole_reads(second)))
        smaller = min(self.traffic(first), self.traffic(second))
        return shared + LAUNCH_BYTES >= SIBLING_SHARE * smaller

    def traffic(self, unit: int) -> int:
        """Bytes that a unit reads and writes."""
        members = self.members[unit]
        moved = sum(map(value_bytes, (*self.whole_reads(unit), *self.stored(set(members)))))
        return moved + sum(looked_up(members).values())

    def same_phase(self, first: int, second: int) -> bool:
        return self.tg.phase(self.members[first][0]) == self.tg.phase(self.members[second][0])

    def merge_producers(self) -> None:
        """Merge along data flow, the edge that saves most first, to a fixpoint."""
        self.merge_along(lambda unit: self.producers(unit) | self.consumers(unit))

    def merge_siblings(self) -> None:
        """Merge units that share a read, the pair that saves most first, to a fixpoint."""
        self.merge_along(self.siblings)

    def merge_along(self, neighbours: Callable[[int], set[int]]) -> None:
        """Greedy merging of neighbours. A pair that a cycle forbids is tried again at the end."""
        pending = {
            (min(unit, other), max(unit, other))
            for unit in self.members
            for other in neighbours(unit)
        }
        while pending:
            heap = [self.entry(first, second) for first, second in pending]
            heapq.heapify(heap)
            pending = set()
            merged = False
            while heap:
                saved, _, first, second = heapq.heappop(heap)
                if first not in self.members or second not in self.members:
                    continue
                current = self.entry(first, second)
                if current[0] > saved:
                    heapq.heappush(heap, current)
                    continue
                done = self.try_merge(first, second)
                if done is None:
                    pending.add((first, second))
                elif done:
                    merged = True
                    kept = self.reach.find(first)
                    for other in neighbours(kept):
                        heapq.heappush(heap, self.entry(min(kept, other), max(kept, other)))
            if not merged:
                return
            pending = {
                pair for pair in pending if pair[0] in self.members and pair[1] in self.members
            }

    def entry(self, first: int, second: int) -> tuple[int, int, int, int]:
        """Heap order: most bytes first, then nearest, then earliest."""
        return (-self.saved_bytes(first, second), abs(first - second), first, second)

    def fits(self, unit: int, nodes: Collection[fx.Node]) -> bool:
        """Whether a unit is one kernel with these nodes, of which it stores what it did before."""
        return not isinstance(self.shape(nodes, self.stored(set(self.members[unit]))), str)


def _unstorable(nodes: list[fx.Node], stored: set[fx.Node], domain: Domain) -> str | None:
    """Why one of the stored values can't be written by this group's kernel.

    A value is written by the programs that hold it: it spans all axes, or is one of a row's, or
    was summed over rows. Any other would be written again and again by programs that share it.
    """
    rows, every = frozenset(domain.rows), frozenset(range(len(domain.sizes)))
    own = {
        node: frozenset(axis for dim in dims for axis in dim) for node, dims in domain.axes.items()
    }
    summed: set[fx.Node] = set()
    for node in nodes:
        across = domain.reduced.get(node, frozenset()) & rows
        if across and domain.kind == "row_column" and not (own[node] | domain.reduced[node]) - rows:
            return "a sum over the results of rows is a kernel of its own"
        if across or any(source in summed for source in node.all_input_nodes):
            summed.add(node)
    for node in stored:
        if not isinstance(node.meta["val"], torch.Tensor):
            return f"the parts of {node.name} are read one by one outside"
        per_row = domain.kind in ("row", "row_column", "nested") and own[node] == rows
        per_row |= domain.kind == "nested" and own[node] == rows | frozenset(domain.middle)
        if node not in summed and own[node] != every and not per_row:
            return f"{node.name} is smaller than the group that would write it"
    return None


def _tensors(nodes: Iterable[fx.Node]) -> list[torch.Tensor]:
    values = (node.meta.get("val") for node in nodes)
    flat = [part for v in values for part in (v if isinstance(v, tuple | list) else (v,))]
    return [value for value in flat if isinstance(value, torch.Tensor)]
