"""Compute a saved value again from row statistics, where that moves fewer bytes than saving it.

The backward of a cross-entropy reads log-probabilities: written by the forward in fp32 and read
back, 8 bytes an element, though logits that are in memory anyway and two numbers a row give them
again in registers. The choice of what to save is made while such composites are whole; this looks
again once they are in pieces.

Obligations: what is computed again is pointwise, draws nothing, and reads only values that are in
memory anyway (inputs, results of operations that aren't fused, values that the backward reads
already) or results of reductions; the old value has no reader that needs it in memory; and no more
bytes are held across the phases than before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from torch import fx

from autodiff import ops
from autodiff.exact import made_once
from autodiff.graph import TrainingGraph
from autodiff.rewrite import GraphEdit
from trainfuse.fusion.flow import Flow, is_creation, is_view, root, value_bytes

# Longest chain that is computed again, and the part of the old traffic that the new may take.
MAX_CHAIN = 8
WORTHWHILE = 0.75
# Statistics may add this much to what is held across the phases.
HELD_MARGIN = 1.05
_FUSIBLE_KINDS = frozenset({"pointwise", "reduction", "gather"})


@dataclass(frozen=True, slots=True)
class _Again:
    """How to compute a value again: nodes to copy, in order, and the values that they read."""

    copied: tuple[fx.Node, ...]
    leaves: tuple[fx.Node, ...]


def recompute_from_statistics(tg: TrainingGraph) -> TrainingGraph:
    """Let the backward compute what it can from values in memory and row statistics.

    Requires decomposed composites; ensures equal values (the same operations on the same inputs).
    """
    flow = Flow(tg)
    chosen: list[tuple[fx.Node, _Again]] = []
    once = made_once(tg)
    pinned = set(once)  # read by a copy, or in an equality: they stay saved
    for value in reversed(flow.compute):
        again = None if value in pinned else _cheaper(flow, value, once)
        if again is not None:
            chosen.append((value, again))
            pinned.update(again.leaves)
    if not chosen:
        return tg
    edit = GraphEdit(tg)
    for value, again in chosen:
        _copy_into_backward(edit, flow, value, again)
    edit.eliminate_dead()
    return edit.finish()


def _kind(node: fx.Node) -> str:
    return ops.lookup(node.target).kind if node.op == "call_function" else node.op


def _crosses(flow: Flow, node: fx.Node) -> bool:
    """Whether the backward reads a forward value."""
    return any(flow.tg.phase(reader) == "backward" for reader in flow.readers.get(node, ()))


def _in_memory(flow: Flow, node: fx.Node) -> bool:
    """Whether a value is in memory when the backward runs, whatever is fused."""
    if node.op != "call_function" or _kind(node) not in (*_FUSIBLE_KINDS, "rng"):
        return True
    return node in flow.escapes or any(
        _kind(reader) not in _FUSIBLE_KINDS for reader in flow.readers.get(node, ())
    )


def _cheaper(flow: Flow, value: fx.Node, once: Collection[fx.Node]) -> _Again | None:
    """How to compute a saved value again, if that moves fewer bytes and holds no more."""
    readers = flow.readers.get(value, ())
    late = [reader for reader in readers if flow.tg.phase(reader) == "backward"]
    if (
        flow.tg.phase(value) != "forward"
        or _kind(value) != "pointwise"
        or _in_memory(flow, value)
        or len(late) != 1  # several kernels would each compute it, or one write it for the rest
    ):
        return None
    again = _chain(flow, value, once)
    if again is None:
        return None
    moved = held = 0
    for leaf in again.leaves:
        size = value_bytes(leaf)
        moved += size if _in_memory(flow, leaf) or _crosses(flow, leaf) else 2 * size
        if leaf.op == "call_function" and not _crosses(flow, leaf):
            held += size
    old = value_bytes(value)
    pays = moved <= WORTHWHILE * 2 * old and held <= HELD_MARGIN * old
    return again if pays else None


def _chain(flow: Flow, value: fx.Node, once: Collection[fx.Node]) -> _Again | None:
    """The pointwise nodes above a value down to what is in memory or reduced; None if too long."""
    copied: dict[fx.Node, None] = {}
    leaves: dict[fx.Node, None] = {}

    def visit(node: fx.Node) -> bool:
        for source in node.all_input_nodes:
            top = root(source)
            if is_creation(top):
                copied[top] = None
            elif (
                _kind(top) == "pointwise"
                and top not in once
                and not _in_memory(flow, top)
                and not _crosses(flow, top)
            ):
                if not visit(top):
                    return False
            else:
                leaves[top] = None
            for view in _views(source):
                copied[view] = None
        copied[node] = None
        return len(copied) - sum(map(is_view, copied)) <= MAX_CHAIN

    if not visit(value):
        return None
    order = flow.place.__getitem__
    return _Again(tuple(sorted(copied, key=order)), tuple(sorted(leaves, key=order)))


def _views(node: fx.Node) -> Iterable[fx.Node]:
    while is_view(node):
        yield node
        node = node.args[0]  # type: ignore[assignment]  # the viewed tensor


def _copy_into_backward(edit: GraphEdit, flow: Flow, value: fx.Node, again: _Again) -> None:
    """Copy the chain to just before its first backward reader, and let all of these read it."""
    old = edit.mapping[value]
    reached = {old: old}
    pending = [old]
    late: list[fx.Node] = []
    while pending:
        for user in pending.pop().users:
            if user.op != "call_function" or user in reached:
                continue
            if edit.facts[user].phase == "backward":
                late.append(user)
            elif is_view(user):
                reached[user] = user
                pending.append(user)
    place = {node: index for index, node in enumerate(edit.graph.nodes)}
    first = min(late, key=place.__getitem__)
    fact = edit.facts[first]
    copies: dict[fx.Node, fx.Node] = {}
    forward_views = [node for node in reached if node is not old]
    with edit.graph.inserting_before(first):
        for node in (*(edit.mapping[n] for n in again.copied), *forward_views):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: copies.get(n, n))
            copies[node] = edit.emit(
                node.target,
                args,
                kwargs,
                fact=replace(fact, where=edit.facts[node].where),
                value=node.meta["val"],
                origin=node,
            )
    for user in late:
        user.args = fx.map_arg(user.args, lambda n: copies[n] if n in reached else n)
        user.kwargs = fx.map_arg(user.kwargs, lambda n: copies[n] if n in reached else n)
