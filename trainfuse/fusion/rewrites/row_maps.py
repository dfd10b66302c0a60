"""Chains of views that rearrange or select rows and leave columns alone.

Shifted labels cut the last position's logits off, and the backward pads it with zeros. What such a
chain does to rows is found by running it on their numbers; the same chain then runs on what a GEMM
reads, so that only the rows that count are multiplied.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autodiff.ops import op_name
from trainfuse.capture.compat import real_tensors
from trainfuse.fusion.domains import argument
from trainfuse.fusion.rewrites.row_sums import fill_of

aten = torch.ops.aten
Apply = Callable[..., Any]
_SHAPED = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default})
_PAD = aten.slice_backward.default


def moved(node: fx.Node) -> fx.Node | None:
    """What a node moves rows of: its first operand, or what it writes into zeros."""
    if node.op != "call_function" or not node.args:
        return None
    source = node.args[0]
    if node.target is aten.slice_scatter.default:
        zeros = isinstance(source, fx.Node) and fill_of(source) == 0
        source = node.args[1] if zeros else None
    return source if isinstance(source, fx.Node) else None


def keeps_columns(node: fx.Node) -> bool:
    """Whether a node moves or selects rows, or pads them with zeros, and only that."""
    source = moved(node)
    if source is None:
        return False
    before, after = source.meta["val"], node.meta.get("val")
    if not isinstance(after, Tensor) or before.dim() == 0 or after.dim() == 0:
        return False
    rank, width = before.dim(), before.shape[-1]
    if after.shape[-1] != width or after.dtype != before.dtype:
        return False
    match node.target:
        case target if target in _SHAPED or target is aten.clone.default:
            return True
        case aten.slice_scatter.default:
            return argument(node, "dim") % rank < rank - 1
        case aten.slice.Tensor | aten.slice_backward.default | aten.unsqueeze.default:
            dim = argument(node, "dim")
            return dim % (rank + (node.target is aten.unsqueeze.default)) < after.dim() - 1
        case aten.permute.default:
            return argument(node, "dims")[-1] % rank == rank - 1
        case aten.transpose.int:
            return rank - 1 not in (argument(node, "dim0") % rank, argument(node, "dim1") % rank)
        case aten.squeeze.dim:
            return argument(node, "dim") % rank < rank - 1
        case _:
            return False


def run_chain(chain: Sequence[fx.Node], value: Any, width: int, call: Apply) -> Any:
    """Apply a chain of such nodes to another value of `width` columns.

    value: as the chain's first operand, but for the last dimension. call: what executes
    (target, value, *rest), on tensors or into a graph.
    """
    for node in chain:
        rest = list(node.args[1:])
        if node.target in _SHAPED:
            value = call(aten.reshape.default, value, [*node.meta["val"].shape[:-1], width])
        elif node.target is aten.slice_backward.default:
            sizes, *where = rest
            value = call(node.target, value, [*sizes[:-1], width], *where)  # type: ignore[misc]
        elif node.target is aten.slice_scatter.default:
            shape = [*node.meta["val"].shape[:-1], width]
            start, end = argument(node, "start") or 0, argument(node, "end")
            where = (start, sys.maxsize if end is None else end, argument(node, "step"))
            value = call(_PAD, value, shape, argument(node, "dim"), *where)
        elif node.target is not aten.clone.default:
            value = call(node.target, value, *rest, **node.kwargs)
    return value


def rows_of(chain: Sequence[fx.Node], count: int) -> Tensor:
    """Numbers of the rows that a chain leaves of `count`, in order."""
    with real_tensors():
        numbers = torch.arange(count, device="cpu").view(count, 1)
        return run_chain(chain, numbers, 1, _execute).reshape(-1)


def places_of(chain: Sequence[fx.Node], shape: Sequence[int]) -> Tensor:
    """For each row that a chain makes, 1 + the number of the row that it shows, 0 for zeros.

    shape: of the chain's first operand, less its columns.
    """
    count = 1
    for size in shape:
        count *= size
    with real_tensors():
        numbers = torch.arange(1, count + 1, device="cpu").view(*shape, 1)
        return run_chain(chain, numbers, 1, _execute).reshape(-1)


def _execute(target: Any, value: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
    return target(value, *rest, **kwargs)


def equal(first: Tensor, second: Tensor) -> bool:
    """Whether two chains leave the same rows in the same order."""
    with real_tensors():
        return torch.equal(first, second)


def is_adjoint(selected: Tensor, places: Tensor, count: int) -> bool:
    """Whether `places` puts each of the selected rows back where it was taken, once.

    count: rows that they were selected from.
    """
    if places.numel() != count:
        return False
    with real_tensors():
        wanted = torch.zeros(count, dtype=torch.int64, device="cpu")
        wanted[selected] = torch.arange(1, selected.numel() + 1, device="cpu")
        return torch.equal(wanted, places)


def chain_to(node: fx.Node, root: fx.Node) -> list[fx.Node] | None:
    """The nodes from root (not included) to node, each moving rows only; None if some doesn't."""
    chain: list[fx.Node] = []
    while node is not root:
        if not keeps_columns(node):
            return None
        chain.append(node)
        node = moved(node)  # type: ignore[assignment]  # what a node that keeps columns reads
    return chain[::-1]


def describe(chain: Sequence[fx.Node]) -> str:
    """Operators of a chain, for a refusal."""
    return ", ".join(name for name, _ in itertools.groupby(op_name(n.target) for n in chain))
