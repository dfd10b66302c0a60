"""A derivative that only asks on which side of a bound a value lies keeps that: a byte, no value.

ReLU's backward reads its result, of which it needs `result <= 0`. Where the result is no more than
a step on the way in a kernel, writing it for the backward costs twice what the answer does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .graph import TrainingGraph
from .reads import fixed_readers, is_fusible, is_view, readers_of, takes_registers
from .rewrite import GraphEdit, same_strides

aten: Any = torch.ops.aten


def save_less_of_signs(tg: TrainingGraph) -> TrainingGraph:
    """Let the forward compare what a later phase would read for a comparison alone.

    Only values that the forward makes on the way: not those that it writes anyway, nor those of
    checkpoints, which are made again. Equal to the last bit, NaN included.
    """
    fixed = fixed_readers(tg)
    nodes = [
        node
        for node in tg.nodes()
        if node.target is aten.threshold_backward.default
        and tg.phase(node) != "forward"
        and node not in fixed
        and _passes_by(tg, node.args[1])
    ]
    if not nodes:
        return tg
    edit = GraphEdit(tg)
    for old in nodes:
        node = edit.mapping[old]
        gradient, value, threshold = node.args
        assert isinstance(value, fx.Node)
        with edit.graph.inserting_after(value):
            below = edit.emit(aten.le.Scalar, (value, threshold), fact=edit.facts[value])
        with edit.graph.inserting_before(node):
            passed = edit.emit(
                aten.where.ScalarSelf, (below, 0.0, gradient), fact=edit.facts[node], origin=node
            )
        if same_strides(passed.meta["val"], node.meta["val"]):
            edit.replace(node, passed)
        else:
            edit.erase(passed)
            edit.erase(below)
    return edit.finish()


def _passes_by(tg: TrainingGraph, value: Any) -> bool:
    """Whether a forward value would be written for the backward alone."""
    base = value
    while base.op == "call_function" and is_view(base):
        base = base.args[0]
    if base.op != "call_function" or tg.phase(base) != "forward" or not is_fusible(base):
        return False
    if base.meta.get("recompute") is not None:
        return False
    readers = readers_of(base)
    return all(
        reader.op != "output" and (tg.phase(reader) != "forward" or takes_registers(reader))
        for reader in readers
    )
