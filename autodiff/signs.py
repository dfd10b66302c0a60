"""A derivative that only asks on which side of a bound a value lies keeps that: a byte, no value.

ReLU's backward reads its result, of which it needs `result <= 0`. Where the result is no more than
a step on the way in a kernel, writing it for the backward costs twice what the answer does.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from .cut import CutProblem, Plan
from .graph import TrainingGraph
from .reads import fixed_readers, is_fusible, is_view, readers_of, takes_registers
from .rewrite import GraphEdit, same_strides

aten: Any = torch.ops.aten

_COMPARISONS = frozenset(
    {
        aten.le.Scalar,
        aten.lt.Scalar,
        aten.ge.Scalar,
        aten.gt.Scalar,
        aten.eq.Scalar,
        aten.ne.Scalar,
    }
)


def save_less_of_signs(
    tg: TrainingGraph,
    static_inputs: Collection[fx.Node] | None = None,
    demanded: Collection[fx.Node] = (),
) -> TrainingGraph:
    """Let the forward compare what it would save for a comparison alone.

    Only values that the forward makes on the way and recompute would save: not those that it writes
    anyway, nor those of checkpoints, which are made again. static_inputs, demanded: as in `choose`.
    Equal to the last bit, NaN included.
    """
    fixed = fixed_readers(tg)
    nodes = [
        node
        for node in tg.nodes()
        if (value := _compared(node)) is not None
        and tg.phase(node) != "forward"
        and node not in fixed
        and _passes_by(tg, value)
    ]
    if not nodes:
        return tg
    saved = set(CutProblem(tg, static_inputs, demanded).cut(Plan())[0])
    nodes = [node for node in nodes if _base(_compared(node)) in saved]
    if not nodes:
        return tg
    edit = GraphEdit(tg)
    for old in nodes:
        node = edit.mapping[old]
        value = _compared(node)
        assert value is not None
        if node.target is aten.threshold_backward.default:
            _select(edit, node, value)
        else:
            with edit.graph.inserting_after(value):
                edit.replace(node, _answer(edit, value, node.target, node.args[1]))
    return edit.finish()


def _compared(node: fx.Node) -> fx.Node | None:
    """The value that a node only compares with a number."""
    if node.target is aten.threshold_backward.default:
        value = node.args[1]
    else:
        value = node.args[0] if node.target in _COMPARISONS else None
    return value if isinstance(value, fx.Node) else None


def _answer(edit: GraphEdit, value: fx.Node, target: Any, number: Any) -> fx.Node:
    """A comparison, where the value is made."""
    fact = edit.facts[value]
    return edit.emit(target, (value, number), fact=fact)


def _select(edit: GraphEdit, node: fx.Node, value: fx.Node) -> None:
    """ReLU's backward in two: the comparison, and what it selects as it lay before."""
    with edit.graph.inserting_after(value):
        below = _answer(edit, value, aten.le.Scalar, node.args[2])
    with edit.graph.inserting_before(node):
        args = (below, 0.0, node.args[0])
        passed = edit.emit(aten.where.ScalarSelf, args, fact=edit.facts[node], origin=node)
    if same_strides(passed.meta["val"], node.meta["val"]):
        edit.replace(node, passed)
    else:
        edit.erase(passed)
        edit.erase(below)


def _base(value: Any) -> fx.Node:
    while value.op == "call_function" and is_view(value):
        value = value.args[0]
    return value


def _passes_by(tg: TrainingGraph, value: Any) -> bool:
    """Whether a forward value would be written for the backward alone."""
    base = _base(value)
    if value.op != "call_function" or tg.phase(value) != "forward":
        return False
    if base.op != "call_function" or tg.phase(base) != "forward" or not is_fusible(base):
        return False
    if base.meta.get("recompute") is not None:
        return False
    readers = readers_of(base)
    return all(
        reader.op != "output" and (tg.phase(reader) != "forward" or takes_registers(reader))
        for reader in readers
    )
