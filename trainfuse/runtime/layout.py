"""Copies that keep a tensor's strides, whatever they are: kernels are made for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autodiff.rewrite import same_strides
from trainfuse.capture.overlap import may_overlap_itself

_WIDEST_BYTES = 16  # of an element, complex128
_MOST_GAPS = 2
"""How many times the elements asked for one copy of a span may take, rather than several."""


def dense(value: Tensor) -> Tensor:
    """One copy of what an expanded tensor repeats: a write must not overlap itself."""
    for dim, (size, step) in enumerate(zip(value.shape, value.stride(), strict=True)):
        if step == 0 and size > 1:
            value = value.narrow(dim, 0, 1)
    return value.detach()


def copy_to(value: Tensor, device: torch.device) -> Tensor:
    """A copy with the same strides, on a device."""
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    dense(made).copy_(dense(value))
    return made


def varied(value: Tensor) -> Tensor | None:
    """A copy of a constant tensor whose elements differ, by half of the constant; else None.

    A bias of zeros or a gain of ones hides what a kernel does with it.
    """
    one = dense(value)
    if not value.is_floating_point() or one.numel() < 2:
        return None
    low, high = (bound.item() for bound in one.aminmax())
    if low != high:
        return None
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    spread = torch.linspace(-0.5, 0.5, one.numel(), device=value.device)
    dense(made).copy_(low + spread.view(one.shape) * (abs(low) or 1.0))
    return made


def strayed(nodes: Sequence[fx.Node], values: Sequence[Tensor]) -> tuple[int, ...]:
    """Which values lie in memory otherwise than planned; it is the same at every call of a plan.

    An operator's shape function may promise another layout than its kernel gives: aten.ormqr's
    promises rows, and LAPACK gives columns. Inductor hands out slices of padded products on a GPU.
    """
    return tuple(
        place
        for place, (node, value) in enumerate(zip(nodes, values, strict=True))
        if value.numel() and not same_strides(node.meta["val"], value)
    )


def as_planned(
    nodes: Sequence[fx.Node], values: Sequence[Tensor], places: Sequence[int]
) -> Sequence[Tensor]:
    """The values, those in these places as copies in the layouts that were planned for them."""
    if not places:
        return values
    moved = list(values)
    for place in places:
        planned: Tensor = nodes[place].meta["val"]
        shape, strides = tuple(planned.shape), tuple(planned.stride())
        made = torch.empty_strided(shape, strides, dtype=planned.dtype, device=values[place].device)
        moved[place] = made.copy_(values[place])
    return moved


class Copies:
    """Copies of some values, made again and again as the values change in place.

    Each copy has its value's strides, and two share memory where their values do. What is to be
    done is found out once: a step's replay is a matter of microseconds. A dense tensor by itself
    takes one clone, and so does what has no strides; what is no tensor is handed on.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        strided = [i for i, value in enumerate(values) if _strided(value)]
        self._spans = [
            _span_of(group, values)
            for group in _groups(strided, values)
            if len(group) > 1 or not _cloned_alike(values[group[0]])
        ]
        spanned = {view.position for span in self._spans for view in span.views}
        self._values = [None if i in spanned else value for i, value in enumerate(values)]

    def __call__(self) -> list[Any]:
        """One copy of each value, in order."""
        made = [v.clone() if isinstance(v, Tensor) else v for v in self._values]
        for span in self._spans:
            span.copy_into(made)
        return made


@dataclass(frozen=True, slots=True)
class _View:
    """One value within a span: its place among the values, its layout, and what it repeats once.

    offset: elements from the start of the span.
    """

    position: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    source: Tensor


@dataclass(frozen=True, slots=True)
class _Span:
    """A stretch of one storage that some values lie in, as a flat tensor.

    at_once: copy it with what lies between the values. In bytes where their types differ.
    """

    flat: Tensor
    at_once: bool
    views: tuple[_View, ...]

    def copy_into(self, made: list[Any]) -> None:
        """Put a copy of each value at its place."""
        base = self._filled() if self.at_once else torch.empty_like(self.flat)
        for view in self.views:
            typed = base if base.dtype is view.dtype else base.view(view.dtype)
            made[view.position] = typed.as_strided(view.size, view.stride, view.offset)
            if not self.at_once:
                once = view.source
                typed.as_strided(once.shape, once.stride(), view.offset).copy_(once)

    def _filled(self) -> Tensor:
        if all(view.dtype is self.flat.dtype for view in self.views):
            return self.flat.clone()
        room = -self.flat.numel() % _WIDEST_BYTES  # a view of another type takes whole elements
        return torch.cat([self.flat, self.flat.new_empty(room)])


def _strided(value: Any) -> bool:
    """Whether a value is a plain tensor that strides describe, with no lazy conjugate or minus."""
    if type(value) is not Tensor or value.layout is not torch.strided or value.is_quantized:
        return False
    return not (value.is_conj() or value.is_neg())


def _cloned_alike(value: Tensor) -> bool:
    """Whether a clone has the value's strides: it keeps those of tensors without gaps only."""
    return torch.empty_like(value, device="meta").stride() == value.stride()


def _bytes(value: Tensor) -> tuple[int, int]:
    """The first byte of a value's storage that it touches, and the one after the last."""
    steps = zip(value.shape, value.stride(), strict=True)
    length = 1 + sum((size - 1) * step for size, step in steps) if value.numel() else 0
    start = int(value.storage_offset())
    return start * value.element_size(), (start + length) * value.element_size()


def _groups(positions: Sequence[int], values: Sequence[Any]) -> list[list[int]]:
    """Positions of values, those together whose spans of one storage overlap."""
    storages: dict[tuple[torch.device, int], list[int]] = {}
    for i in positions:
        place = values[i].device, values[i].untyped_storage().data_ptr()
        storages.setdefault(place, []).append(i)
    groups: list[list[int]] = []
    for members in storages.values():
        reached = -1
        # those without elements last: they join no group, and must not come between its members
        for i in sorted(members, key=lambda i: (not values[i].numel(), _bytes(values[i]))):
            start, end = _bytes(values[i])
            if start < min(reached, end):
                groups[-1].append(i)
            else:
                groups.append([i])
            reached = max(reached, end)
    return groups


def _span_of(group: Sequence[int], values: Sequence[Any]) -> _Span:
    """How the values of one group are copied."""
    mine: list[Tensor] = [values[i].detach() for i in group]
    low, high = min(_bytes(v)[0] for v in mine), max(_bytes(v)[1] for v in mine)
    dtype = mine[0].dtype
    if mixed := len({v.dtype for v in mine}) > 1:
        dtype, low = torch.uint8, low - low % _WIDEST_BYTES
    first, width = mine[0], dtype.itemsize
    flat = torch.empty(0, dtype=dtype, device=first.device)
    flat.set_(first.untyped_storage(), low // width, ((high - low) // width,), (1,))
    views = tuple(
        _View(
            i,
            value.dtype,
            tuple(value.shape),
            value.stride(),
            value.storage_offset() - low // value.element_size(),
            dense(value),
        )
        for i, value in zip(group, mine, strict=True)
    )
    asked = sum(view.source.numel() for view in views)
    overlapping = any(may_overlap_itself(view.source) for view in views)
    at_once = mixed or overlapping or flat.numel() <= _MOST_GAPS * asked
    return _Span(flat, at_once, views)
