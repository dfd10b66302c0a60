"""Iteration axes by unification: dims of tensors that walk together become one axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import fx


class Axis:
    """One axis while a group is being inferred: free, merged into another, or split in parts.

    Mutable on purpose: unification is a union-find, and nothing of it outlives `infer`.
    """

    __slots__ = ("alias", "parts", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.alias: Axis | None = None
        self.parts: tuple[Axis, Axis] | None = None


AxisList = Sequence[Axis]
DimMap = tuple[tuple[Axis, ...], ...]


def fresh_dims(shape: Iterable[int]) -> DimMap:
    """A new axis for every dim that has more than one element."""
    return tuple((Axis(size),) if size > 1 else () for size in shape)


def leaves(axes: AxisList) -> list[Axis]:
    """The free axes that a list of axes has come to stand for, outermost first."""
    found: list[Axis] = []
    for axis in axes:
        while axis.alias is not None:
            axis = axis.alias
        if axis.parts is None:
            found.append(axis)
        else:
            found.extend(leaves(axis.parts))
    return found


def split(axis: Axis, inner: int) -> tuple[Axis, Axis]:
    """Split a free axis in (outer, inner) parts; `inner` must divide its size."""
    axis.parts = (Axis(axis.size // inner), Axis(inner))
    return axis.parts


def unify(first: AxisList, second: AxisList) -> bool:
    """Make two products of axes walk together, splitting where sizes differ.

    Both have the same number of elements. False when no split fits (2x3 against 3x2).
    """
    left, right = leaves(first)[::-1], leaves(second)[::-1]
    while left and right:
        a, b = left.pop(), right.pop()
        # An earlier step of this loop may have merged or split either of them.
        if a.alias is not None or a.parts is not None:
            left.extend(leaves((a,))[::-1])
            right.append(b)
        elif b.alias is not None or b.parts is not None:
            right.extend(leaves((b,))[::-1])
            left.append(a)
        elif a is b:
            continue
        elif a.size == b.size:
            b.alias = a
        elif a.size < b.size:
            if b.size % a.size:
                return False
            outer, inner = split(b, b.size // a.size)
            outer.alias = a
            right.append(inner)
        else:
            if a.size % b.size:
                return False
            outer, inner = split(a, a.size // b.size)
            outer.alias = b
            left.append(inner)
    return True


def regroup(axes: AxisList, shape: Sequence[int]) -> DimMap | None:
    """The dims of a row-major reshape of `axes` to `shape`; None when an axis can't be split so."""
    pending = leaves(axes)[::-1]
    dims: list[tuple[Axis, ...]] = []
    for size in shape:
        dim: list[Axis] = []
        while size > 1:
            axis = pending.pop()
            if axis.parts is not None:
                # Another part of this same reshape has just split it.
                pending.extend(leaves((axis,))[::-1])
            elif size % axis.size == 0:
                dim.append(axis)
                size //= axis.size
            elif axis.size % size == 0:
                outer, inner = split(axis, axis.size // size)
                dim.append(outer)
                pending.append(inner)
                size = 1
            else:
                return None
        dims.append(tuple(dim))
    return tuple(dims)


class Misfit(Exception):
    """A node that has no place in one iteration space; becomes a Refusal in `infer`."""

    def __init__(self, node: fx.Node, reason: str) -> None:
        super().__init__(reason)
        self.node = node
        self.reason = reason
