"""How values are read: through views, by which kinds of nodes, and how large they are."""

from __future__ import annotations

import operator

import torch
from torch import fx

from . import ops
from .graph import TrainingGraph
from .philox import KEEP_MASK
from .rewrite import known_equal


def hinted(size: int | torch.SymInt) -> int:
    """A size; a symbolic one by its hint, one that the data decides as 1."""
    return size if isinstance(size, int) else int(size.node.hint or 1)


_LOOKUPS = frozenset(
    {
        "aten.embedding.default",
        "aten.index_select.default",
        "aten.index.Tensor",
        "aten.gather.default",
        "aten.constant_pad_nd.default",
        "aten.roll.default",
        "aten.flip.default",
        "aten.repeat.default",
        "prims.rev.default",
    }
)


def num_bytes(node: fx.Node) -> int:
    """Bytes of a tensor node's elements; an expanded dimension is one, sizes are as `hinted`."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0
    count = 1
    for size, stride in zip(value.shape, value.stride(), strict=True):
        count *= hinted(size) if hinted(stride) else 1
    return count * value.dtype.itemsize


def is_fusible(node: fx.Node) -> bool:
    """Whether a kernel of ours could hold the node, so that its operands need no memory."""
    row = ops.lookup(node.target)
    return (
        row.kind in ("pointwise", "reduction", "creation", "norm", "softmax")
        or row.name == KEEP_MASK
        or row.name in _LOOKUPS
    )


def picks_one(node: fx.Node) -> bool:
    """Whether a node gathers one element of each row, as a row's reduction can."""
    if node.target is not torch.ops.aten.gather.default:
        return False
    shape, dim = node.meta["val"].shape, node.args[1]
    return len(shape) > 1 and isinstance(dim, int) and known_equal(shape[dim], 1)


def is_lookup(node: fx.Node) -> bool:
    """Whether a node reads a tensor at computed places: a kernel could, but of memory only."""
    return ops.lookup(node.target).name in _LOOKUPS and not picks_one(node)


def takes_registers(node: fx.Node) -> bool:
    """Whether a kernel that computes a node's operands could hold the node, too."""
    return is_fusible(node) and not is_lookup(node)


def readers_of(node: fx.Node) -> list[fx.Node]:
    """Nodes that read a value, seen through views."""
    found: list[fx.Node] = []
    pending, seen = [node], {node}
    while pending:
        for user in pending.pop().users:
            if user in seen:
                continue
            seen.add(user)
            if user.op == "call_function" and is_view(user):
                pending.append(user)
            else:
                found.append(user)
    return found


def is_view(node: fx.Node) -> bool:
    """Whether a node is an index map of its first operand; parts of tuples are not."""
    return ops.lookup(node.target).kind == "view" and node.target is not operator.getitem


def fixed_readers(tg: TrainingGraph) -> set[fx.Node]:
    """Later nodes that go on reading the forward's own values: nothing is copied for them.

    They are views that only hand a value to the user, and nodes after an update: computed again
    there, a value could be made of parameters that the update has overwritten.
    """
    found: set[fx.Node] = set()
    later = [node for node in tg.nodes() if tg.phase(node) != "forward"]
    for node in reversed(later):
        if is_view(node) and all(user.op == "output" or user in found for user in node.users):
            found.add(node)
    updated = False
    for node in tg.nodes():
        # a joint's copy_ epilogues are no update: they stand between forward and backward
        updated = updated or ops.lookup(node.target).kind == "effect"
        if updated and tg.phase(node) != "forward":
            found.add(node)
    return found
