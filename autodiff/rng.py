"""Dropout masks as pure functions of one seed: Philox keyed by seed, call and element."""

from __future__ import annotations

import torch
from torch import fx

from . import (
    ops,
    philox,  # noqa: F401  # registers torch.ops.trainfuse.seed and keep_mask
)
from .graph import NodeFacts, TrainingGraph
from .rewrite import GraphEdit


def functionalize_dropout(tg: TrainingGraph) -> TrainingGraph:
    """Replace each native_dropout by masks drawn from one seed, and its backward likewise.

    The mask stays a forward value here; recompute draws it again in the backward phase, where it
    costs nothing, so that no mask is ever saved. Requires: dropout not yet decomposed.
    """
    dropouts = [node for node in tg.nodes() if _is_training_dropout(node)]
    if not dropouts:
        return tg
    edit = GraphEdit(tg)
    seeds: dict[torch.device, fx.Node] = {}
    # An input where there is one, so that the seed waits for no computed value.
    inputs = {
        node.meta["val"].device: node
        for node in reversed(list(edit.graph.nodes))
        if node.op == "placeholder" and isinstance(node.meta["val"], torch.Tensor)
    }
    for offset, old in enumerate(dropouts):
        node = edit.mapping[old]
        device = node.args[0].meta["val"].device
        if device not in seeds:
            with edit.graph.inserting_before(node):
                like = inputs.get(device, node.args[0])
                seeds[device] = edit.emit(
                    torch.ops.trainfuse.seed.default, (like,), fact=edit.facts[node]
                )
        _rewrite_dropout(edit, node, seeds[device], offset)
    for old in tg.nodes():
        if ops.op_name(old.target) == "aten.native_dropout_backward.default":
            _rewrite_dropout_backward(edit, edit.mapping[old])
    return edit.finish()


def _is_training_dropout(node: fx.Node) -> bool:
    if ops.op_name(node.target) != "aten.native_dropout.default":
        return False
    # train=False makes it an identity with a mask of ones, which draws nothing.
    return len(node.args) < 3 or node.args[2] is not False


def _rewrite_dropout(edit: GraphEdit, node: fx.Node, seed: fx.Node, offset: int) -> None:
    value, p = node.args[0], node.args[1]
    assert isinstance(value, fx.Node)
    assert isinstance(p, (int, float))
    fact = edit.facts[node]
    with edit.graph.inserting_before(node):
        shape = [
            size
            if isinstance(size, int)
            else edit.emit(torch.ops.aten.sym_size.int, (value, dim), fact=fact, origin=node)
            for dim, size in enumerate(value.meta["val"].shape)
        ]
        mask = edit.emit(
            torch.ops.trainfuse.keep_mask.default,
            (seed, offset, float(p), shape),
            fact=fact,
            origin=node,
        )
        kept = edit.emit(torch.ops.aten.mul.Tensor, (value, mask), fact=fact, origin=node)
        factor = _scale(float(p))
        scaled = edit.emit(torch.ops.aten.mul.Tensor, (kept, factor), fact=fact, origin=node)
    for getitem in list(node.users):
        edit.replace(getitem, scaled if getitem.args[1] == 0 else mask)
    edit.rename(node, scaled)
    edit.erase(node)


def _scale(p: float) -> float:
    """ATen's factor: 0 where everything is dropped, never a division by zero."""
    return 0.0 if p == 1.0 else 1.0 / (1.0 - p)


def _rewrite_dropout_backward(edit: GraphEdit, node: fx.Node) -> None:
    gradient, mask, scale = node.args
    fact: NodeFacts = edit.facts[node]
    with edit.graph.inserting_before(node):
        kept = edit.emit(torch.ops.aten.mul.Tensor, (gradient, mask), fact=fact, origin=node)
        scaled = edit.emit(torch.ops.aten.mul.Tensor, (kept, scale), fact=fact, origin=node)
    edit.replace(node, scaled)
