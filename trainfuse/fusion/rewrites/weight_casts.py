"""Cast all weights that autocast casts in one launch.

Under autocast each weight is cast once a step, in a kernel of a few microseconds of its own. Casts
that only feed contractions can't join a kernel of ours, so they are made together, first thing in
their phase. Obligations: the source is a parameter, which nothing writes before the update; every
reader is outside fusion, else the cast would be free inside its reader's kernel.
"""

from __future__ import annotations

import operator
from collections import defaultdict

import torch
from torch import Tensor, fx

from autodiff import ops
from autodiff.graph import TrainingGraph
from autodiff.rewrite import GraphEdit

_CASTS = (
    torch.ops.aten._to_copy.default,
    torch.ops.prims.convert_element_type.default,
)
_FUSIBLE = frozenset({"pointwise", "reduction"})


@torch.library.custom_op("trainfuse::cast_all", mutates_args=())
def cast_all(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Copies of tensors in another type, with their strides, made together."""
    made = [torch.empty_like(t, dtype=dtype) for t in tensors]
    torch._foreach_copy_(made, tensors)
    return made


@cast_all.register_fake
def _(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [torch.empty_like(t, dtype=dtype) for t in tensors]


def batch_weight_casts(tg: TrainingGraph) -> TrainingGraph:
    """Replace the forward's casts of parameters for contractions by one list cast a type."""
    parameters = {fact.name for fact in tg.inputs if fact.kind == "parameter"}
    lists: dict[torch.dtype, list[fx.Node]] = defaultdict(list)
    for node in tg.nodes("forward"):
        if node.target in _CASTS and _is_plain(node, parameters) and not _joins_a_kernel(node):
            lists[node.meta["val"].dtype].append(node)
    if all(len(casts) < 2 for casts in lists.values()):
        return tg
    edit = GraphEdit(tg)
    replaced: list[tuple[fx.Node, fx.Node]] = []
    first = next(node for node in edit.graph.nodes if node.op == "call_function")
    for dtype, casts in lists.items():
        if len(casts) < 2:
            continue
        olds = [edit.mapping[node] for node in casts]
        with edit.graph.inserting_before(first):
            together = edit.emit(
                torch.ops.trainfuse.cast_all.default,
                ([n.args[0] for n in olds], dtype),
                fact=edit.facts[olds[0]],
                value=[n.meta["val"] for n in olds],
            )
            parts = [
                edit.emit(
                    operator.getitem, (together, i), fact=edit.facts[old], value=old.meta["val"]
                )
                for i, old in enumerate(olds)
            ]
        replaced += zip(olds, parts, strict=True)
    # last, since the node that everything is inserted before may be one of them
    for old, part in replaced:
        edit.replace(old, part)
    return edit.finish()


def _is_plain(node: fx.Node, parameters: set[str]) -> bool:
    source = node.args[0]
    if not isinstance(source, fx.Node) or source.name not in parameters:
        return False
    value, cast = source.meta["val"], node.meta["val"]
    return value.stride() == cast.stride() and value.device == cast.device and value.numel() > 0


def _joins_a_kernel(node: fx.Node) -> bool:
    """Whether a reader, seen through views, is a node that fusion takes."""
    pending, seen = [node], {node}
    while pending:
        for user in pending.pop().users:
            kind = ops.lookup(user.target).kind if user.op == "call_function" else "opaque"
            if kind in _FUSIBLE:
                return True
            if kind == "view" and user not in seen:
                seen.add(user)
                pending.append(user)
    return False
