"""Execution order: after what is read, otherwise as the graph had it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def topological(keys: Sequence[int], before: Sequence[set[int]]) -> list[int]:
    """Indices in an order that respects `before`, smallest key first among those that are ready.

    keys: the place of each item in the original order (a group's is that of its last node, so
    that its results don't wait in memory). before: indices that must come earlier; acyclic.
    """
    missing = [len(sources) for sources in before]
    after: list[list[int]] = [[] for _ in keys]
    for index, sources in enumerate(before):
        for source in sources:
            after[source].append(index)
    ready = [(keys[index], index) for index, count in enumerate(missing) if count == 0]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        _, index = heapq.heappop(ready)
        order.append(index)
        for target in after[index]:
            missing[target] -= 1
            if missing[target] == 0:
                heapq.heappush(ready, (keys[target], target))
    assert len(order) == len(keys), "a merge made a cycle"
    return order
