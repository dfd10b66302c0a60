"""Make a row-wise loss's gradient in the forward phase, in the kernel that makes the loss.

The first thing that a backward does with a cross-entropy is to read the logits again: where a
step is captured whole its cotangent is known, so one kernel can take a row's maximum and sum, its
loss and its gradient. A group never spans phases; what moves here is only the phase of the first
nodes of the backward, which need nothing that the backward computes. Nothing runs earlier than
before, and no more is held: the logits die where the gradient is born.

Obligations: what moves depends on forward values and on constants alone; together with the forward
nodes that it needs, down to the values that are in memory anyway, it is one row kernel. So what
scales the gradient (how many targets count) may depend on targets, never on the rows' losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import fx

from autodiff import ops
from autodiff.derive import cleanup, decompose
from autodiff.formulas import losses
from autodiff.graph import Refusal, TrainingGraph
from trainfuse.fusion.domains import argument, infer
from trainfuse.fusion.flow import is_view, root
from trainfuse.fusion.plan import FusionOptions
from trainfuse.fusion.rewrites.row_sums import simplify_sums

Supports = Callable[[fx.Node], str | None]
_KINDS = frozenset({"pointwise", "reduction", "gather", "view", "creation"})


def gradients_in_forward(tg: TrainingGraph, supports: Supports) -> TrainingGraph:
    """Call the first nodes of the backward forward, where one row kernel can make them.

    supports: why the code generator can't build a node, or None. Losses are decomposed in the
    graph returned; when nothing can move it is the graph given.
    """
    if not any("oftmax" in str(n.target) or "logsumexp" in str(n.target) for n in tg.nodes()):
        if not any(n.target is torch.ops.aten.exp.default for n in tg.nodes()):
            return tg
    pieces = simplify_sums(cleanup(decompose(tg, losses())))
    early = _Early(pieces, supports)
    moved: set[fx.Node] = set()
    for results in early.losses():
        kernel = early.kernel(results)
        if kernel is not None:
            moved |= early.needed(results)
    if not moved:
        return tg
    facts = {
        node: replace(fact, phase="forward", forward_of=None) if node in moved else fact
        for node, fact in pieces.facts.items()
    }
    return pieces.replace(facts=facts)


class _Early:
    """The backward nodes that need nothing of the backward, and what they make."""

    def __init__(self, tg: TrainingGraph, supports: Supports) -> None:
        self.tg, self.supports = tg, supports
        self.place = {node: index for index, node in enumerate(tg.graph.nodes)}
        self.tangents = {fact.name for fact in tg.inputs if fact.kind == "tangent"}
        self.nodes: dict[fx.Node, None] = {}
        for node in tg.nodes("backward"):
            if self.fusible(node) and all(self.ready(source) for source in node.all_input_nodes):
                self.nodes[node] = None

    def fusible(self, node: fx.Node) -> bool:
        """Whether a node can be part of a row kernel; sums over rows are for others to make."""
        if node.op != "call_function":
            return False
        kind = ops.lookup(node.target).kind
        if kind not in _KINDS or self.supports(node) is not None:
            return False
        return kind != "reduction" or _along_rows(node)

    def inside(self, node: fx.Node) -> bool:
        """Whether a kernel computes a value, rather than read it, or a view of it, from memory."""
        return self.fusible(node) and (not is_view(node) or self.fusible(root(node)))

    def ready(self, node: fx.Node) -> bool:
        if node.op != "call_function":
            return node.name not in self.tangents
        return self.tg.phase(node) == "forward" or node in self.nodes

    def losses(self) -> Iterable[set[fx.Node]]:
        """What the rest of the backward reads, largest values of one size together."""
        results = {
            root(node)
            for node in self.nodes
            if any(user not in self.nodes for user in node.users) and root(node) in self.nodes
        }
        # one that our own kernels would read is better made by them
        results = {node for node in results if not any(map(self.waits, _readers(node)))}
        by_size: dict[int, set[fx.Node]] = {}
        for node in results:
            by_size.setdefault(_numel(node), set()).add(node)
        return [by_size[size] for size in sorted(by_size, reverse=True) if size > 1]

    def waits(self, reader: fx.Node) -> bool:
        """Whether a node could be in the kernel, but for something that is not there yet."""
        return reader not in self.nodes and self.fusible(reader)

    def needed(self, results: Iterable[fx.Node]) -> set[fx.Node]:
        """Backward nodes that the results are computed from, themselves included."""
        found: set[fx.Node] = set()
        pending = list(results)
        while pending:
            node = pending.pop()
            if node in self.nodes and node not in found:
                found.add(node)
                pending.extend(node.all_input_nodes)
        return found

    def kernel(self, results: set[fx.Node]) -> list[fx.Node] | None:
        """The nodes of the one row kernel that makes the results, or None."""
        size = max(map(_numel, results))
        above: set[fx.Node] = set()
        pending = list(results)
        while pending:
            node = pending.pop()
            if node not in above:
                above.add(node)
                pending += node.all_input_nodes if self.inside(node) else ()
        # what is computed from a value as large as the results
        depends: set[fx.Node] = set()
        members: set[fx.Node] = set()
        for node in sorted(above, key=self.place.__getitem__):
            if not self.inside(node):
                depends.update([node] if _numel(node) >= size else ())
            elif not depends.isdisjoint(node.all_input_nodes):
                depends.add(node)
                members.add(node)
        for node in list(members):
            members.update(n for n in node.all_input_nodes if _is_creation(n))
        members |= views_of_one({n for m in members for n in m.all_input_nodes} - members)
        order = [node for node in self.tg.nodes() if node in members]
        forward = [node for node in order if self.tg.phase(node) == "forward"]
        if not any(ops.lookup(node.target).kind == "reduction" for node in forward):
            return None
        if len(order) > FusionOptions().max_nodes or self.leaves_and_returns(members):
            return None
        domain = infer(order)
        return None if isinstance(domain, Refusal) or domain.kind != "row" else order

    def leaves_and_returns(self, members: set[fx.Node]) -> bool:
        """Whether what the kernel reads is computed, elsewhere, from what it makes."""
        pending = {n for node in members for n in node.all_input_nodes if n not in members}
        seen: set[fx.Node] = set()
        first = min(map(self.place.__getitem__, members))
        while pending:
            node = pending.pop()
            if node in members and not _is_creation(node):
                return True  # a constant comes from no kernel
            if node not in seen and self.place[node] > first:
                seen.add(node)
                pending.update(node.all_input_nodes)
        return False


def views_of_one(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Views between values that are read and what they show, where they show one in several ways.

    With them a group's axes are the same in all; without, nothing tells it.
    """
    by_root: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        by_root.setdefault(root(node), []).append(node)
    found: set[fx.Node] = set()
    for several in by_root.values():
        for node in several if len(several) > 1 else ():
            while is_view(node) and node not in found:
                found.add(node)
                node = node.args[0]  # type: ignore[assignment]  # a view's source
    return found


def _along_rows(node: fx.Node) -> bool:
    """Whether a reduction is over the last dimension of several."""
    source, dims = node.args[0], argument(node, "dim")
    rank = source.meta["val"].dim() if isinstance(source, fx.Node) else 0
    if rank < 2 or not isinstance(dims, list | tuple):
        return False
    return [dim % rank for dim in dims] == [rank - 1]


def _readers(node: fx.Node) -> Iterable[fx.Node]:
    """Nodes that read a value, through views or not."""
    for user in node.users:
        if is_view(user):
            yield from _readers(user)
        else:
            yield user


def _is_creation(node: fx.Node) -> bool:
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]  # a view's source
    return node.op == "call_function" and ops.lookup(node.target).kind == "creation"


def _numel(node: fx.Node) -> int:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0
    return value.numel() if all(type(size) is int for size in value.shape) else 0
