"""Reachability in a graph whose nodes are merged step by step, as bitsets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Reach:
    """Ancestors and descendants of units; a unit starts as one node and grows by merging.

    Bits are node indices; a merged unit keeps the bits of all its nodes, in everybody's sets.
    """

    def __init__(self, predecessors: Sequence[Iterable[int]]) -> None:
        """predecessors: for each node, in topological order, the indices that it depends on."""
        count = len(predecessors)
        self.parent = list(range(count))
        self.bits = [1 << index for index in range(count)]
        self.above = [0] * count
        self.below = [0] * count
        successors: list[list[int]] = [[] for _ in range(count)]
        for index, sources in enumerate(predecessors):
            for source in sources:
                self.above[index] |= self.above[source] | self.bits[source]
                successors[source].append(index)
        for index in reversed(range(count)):
            for target in successors[index]:
                self.below[index] |= self.below[target] | self.bits[target]

    def find(self, index: int) -> int:
        """The unit that a node belongs to now."""
        while self.parent[index] != index:
            self.parent[index] = self.parent[self.parent[index]]
            index = self.parent[index]
        return index

    def between(self, first: int, second: int) -> list[int]:
        """Units on paths from one of two units to the other, each after those that it depends on.

        Without them the two would make a cycle.
        """
        both = self.bits[first] | self.bits[second]
        down = self.below[first] & self.above[second]
        up = self.below[second] & self.above[first]
        pending = list(self._units((down | up) & ~both))
        ordered: list[int] = []
        while pending:
            left = sum(self.bits[unit] for unit in pending)
            ready = next(unit for unit in pending if not self.above[unit] & left)
            ordered.append(ready)
            pending.remove(ready)
        return ordered

    def merge(self, first: int, second: int) -> int:
        """Join two units, which must not make a cycle; returns the joint one."""
        both = self.bits[first] | self.bits[second]
        for one, other in ((first, second), (second, first)):
            # Who is above one unit alone learns of what is below the other; likewise downwards.
            gained = self.bits[other] | self.below[other]
            for unit in self._units(self.above[one] & ~self.above[other] & ~both):
                self.below[unit] |= gained
            gained = self.bits[other] | self.above[other]
            for unit in self._units(self.below[one] & ~self.below[other] & ~both):
                self.above[unit] |= gained
        self.parent[second] = first
        self.above[first] = (self.above[first] | self.above[second]) & ~both
        self.below[first] = (self.below[first] | self.below[second]) & ~both
        self.bits[first] = both
        return first

    def _units(self, bits: int) -> Iterable[int]:
        """Each unit that has a bit in the set, once."""
        while bits:
            lowest = bits & -bits
            unit = self.find(lowest.bit_length() - 1)
            yield unit
            bits &= ~self.bits[unit]
