"""Pooling keeps little for its backward: the place in a window, and nothing for a shape alone.

ATen's backward of max pooling asks for the place of each maximum in its plane, as int64. Less the
start of the window, which its position says, that place is a small number: one byte, mostly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from . import ops
from .graph import NodeFacts, TrainingGraph
from .rewrite import GraphEdit

aten = torch.ops.aten

SHAPE_ALONE = frozenset(
    {
        "aten.max_pool2d_with_indices_backward.default",
        "aten.max_pool3d_with_indices_backward.default",
        "aten.adaptive_max_pool2d_backward.default",
        "aten.adaptive_max_pool3d_backward.default",
        "aten.avg_pool2d_backward.default",
        "aten.avg_pool3d_backward.default",
        "aten._adaptive_avg_pool2d_backward.default",
        "aten._adaptive_avg_pool3d_backward.default",
        "aten.reflection_pad1d_backward.default",
        "aten.reflection_pad2d_backward.default",
        "aten.reflection_pad3d_backward.default",
        "aten.replication_pad1d_backward.default",
        "aten.replication_pad2d_backward.default",
        "aten.replication_pad3d_backward.default",
    }
)
"""Operators that look only at the shape, type and memory format of their second operand."""

_TYPES = ((torch.uint8, 1 << 8), (torch.int16, 1 << 15), (torch.int32, 1 << 31))


def save_less_of_pools(tg: TrainingGraph) -> TrainingGraph:
    """Let the backward of pooling read small offsets, and memory that nobody has written.

    A later phase's operand is replaced; its dtype, shape and strides stay what they were.
    """
    nodes = [node for node in tg.nodes() if ops.op_name(node.target) in SHAPE_ALONE]
    if not nodes:
        return tg
    edit = GraphEdit(tg)
    for old in nodes:
        node = edit.mapping[old]
        if node.target is aten.max_pool2d_with_indices_backward.default:
            _by_offset(edit, node)
        operand: Any = node.args[1]
        if edit.tg.phase(operand) != edit.facts[node].phase:
            _unread(edit, node, operand)
    edit.eliminate_dead()
    return edit.finish()


def _unread(edit: GraphEdit, node: fx.Node, operand: fx.Node) -> None:
    value = operand.meta["val"]
    if any(not isinstance(number, int) for number in (*value.shape, *value.stride())):
        return
    with edit.graph.inserting_before(node):
        blank = edit.emit(
            aten.empty_strided.default,
            (list(value.shape), list(value.stride())),
            {"dtype": value.dtype, "device": value.device},
            fact=edit.facts[node],
        )
    node.update_arg(1, blank)


def _by_offset(edit: GraphEdit, node: fx.Node) -> None:
    """Replace the places that a backward reads by offsets, and turn those back just before it."""
    places = node.args[-1]
    assert isinstance(places, fx.Node)
    if places not in edit.facts or edit.facts[places].phase == edit.facts[node].phase:
        return
    grid = _grid(node)
    if grid is None:
        return
    ranges, dtype = grid
    made, read = edit.facts[places], edit.facts[node]
    with edit.graph.inserting_after(places):
        anchor = edit.graph.call_function(aten.alias.default, (places,))
    with edit.graph.inserting_before(anchor):
        start = _starts(edit, places, ranges, made)
        offset = edit.emit(aten.sub.Tensor, (places, start), fact=made)
        small = edit.emit(aten._to_copy.default, (offset,), {"dtype": dtype}, fact=made)
    edit.graph.erase_node(anchor)
    with edit.graph.inserting_before(node):
        start = _starts(edit, places, ranges, read)
        wide = edit.emit(aten._to_copy.default, (small,), {"dtype": torch.int64}, fact=read)
        again = edit.emit(aten.add.Tensor, (wide, start), fact=read)
    node.update_arg(len(node.args) - 1, again)


def _starts(edit: GraphEdit, places: fx.Node, ranges: Any, fact: NodeFacts) -> fx.Node:
    """Where each window starts in its plane: int64 [rows, columns]."""
    options = {"dtype": torch.int64, "device": places.meta["val"].device}
    rows, columns = (
        edit.emit(aten.arange.start_step, bounds, options, fact=fact) for bounds in ranges
    )
    rows = edit.emit(aten.unsqueeze.default, (rows, 1), fact=fact)
    return edit.emit(aten.add.Tensor, (rows, columns), fact=fact)


def _grid(node: fx.Node) -> Any:
    """Where windows start, as two ranges to be added up, and the smallest type of an offset.

    None where a size is symbolic. An offset is (row * dilation) * width + column * dilation.
    """
    kernel, stride, padding, dilation = (_pair(argument) for argument in node.args[2:6])
    stride = stride or kernel
    width = node.args[1].meta["val"].shape[-1]
    counts = node.args[-1].meta["val"].shape[-2:]
    numbers = (*kernel, *stride, *padding, *dilation, width, *counts)
    if any(not isinstance(number, int) for number in numbers):
        return None
    largest = (kernel[0] - 1) * dilation[0] * width + (kernel[1] - 1) * dilation[1]
    ranges = []
    for axis, size in enumerate((width, 1)):
        first, step = -padding[axis] * size, stride[axis] * size
        ranges.append((first, first + step * counts[axis], step))
    return ranges, next(dtype for dtype, limit in _TYPES if largest < limit)


def _pair(argument: Any) -> tuple[Any, ...]:
    """[n] or [n, m] as two numbers; [] stays empty."""
    values = (argument,) if isinstance(argument, int) else tuple(argument)
    return values * 2 if len(values) == 1 else values
