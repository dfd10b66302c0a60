"""Whether an update did what the user's optimizer does: torch's own step, on the same gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from autodiff.compare import TensorError, excess, luck
from autodiff.norms import figures_of_parts, measure_parts, norms_of_parts
from trainfuse.runtime.room import SHARE, free_bytes

if TYPE_CHECKING:
    from trainfuse.runtime.foreach import UpdateCall

Tensors = dict[str, Tensor]
Squares = dict[tuple[int, str], list[float]]
"""By parameter and role: the sums of squares of the exact values, of torch's error and of ours."""
_LEAST, _LARGEST = 1 << 14, 1 << 25
"""Elements that are updated at a time: an update works element by element."""
_BYTES_PER_ELEMENT = 128
"""What a reference takes at most: parameter, gradient and state of both precisions, and what is
computed with them."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of one parameter, flat: its position, and the values after and before the update."""

    position: int
    now: Tensors
    before: Tensors
    grad: Tensor

    def cut(self, part: Callable[[Tensor], Tensor]) -> _Piece:
        """A part of it: the same of each tensor."""
        now, before = ({r: part(t) for r, t in v.items()} for v in (self.now, self.before))
        return _Piece(self.position, now, before, part(self.grad))


@dataclass(frozen=True, slots=True)
class _Measured:
    """A batch whose figures the device is about to have; step: its count before the update."""

    batch: Sequence[_Piece]
    step: float | None
    lengths: Sequence[int]
    norms: Tensor


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one update. wrong: the first wrong parameter's position and worst tensor, or None.

    finite: everything that the update wrote was seen to be.
    """

    wrong: tuple[int, TensorError] | None
    finite: bool


@torch.no_grad()
def check_update(
    call: UpdateCall,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    old: Callable[[Tensor], Tensor],
    factor: float,
) -> Verdict:
    """Compare what an update wrote with torch's own step.

    Called after the update ran, before the optimizer's visible step counters advance. old: what a
    tensor held before. Learning rate, betas and step count are read from the optimizer, as torch's
    own step would read them.
    """
    handle, finite = call.handle, True
    for bucket in call.buckets:
        device = params[bucket.positions[0]].device
        counts = handle.visible_steps([call.indices[p] for p in bucket.positions])
        steps = dict(zip(bucket.positions, counts, strict=True))
        if "step" in bucket.template.written:
            counted = handle.step_vector(device).tolist()
            for position, step in steps.items():
                now = counted[call.indices[position]]
                if step is not None and now != step + 1:
                    error = TensorError("step", 0, abs(now - step - 1), 0.0, 2.0)
                    return Verdict((position, error), finite=False)
        written = [role for role in bucket.template.written if role != "step"]
        measured: list[_Measured] = []
        for step in dict.fromkeys(steps.values()):
            alike = [p for p in bucket.positions if steps[p] == step]
            values = (_values(call, p, written, params[p], grads[p], old) for p in alike)
            batches = _batches(values, _elements(device))
            measured += [_measure(call, step, batch) for batch in batches]
        squares, known = _squares(call, measured)
        dtypes = {p: params[p].dtype for p in bucket.positions}
        wrong = _worst(squares, dtypes, {p: params[p].numel() for p in bucket.positions}, factor)
        if wrong is not None:
            return Verdict(wrong, finite=False)
        finite = finite and known
    return Verdict(None, finite)


def _elements(device: torch.device) -> int:
    """How many elements have room for their reference."""
    free = free_bytes(device)
    room = _LARGEST if free is None else int(SHARE * free) // _BYTES_PER_ELEMENT
    return max(min(room, _LARGEST), _LEAST)


def _values(
    call: UpdateCall,
    position: int,
    written: Sequence[str],
    param: Tensor,
    grad: Tensor,
    old: Callable[[Tensor], Tensor],
) -> _Piece:
    index, handle = call.indices[position], call.handle
    now = {role: handle.tensor(index, role) for role in written}
    now["param"] = param
    before = {r: old(handle.params[index] if r == "param" else now[r]) for r in written}
    return _Piece(position, now, before, grad)


def _batches(pieces: Iterable[_Piece], size: int) -> Iterator[list[_Piece]]:
    """Pieces of at most `size` elements together: large parameters cut, small ones in company."""
    batch: list[_Piece] = []
    left = size
    for whole in pieces:
        rest = whole.cut(lambda t: t.reshape(-1))
        while (count := rest.grad.numel()) > left:
            if left:
                batch.append(rest.cut(lambda t: t[:left]))  # noqa: B023  # called at once
            yield batch
            rest = rest.cut(lambda t: t[left:])  # noqa: B023
            batch, left = [], size
        if count:
            batch.append(rest)
            left -= count
    if batch:
        yield batch


def _measure(call: UpdateCall, step: float | None, batch: Sequence[_Piece]) -> _Measured:
    """Update a batch by torch, in its own precision and in fp64; waits for nothing."""
    lengths = [piece.grad.numel() for piece in batch]
    return _Measured(batch, step, lengths, norms_of_parts(_flat(call, step, batch), lengths))


def _flat(
    call: UpdateCall, step: float | None, batch: Sequence[_Piece]
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of each role the batch end to end: as the update left it, by torch, and in fp64."""
    index = call.indices[batch[0].position]
    device = batch[0].now["param"].device
    roles = list(batch[0].now)
    before = {r: _joined([piece.before[r] for piece in batch], device) for r in roles}
    grads = [piece.grad for piece in batch]
    wide = {r: _joined([p.before[r] for p in batch], device, torch.float64) for r in roles}
    exact = _by_torch(call, index, step, wide, _joined(grads, device, torch.float64), fused=True)
    native = _by_torch(call, index, step, before, _joined(grads, device), fused=False)
    return [(_joined([p.now[r] for p in batch], device), native[r], exact[r]) for r in roles]


