"""Operations that are worth a kernel of their own: those for which ATen's is far from the roof.

One operation is one kernel in ATen, too, and mostly as fast as memory is. Three kinds are not:
elementwise ones whose operands lie otherwise than the result (a row added to a matrix, a permuted
copy; on an H200 40% of the copy's speed), sums over leading dims (6 to 76%), and selections of rows
(87%; half of that where a row is no multiple of 16 bytes).
"""

from __future__ import annotations

import torch
from torch import fx

from autodiff import ops
from trainfuse.fusion.arguments import argument
from trainfuse.fusion.indirect import Lookup, parse

MIN_ELEMENTS = 1 << 10
"""Fewer are a launch, whoever makes it."""
_SUMS = frozenset(
    {"aten.sum.dim_IntList", "aten.mean.dim", "aten.amax.default", "aten.amin.default"}
)
_ROWS = frozenset({"aten.embedding.default", "aten.index_select.default", "aten.index.Tensor"})


def outruns_aten(node: fx.Node) -> bool:
    """Whether our kernel of this operation alone is clearly faster than ATen's."""
    result = node.meta.get("val")
    if not isinstance(result, torch.Tensor) or node.op != "call_function":
        return False
    operands = [n.meta.get("val") for n in node.all_input_nodes]
    if not operands or not all(isinstance(value, torch.Tensor) for value in operands):
        return False
    every = [result, *operands]
    if not all(type(size) is int for value in every for size in (*value.shape, *value.stride())):
        return False
    if max(value.numel() for value in every) < MIN_ELEMENTS:
        return False
    if ops.op_name(node.target) in _SUMS:
        return result.numel() > 1 and not _sums_neighbours(node, operands[0])
    if ops.op_name(node.target) in _ROWS:
        found = parse(node)
        return isinstance(found, Lookup) and found.walk[-1] is not None
    return ops.lookup(node.target).kind == "pointwise" and any(
        value.dim() > 0 and value.numel() > 1 and not _lies_like(value, result)
        for value in operands
    )


def _lies_like(value: torch.Tensor, result: torch.Tensor) -> bool:
    """Whether neighbours in the result are neighbours in the operand, all along."""
    strides = [0] * (result.dim() - value.dim()) + [
        0 if size == 1 else stride for size, stride in zip(value.shape, value.stride(), strict=True)
    ]
    pairs = zip(result.shape, result.stride(), strides, strict=True)
    return all(size == 1 or theirs == ours for size, theirs, ours in pairs)


def _sums_neighbours(node: fx.Node, value: torch.Tensor) -> bool:
    """Whether the dim whose elements are neighbours in memory is summed over."""
    dims = argument(node, "dim")
    if not value.dim():
        return True  # a scalar has a dim 0 to sum over
    reduced = {dim % value.dim() for dim in ([dims] if isinstance(dims, int) else dims or ())}
    steps = [(stride, dim) for dim, stride in enumerate(value.stride()) if value.shape[dim] > 1]
    return not reduced or not steps or min(steps)[1] in reduced
