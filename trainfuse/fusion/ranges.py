"""What is known of an index without looking at it: ranges, and bounds of arithmetic on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from trainfuse.fusion.arguments import argument

aten = torch.ops.aten
Bounds = tuple[int, int]
_RANGES = frozenset(
    {
        aten.arange.default,
        aten.arange.start,
        aten.arange.start_step,
        torch.ops.prims.iota.default,
    }
)
_CASTS = frozenset({aten._to_copy.default, torch.ops.prims.convert_element_type.default})
# Views that keep the order of elements; an expansion of one that has more elements repeats some.
_IN_ORDER = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.expand.default,
        aten.alias.default,
        aten.detach.default,
    }
)
_SOME_OF = frozenset(
    {
        aten.permute.default,
        aten.transpose.int,
        aten.t.default,
        aten.slice.Tensor,
        aten.select.int,
    }
)
_INT32 = 1 << 31


def range_of(node: fx.Node) -> tuple[int, int, int] | None:
    """(start, step, count) of a tensor that holds just the elements of a range, in order."""
    count = node.meta["val"].numel()
    while node.op == "call_function" and node.target in _IN_ORDER | _CASTS:
        node = node.args[0]  # type: ignore[assignment]  # a view's, or a cast's, source
        if node.meta["val"].numel() != count:
            return None
    return _range(node)


def _range(node: fx.Node) -> tuple[int, int, int] | None:
    if node.op != "call_function" or node.target not in _RANGES:
        return None
    if not _is_integer(node):
        return None
    start, step = argument(node, "start"), argument(node, "step")
    start, step = 0 if start is None else start, 1 if step is None else step
    if type(start) is not int or type(step) is not int:
        return None
    return start, step, node.meta["val"].numel()


def bounds_of(node: fx.Node) -> Bounds | None:
    """Least and greatest value that an index can have, or None when its data decide."""
    found = _bounds(node)
    # what doesn't fit int32 may have wrapped in a cast on the way
    return found if found is not None and -_INT32 <= found[0] and found[1] < _INT32 else None


def _bounds(node: fx.Node) -> Bounds | None:
    if node.op != "call_function" or not _is_integer(node):
        return None
    if node.target in _SOME_OF | _IN_ORDER | _CASTS:
        return _bounds(node.args[0])  # type: ignore[arg-type]  # a view's, or a cast's, source
    found = _range(node)
    if found is not None:
        start, step, count = found
        last = start + step * (count - 1)
        return min(start, last), max(start, last)
    rule = _ARITHMETIC.get(node.target)
    if rule is None or node.kwargs or not isinstance(node.args[0], fx.Node):
        return None
    inner, number = _bounds(node.args[0]), node.args[1]
    return None if inner is None or type(number) is not int else rule(inner, number)


def _is_integer(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64)


def _remainder(inner: Bounds, number: int) -> Bounds | None:
    """fmod and remainder of what is no less than 0 by what is more."""
    return (0, number - 1) if inner[0] >= 0 and number > 0 else None


_ARITHMETIC: dict[Any, Any] = {
    aten.add.Tensor: lambda inner, number: (inner[0] + number, inner[1] + number),
    aten.sub.Tensor: lambda inner, number: (inner[0] - number, inner[1] - number),
    aten.fmod.Scalar: _remainder,
    aten.remainder.Scalar: _remainder,
    aten.clamp_min.default: lambda inner, number: tuple(max(b, number) for b in inner),
}
