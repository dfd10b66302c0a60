"""What is wrong with one result, beside eager's own error against a more exact one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .compare import luck
from .norms import Numbers

_WRONG_FRACTION = 1e-3
"""Share of integer or boolean elements that may differ where fp64 itself decides otherwise."""
_FEW, _SHARE = 8, 0.02
"""Elements that may differ where whole steps are compared: a number, or a share of them."""
_PIECE = 1 << 20
WORKING_BYTES = 12 * 8 * _PIECE
"""What comparing two results takes beside them: a dozen pieces in fp64."""
_EPSILON = {
    torch.float64: 1e-12,
    torch.float32: 2e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}
"""Relative slack: a few roundings of the result's own dtype."""
_RELATIVE_CAP = 64.0
"""Most epsilons that one element's relative error counts: a sum that cancels may have more."""


def mismatch(ours: Tensor, native: Tensor, exact: Tensor, factor: float) -> str | None:
    """How `ours` is worse than `factor` times eager's own error against fp64, or None.

    Three norms, as each is blind to something: the largest error (spread errors), the root mean
    square (a single wrong element), and the mean relative error (small values beside an outlier).
    Results of few elements get room for luck. Works in pieces where `ours` is, so that no fp64
    copy of a large result is made.
    """
    return Comparison(ours, native, exact, factor).wrong()


class Comparison:
    """`mismatch` under way: launched when it is made, and waited for when it is read."""

    def __init__(self, ours: Tensor, native: Tensor, exact: Tensor, factor: float) -> None:
        self._factor, self._figures, self._odd = factor, None, None
        if ours.shape != native.shape or ours.dtype != native.dtype:
            mine, theirs = f"{ours.dtype} {tuple(ours.shape)}", f"{native.dtype}"
            self._odd = f"{mine} for {theirs} {tuple(native.shape)}"
            return
        if ours.is_complex():
            ours, native, exact = (
                torch.view_as_real(t.resolve_conj()) for t in (ours, native, exact)
            )
        self._dtype, self._count = ours.dtype, ours.numel()
        if not self._count:
            return
        flat = [t.reshape(-1).split(_PIECE) for t in (ours, native, exact)]
        self._pieces = _Pieces(list(zip(*flat, strict=True)), ours.device)
        if not ours.dtype.is_floating_point:
            found = torch.stack([_differing(*piece) for piece in self._pieces])
            self._figures = Numbers(found.sum(0))
            return
        self._eps = _EPSILON.get(ours.dtype, 1e-1)
        sizes = torch.stack([_finite(piece)[2].abs().sum() for piece in self._pieces])
        scale = sizes.sum() / self._count * self._eps + torch.finfo(torch.float64).tiny
        cap = min(_RELATIVE_CAP * self._eps, 1.0)
        figures = torch.stack([_figures(piece, scale, cap) for piece in self._pieces])
        self._figures = Numbers(torch.cat([figures[:, :3].amax(0), figures[:, 3:].sum(0)]))

    def wrong(self) -> str | None:
        """What is, or None."""
        if self._odd is not None or self._figures is None:
            return self._odd
        figures = self._figures.read().tolist()
        if not self._dtype.is_floating_point:
            wrong, eager = map(int, figures)
            allowed = math.floor(self._factor * eager + _WRONG_FRACTION * self._count)
            return None if wrong <= allowed else f"{wrong} elements differ, eager's own {eager}"
        largest, total = figures[:3], figures[3:]
        if total[5] < self._count:
            for piece in self._pieces:
                if (where := _wrong_specials(*piece)) is not None:
                    return where
        eps, count = self._eps, max(total[5], 1.0)
        rms = [math.sqrt(value / count) for value in total[:3]]
        checks = (
            ("largest error", largest[0], largest[1], eps * largest[2]),
            ("rms error", rms[0], rms[1], eps * rms[2]),
            ("mean relative error", total[3] / count, total[4] / count, 4 * eps),
        )
        for name, got, theirs, slack in checks:
            allowed = luck(self._count) * (self._factor * theirs + slack)
            if not got <= allowed:
                return f"{name} {got:.3g}, eager's own {theirs:.3g}, allowed {allowed:.3g}"
        return None


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Pieces of three tensors, brought to one device as they are walked through."""

    parts: list[tuple[Tensor, ...]]
    device: torch.device

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for three in self.parts:
            yield tuple(part.to(self.device) for part in three)


def _finite(piece: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The three values in fp64, zero where one is not finite, and which elements count."""
    o, n, r = (t.double() for t in piece)
    all_ = (o * 0.25).add_(n, alpha=0.25).add_(r, alpha=0.25)  # finite where each of them is
    finite = (all_ - all_) == 0.0
    o, n, r = (torch.where(finite, t, 0.0) for t in (o, n, r))
    return o, n, r, finite


def _figures(piece: Sequence[Tensor], scale: Tensor, cap: float) -> Tensor:
    """Largest error of ours and eager's, and largest value; then sums: three squares, two
    relative errors, and the count."""
    o, n, r, finite = _finite(piece)
    a, b, size = (o - r).abs(), (n - r).abs(), r.abs()
    relative = [(error / (size + scale)).clamp(max=cap).sum() for error in (a, b)]
    squares = [x.square().sum() for x in (a, b, size)]
    return torch.stack([a.max(), b.max(), size.max(), *squares, *relative, finite.sum().double()])


def _wrong_specials(o: Tensor, n: Tensor, r: Tensor) -> str | None:
    """NaN and infinity must be where fp64 or eager has them; both having one forces it."""
    for name, test in (("NaN", torch.isnan), ("inf", torch.isposinf), ("-inf", torch.isneginf)):
        mine, eager, exact = test(o), test(n), test(r)
        wrong = (mine & ~eager & ~exact) | (~mine & eager & exact)
        if bool(wrong.any()):
            return f"{name} in {int(mine.sum())} elements, eager {int(eager.sum())}"
    return None


def _differing(ours: Tensor, native: Tensor, exact: Tensor) -> Tensor:
    """How many elements of ours, and of eager's, are others than they should be."""
    expected = exact.to(ours.dtype)
    return torch.stack([(ours != expected).sum(), (native != expected).sum()])


def wrong_integers(ours: Tensor, native: Tensor, exact: Tensor) -> bool:
    """Whether whole numbers differ in more places than rounding turns, over a whole step.

    A comparison or an argmax of values that rounding made equal may fall either way; in eager it
    does too, but not in the same places.
    """
    expected = exact.to(device=ours.device, dtype=ours.dtype)
    if ours.shape != expected.shape:
        return True
    eager = int((native.to(ours.device) != expected).sum())
    wrong = int((ours != expected).sum())
    return wrong > 2 * eager + max(_FEW, _SHARE * ours.numel())
