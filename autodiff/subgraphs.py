"""What slicing gives: subgraphs, and the owner of every node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from . import ops
from .graph import Refusal

UNSLICED = -1
"""Owner of nodes that fusion may take freely: nothing is derived from them, or it already was."""

TRANSPARENT = ("view", "creation")
"""Kinds that do no work of their own: never counted, and looked through."""


@dataclass(frozen=True, slots=True)
class Subgraph:
    """One differentiable subgraph.

    nodes: forward nodes in order, views included. backward: the nodes derived from them.
    executed: forward nodes that do work (views, getitem and constants don't count).
    inputs, outputs: values that the forward reads from outside, and values that are read outside
    both phases; what only its own backward reads is a capture, chosen by recompute.
    """

    index: int
    nodes: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]
    executed: int
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True)
class Slices:
    """How a training graph was sliced.

    owner: subgraph index of each owned node, or UNSLICED; a node without owner runs as ATen.
    """

    subgraphs: tuple[Subgraph, ...]
    owner: Mapping[fx.Node, int]
    refusals: tuple[Refusal, ...]


def producers(node: fx.Node) -> set[fx.Node]:
    """Working nodes and inputs that a node reads, seen through views."""
    found: set[fx.Node] = set()
    pending = list(node.all_input_nodes)
    while pending:
        parent = pending.pop()
        if parent.op == "call_function" and ops.lookup(parent.target).kind in TRANSPARENT:
            pending.extend(parent.all_input_nodes)
        else:
            found.add(parent)
    return found
