"""Whether an update did what the user's optimizer does: torch's own step, on the same gradients."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from autodiff.compare import TensorError, excess, luck
from autodiff.norms import Numbers, figures_of_parts, measure_parts, norms_of_parts
from trainfuse.runtime.room import SHARE, free_bytes

if TYPE_CHECKING:
    from trainfuse.runtime.foreach import BucketCall, UpdateCall

Tensors = dict[str, Tensor]
Item = tuple[Tensor, ...]
_Sides = Callable[["UpdateCall", float | None, Sequence["_Piece"]], list[Item]]
Squares = dict[tuple[int, str], list[float]]
"""By parameter and role: sums of squares of what an item's last tensor holds, then of the errors
that the others have beside it, the last of them first."""
_LEAST, _LARGEST = 1 << 14, 1 << 25
"""Elements that are updated at a time: an update works element by element."""
_OWN_STEPS = 2
"""Ways of torch's to step in a parameter's own precision: its one kernel, and single operators."""
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
    """A batch whose figures are on their way. sides: of each role, what is compared."""

    batch: Sequence[_Piece]
    sides: Callable[[], list[Item]]
    lengths: Sequence[int]
    shape: torch.Size
    norms: Numbers


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one update. wrong: the first wrong parameter's position and worst tensor, or None.

    finite: everything that the update wrote was seen to be.
    """

    wrong: tuple[int, TensorError] | None
    finite: bool


class UpdateCheck:
    """Compares what an update wrote with torch's own step: launched when it is made.

    What is as near to torch's step as rounding one number leaves it is right: an error is at most
    torch's own and the distance to it. Only for the rest is torch's own error asked for, in fp64.

    Made after the update ran, before the optimizer's visible step counters advance. old: what a
    tensor held before. Learning rate, betas and step count are read from the optimizer, as torch's
    own step would read them.
    """

    @torch.no_grad()
    def __init__(
        self,
        call: UpdateCall,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        old: Callable[[Tensor], Tensor],
        factor: float,
    ) -> None:
        self._factor = factor
        self._buckets = [
            _BucketCheck(bucket, {p: (params[p], grads[p]) for p in bucket.positions}, old)
            for bucket in call.buckets
        ]

    @torch.no_grad()
    def verdict(self) -> Verdict:
        """What was found; waits for the device."""
        finite = True
        for bucket in self._buckets:
            wrong = bucket.wrong(self._factor)
            if wrong is not None:
                return Verdict(wrong, finite=False)
            finite = finite and bucket.finite
        return Verdict(None, finite)


class _BucketCheck:
    """The same, of the parameters that one template updates. finite: known once it was read."""

    def __init__(
        self,
        bucket: BucketCall,
        tensors: Mapping[int, tuple[Tensor, Tensor]],
        old: Callable[[Tensor], Tensor],
    ) -> None:
        """tensors: parameters and their gradients, by position."""
        self._bucket, call, written = bucket, bucket.call, bucket.template.written
        self._call, self._params = call, {p: param for p, (param, _) in tensors.items()}
        counts = call.handle.visible_steps([call.indices[p] for p in tensors])
        self._steps = dict(zip(tensors, counts, strict=True))
        self._counted: Numbers | None = None
        if "step" in written:
            device = next(iter(self._params.values())).device
            self._counted = Numbers(call.handle.step_vector(device))
        roles = [role for role in written if role != "step"]
        self._values = {p: _values(call, p, roles, *both, old) for p, both in tensors.items()}
        # where most are far, each comparison would be the second one
        sides = (_beside_torch, _beside_operators, _beside_fp64)
        self._first = self._launched(self._values, sides[bucket.far])
        self.finite = False

    def wrong(self, factor: float) -> tuple[int, TensorError] | None:
        """The first wrong parameter's position and worst tensor, or None."""
        if self._counted is not None:
            counted = self._counted.read().tolist()
            for position, step in self._steps.items():
                now = counted[self._call.indices[position]]
                if step is not None and now != step + 1:
                    return position, TensorError("step", 0, abs(now - step - 1), 0.0, 2.0)
        in_fp64 = self._bucket.far == _OWN_STEPS
        squares, self.finite = _squares(self._first, looked_at=in_fp64)
        if not in_fp64:
            beyond = _beyond(squares, self._params, factor, _distance)
            if not beyond:
                return None
            self._bucket.far += 2 * len(beyond) > len(self._params)
            far = {p: self._values[p] for p, _ in beyond}
            squares, _ = _squares(self._launched(far, _beside_fp64), looked_at=True)
        return next(iter(_beyond(squares, self._params, factor, _error)), None)

    def _launched(self, values: Mapping[int, _Piece], sides: _Sides) -> list[_Measured]:
        """What compares some parameters: those of one count of steps in company."""
        alike: dict[float | None, list[_Piece]] = {}
        for position, piece in values.items():
            alike.setdefault(self._steps[position], []).append(piece)
        measured: list[_Measured] = []
        for step, pieces in alike.items():
            for batch in _batches(pieces, _elements(pieces[0].grad.device)):
                compared = functools.partial(sides, self._call, step, batch)
                lengths = [piece.grad.numel() for piece in batch]
                norms = norms_of_parts(compared(), lengths)
                found = Numbers(norms.flatten())
                measured.append(_Measured(batch, compared, lengths, norms.shape, found))
        return measured


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


