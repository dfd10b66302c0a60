"""Data flow without views: who computes a value, who reads it, in what order they must run."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx

from autodiff import ops
from autodiff.graph import TrainingGraph
from autodiff.reads import hinted
from trainfuse.fusion.indirect import source_of


def is_view(node: fx.Node) -> bool:
    """Whether a node is an index map of one tensor: free, and no kernel of its own."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    return ops.lookup(node.target).kind == "view" and isinstance(node.meta["val"], torch.Tensor)


def is_creation(node: fx.Node) -> bool:
    """Whether a node is a constant tensor that any kernel can make for itself."""
    return (
        node.op == "call_function"
        and ops.lookup(node.target).kind == "creation"
        and isinstance(node.meta.get("val"), torch.Tensor)
    )


def root(node: fx.Node) -> fx.Node:
    """The computed value, or graph input, that a chain of views shows."""
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]  # a view's first argument is its tensor
    return node


def sources(node: fx.Node) -> list[fx.Node]:
    """What must be there for a value to be read: its root, and the sizes that its views take."""
    found: dict[fx.Node, None] = {}
    pending = [node]
    while pending:
        node = pending.pop()
        if is_view(node):
            pending += node.all_input_nodes
        else:
            found[node] = None
    return list(found)


def value_bytes(node: fx.Node) -> int:
    """Bytes that reading a value once touches; an expanded dim is read once."""
    value = node.meta.get("val")
    tensors = value if isinstance(value, tuple | list) else (value,)
    total = 0
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            count = tensor.dtype.itemsize
            for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
                count *= hinted(size) if hinted(stride) else 1
            total += count
    return total


def looked_up(nodes: Iterable[fx.Node]) -> dict[fx.Node, int]:
    """Tensors that some nodes read only at computed places, and the bytes that this touches."""
    touched: dict[fx.Node, int] = {}
    whole: set[fx.Node] = set()
    for node in nodes:
        source = source_of(node)
        if source is not None:
            value = node.meta["val"]
            moved = value.numel() * source.meta["val"].dtype.itemsize
            touched[source] = min(touched.get(source, 0) + moved, value_bytes(source))
        whole.update(other for other in node.all_input_nodes if other is not source)
    return {source: moved for source, moved in touched.items() if source not in whole}


class Flow:
    """The graph with views left out.

    compute: executed nodes that are no views, in order; position: index of each in it.
    reads: roots that a node reads, and sizes that it takes. readers: nodes that read a root,
    through views or not. escapes: roots that the graph returns.
    """

    def __init__(self, tg: TrainingGraph) -> None:
        self.tg = tg
        nodes = tg.nodes()
        self.place = {node: index for index, node in enumerate(tg.graph.nodes)}
        self.compute = [node for node in nodes if not is_view(node)]
        self.position = {node: index for index, node in enumerate(self.compute)}
        self.reads: dict[fx.Node, list[fx.Node]] = {}
        self.readers: dict[fx.Node, list[fx.Node]] = {}
        for node in self.compute:
            reads = dict.fromkeys(s for read in node.all_input_nodes for s in sources(read))
            self.reads[node] = list(reads)
            for source in reads:
                self.readers.setdefault(source, []).append(node)
        outputs = tg.graph.output_node().all_input_nodes
        self.escapes = {source for node in outputs for source in sources(node)}

    def predecessors(self) -> list[list[int]]:
        """For each compute node, what must run before it: what it reads, and order kept on purpose.

        Random draws keep their order. An effect runs after all before it and before all after it.
        """
        before: list[list[int]] = []
        last_draw: int | None = None
        last_effect: int | None = None
        for index, node in enumerate(self.compute):
            earlier = [self.position[read] for read in self.reads[node] if read in self.position]
            if last_effect is not None:
                earlier.append(last_effect)
            if ops.is_effect(node):
                earlier = list(range(last_effect or 0, index))
                last_effect = index
            elif ops.draws_randomness(node):
                if last_draw is not None:
                    earlier.append(last_draw)
                last_draw = index
            before.append(earlier)
        return before

    def close(
        self, members: Iterable[fx.Node], free: frozenset[fx.Node]
    ) -> tuple[list[fx.Node], list[fx.Node]]:
        """Nodes of a group (members, views between them, constants) and the values it reads.

        free: constants that a kernel can make itself. Both in graph order of (first) use.
        """
        chosen = set(members)
        nodes = set(chosen)
        inputs: dict[fx.Node, None] = {}
        for member in sorted(chosen, key=self.place.__getitem__):
            for source in member.all_input_nodes:
                chain = [source]
                while is_view(chain[-1]):
                    chain.append(chain[-1].args[0])  # type: ignore[arg-type]  # the viewed tensor
                inside = chain[-1] in chosen or chain[-1] in free
                if inside:
                    nodes.update(chain)
                else:
                    inputs[source] = None
        return sorted(nodes, key=self.place.__getitem__), list(inputs)
