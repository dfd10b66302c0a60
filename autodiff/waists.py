"""Where a forward is narrow: the few values that all of its later part is computed from."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import fx

from . import ops
from .cut import CutProblem
from .philox import KEEP_MASK
from .reads import is_view, num_bytes


class Waists:
    """A cut problem's forward as a line: what crosses each position, and what lies between two.

    saved: what is kept without checkpoints; its bytes are what checkpoints are spaced by.
    """

    def __init__(self, problem: CutProblem, saved: Sequence[fx.Node]) -> None:
        self._order = order = problem.forward
        self._position = {node: i for i, node in enumerate(order)}
        self._last = self._last_reads(problem)
        change = [0] * (len(order) + 1)
        for value, last in self._last.items():
            change[self._position[value]] += num_bytes(value)
            change[last] -= num_bytes(value)
        self._held = list(accumulate(change))
        weight = [0] * len(order)
        for node in saved:
            weight[self._position[node]] += problem.held_bytes(node)
        self._mass = list(accumulate(weight))

    def _last_reads(self, problem: CutProblem) -> dict[fx.Node, int]:
        """Until where the forward itself needs each value's memory; constants aside."""
        owner: dict[fx.Node, fx.Node] = {}
        last: dict[fx.Node, int] = {}
        constant = {f.name for f in problem.tg.inputs if f.kind in ("parameter", "buffer")}
        fixed: set[fx.Node] = set()
        for i, node in enumerate(self._order):
            row = ops.lookup(node.target)
            parents = [owner[p] for p in node.all_input_nodes if p in owner]
            for parent in parents:
                if parent in last:
                    last[parent] = max(last[parent], i)
            shows = node.op == "call_function" and is_view(node) and bool(parents)
            owner[node] = parents[0] if shows else node
            if shows:
                continue
            if node.op != "call_function":
                if node.op == "get_attr" or node.name in constant:
                    fixed.add(node)
                continue
            if row.kind == "creation" or row.name == KEEP_MASK:
                fixed.add(node)
            elif row.kind == "pointwise" and parents and fixed.issuperset(parents):
                fixed.add(node)  # a cast of a weight: made again from what is there anyway
            elif isinstance(node.meta.get("val"), torch.Tensor):
                last[node] = i
        return last

    def checkpoints(self, parts: int) -> frozenset[fx.Node]:
        """What crosses the narrowest places that part the line into about so many parts."""
        places = self._places(self._mass[-1] / parts if self._mass else 0)
        return frozenset(value for place in places for value in self.crossing(place))

    def crossing(self, place: int) -> set[fx.Node]:
        """The values that the forward holds after the node at a position."""
        return {v for v, last in self._last.items() if self._position[v] <= place < last}

    def _places(self, share: float) -> list[int]:
        """Positions such that between two of them lies at most a share, and half of it at least."""
        places: list[int] = []
        start, total = 0.0, self._mass[-1] if self._mass else 0
        while share and total - start > share:
            low = bisect.bisect_left(self._mass, start + share / 2)
            high = bisect.bisect_right(self._mass, start + share)
            window = range(low, max(high, low + 1))
            place = min(window, key=lambda p: (self._held[p], -p))
            places.append(place)
            if self._mass[place] <= start:
                break
            start = self._mass[place]
        return places
