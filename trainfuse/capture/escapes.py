"""Which outputs of a step can still be differentiated by whoever called it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

CUT = torch.ops.aten.detach.default
"""What a whole step cuts its outputs off with; a user's `detach()` is another call."""


def escaping_output(graph: fx.Graph) -> fx.Node | None:
    """An output of Dynamo's graph that was cut off though a caller could differentiate it, or None.

    Others have a history that the step's own backward freed, as a loss that is returned for a
    log; eager refuses to differentiate those too.
    """
    freed: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target is torch.autograd.grad and not _keeps(node):
            roots = [n for n in tree_leaves(node.args[0]) if isinstance(n, fx.Node)]
            freed |= _history(roots)
    for node in graph.output_node().all_input_nodes:
        if node.target is CUT:
            source: Any = node.args[0]
            own = _history([source])
            if freed.isdisjoint(own):
                return source
    return None


def _keeps(grad: fx.Node) -> bool:
    """Whether a call of autograd.grad leaves the graph that it walks in place."""
    names = ("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph")
    given = {**dict(zip(names, grad.args, strict=False)), **grad.kwargs}
    retain = given.get("retain_graph")
    return bool(given.get("create_graph")) if retain is None else bool(retain)


def _history(roots: Iterable[fx.Node]) -> set[fx.Node]:
    """The calls that autograd recorded on the way to some values."""
    found: set[fx.Node] = set()
    pending = list(roots)
    while pending:
        node = pending.pop()
        if node in found or node.op in ("placeholder", "get_attr") or not _recorded(node):
            continue
        found.add(node)
        pending.extend(node.all_input_nodes)
    return found


def _recorded(node: fx.Node) -> bool:
    values = tree_leaves(node.meta.get("example_value"))
    return any(isinstance(value, Tensor) and value.requires_grad for value in values)