def _beside_torch(call: UpdateCall, step: float | None, batch: Sequence[_Piece]) -> list[Item]:
    """Of each role the batch end to end: as the update left it, and by torch's own step."""
    return _beside(batch, _stepped(call, step, batch, None))


def _beside_operators(call: UpdateCall, step: float | None, batch: Sequence[_Piece]) -> list[Item]:
    """The same by torch's single operators: on a GPU its one kernel may round more than they do."""
    return _beside(batch, _stepped(call, step, batch, None, fused=False))


def _beside(batch: Sequence[_Piece], native: Tensors) -> list[Item]:
    device = batch[0].now["param"].device
    return [(_joined([p.now[r] for p in batch], device), native[r]) for r in batch[0].now]


def _beside_fp64(call: UpdateCall, step: float | None, batch: Sequence[_Piece]) -> list[Item]:
    """The same, and by torch in fp64."""
    exact = _stepped(call, step, batch, torch.float64)
    beside = zip(batch[0].now, _beside_torch(call, step, batch), strict=True)
    return [(*sides, exact[role]) for role, sides in beside]


def _stepped(
    call: UpdateCall,
    step: float | None,
    batch: Sequence[_Piece],
    dtype: torch.dtype | None,
    *,
    fused: bool = True,
) -> Tensors:
    """What torch's own step makes of a batch; dtype: computed in it, None for its own.

    fused: by torch's one kernel, where it has one.
    """
    device = batch[0].now["param"].device
    before = {
        role: _joined([piece.before[role] for piece in batch], device, dtype)
        for role in batch[0].now
    }
    grad = _joined([piece.grad for piece in batch], device, dtype)
    return _by_torch(call, call.indices[batch[0].position], step, before, grad, fused=fused)


def _joined(
    parts: Sequence[Tensor], device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """Flat tensors end to end, in memory of their own; in one launch."""
    lengths = [part.numel() for part in parts]
    flat = torch.empty(sum(lengths), dtype=dtype or parts[0].dtype, device=device)
    torch._foreach_copy_([*flat.split(lengths)], list(parts))
    return flat


def _squares(measured: Sequence[_Measured], *, looked_at: bool) -> tuple[Squares, bool]:
    """What all batches make up of each tensor's size and errors, and whether all is finite.

    looked_at: where it is not, by what is finite; else it is NaN. Waits for the device.
    """
    squares: Squares = {}
    finite = True
    for found in measured:
        own = found.norms.read()
        known = bool(own.isfinite().all())  # a norm is finite where every element is
        finite = finite and known
        if known or not looked_at:
            by_role = figures_of_parts(own.view(found.shape).tolist(), found.lengths)
        else:
            by_role = measure_parts(found.sides(), found.lengths)
        for role, figures in zip(found.batch[0].now, by_role, strict=True):
            for piece, count, figure in zip(found.batch, found.lengths, figures, strict=True):
                sums = squares.setdefault((piece.position, role), [0.0] * len(figure))
                squares[piece.position, role] = [
                    total + count * f * f for total, f in zip(sums, figure, strict=True)
                ]
    return squares, finite


def _distance(size: float, distance: float) -> tuple[float, float, float]:
    """The errors beside a step that is taken to be exact."""
    return size, 0.0, distance


def _error(size: float, own: float, error: float) -> tuple[float, float, float]:
    """The errors beside fp64: torch's, and ours."""
    return size, own, error


def _beyond(
    squares: Squares,
    params: Mapping[int, Tensor],
    factor: float,
    errors: Callable[..., tuple[float, float, float]],
) -> list[tuple[int, TensorError]]:
    """Parameters whose error is more than the factor allows, each by its worst tensor.

    errors: size, torch's error and ours, of a tensor's root mean squares.
    """
    found: dict[int, list[TensorError]] = {}
    # below the normal numbers a GPU may flush to zero
    tiny = torch.finfo(torch.float32).tiny
    for (position, role), sums in squares.items():
        count, dtype = params[position].numel(), params[position].dtype
        size, own, error = errors(*(math.sqrt(total / count) for total in sums))
        ratio = excess(error, own, dtype, size, size, factor)
        if not (ratio <= factor * luck(count) or error < tiny):
            found.setdefault(position, []).append(TensorError(role, 0, error, own, ratio))
    return [
        (position, max(errors, key=lambda e: math.inf if math.isnan(e.ratio) else e.ratio))
        for position, errors in found.items()
    ]


def _by_torch(
    call: UpdateCall,
    index: int,
    step: float | None,
    before: Tensors,
    grad: Tensor,
    *,
    fused: bool = True,
) -> Tensors:
    """One step of an optimizer of the user's class and options over flat pieces of parameters.

    before: is written, and returned. fused: by torch's one kernel, where it has one; but of halves
    by single operators, which round as often as the user's do.
    """
    optimizer, group = call.handle.optimizer, call.handle.group_of(index)
    param = nn.Parameter(before["param"])
    param.grad = grad.to(param.dtype)
    fused = fused and param.dtype in (torch.float32, torch.float64)
    options = {**group, "foreach": False, "fused": fused, "capturable": False}
    made = type(optimizer)([{**options, "params": [param]}])
    states: dict[str, Any] = {role: t for role, t in before.items() if role != "param"}
    if step is not None:  # one kernel reads the count where it runs
        states["step"] = torch.full((), step, device=param.device if fused else "cpu")
    if states:
        made.state[param] = states
    made.step()
    return {"param": param.detach(), **{role: made.state[param][role] for role in states}}
