"""Whether an update did what the user's optimizer does: torch's own step, on the same gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from autodiff.compare import TensorError, judge, luck

if TYPE_CHECKING:
    from trainfuse.runtime.foreach import UpdateCall

Tensors = dict[str, Tensor]
_PIECE = 1 << 22
"""Elements that are updated at a time: an update works element by element."""


def wrong_update(
    call: UpdateCall,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    old: Callable[[Tensor], Tensor],
    factor: float,
) -> tuple[int, TensorError] | None:
    """The first parameter (its position, and the worst tensor) that an update got wrong, or None.

    Called after the update ran, before the optimizer's visible step counters advance. old: what a
    tensor held before. Learning rate, betas and step count are read from the optimizer, as torch's
    own step would read them.
    """
    for bucket in call.buckets:
        written = [role for role in bucket.template.written if role != "step"]
        for position in bucket.positions:
            index = call.indices[position]
            now = {role: call.handle.tensor(index, role) for role in written}
            now["param"] = params[position]
            before = {role: old(call.handle.params[index] if role == "param" else now[role])
                      for role in written}  # fmt: skip
            step = call.handle.visible_step(index)
            for piece in _pieces(now, before, grads[position]):
                error = _worst(call, index, step, *piece, factor=factor)
                if error is not None:
                    return position, error
            if "step" in bucket.template.written:
                counted = float(call.handle.tensor(index, "step"))
                if step is not None and counted != step + 1:
                    return position, TensorError("step", 0, abs(counted - step - 1), 0.0, 2.0)
    return None


def _pieces(now: Tensors, before: Tensors, grad: Tensor) -> Iterator[tuple[Tensors, ...]]:
    """(new values, old values, gradient), flat and a piece at a time, on the parameter's device."""
    device = now["param"].device
    flat = {("now", role): t for role, t in now.items()}
    flat |= {("before", role): t for role, t in before.items()}
    flat["grad", "grad"] = grad
    parts = {key: t.detach().reshape(-1).split(_PIECE) for key, t in flat.items()}
    for i in range(len(parts["grad", "grad"])):
        piece = {key: part[i].to(device) for key, part in parts.items()}
        yield tuple(
            {role: t for (group, role), t in piece.items() if group == wanted}
            for wanted in ("now", "before", "grad")
        )


def _worst(
    call: UpdateCall,
    index: int,
    step: float | None,
    now: Tensors,
    before: Tensors,
    grad: Tensors,
    *,
    factor: float,
) -> TensorError | None:
    native, exact = (
        _by_torch(call, index, step, before, grad["grad"], dtype) for dtype in (None, torch.float64)
    )
    room = factor * luck(grad["grad"].numel())
    errors = [judge({r: now[r]}, {r: native[r]}, {r: exact[r]}, k=factor)[0] for r in now]
    # below the normal numbers a GPU may flush to zero
    tiny = torch.finfo(torch.float32).tiny
    wrong = [e for e in errors if not (e.ratio <= room or e.ours < tiny)]
    return max(wrong, key=lambda e: math.inf if math.isnan(e.ratio) else e.ratio, default=None)


def _by_torch(
    call: UpdateCall,
    index: int,
    step: float | None,
    before: Tensors,
    grad: Tensor,
    dtype: torch.dtype | None,
) -> Tensors:
    """One step of an optimizer of the user's class and options over one piece of one parameter."""
    optimizer, group = call.handle.optimizer, call.handle.group_of(index)
    param = nn.Parameter(before["param"].to(dtype=dtype or before["param"].dtype, copy=True))
    param.grad = grad.to(param.dtype)
    made = type(optimizer)([{**_plain(group), "params": [param]}])
    states: dict[str, Any] = {
        role: t.to(dtype=dtype or t.dtype, copy=True)
        for role, t in before.items()
        if role != "param"
    }
    if step is not None:
        states["step"] = torch.tensor(step)
    if states:
        made.state[param] = states
    made.step()
    return {"param": param.detach(), **{role: made.state[param][role] for role in states}}


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's options, for torch's single-tensor form on a host's counter."""
    return {**group, "foreach": False, "fused": False, "capturable": False}
