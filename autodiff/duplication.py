"""Recompute made real: copies of forward nodes in the phase that reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from .graph import NodeFacts, TrainingGraph
from .reads import fixed_readers
from .rewrite import GraphEdit


def duplicate(tg: TrainingGraph, recomputed: Sequence[fx.Node]) -> TrainingGraph:
    """Give later phases their own copies of the recomputed forward nodes, in graph order.

    A copy stands just before its first reader.
    """
    edit = GraphEdit(tg)
    fixed = {edit.mapping[node] for node in fixed_readers(tg)}
    rank = {node: i for i, node in enumerate(edit.graph.nodes)}
    anchor_of: dict[fx.Node, fx.Node] = {}
    front: dict[fx.Node, fx.Node] = {}
    # Latest first, so that a copy's readers, copies included, are placed before it is.
    for old in reversed(recomputed):
        node = edit.mapping[old]
        readers = [
            user
            for user in node.users
            if user.op == "call_function"
            and edit.facts[user].phase != "forward"
            and user not in fixed
        ]
        if not readers:
            continue
        anchor = min((anchor_of.get(user, user) for user in readers), key=rank.__getitem__)
        with edit.graph.inserting_before(front.get(anchor, anchor)):
            copy = edit.graph.node_copy(node)
        link = _reader_link(edit, readers, rank, anchor_of) or node.name
        edit.facts[copy] = NodeFacts(edit.facts[anchor].phase, link, edit.facts[node].where)
        anchor_of[copy], front[anchor] = anchor, copy
        for user in readers:
            user.replace_input_with(node, copy)
    edit.eliminate_dead()
    return edit.finish()


def _reader_link(
    edit: GraphEdit,
    readers: Sequence[fx.Node],
    rank: Mapping[fx.Node, int],
    anchor_of: Mapping[fx.Node, fx.Node],
) -> str | None:
    """The forward node that a copy's readers derive from: true readers first, then copies."""
    ordered = sorted(readers, key=lambda user: (user in anchor_of, rank.get(user, 0)))
    links = (edit.facts[user].forward_of for user in ordered)
    return next((link for link in links if link is not None), None)
