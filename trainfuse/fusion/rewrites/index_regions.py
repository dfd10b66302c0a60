"""Where along a dim a value is looked at: selections by coordinate choose among joined pieces."""

from __future__ import annotations

import torch
from torch import fx

from trainfuse.fusion.ranges import range_of

aten = torch.ops.aten
Interval = tuple[int, int]
MAX_CHAIN = 16


def seen(node: fx.Node, dim: int, left: int = MAX_CHAIN) -> Interval:
    """The coordinates along a dim, counted from the end, at which anything uses a value.

    From the first to past the last; all of them, unless every reader is a selection.
    """
    size = node.meta["val"].shape[dim]
    low, high = size, 0
    for user in node.users:
        found = _chosen(user, node, dim, size) if left else None
        if found is None:
            return 0, size
        outer = seen(user, dim, left - 1)
        low, high = min(low, max(found[0], outer[0])), max(high, min(found[1], outer[1]))
    return (low, high) if low < high else (0, size)


def _chosen(user: fx.Node, node: fx.Node, dim: int, size: int) -> Interval | None:
    """Where a selection takes a value; None for another reader, or by another condition."""
    if user.target is aten.where.self:
        condition, first, second = user.args
    elif user.target is aten.where.ScalarOther:
        (condition, first), second = user.args[:2], None
    else:
        return None
    value = user.meta["val"]
    if condition is node or first is second or -dim > value.dim() or value.shape[dim] != size:
        return None
    inside = _interval(condition, dim, size)
    if inside is None or first is node:
        return inside
    low, high = inside
    if low == 0:
        return high, size
    return (0, low) if high == size else None


def _interval(condition: object, dim: int, size: int) -> Interval | None:
    """Where a condition on one dim's coordinate holds, if it is an interval."""
    if not isinstance(condition, fx.Node) or condition.op != "call_function":
        return None
    if condition.target is aten.bitwise_and.Tensor:
        one, other = (_interval(argument, dim, size) for argument in condition.args)
        return (
            None if one is None or other is None else (max(one[0], other[0]), min(one[1], other[1]))
        )
    if condition.target not in (aten.lt.Scalar, aten.ge.Scalar):
        return None
    place, bound = condition.args
    assert isinstance(place, fx.Node)
    shape = place.meta["val"].shape
    found = range_of(place) if -dim <= len(shape) and shape[dim] == size else None
    if found is None or found[1] != 1 or found[2] != size or type(bound) is not int:
        return None
    at = min(max(bound - found[0], 0), size)
    return (0, at) if condition.target is aten.lt.Scalar else (at, size)
