"""Softmaxes whose result only the backward needs in memory: it has them again from what is there.

Such a softmax, one behind a dropout, would be written for the backward alone. In pieces, the cut
sees that the scores, which are in memory anyway, and two numbers a row give it again in registers:
as many bytes are read, and none are written. Where the forward writes a softmax for other readers,
reading that is less arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from .derive import decompose
from .formulas import softmax_backward
from .graph import TrainingGraph
from .reads import readers_of, takes_registers
from .widening import is_empty, widened

aten = torch.ops.aten


def save_less_of_softmaxes(tg: TrainingGraph) -> TrainingGraph:
    """The same graph with such softmaxes and their backwards in pieces."""
    forward = {node for node in tg.nodes("forward") if _passes(tg, node)}
    backward = {reader for node in forward for reader in readers_of(node) if _is_backward(reader)}
    table = {
        aten._softmax.default: _softmax,
        aten._softmax_backward_data.default: softmax_backward,
    }
    return decompose(tg, table, only=forward | backward)


def _passes(tg: TrainingGraph, node: fx.Node) -> bool:
    """Whether a node is a softmax that the forward reads in registers, and its backward alone."""
    if node.target is not aten._softmax.default or node in tg.output_nodes:
        return False
    readers = readers_of(node)
    early = [reader for reader in readers if tg.phase(reader) == "forward"]
    late = [reader for reader in readers if tg.phase(reader) != "forward"]
    in_registers = bool(early) and all(map(takes_registers, early))
    return in_registers and len(late) == 1 and _is_backward(late[0])


def _is_backward(node: fx.Node) -> bool:
    return node.target is aten._softmax_backward_data.default


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Any:
    """aten._softmax, with one quotient a row: both phases multiply by it."""
    if x.dim() == 0 or is_empty(x):
        return NotImplemented
    work, dim = widened(x), dim % x.dim()
    exponential = torch.exp(work - torch.amax(work, [dim], True))
    result = exponential * torch.reciprocal(torch.sum(exponential, [dim], True))
    return result if half_to_float else result.to(x.dtype)
