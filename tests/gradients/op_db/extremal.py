"""Calls on infinities, NaN and zeros of both signs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import torch

from tests.gradients.op_db.calls import Call

_ODD = (0.0, -0.0, 1.0, -1.0, 0.5, -2.5, float("inf"), -float("inf"), float("nan"))
VALUES = (*_ODD, 3.0, -3.0, 6.0, -0.5, 0.25, 2.0, -1.5)
"""Sixteen: ATen's vectors hold them without a rest, which it treats differently at NaN."""
_GIVEN: dict[str, Callable[[float], bool]] = {
    # Their mean of values with an infinity is NaN for torch, but not if it comes last, or where
    # lanes of a GPU are merged: Welford's method. Ours is infinite.
    "std_mean": lambda value: not math.isinf(value),
    "var_mean": lambda value: not math.isinf(value),
    # Its derivative on a CPU reads beyond its memory, which ends the process.
    "nn.functional.grid_sample": math.isfinite,
    # LAPACK refuses such matrices, and its gelsy begins with pivots that torch leaves as memory
    # held them: a column of zeros in front then decides the rank.
    "linalg.lstsq": lambda value: math.isfinite(value) and value != 0,
}
"""Which values are given to operators that have no answer of eager's to others, and why."""


def extremal(call: Call, pointwise: bool) -> Call:
    """The call with such values in its differentiable leaves.

    pointwise: where up to two leaves have one shape, every pair of values meets. Else every third
    element is replaced, other ones in each leaf.
    """
    places = [i for i, leaf in enumerate(call.leaves) if leaf.requires_grad]
    shapes = {call.leaves[i].shape for i in places}
    leaves = list(call.leaves)
    if pointwise and len(places) == len(leaves) <= 2 and len(shapes) == 1:
        grid = zip(*itertools.product(VALUES, repeat=max(len(places), 2)), strict=True)
        for place, column in zip(places, grid, strict=False):
            old = leaves[place]
            leaves[place] = torch.tensor(column, dtype=old.dtype, device=old.device)
    else:
        for shift, place in enumerate(places):
            leaves[place] = _sprinkled(leaves[place], shift, _odd(call))
    for leaf, old in zip(leaves, call.leaves, strict=True):
        leaf.requires_grad_(old.requires_grad)
    return replace(call, leaves=tuple(leaves))


def _odd(call: Call) -> tuple[float, ...]:
    chosen = [may for name, may in _GIVEN.items() if f"{call.name}.".startswith(f"{name}.")]
    return tuple(value for value in _ODD if all(may(value) for may in chosen))


def _sprinkled(leaf: torch.Tensor, shift: int, odd: tuple[float, ...]) -> torch.Tensor:
    if leaf.layout is not torch.strided or leaf.numel() < 3:
        return leaf.detach().clone()
    values = torch.tensor(odd, dtype=leaf.dtype, device=leaf.device)
    flat = leaf.detach().clone(memory_format=torch.contiguous_format).view(-1)
    chosen = torch.arange(shift % 3, flat.numel(), 3, device=leaf.device)
    flat[chosen] = values[(torch.arange(len(chosen), device=leaf.device) + shift) % len(values)]
    return flat.view(leaf.shape)
