"""Editing a copy of a training graph while its facts stay true."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from . import ops
from ._compat import FakeMode, fake_mode_among, plain_tracing
from .graph import NodeFacts, TrainingGraph

_NOTES = (
    "ac_graph_id",
    "custom",
    "nn_module_stack",
    "original_aten",
    "partitioner_tag",
    "recompute",
    "seq_nr",
    "stack_trace",
)
"""Keys of node.meta that say where a node comes from, not what its value is."""


class GraphEdit:
    """A private copy under edit: emit, replace and erase nodes, then `finish`.

    Forward nodes that go away hand their name's links over to their replacement, so that a
    backward node always names a forward node that exists.
    """

    __slots__ = ("_renamed", "facts", "graph", "mapping", "tg")

    def __init__(self, tg: TrainingGraph) -> None:
        self.tg, self.mapping = tg.copy()
        self.graph = self.tg.graph
        self.facts: dict[fx.Node, NodeFacts] = dict(self.tg.facts)
        self._renamed: dict[str, str] = {}

    def emit(
        self,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        *,
        fact: NodeFacts,
        value: Any = None,
        origin: fx.Node | None = None,
    ) -> fx.Node:
        """Insert a call at the graph's insertion point; its value is inferred unless given.

        origin: the node whose work it does: torch's own notes on that node hold for it too.
        """
        node = self.graph.call_function(target, args, kwargs or {})
        if origin is not None:
            node.meta.update({key: origin.meta[key] for key in _NOTES if key in origin.meta})
            node.meta.setdefault("original_aten", origin.target)
        node.meta["val"] = infer(node) if value is None else value
        self.facts[node] = fact
        return node

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Let every reader of old read new, and drop old."""
        old.replace_all_uses_with(new)
        self.rename(old, new)
        self.erase(old)

    def rename(self, old: fx.Node, new: fx.Node) -> None:
        """Links to old's name become links to new's, when that is a computed value."""
        if new.op == "call_function":
            self._renamed[old.name] = new.name

    def erase(self, node: fx.Node) -> None:
        """Remove a node that nothing reads."""
        self.graph.erase_node(node)
        self.facts.pop(node, None)

    def eliminate_dead(self) -> None:
        """Remove unread nodes, latest first, keeping effects, assertions and random draws."""
        for node in reversed(list(self.graph.nodes)):
            if node.op in ("call_function", "get_attr") and not node.users:
                if not ops.is_kept(node):
                    self.erase(node)

    def finish(self, **changes: Any) -> TrainingGraph:
        """The edited training graph, links resolved and its code outdated."""
        forward = {node.name for node, fact in self.facts.items() if fact.phase == "forward"}
        facts: dict[fx.Node, NodeFacts] = {}
        for node in self.graph.nodes:
            if node.op != "call_function":
                continue
            fact = self.facts[node]
            link = fact.forward_of
            while link is not None and link in self._renamed:
                link = self._renamed[link]
            if link is not None and forward and link not in forward:
                link = None
            facts[node] = fact if link == fact.forward_of else replace(fact, forward_of=link)
        self.tg.gm.recompile()
        return self.tg.replace(facts=facts, **changes)


def fake_mode_of(graph: fx.Graph) -> FakeMode:
    """The fake mode that the graph's values live in."""
    modes = (fake_mode_among(node.meta.get("val")) for node in graph.nodes)
    return next((mode for mode in modes if mode is not None), None) or FakeMode()


def value_of(argument: Any) -> Any:
    """The recorded value of a node; literals are their own value."""
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument


def infer(node: fx.Node, instead: Mapping[fx.Node, Any] | None = None) -> Any:
    """Value of a call from the values of its arguments, by running it on fake tensors.

    instead: values that some arguments shall have, in place of those that are recorded.
    """
    given = instead or {}
    args, kwargs = fx.map_arg(
        (node.args, node.kwargs), lambda n: given[n] if n in given else value_of(n)
    )
    target: Any = node.target
    mode = fake_mode_among([parent.meta.get("val") for parent in node.all_input_nodes])
    with plain_tracing(), mode or fake_mode_of(node.graph):  # a creation reads nothing
        return target(*args, **kwargs)


def known_equal(one: Any, other: Any) -> bool:
    """Whether two sizes, or two sequences of sizes, are equal for all values of their symbols.

    Comparing them by == would guard on today's sizes, and so recompile at the next.
    """
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(known_equal, one, other))
    return statically_known_true(one == other)


def same_strides(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal strides wherever a stride is ever used; the shapes must agree."""
    return all(
        known_equal(a, b) or known_equal(size, 1)
        for a, b, size in zip(one.stride(), other.stride(), one.shape, strict=True)
    )


def is_row_major(value: torch.Tensor) -> bool:
    """Whether a tensor is contiguous for all values of its symbols."""
    expected: Any = 1
    for stride, size in zip(reversed(value.stride()), reversed(value.shape), strict=True):
        if not known_equal(size, 1) and not known_equal(stride, expected):
            return False
        expected = expected * size
    return True
