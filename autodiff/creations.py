"""Constants: they stop reading what gives them only a shape, and each reader has its own range."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from . import ops
from .graph import TrainingGraph
from .reads import is_view
from .rewrite import GraphEdit

aten = torch.ops.aten

_VALUES: dict[Any, float | int | None] = {
    aten.full_like.default: None,
    aten.zeros_like.default: 0,
    aten.ones_like.default: 1,
    aten.new_zeros.default: 0,
    aten.new_ones.default: 1,
    aten.new_full.default: None,
}
"""What each op fills with; None: its own argument says."""


def detach_creations(tg: TrainingGraph) -> TrainingGraph:
    """Replace `full_like(x, v)` and its kin by `full(shape, v)`, permuted where x is.

    Otherwise the value of x would have to live, and be counted as read, for its shape alone.
    """
    if not any(node.target in _VALUES for node in tg.graph.nodes):
        return tg
    edit = GraphEdit(tg)
    for node in list(edit.graph.nodes):
        if node.op == "call_function" and node.target in _VALUES:
            _detach(edit, node)
    edit.eliminate_dead()
    return edit.finish()


def _detach(edit: GraphEdit, node: fx.Node) -> None:
    value = node.meta["val"]
    fill = _VALUES[node.target]
    if fill is None:
        fill = node.args[-1] if len(node.args) > 1 else node.kwargs.get("fill_value")
    order = _memory_order(value)
    if order is None or not isinstance(fill, bool | int | float):
        return
    in_order = order == sorted(order)
    with edit.graph.inserting_before(node):
        made = edit.emit(
            aten.full.default,
            ([value.shape[dim] for dim in order], fill),
            {"dtype": value.dtype, "device": value.device},
            fact=edit.facts[node],
            value=value if in_order else None,
        )
        if not in_order:
            places = [order.index(dim) for dim in range(value.dim())]
            made = edit.emit(
                aten.permute.default, (made, places), fact=edit.facts[node], value=value
            )
    edit.replace(node, made)


def _memory_order(value: torch.Tensor) -> list[int] | None:
    """Dimensions from the outermost in memory to the innermost; None where memory has gaps."""
    if value.is_contiguous():
        return list(range(value.dim()))
    if any(not isinstance(number, int) for number in (*value.shape, *value.stride())):
        return None  # which stride is larger would be a guard on today's sizes
    order = sorted(range(value.dim()), key=lambda dim: -value.stride(dim))
    expected = 1
    for dim in reversed(order):
        if value.shape[dim] != 1 and value.stride(dim) != expected:
            return None
        expected *= value.shape[dim]
    return order


_RANGES = frozenset(
    {
        aten.arange.default,
        aten.arange.start,
        aten.arange.start_step,
        torch.ops.prims.iota.default,
    }
)


def part_ranges(tg: TrainingGraph) -> TrainingGraph:
    """Give each reader of a range a range of its own.

    A causal mask compares the rows of one range with its columns: two maps of one value, of which
    a kernel has only one. Of two ranges it has one each, and makes both in registers.
    """
    shared = [n for n in tg.graph.nodes if n.target in _RANGES and len(n.users) > 1]
    if not shared:
        return tg
    edit = GraphEdit(tg)
    for old in shared:
        node = edit.mapping[old]
        for user in [user for user in node.users if _is_computed_with(user)][1:]:
            with edit.graph.inserting_before(user):
                own = edit.graph.node_copy(node)
            edit.facts[own] = edit.facts[user if user in edit.facts else node]
            user.replace_input_with(node, own)
    return edit.finish()


def _is_computed_with(user: fx.Node) -> bool:
    """Whether a range's reader is arithmetic, or a view for arithmetic; a gather needs no own."""
    if user.op == "call_function" and is_view(user):
        return any(map(_is_computed_with, user.users))
    return ops.lookup(user.target).kind == "pointwise"
