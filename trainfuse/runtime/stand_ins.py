"""Values that stand in for a group's real ones while its kernels are timed.

What a kernel reads at computed places decides how long it takes, and an index out of range stops
the program. So indices that a group reads are spread over what they index, keys are sorted where a
sum by key wants that, and those that a group computes are looked at before any kernel runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, fx

from autodiff.ops import op_name
from autodiff.reference import run_nodes
from trainfuse.fusion import indirect
from trainfuse.fusion.arguments import argument
from trainfuse.fusion.plan import FusionGroup
from trainfuse.fusion.segment_ops import SEGMENT_SUM, key_bias

_STRIDE = 7919
"""Neighbouring indices are that far apart: a prime, so that they don't share a table's lines."""


def stand_in(node: fx.Node, random: torch.Generator) -> Tensor:
    """A tensor like a node's value, with its strides: noise, zeros for integers, true masks."""
    value: Tensor = node.meta["val"]
    size = value.untyped_storage().nbytes() // value.dtype.itemsize
    flat = torch.zeros(size, dtype=value.dtype, device=value.device)
    if value.dtype.is_floating_point:
        flat.normal_(generator=random)
    elif value.dtype == torch.bool:
        flat.fill_(True)
    return flat.as_strided(value.shape, value.stride(), value.storage_offset())


def stand_ins(group: FusionGroup, random: torch.Generator) -> list[Tensor] | None:
    """A value for each input of a group, or None when an index might be out of range with them.

    Runs on the device that the group's values are on; needs real tensors, not fake ones.
    """
    values = {node: stand_in(node, random) for node in group.inputs}
    picks = list(_picks(group))
    sums = [node for node in group.nodes if op_name(node.target) == SEGMENT_SUM]
    for index, size, _ in picks:
        if index in values and size > 0:
            limit = min(s for other, s, _ in picks if other is index)
            _spread(values[index], limit)
    for node in sums:
        _sorted_keys(values, node, random)
    known = _computed(group, values, [index for index, _, _ in picks])
    inside = (_inside(known[index], size, wraps=wraps) for index, size, wraps in picks)
    return [values[node] for node in group.inputs] if all(inside) else None


def _picks(group: FusionGroup) -> Iterator[tuple[fx.Node, int, bool]]:
    """Each index tensor, the size of the dim that it indexes, and whether negative ones count."""
    for node in group.nodes:
        if node.target not in indirect.TARGETS:
            continue
        found = indirect.parse(node)
        assert not isinstance(found, str), found
        for dim, place in found.places.items():
            if place.index is not None:
                size = found.source.meta["val"].shape[dim]
                yield place.index, size, place.kind == "wrapping pick"


def _spread(index: Tensor, size: int) -> None:
    places = torch.arange(index.numel(), device=index.device) * _STRIDE % size
    if all(stride > 0 for stride in index.stride()):
        index.copy_(places.view(index.shape))


def _sorted_keys(values: dict[fx.Node, Tensor], node: fx.Node, random: torch.Generator) -> None:
    """Keys as many as each other; rows of the source from all over it."""
    keys, order = values[argument(node, "keys")], argument(node, "order")
    count, rows = keys.numel(), node.meta["val"].shape[0]
    spread = torch.arange(count, device=keys.device) * rows // max(count, 1)
    places = torch.randperm(count, generator=random, device=keys.device)
    if order is None:
        spread = spread[places]
    else:
        values[order].copy_(places)
    keys.copy_(spread - key_bias(keys.dtype))


def _computed(
    group: FusionGroup, values: Mapping[fx.Node, Tensor], wanted: list[fx.Node]
) -> dict[fx.Node, Tensor]:
    """Values of index tensors, by ATen."""
    needed = set(wanted)
    for node in reversed(group.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    return run_nodes([node for node in group.nodes if node in needed], values)


def _inside(index: Tensor, size: int, *, wraps: bool) -> bool:
    if index.numel() == 0:
        return True
    least, most = (int(bound) for bound in index.aminmax())
    return (-size if wraps else 0) <= least and most < size
