"""Reductions whose dims torch's rules misread, with the dims as the rules understand them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

_DIM_AT = {
    torch.ops.aten.linalg_vector_norm.default: 2,
    torch.ops.aten.nansum.default: 1,
}
"""Position of `dim` in operators of which torch 2.11 plans another shape than eager returns.

The norm over a dim of size 1 that is counted from the end keeps the dim; a sum over no dims, which
is one over all, is left undone. What is planned is computed: gradients would be wrong, silently.
"""


def counted(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]] | None:
    """The same call with dims counted from the start, and none for all; None if it is that."""
    at = _DIM_AT.get(op)
    if at is None:
        return None
    given = args[at] if len(args) > at else kwargs.get("dim")
    if given is None:
        return None
    rank = max(args[0].dim(), 1)
    plain = [dim + rank if -rank <= dim < 0 else dim for dim in given]
    if plain and plain == list(given):
        return None
    if len(args) > at:
        return (*args[:at], plain or None, *args[at + 1 :]), kwargs
    return args, {**kwargs, "dim": plain or None}


def rules(stock: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Decompositions of these operators, theirs in `stock` or none, with the dims counted."""
    return {op: _rule(op, stock.get(op)) for op in _DIM_AT}


def _rule(op: Any, stock: Callable[..., Any] | None) -> Callable[..., Any]:
    @functools.wraps(stock or op)
    def decomposed(*args: Any, **kwargs: Any) -> Any:
        call = counted(op, args, kwargs)
        if stock is None and call is None:
            return NotImplemented
        given, named = call or (args, kwargs)
        return (stock or op)(*given, **named)

    return decomposed
