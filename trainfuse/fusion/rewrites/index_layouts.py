"""How readers of an indexing find what takes its place, which may lie otherwise in memory."""

from __future__ import annotations

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from autodiff import ops
from autodiff.reads import is_view
from autodiff.rewrite import infer, is_row_major, same_strides
from trainfuse.fusion.domains import RESHAPES


def layouts_after(old: fx.Node, new: fx.Node) -> dict[fx.Node, torch.Tensor] | None:
    """The views of `old` and their values once they show `new`; None when a reader can't have it.

    A slice lies among what it was cut from, what is computed for it is dense. A reader that isn't
    ours makes its result's layout of its operands': it must come out as it was planned.
    """
    if same_strides(old.meta["val"], new.meta["val"]):
        return {}
    moved: dict[fx.Node, torch.Tensor] = {old: new.meta["val"]}
    views: dict[fx.Node, torch.Tensor] = {}
    pending = [old]
    while pending:
        for reader in pending.pop(0).users:
            if reader.op != "call_function" or reader in moved or reader in views:
                if reader.op != "call_function":
                    return None
                continue
            value = _inferred(reader, moved)
            if value is None:
                return None
            if is_view(reader):
                moved[reader] = views[reader] = value
                pending.append(reader)
    return views


def _inferred(reader: fx.Node, moved: dict[fx.Node, torch.Tensor]) -> torch.Tensor | None:
    """A reader's (first) value when these lie otherwise; None when that isn't what was planned."""
    row = ops.lookup(reader.target)
    if row.kind in ("opaque", "effect"):
        return None
    if is_view(reader) and reader.target in RESHAPES:
        source = reader.args[0]
        assert isinstance(source, fx.Node)
        if not is_row_major(moved[source]) and not _adds_ones(reader, source):
            return None
    planned = reader.meta["val"]
    made = infer(reader, moved)
    if is_view(reader):
        return made if isinstance(made, torch.Tensor) else None
    for one, other in zip(tree_leaves(made), tree_leaves(planned), strict=True):
        if isinstance(one, torch.Tensor) and not same_strides(one, other):
            return None
    return next(v for v in tree_leaves(made) if isinstance(v, torch.Tensor))


def _adds_ones(view: fx.Node, source: fx.Node) -> bool:
    """Whether a reshape only adds or takes away dims of one element."""
    shapes = (node.meta["val"].shape for node in (view, source))
    one, other = ([size for size in shape if size != 1] for shape in shapes)
    return one == other
