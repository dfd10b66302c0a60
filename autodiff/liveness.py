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
    """Largest sum of the values alive together, run in graph order; see `Liveness`."""
    return Liveness(tg).peak


class Liveness:
    """Every tensor that a node makes: who reads it, until when, and what is alive together.

    Values of the step's own: neither inputs nor what it gives back (outputs, new values of inputs,
    gradients that an update reads), which are `results`. A value takes memory, and is among
    `materialized`, unless kernels of ours would make it where it is read: its maker and all its
    readers are fusible, of one phase, and nothing that it leads to stands between them. A pointwise
    result takes the memory of an operand of its layout that nothing reads later.

    nodes, position: in graph order. owners: as `owners_of`. last: of a value, the place of the last
    node that reads it, from memory or through what is made again inside that node's kernel. live:
    bytes alive at each node.
    """

    def __init__(self, tg: TrainingGraph) -> None:
        self.tg = tg
        self.nodes = nodes = tg.nodes()
        self.position = {node: i for i, node in enumerate(nodes)}
        self.owners = owners = owners_of(tg)
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
        made = (value for values in self._made.values() for value in values)
        self.materialized = dict.fromkeys(value for value in made if value not in self._fused)
        self.live = self._sums()

    @property
    def peak(self) -> Peak:
        """Where most is alive, the first such place."""
        if not self.live:
            return Peak(0, "")
        most = max(self.live)
        return Peak(most, self.nodes[self.live.index(most)].name)

    def reads_until(self, node: fx.Node) -> int:
        """Until where a node reads its operands: in kernels that make it again inside, the last."""
        made = (self.last[value] for value in self._made.get(node, ()) if value in self._fused)
        return max(self.position[node], *made, 0)

    def _sums(self) -> list[int]:
        change = [0] * (len(self.nodes) + 1)
        for value in self.materialized:
            if value not in self.results:
                change[self.position[value]] += num_bytes(value)
                change[self.last[value] + 1] -= num_bytes(value)
        for value in self._written_over():
            change[self.last[value]] -= num_bytes(value)
            change[self.last[value] + 1] += num_bytes(value)
        return list(accumulate(change))[:-1]

    def _written_over(self) -> set[fx.Node]:
        """Values whose last reader's kernel writes its result in their place."""
        found: set[fx.Node] = set()
        for result in self.materialized:
            if ops.lookup(result.target).kind != "pointwise" or result in self.results:
                continue
            seen, pending = {result}, [result]
            while pending:
                for parent in pending.pop().all_input_nodes:
                    value = self.owners[parent]
                    if value in seen:
                        continue
                    seen.add(value)
                    if value in self._fused:
                        pending.append(value)
                    elif self._dies_for(value, result) and value not in found:
                        found.add(value)
                        pending.clear()
                        break
        return found

    def _dies_for(self, value: fx.Node, result: fx.Node) -> bool:
        if value not in self.materialized or value in self.results:
            return False
        if self.last[value] != self.position[result]:
            return False
        old, new = value.meta["val"], result.meta["val"]
        return (old.dtype, num_bytes(value)) == (new.dtype, num_bytes(result))

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
                    same = self.tg.phase(reader) == self.tg.phase(value)
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
