"""Reentrant checkpoints as eager runs them, for Dynamo to trace in their place.

Dynamo traces every checkpoint as one that is not reentrant. A reentrant one
(`torch.utils.checkpoint.CheckpointFunction`) is a custom Function around its stretch, and that
shows in the gradients:

- Only tensors that are arguments themselves make it differentiable. Where none of them requires a
  gradient, parameters within get none.
- If one output gets a gradient, the others get zeros: whatever only they depend on has a gradient
  of zeros, which weight decay and momentum tell from None.
- An output is a tensor, or an element of a tuple, whatever kind of tuple; tensors deeper within
  have no history.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint as stock

from trainfuse.capture.overlap import may_overlap_itself


class _Tied(torch.autograd.Function):
    """An identity of several tensors, whose backward has a gradient for each: zeros for none.

    Of copies, which later passes drop: views that a Function made can't be written in place. What
    overlaps itself can't be either way, and a copy would be dense.
    """

    @staticmethod
    def forward(ctx: Any, *values: Tensor) -> tuple[Tensor, ...]:
        return tuple(v.detach() if may_overlap_itself(v) else _copy(v) for v in values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


def _copy(value: Tensor) -> Tensor:
    """A copy laid out as the value, be there gaps between its elements."""
    copy = value.clone()
    if copy.stride() == value.stride():
        return copy
    return torch.empty_strided(
        value.shape, value.stride(), dtype=value.dtype, device=value.device
    ).copy_(value)


def checkpoint(
    function: Callable[..., Any], *args: Any, use_reentrant: bool | None = None, **options: Any
) -> Any:
    """What `torch.utils.checkpoint.checkpoint` returns where it is reentrant, for Dynamo to trace.

    options: `preserve_rng_state` and the like; eager refuses the stretch's own.
    """
    outputs = stock.checkpoint(function, *args, use_reentrant=False, **options)
    differentiable = any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
    if isinstance(outputs, Tensor):
        return outputs if differentiable else outputs.detach()
    if not isinstance(outputs, tuple):
        return _detached(outputs)
    if not differentiable:
        return tuple([_detached(v) for v in outputs])
    places = [i for i, value in enumerate(outputs) if _has_gradient(value)]
    results = [v if isinstance(v, Tensor) else _detached(v) for v in outputs]
    if len(places) > 1:
        tied = _Tied.apply(*[outputs[i] for i in places])
        for place, value in zip(places, tied, strict=True):
            results[place] = value
    return tuple(results)


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _detached(value: Any) -> Any:
    """The value without its tensors' history.

    Raises TypeError for a container of another kind than Python's own: eager then runs the call.
    """
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[_detached(v) for v in value])
    if type(value) in (tuple, list):
        return type(value)([_detached(v) for v in value])
    if type(value) is dict:
        return {key: _detached(v) for key, v in value.items()}
    if value is None or isinstance(value, int | float | str):
        return value
    raise TypeError(f"a reentrant checkpoint gives tensors in a {type(value).__name__}")
