"""Graphs for the slicing tests, and what must hold of every slicing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from training_graphs import Builder

from autodiff import ops
from autodiff.graph import TrainingGraph
from autodiff.slicing import slice_graph
from autodiff.subgraphs import UNSLICED, Slices, producers

aten: Any = torch.ops.aten


def o(b: Builder, *args: fx.Node) -> fx.Node:
    """A candidate of one or more operands."""
    if len(args) == 1:
        return b.call(aten.sigmoid.default, args[0])
    result = b.call(aten.add.Tensor, args[0], args[1])
    assert len(args) == 2
    return result


def opaque(b: Builder, *args: fx.Node) -> fx.Node:
    """An opaque node: nothing in the table fuses it."""
    if len(args) == 1:
        return b.call(aten.cumsum.default, args[0], 0)
    return b.call(aten.linalg_cross.default, args[0], args[1])


def differentiated(b: Builder, *outputs: fx.Node) -> TrainingGraph:
    """The graph with one backward node for each working forward node."""
    forward = [
        n
        for n in b.graph.nodes
        if n.op == "call_function" and ops.lookup(n.target).kind not in ("view", "creation")
    ]
    gradients = [
        b.call(aten.cos.default, node, phase="backward", of=node)
        for node in reversed(forward)
        if isinstance(node.meta["val"], torch.Tensor) and node.meta["val"].is_floating_point()
    ]
    return b.finish(*outputs, *gradients)


def check(tg: TrainingGraph, slices: Slices) -> None:
    """Each phase, with every subgraph contracted to a point, is acyclic."""
    for phase in ("forward", "backward"):
        point = {
            node: (index if (index := slices.owner.get(node, UNSLICED)) != UNSLICED else node)
            for node in tg.nodes(phase)  # type: ignore[arg-type]  # a literal of Phase
            if ops.lookup(node.target).kind not in ("view", "creation")
        }
        reads: dict[object, set[object]] = {}
        for node, own in point.items():
            before = {point[p] for p in producers(node) if p in point}
            reads.setdefault(own, set()).update(before - {own})
        done: set[object] = set()
        while len(done) < len(reads):
            ready = {own for own, before in reads.items() if own not in done and before <= done}
            assert ready, "a cycle between subgraphs"
            done |= ready


def cut(b: Builder, *outputs: fx.Node, threshold: int = 1, **options: Any) -> Slices:
    tg = differentiated(b, *outputs)
    slices = slice_graph(tg, threshold, **options)
    check(tg, slices)
    return slices


def owners(slices: Slices, nodes: Sequence[fx.Node]) -> list[int | None]:
    return [slices.owner.get(node) for node in nodes]
