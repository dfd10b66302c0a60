"""How many bytes of its own a training graph holds at once: an estimate from before fusion."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import fx

from . import ops
from .graph import TrainingGraph
from .reads import is_fusible, is_view, num_bytes, takes_registers


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes alive at once, and the node that runs then."""

    num_bytes: int
    node: str


def peak_bytes(tg: TrainingGraph) -> Peak:
    """Largest sum of the values alive together, run in graph order.

    Values of the step's own: neither inputs nor what it gives back (outputs, new values of inputs,
    gradients that an update reads). A value takes memory unless kernels of ours would make it where
    it is read: its maker and all its readers are fusible, of one phase, and nothing that it leads
    to stands between them.
    """
    nodes = tg.nodes()
    if not nodes:
        return Peak(0, "")
    values = _Values(tg, nodes)
    change = [0] * (len(nodes) + 1)
    for value in values.materialized():
        if value in values.results:
            continue
        size = num_bytes(value)
        change[values.position[value]] += size
        change[values.last[value] + 1] -= size
    live = list(accumulate(change))
    at = max(range(len(nodes)), key=live.__getitem__)
    return Peak(live[at], nodes[at].name)


class _Values:
    """Every tensor that a node makes: who reads it, and until when its memory is needed.

    position: of the node that makes it. last: of the last node that reads it, from memory or
    through what is made again inside that node's kernel.
    """

    def __init__(self, tg: TrainingGraph, nodes: list[fx.Node]) -> None:
        self.position = {node: i for i, node in enumerate(nodes)}
        self._tg = tg
        owners = owners_of(tg)
        self._made: dict[fx.Node, list[fx.Node]] = {}
        for node in nodes:
            if owners[node] is node and isinstance(node.meta.get("val"), torch.Tensor):
                self._made.setdefault(maker_of(node), []).append(node)
        self._readers: dict[fx.Node, set[fx.Node]] = {}
        self.results: set[fx.Node] = set()
        for node in tg.graph.nodes:
            for parent in node.all_input_nodes:
                owner = owners[parent]
                if node.op == "output" or ops.is_effect(node):
                    self.results.add(owner)
                if node.op == "call_function" and owners[node] is not owner:
                    self._readers.setdefault(owner, set()).add(node)
        self.last: dict[fx.Node, int] = {}
        self._fused: set[fx.Node] = set()
        self._walk(list(reversed(nodes)))

    def materialized(self) -> list[fx.Node]:
        """Values that have memory."""
        return [v for made in self._made.values() for v in made if v not in self._fused]

    def _walk(self, nodes: list[fx.Node]) -> None:
        """Latest first: boundary is the first node after a value that no kernel of ours holds."""
        boundary: dict[fx.Node, int] = {}
        for node in nodes:
            for value in self._made.get(node, ()):
                first, last, until = len(nodes), -1, self.position[value]
                fused = is_fusible(node) and value not in self.results
                for reader in self._readers.get(value, ()):
                    at = self.position[reader]
                    inside = takes_registers(reader)
                    made = self._made.get(reader, ())
                    first = (
                        min(first, *(boundary[v] for v in made), len(nodes))
                        if inside
                        else min(first, at)
                    )
                    last, until = max(last, at), max(until, at)
                    until = max(until, *(self.last[v] for v in made if v in self._fused), until)
                    same = self._tg.phase(reader) == self._tg.phase(value)
                    fused = fused and inside and same
                boundary[value], self.last[value] = first, until
                if fused and last <= first:
                    self._fused.add(value)


def owners_of(tg: TrainingGraph) -> Mapping[fx.Node, fx.Node]:
    """Each node's owner: the node whose memory it shows, itself but for views."""
    owners: dict[fx.Node, fx.Node] = {}
    for node in tg.graph.nodes:
        parent = node.args[0] if node.args else None
        shows = node.op == "call_function" and isinstance(parent, fx.Node) and is_view(node)
        owners[node] = owners[parent] if shows else node
    return owners


def maker_of(node: fx.Node) -> fx.Node:
    """The node that computes a value: for a part of a tuple, the tuple's."""
    if node.target is operator.getitem:
        parent = node.args[0]
        assert isinstance(parent, fx.Node)
        return parent
    return node
