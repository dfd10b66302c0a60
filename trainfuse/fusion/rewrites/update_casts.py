"""Fold the cast of a gradient into the update that reads it.

Under autocast every weight gradient is computed in half precision and cast to the parameter's
type only to be read by the optimizer. The update's template casts its gradient itself, so the
copy in between is a write and a read saved. The same of a gradient that a chunked head has summed
in fp32 for a half parameter: beside the sum the copy would be half as much memory again.
Obligations: the update is the cast's only reader, and
the uncast gradient has the parameter's shape and strides (the update walks memory linearly).
"""

from __future__ import annotations

import torch
from torch import fx

import autodiff.accumulation  # noqa: F401  # registers torch.ops.trainfuse.accumulate
from autodiff.graph import TrainingGraph
from autodiff.rewrite import GraphEdit

_CASTS = (
    torch.ops.aten._to_copy.default,
    torch.ops.prims.convert_element_type.default,
)


def fold_update_casts(tg: TrainingGraph) -> TrainingGraph:
    """Let update nodes read gradients before their cast to the parameter's type."""
    update = torch.ops.trainfuse.update.default
    if not any(node.target is update for node in tg.graph.nodes):
        return tg
    edit = GraphEdit(tg)
    for node in list(edit.graph.nodes):
        if node.target is not update:
            continue
        params, grads, handle = node.args
        node.args = (params, [_uncast(p, g) for p, g in zip(params, grads, strict=True)], handle)
    edit.eliminate_dead()
    return edit.finish()


def _uncast(param: fx.Node, grad: fx.Node) -> fx.Node:
    if grad.target not in _CASTS or len(grad.users) != 1:
        return grad
    source = grad.args[0]
    assert isinstance(source, fx.Node)
    before, after, owner = source.meta["val"], grad.meta["val"], param.meta["val"]
    half = before.dtype in (torch.float16, torch.bfloat16)
    worthwhile = half or source.target is torch.ops.trainfuse.accumulate.default
    layout = before.stride() == owner.stride() and before.shape == owner.shape
    same = after.dtype == owner.dtype and before.device == owner.device
    return source if worthwhile and layout and same else grad