def _joined(
    parts: Sequence[Tensor], device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """Flat tensors end to end, in memory of their own; in one launch."""
    lengths = [part.numel() for part in parts]
    flat = torch.empty(sum(lengths), dtype=dtype or parts[0].dtype, device=device)
    torch._foreach_copy_([*flat.split(lengths)], list(parts))
    return flat


def _squares(call: UpdateCall, measured: Sequence[_Measured]) -> tuple[Squares, bool]:
    """What all batches make up of each tensor's size and errors, and whether all is finite.

    Waits for the device once.
    """
    squares: Squares = {}
    if not measured:
        return squares, True
    norms = torch.cat([found.norms.flatten() for found in measured]).cpu()
    parts = norms.split([found.norms.numel() for found in measured])
    for found, own in zip(measured, parts, strict=True):
        if own.isfinite().all():
            by_role = figures_of_parts(own.view(found.norms.shape).tolist(), found.lengths)
        else:
            by_role = measure_parts(_flat(call, found.step, found.batch), found.lengths)
        for role, figures in zip(found.batch[0].now, by_role, strict=True):
            for piece, count, figure in zip(found.batch, found.lengths, figures, strict=True):
                sums = squares.setdefault((piece.position, role), [0.0, 0.0, 0.0])
                squares[piece.position, role] = [
                    total + count * f * f for total, f in zip(sums, figure, strict=True)
                ]
    # a norm is finite where every element is
    return squares, bool(norms.isfinite().all())


def _worst(
    squares: Squares,
    dtypes: Mapping[int, torch.dtype],
    counts: Mapping[int, int],
    factor: float,
) -> tuple[int, TensorError] | None:
    """The first parameter that is wrong, by its worst tensor."""
    found: dict[int, list[TensorError]] = {}
    # below the normal numbers a GPU may flush to zero
    tiny = torch.finfo(torch.float32).tiny
    for (position, role), sums in squares.items():
        count = counts[position]
        size, own, error = (math.sqrt(total / count) for total in sums)
        ratio = excess(error, own, dtypes[position], size, size, factor)
        if not (ratio <= factor * luck(count) or error < tiny):
            found.setdefault(position, []).append(TensorError(role, 0, error, own, ratio))
    for position, errors in found.items():
        return position, max(errors, key=lambda e: math.inf if math.isnan(e.ratio) else e.ratio)
    return None


def _by_torch(
    call: UpdateCall,
    index: int,
    step: float | None,
    before: Tensors,
    grad: Tensor,
    *,
    fused: bool,
) -> Tensors:
    """One step of an optimizer of the user's class and options over flat pieces of parameters.

    before: is written, and returned. fused: by torch's one kernel, which rounds once, in place of
    its single operators, which round as often as the user's do.
    """
    optimizer, group = call.handle.optimizer, call.handle.group_of(index)
    param = nn.Parameter(before["param"])
    param.grad = grad.to(param.dtype)
    options = {**group, "foreach": False, "fused": fused, "capturable": False}
    made = type(optimizer)([{**options, "params": [param]}])
    states: dict[str, Any] = {role: t for role, t in before.items() if role != "param"}
    if step is not None:  # one kernel reads the count where it runs
        states["step"] = torch.full((), step, device=param.device if fused else "cpu")
    if states:
        made.state[param] = states
    made.step()
    return {"param": param.detach(), **{role: made.state[param][role] for role in states}}
