"""Minimum cut by Dinic's algorithm, iterative, on integer capacities."""

from __future__ import annotations

from collections import deque

INFINITE = 1 << 62


class FlowNetwork:
    """A directed network that grows by `add_edge` and is cut once by `source_side`.

    Edges are stored in pairs: edge e and its reverse e ^ 1.
    """

    __slots__ = ("_capacity", "_edges_of", "_head")

    def __init__(self, num_vertices: int) -> None:
        self._edges_of: list[list[int]] = [[] for _ in range(num_vertices)]
        self._head: list[int] = []
        self._capacity: list[int] = []

    def add_edge(self, tail: int, head: int, capacity: int) -> None:
        """Add an edge; capacity INFINITE for one that may not be cut."""
        self._edges_of[tail].append(len(self._head))
        self._head.append(head)
        self._capacity.append(capacity)
        self._edges_of[head].append(len(self._head))
        self._head.append(tail)
        self._capacity.append(0)

    def source_side(self, source: int, sink: int) -> set[int] | None:
        """Vertices on the source's side of the minimum cut nearest to the source.

        None when every cut is infinite. Source: Dinic, 1970.
        """
        flow = 0
        while True:
            levels = self._levels(source)
            if levels[sink] < 0:
                return {vertex for vertex, level in enumerate(levels) if level >= 0}
            flow += self._blocking_flow(source, sink, levels)
            if flow >= INFINITE:
                return None

    def _levels(self, source: int) -> list[int]:
        levels = [-1] * len(self._edges_of)
        levels[source] = 0
        queue = deque([source])
        head, capacity = self._head, self._capacity
        while queue:
            vertex = queue.popleft()
            for edge in self._edges_of[vertex]:
                other = head[edge]
                if capacity[edge] > 0 and levels[other] < 0:
                    levels[other] = levels[vertex] + 1
                    queue.append(other)
        return levels

    def _blocking_flow(self, source: int, sink: int, levels: list[int]) -> int:
        """Saturate the level graph by depth-first search with an explicit path."""
        head, capacity, edges_of = self._head, self._capacity, self._edges_of
        cursor = [0] * len(edges_of)
        path: list[int] = []
        vertex, total = source, 0
        while True:
            if vertex == sink:
                pushed = min(capacity[edge] for edge in path)
                for edge in path:
                    capacity[edge] -= pushed
                    capacity[edge ^ 1] += pushed
                total += pushed
                if total >= INFINITE:
                    return total
                first = next(i for i, edge in enumerate(path) if capacity[edge] == 0)
                vertex = head[path[first] ^ 1]
                del path[first:]
                continue
            edges = edges_of[vertex]
            while cursor[vertex] < len(edges):
                edge = edges[cursor[vertex]]
                if capacity[edge] > 0 and levels[head[edge]] == levels[vertex] + 1:
                    break
                cursor[vertex] += 1
            if cursor[vertex] < len(edges):
                path.append(edges[cursor[vertex]])
                vertex = head[path[-1]]
            elif vertex == source:
                return total
            else:
                vertex = head[path.pop() ^ 1]
                cursor[vertex] += 1
