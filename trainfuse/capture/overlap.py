"""Inputs that share memory, one of them written: no plan holds for those, and none is made.

A plan reads its inputs as if they were apart. AOTAutograd's own remedy bakes in how they overlapped
at the first call, which no guard checks later.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

OVERLAP = "inputs share memory, and one of them is written"

_SPAN = 1 << 24
"""Bytes of address space up to which interleaved tensors are told apart."""


class OverlapGuard:
    """Checks, before each call of a plan, that what it writes overlaps no other input.

    values: the plan's inputs at its first call; overlaps: whether the plan is wrong for those
    already. written: positions that the plan writes. static: positions of parameters and buffers;
    two of those are compared here, not in each call. fixed: sizes and strides are the same at every
    call. needed: whether there is anything to check.
    """

    def __init__(
        self,
        values: Sequence[Any],
        written: Collection[int],
        static: Collection[int],
        *,
        fixed: bool = True,
    ) -> None:
        tensors = [i for i, v in enumerate(values) if _has_memory(v)]
        self._written, self._fixed = frozenset(written), fixed
        self._moving = [i for i in tensors if i not in static]
        writes_moving = not self._written.isdisjoint(self._moving)
        # an input of the call may overlap what stands still, whichever of the two is written
        self._still = [i for i in tensors if i in static and (writes_moving or i in self._written)]
        self._extents = {i: _extent(values[i]) for i in tensors}
        self._known: dict[tuple[int, int, int], bool] = {}
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.needed = bool(self._written) and bool(self._moving)
        self.overlaps = bool(self._written) and self._any_pair(values, tensors)
        if self.needed:
            self._measure(values)

    def violated(self, args: Sequence[Any]) -> bool:
        """Whether a written input now overlaps another one."""
        if not self._fixed:
            self._known.clear()
            self._extents.update((i, _extent(args[i])) for i in self._moving)
        spans = []
        for i in self._moving:
            start = args[i].data_ptr()
            end = start + self._extents[i]
            spans.append((start, end))
            place = bisect.bisect_right(self._starts, start)
            near = place and self._ends[place - 1] > start
            if near or (place < len(self._starts) and self._starts[place] < end):
                return self._look_closer(args)
        if len(spans) > 1:
            spans.sort()
            for (_, end), (start, _) in itertools.pairwise(spans):
                if start < end:
                    return self._look_closer(args)
        return False

    def _look_closer(self, args: Sequence[Any]) -> bool:
        """Exactly, with the addresses that everything has by now."""
        self._measure(args)
        return self._any_pair(args, [*self._moving, *self._still])

    def _measure(self, args: Sequence[Any]) -> None:
        """Merge what stands still into intervals, sorted."""
        spans = sorted((p := args[i].data_ptr(), p + self._extents[i]) for i in self._still)
        self._starts, self._ends = [], []
        for start, end in spans:
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._starts.append(start)
                self._ends.append(end)

    def _any_pair(self, args: Sequence[Any], positions: Sequence[int]) -> bool:
        """Whether any two of these overlap of which one is written."""
        pending: list[int] = []
        for i in sorted(positions, key=lambda i: args[i].data_ptr()):
            start = args[i].data_ptr()
            pending = [j for j in pending if args[j].data_ptr() + self._extents[j] > start]
            for j in pending:
                written = i in self._written or j in self._written
                if written and args[i].device == args[j].device and self._share(args, j, i):
                    return True
            pending.append(i)
        return False

    def _share(self, args: Sequence[Any], low: int, high: int) -> bool:
        key = (low, high, args[high].data_ptr() - args[low].data_ptr())
        if key not in self._known:
            self._known[key] = share_memory(args[low], args[high])
        return self._known[key]


def share_memory(low: Tensor, high: Tensor) -> bool:
    """Whether two tensors, the second at the higher address, have an element in common.

    Where that would take too much memory to find out, True if their spans meet.
    """
    distance = high.data_ptr() - low.data_ptr()
    if distance >= _extent(low):
        return False
    size = low.element_size()
    span = max(_extent(low), distance + _extent(high))
    if span > _SPAN * size or high.element_size() != size or distance % size:
        return True
    marks = torch.zeros(span // size, dtype=torch.bool)
    marks.as_strided(low.shape, low.stride()).fill_(True)
    return bool(marks.as_strided(high.shape, high.stride(), distance // size).any())


def may_overlap_itself(tensor: Tensor) -> bool:
    """Whether two elements of a tensor may be at one place, as those of sliding windows are."""
    reach = 0
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and step <= reach:
            return True
        reach += (size - 1) * step
    return False


def _has_memory(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and value.numel() > 0


def _extent(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
