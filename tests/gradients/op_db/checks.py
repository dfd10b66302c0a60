"""What must hold of an outcome: values, types, layouts, flags and aliases as eager's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from autodiff.compare import SMALL_TENSOR, judge, luck
from autodiff.norms import rms, rmse
from tests.gradients.op_db.runs import Outcome

K = 2.0
K_HALF = 3.0  # of tensors so small that one rounding decides
LUCKIEST = 4.0  # eager's five roundings may cancel, and leave it a quarter of its usual error
LOOSE = 0.05
"""Relative error of eager from which the rule alone shows nothing: twice of it accepts zero."""


def problems(
    ours: Outcome, eager: Outcome, exact: Outcome, spread: Outcome | None = None
) -> list[str]:
    """Everything that is wrong with our outcome; an empty list when it is right.

    spread: eager's outcome on inputs with gaps in memory, where it may be of two minds.
    """
    found = []
    if len(ours.outputs) != len(eager.outputs):
        return [f"{len(ours.outputs)} outputs, eager gives {len(eager.outputs)}"]
    if ours.loss is None and ours.flags != eager.flags:  # a step's outputs have no history
        found.append(f"requires_grad {ours.flags}, eager's {eager.flags}")
    if ours.aliases != eager.aliases:
        found.append(f"shares memory with leaves {ours.aliases}, eager's with {eager.aliases}")
    if ours.written != eager.written:
        found.append(f"writes leaves {ours.written}, eager {eager.written}")
    loose = {f"gradient {i}" for i in eager.loose}
    theirs, traced = _named(eager), _named(eager.traced or eager)
    for name, mine in _named(ours).items():
        layouts = [] if name in loose else [theirs[name], traced[name]]
        found += _metadata(name, mine, theirs[name], layouts)
    return found or [*_values(ours, eager, exact, spread), *_loss(ours, eager, exact, spread)]


def _named(outcome: Outcome) -> dict[str, Tensor | None]:
    named: dict[str, Tensor | None] = {f"output {i}": t for i, t in enumerate(outcome.outputs)}
    return named | {f"gradient {i}": t for i, t in enumerate(outcome.gradients)}


def _metadata(
    name: str, mine: Tensor | None, theirs: Tensor | None, layouts: Sequence[Tensor | None]
) -> Iterator[str]:
    """layouts: tensors one of which ours must be laid out as; none where a layout says nothing."""
    if mine is None or theirs is None:
        if mine is not theirs:
            yield f"{name} is {_kind(mine)}, eager's {_kind(theirs)}"
        return
    if (mine.dtype, mine.shape, mine.layout) != (theirs.dtype, theirs.shape, theirs.layout):
        yield f"{name} is {_kind(mine)}, eager's {_kind(theirs)}"
    elif layouts and strides(mine) not in [strides(t) for t in layouts if t is not None]:
        yield f"{name} has strides {mine.stride()} for {theirs.stride()}, {tuple(mine.shape)}"


def _kind(tensor: Tensor | None) -> str:
    if tensor is None:
        return "None"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} {tensor.layout}"


def strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides where they mean something: of dimensions of several elements, of strided tensors."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return ()
    return tuple(s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)


def _real(tensor: Tensor | None) -> Tensor | None:
    """Comparable: dense, complex numbers as pairs."""
    if tensor is None:
        return None
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg()


def _values(ours: Outcome, eager: Outcome, exact: Outcome, spread: Outcome | None) -> Iterator[str]:
    mine, theirs, reference = (
        {name: _real(t) for name, t in _named(one).items()} for one in (ours, eager, exact)
    )
    apart = {name: _real(t) for name, t in _named(spread).items()} if spread else {}
    theirs = {
        name: _either(mine[name], t, reference[name], apart.get(name)) for name, t in theirs.items()
    }
    scale = max((rms(t) for t in reference.values() if _is_real(t)), default=0.0)
    for error in judge(mine, theirs, reference, k=K):
        if error.ratio <= _allowed(theirs[error.name]):
            if theirs[error.name].dtype.is_floating_point:
                three = (one[error.name] for one in (mine, theirs, reference))
                yield from _vague(error.name, *three, scale)
        elif not _same(mine[error.name], theirs[error.name]):
            yield (
                f"{error.name}: error {error.ours:.3g}, eager's {error.eager:.3g},"
                f" {error.ratio:.3g} of what is allowed {error.note}"
            )


def _allowed(theirs: Tensor) -> float:
    """K, and of tensors of few elements, of which there are thousands, as much as luck explains."""
    count = theirs.numel()
    if count >= SMALL_TENSOR:
        return K
    return max(K * min(luck(count), LUCKIEST), K_HALF if theirs.dtype.itemsize == 2 else K)


def _same(mine: Tensor, theirs: Tensor) -> bool:
    """Whether they are equal, NaN to NaN: right, where fp64 has another answer (nan_to_num)."""
    return bool(torch.isclose(mine, theirs, rtol=0.0, atol=0.0, equal_nan=True).all())


def _either(
    mine: Tensor | None, theirs: Tensor | None, exact: Tensor | None, spread: Tensor | None
) -> Tensor | None:
    """Eager's result, but fp64's where ours is NaN, or infinite, as fp64's is, or is near fp64's
    where eager overflows on the way; and eager's on inputs with gaps where that is another.

    Either is right: ATen's vector code for a CPU has gelu(inf) as NaN, in fp32 alone, and the
    slope of softshrink at NaN as 0, where its code for one element has 1; and cumprod's gradient
    on a GPU has NaN elsewhere than a traced one.
    """
    if mine is None or theirs is None or exact is None or not theirs.is_floating_point():
        return theirs
    if mine.dtype is not theirs.dtype or mine.shape != theirs.shape:
        return theirs
    alike = (mine.isnan() & exact.isnan()) | (mine.isinf() & (mine.double() == exact))
    finite = exact[exact.isfinite()]
    noise = 4 * torch.finfo(mine.dtype).eps * rms(finite) if finite.numel() else 0.0
    alike |= ~theirs.isfinite() & _close(mine, exact.to(mine.dtype), noise)
    if spread is not None:
        alike |= _close(mine, spread) & ~_close(theirs, spread)
    return torch.where(alike, mine, theirs)


def _close(one: Tensor, other: Tensor, noise: float = 0.0) -> Tensor:
    slack = 4 * torch.finfo(one.dtype).eps
    return torch.isclose(one, other, rtol=slack, atol=noise, equal_nan=True)


def _is_real(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.is_floating_point()


def _vague(name: str, mine: Tensor, theirs: Tensor, exact: Tensor, scale: float) -> Iterator[str]:
    """Where eager itself is far from fp64 (a step function at its step), be near to either.

    fp64 is right where eager overflows on its way to a finite number.
    scale: the largest size of the comparison's tensors; what is noise beside it is left alone.
    """
    own = rmse(theirs, exact)
    noise = 4 * torch.finfo(theirs.dtype).eps * scale
    if own > max(LOOSE * max(rms(exact), rms(theirs), 1e-3 * scale), noise):
        apart = rmse(mine, theirs.double())
        right = rmse(mine, exact) <= 4 * torch.finfo(mine.dtype).eps * rms(exact)
        if not right and not apart <= 0.1 * own:
            yield f"{name}: eager is {own:.3g} from fp64, and ours {apart:.3g} from eager"


def _loss(ours: Outcome, eager: Outcome, exact: Outcome, spread: Outcome | None) -> Iterator[str]:
    """A sum of terms of both signs: its error is measured by their magnitudes."""
    if ours.loss is None or eager.loss is None or exact.loss is None:
        return
    mine, theirs, right = (float(one.loss) for one in (ours, eager, exact))  # type: ignore[arg-type]
    if not math.isfinite(theirs) or not math.isfinite(right):
        if abs(mine - right) <= K * exact.room:
            return  # eager overflows on the way
        # a sum that is too large for the type, or so near to it that rounding decides
        large = abs(right) + K * exact.room > torch.finfo(ours.loss.dtype).max
        beyond = math.copysign(math.inf, right) if large else theirs
        others = [
            theirs,
            beyond,
            *([] if spread is None or spread.loss is None else [float(spread.loss)]),
        ]
        if not any(mine == one or (math.isnan(mine) and math.isnan(one)) for one in others):
            yield f"loss {mine}, eager's {theirs}"
        return
    room = K * abs(theirs - right) + exact.room
    if not abs(mine - right) <= room:
        yield f"loss {mine}, eager's {theirs}, fp64's {right}"
