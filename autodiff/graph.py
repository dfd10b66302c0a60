"""The training graph: a functional ATen graph whose nodes know their phase and what they derive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import fx

from . import _compat

Phase = Literal["forward", "backward", "update"]
InputKind = Literal["parameter", "buffer", "input", "scalar", "seed", "tangent", "saved"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "update")


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why something was left as it is: a failed proof, kept as a value.

    stage: the room that refused; node: the ATen node's name and target; where: "file.py:12" in
    the user's code, or None when the capture carried no line.
    """

    stage: str
    reason: str
    node: str = ""
    where: str | None = None


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What is known of one executed node.

    forward_of: for a backward node, the name of the forward node whose derivative it is.
    where: the user's source line, "file.py:12".
    again: which making of its value this is, to spare memory in between: equal nodes of different
    makings are never joined.
    """

    phase: Phase
    forward_of: str | None = None
    where: str | None = None
    again: int = 0


@dataclass(frozen=True, slots=True)
class InputFact:
    """One placeholder: what it is to the user's program.

    target: the parameter's or buffer's qualified name when it is known.
    """

    name: str
    kind: InputKind
    target: str | None = None
    requires_grad: bool = False


@dataclass(frozen=True, slots=True)
class TrainingGraph:
    """A functional ATen graph of one training step, or of one phase of it.

    gm: call_function, placeholder, get_attr and output nodes only; every tensor node carries its
    FakeTensor in meta["val"].
    facts: one entry for every call_function node.
    inputs: one entry for every placeholder, in order.
    num_outputs: how many leading entries of the output tuple belong to the user.
    mutations: placeholders that receive the remaining output entries, in order.
    """

    gm: fx.GraphModule
    facts: Mapping[fx.Node, NodeFacts]
    inputs: tuple[InputFact, ...]
    num_outputs: int
    mutations: tuple[str, ...] = ()

    @property
    def graph(self) -> fx.Graph:
        """The underlying fx graph."""
        return self.gm.graph

    @property
    def output_nodes(self) -> tuple[Any, ...]:
        """Entries of the output tuple: the user's outputs, then the mutated inputs' new values."""
        return tuple(self.graph.output_node().args[0])  # type: ignore[arg-type]  # fx's Argument

    def phase(self, node: fx.Node) -> Phase:
        """Phase of an executed node; placeholders count as forward."""
        fact = self.facts.get(node)
        return "forward" if fact is None else fact.phase

    def where(self, node: fx.Node) -> str | None:
        """The user's source line that a node came from."""
        fact = self.facts.get(node)
        return None if fact is None else fact.where

    def nodes(self, phase: Phase | None = None) -> list[fx.Node]:
        """Executed nodes in order, of one phase if given."""
        return [
            node
            for node in self.graph.nodes
            if node.op == "call_function" and (phase is None or self.phase(node) == phase)
        ]

    def refuse(self, stage: str, node: fx.Node, reason: str) -> Refusal:
        """A refusal that names the node and the user's line."""
        return Refusal(stage, reason, f"{node.name}: {node.target}", self.where(node))

    def copy(self) -> tuple[TrainingGraph, dict[fx.Node, fx.Node]]:
        """A copy to edit, and the map from this graph's nodes to the copy's."""
        graph = fx.Graph()
        mapping: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            # arguments that are set afterwards are not searched, leaf by leaf, for sizes
            made = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
            made.args, made.kwargs = fx.map_arg((node.args, node.kwargs), mapping.__getitem__)
            made.meta.update(node.meta)
            mapping[node] = made
        facts = {mapping[node]: fact for node, fact in self.facts.items()}
        gm = _compat.graph_module(self.gm, graph)
        return replace(self, gm=gm, facts=facts), mapping

    def replace(self, **changes: Any) -> TrainingGraph:
        """This graph with some fields changed."""
        return replace(self, **changes)
