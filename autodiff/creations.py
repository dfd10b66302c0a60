"""Constants that name another tensor only for its shape stop reading it."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .graph import TrainingGraph
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
    """Replace `full_like(x, v)` and its kin by `full(shape, v)`, where the result is contiguous.

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
    if not value.is_contiguous():
        return
    fill = _VALUES[node.target]
    if fill is None:
        fill = node.args[-1] if len(node.args) > 1 else node.kwargs.get("fill_value")
    if not isinstance(fill, bool | int | float):
        return
    with edit.graph.inserting_before(node):
        made = edit.emit(
            aten.full.default,
            (list(value.shape), fill),
            {"dtype": value.dtype, "device": value.device},
            fact=edit.facts[node],
            value=value,
        )
    edit.replace(node, made)
