"""Values that a kernel makes again because that moves fewer bytes than passing them through memory.

After a reduction, what it summed is often read again: an activation's derivative, a deviation from
a mean. The kernel that sums has it in registers; the one that reads the sums would have to load
it, mostly in fp32, though it can be had from the half-precision operands. The same holds of causal
masks, made of indices, and of dropout masks, made of a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from autodiff import ops
from autodiff.exact import made_once
from autodiff.philox import KEEP_MASK
from trainfuse.fusion.flow import Flow, value_bytes

# Nodes that are made again for one reader, and the part of the old traffic that the new may take.
MAX_CHAIN = 24
WORTHWHILE = 0.75

Fits = Callable[[int, Collection[fx.Node]], bool]


@dataclass(frozen=True, slots=True)
class Units:
    """The grouping's units, as far as borrowing looks at them.

    members, borrowed: nodes of each unit; `borrowed` is written. unit: who computes a value, if a
    unit does. fits: whether a unit with more nodes is still one kernel. free: constants.
    """

    flow: Flow
    members: dict[int, list[fx.Node]]
    borrowed: dict[int, list[fx.Node]]
    unit: Callable[[fx.Node], int | None]
    fits: Fits
    free: frozenset[fx.Node]

    def inside(self, unit: int) -> set[fx.Node]:
        """What a unit computes, for others or for itself."""
        return {*self.members[unit], *self.borrowed[unit]}

    def loads(self, unit: int) -> set[fx.Node]:
        """What a unit reads from memory."""
        inside = self.inside(unit)
        reads = {value for node in inside for value in self.flow.reads[node]}
        return reads - inside - self.free


def borrow(units: Units) -> None:
    """Give readers their own copies of what other units of their phase compute, where it pays."""
    _Borrowing(units).run()


class _Borrowing:
    """Who reads which value from memory, while that changes.

    loaders: units that load a value, None for what stays ATen or is returned.
    """

    def __init__(self, units: Units) -> None:
        self.units = units
        flow = units.flow
        self.once = made_once(flow.tg)
        self.effects = [i for i, node in enumerate(flow.compute) if ops.is_effect(node)]
        self.loaders: dict[fx.Node, set[int | None]] = {node: {None} for node in flow.escapes}
        for unit in units.members:
            for value in units.loads(unit):
                self.loaders.setdefault(value, set()).add(unit)
        for node in flow.compute:
            if units.unit(node) is None:
                for value in flow.reads[node]:
                    self.loaders.setdefault(value, set()).add(None)

    def run(self) -> None:
        for source, target in list(self.pairs()):
            if self.apart(source, target):
                continue
            own = set(self.units.members[source])
            place = self.units.flow.position.__getitem__
            passed = sorted(self.units.loads(target) & own, key=place)
            if not self.take(source, target, passed) and len(passed) > 1:
                for value in passed:
                    self.take(source, target, [value])

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Units of one phase, the second reading what the first computes, by the values' place."""
        seen: set[tuple[int, int]] = set()
        flow, members = self.units.flow, self.units.members
        for node in flow.compute:
            source = self.units.unit(node)
            if source is None:
                continue
            for reader in flow.readers.get(node, ()):
                target = self.units.unit(reader)
                if target is None or target == source or (source, target) in seen:
                    continue
                seen.add((source, target))
                if flow.tg.phase(members[source][0]) == flow.tg.phase(members[target][0]):
                    yield source, target

    def apart(self, source: int, target: int) -> bool:
        """Whether an effect runs between two units: it may overwrite what the first one read."""
        position = self.units.flow.position
        first = min(position[node] for node in self.units.members[source])
        last = max(position[node] for node in self.units.members[target])
        return any(first < effect < last for effect in self.effects)

    def take(self, source: int, target: int, passed: Sequence[fx.Node]) -> bool:
        """Let the target make these values itself, if it can and it pays."""
        units = self.units
        kept = {v for v in units.members[source] if self.loaders.get(v, set()) - {target}}
        made = _chain(units, source, passed, kept, self.once)
        if made is None:
            return False
        copied, leaves = made
        inside, held = units.inside(target), units.loads(target)
        moved = sum(value_bytes(leaf) for leaf in leaves if leaf not in held)
        saved = sum(value_bytes(value) * (1 if value in kept else 2) for value in passed)
        fresh = [node for node in copied if node not in inside]
        if moved > WORTHWHILE * saved or not units.fits(target, {*inside, *fresh}):
            return False
        for value in held:
            self.loaders[value].discard(target)
        units.borrowed[target].extend(fresh)
        for value in units.loads(target):
            self.loaders.setdefault(value, set()).add(target)
        return True


def _chain(
    units: Units,
    source: int,
    passed: Sequence[fx.Node],
    kept: Collection[fx.Node],
    once: Collection[fx.Node],
) -> tuple[list[fx.Node], list[fx.Node]] | None:
    """The nodes of a unit that make some of its values, and what in memory they are made of.

    None when a reduction stands in between, a value of `once`, which may not be made again, or too
    many nodes. kept: values of the unit that are in memory whatever happens.
    """
    inside = units.inside(source)
    copied: dict[fx.Node, None] = {}
    leaves: dict[fx.Node, None] = {}
    pending = list(passed)
    while pending:
        node = pending.pop()
        if node in copied:
            continue
        row = ops.lookup(node.target)
        if node in once or (row.kind != "pointwise" and row.name != KEEP_MASK):
            return None
        copied[node] = None
        for read in units.flow.reads[node]:
            if read in inside and read not in kept:
                pending.append(read)
            elif read not in units.free:
                leaves[read] = None
    return (list(copied), list(leaves)) if 0 < len(copied) <= MAX_CHAIN else None
