"""Forward values that a backward kernel makes of what it reads anyway, and doesn't read, too.

ReLU's derivative asks the sign of its result, and batch norm's reads the convolution's result, of
which the former is made by a few operations and some numbers a channel. Both are in memory, since
contractions read them, so the choice of what to save can't see that one of the reads is spared.
Obligations: what is made again is pointwise and draws nothing; every value that it is made of is
read by the same fusible stretch of the backward already, or is far smaller.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import fx

from . import ops
from .exact import made_once
from .graph import TrainingGraph
from .reads import fixed_readers, is_view, num_bytes, readers_of
from .rewrite import GraphEdit

MAX_CHAIN = 12
SMALL = 1 / 16
"""Part of the value's bytes that an operand may have which the backward doesn't read yet."""
ARITHMETIC = 1 / 16
"""Price of computing a byte, in bytes moved; as the least effort of recompute."""


def reread_less(tg: TrainingGraph) -> TrainingGraph:
    """Let fusible stretches of the backward make forward values of others that they read.

    Requires norms in pieces; ensures equal values: the same operations on the same inputs.
    """
    if not tg.nodes("backward"):
        return tg
    stretches, once = _Stretches(tg), made_once(tg)
    chosen: list[tuple[fx.Node, tuple[fx.Node, ...], list[fx.Node]]] = []
    for value in tg.nodes("forward"):
        if not _is_plain(value) or value in once:
            continue
        for stretch, readers in stretches.readers(value):
            chain = _chain(value, stretches.reads[stretch] - {value}, once)
            if chain is not None:
                chosen.append((value, chain, readers))
    if not chosen:
        return tg
    edit = GraphEdit(tg)
    for value, chain, readers in reversed(chosen):
        _copy(edit, value, chain, readers)
    edit.eliminate_dead()
    return edit.finish()


class _Stretches:
    """Backward nodes that fusion may join: connected by data, not through a contraction.

    reads: forward values, seen through views, that each stretch reads.
    """

    def __init__(self, tg: TrainingGraph) -> None:
        self.tg = tg
        fixed = fixed_readers(tg)
        self.parent: dict[fx.Node, fx.Node] = {
            node: node for node in tg.nodes("backward") if _is_joinable(node) and node not in fixed
        }
        for node in self.parent:
            for reader in readers_of(node):
                if reader in self.parent:
                    self.parent[self.find(reader)] = self.find(node)
        self.reads: dict[fx.Node, set[fx.Node]] = {}
        for node in self.parent:
            reads = self.reads.setdefault(self.find(node), set())
            reads.update(_base(read) for read in node.all_input_nodes)

    def find(self, node: fx.Node) -> fx.Node:
        """A stretch's representative."""
        while self.parent[node] is not node:
            self.parent[node] = self.parent[self.parent[node]]
            node = self.parent[node]
        return node

    def readers(self, value: fx.Node) -> list[tuple[fx.Node, list[fx.Node]]]:
        """The stretches that read a forward value, and where."""
        found: dict[fx.Node, list[fx.Node]] = {}
        for reader in readers_of(value):
            if reader in self.parent:
                found.setdefault(self.find(reader), []).append(reader)
        return list(found.items())


def _is_joinable(node: fx.Node) -> bool:
    return ops.lookup(node.target).kind in ("pointwise", "reduction")


def _is_plain(node: fx.Node) -> bool:
    """Whether a node may be copied: pointwise, and in no checkpointed region."""
    return ops.lookup(node.target).kind == "pointwise" and node.meta.get("recompute") is None


def _base(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and is_view(node):
        node = node.args[0]  # type: ignore[assignment]  # the viewed tensor
    return node


def _chain(
    value: fx.Node, read: Collection[fx.Node], once: Collection[fx.Node]
) -> tuple[fx.Node, ...] | None:
    """Nodes that make a value of `read` and of small tensors, in order; None if none do, or many.

    Something large must be among them: what is made of small tensors alone is recompute's business.
    once: what may not be made again.
    """
    copied: dict[fx.Node, None] = {}
    size = num_bytes(value)
    shares = False

    def visit(node: fx.Node) -> bool:
        nonlocal shares
        for source in node.all_input_nodes:
            base, views = source, []
            while base.op == "call_function" and is_view(base):
                views.append(base)
                base = base.args[0]  # type: ignore[assignment]  # the viewed tensor
            if base in copied:
                pass
            elif base in read:
                shares = shares or num_bytes(base) > SMALL * size
            elif base.op == "call_function" and ops.lookup(base.target).kind == "creation":
                copied[base] = None
            elif num_bytes(base) > SMALL * size:
                if base.op != "call_function" or not _is_plain(base) or base in once:
                    return False
                if not visit(base):
                    return False
            copied.update(dict.fromkeys(reversed(views)))
        copied[node] = None
        return len(copied) <= 3 * MAX_CHAIN

    if size == 0 or not visit(value) or not shares:
        return None
    made = [node for node in copied if ops.lookup(node.target).kind == "pointwise"]
    price = sum(num_bytes(node) for node in made) * ARITHMETIC
    return tuple(copied) if len(made) <= MAX_CHAIN and price < size else None


def _copy(
    edit: GraphEdit, value: fx.Node, chain: tuple[fx.Node, ...], readers: list[fx.Node]
) -> None:
    """Copy a chain to just before its first reader, and let the readers read the copy."""
    late = [edit.mapping[reader] for reader in readers]
    place = {node: index for index, node in enumerate(edit.graph.nodes)}
    copies: dict[fx.Node, fx.Node] = {}
    views = _views_between(edit.mapping[value], late)
    first = min(late, key=place.__getitem__)
    fact = edit.facts[first]
    with edit.graph.inserting_before(first):
        for node in (*(edit.mapping[n] for n in chain), *views):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: copies.get(n, n))
            copies[node] = edit.emit(
                node.target,
                args,
                kwargs,
                fact=replace(fact, where=edit.facts[node].where),
                value=node.meta["val"],
                origin=node,
            )
    replaced = {edit.mapping[value], *views}
    for reader in late:
        reader.args = fx.map_arg(reader.args, lambda n: copies[n] if n in replaced else n)
        reader.kwargs = fx.map_arg(reader.kwargs, lambda n: copies[n] if n in replaced else n)


def _views_between(value: fx.Node, late: list[fx.Node]) -> list[fx.Node]:
    """Views through which readers see a value, each after what it shows."""
    found: dict[fx.Node, None] = {}
    for reader in late:
        for source in reader.all_input_nodes:
            views: list[fx.Node] = []
            while source is not value and source.op == "call_function" and is_view(source):
                views.append(source)
                source = source.args[0]  # type: ignore[assignment]  # the viewed tensor
            if source is value:
                found.update(dict.fromkeys(reversed(views)))
    return list(found)
