"""The rule: a tensor's error against fp64 is at most k times eager's own, plus a floor."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from .norms import Figures, measure

Tensors = Mapping[str, torch.Tensor | None]

# Below this many elements one tensor's error is too few samples: see `judge`.
SMALL_TENSOR = 1000
# A run whose weights moved less than this (relative RMS) shows nothing about its later steps.
LEAST_MOVE = 1e-3


@dataclass(frozen=True, slots=True)
class TensorError:
    """RMSE of one tensor against fp64, ours and eager's; ratio is the one to hold to `limit`.

    size: RMS of the tensor in fp64.
    """

    name: str
    step: int
    ours: float
    eager: float
    ratio: float
    note: str = ""
    elements: int = 1
    size: float = 0.0


@dataclass(frozen=True, slots=True)
class GradientReport:
    """Every compared tensor, and whether each error is within k times eager's."""

    errors: tuple[TensorError, ...]
    k: float
    moved: float | None = None

    @property
    def worst(self) -> TensorError:
        """The tensor with the largest ratio; a NaN ratio counts as infinite."""
        return max(self.errors, key=lambda e: math.inf if math.isnan(e.ratio) else e.ratio)

    @property
    def ratio(self) -> float:
        """The largest error ratio."""
        return self.worst.ratio

    @property
    def failures(self) -> tuple[TensorError, ...]:
        """Tensors beyond their limit."""
        return tuple(e for e in self.errors if not e.ratio <= limit(self.k, e.elements))

    @property
    def ok(self) -> bool:
        """True when every tensor is within its limit and the weights moved."""
        return not self.failures and (self.moved is None or self.moved >= LEAST_MOVE)

    def check(self) -> GradientReport:
        """This report, or an AssertionError that lists the worst tensors."""
        if self.moved is not None and self.moved < LEAST_MOVE:
            raise AssertionError(
                f"the weights moved by {self.moved:.1e} of their size, so later steps prove "
                f"nothing: raise the learning rate until they move by {LEAST_MOVE}"
            )
        if self.failures:
            lines = [
                f"  step {e.step} {e.name}: ours {e.ours:.3e}, eager {e.eager:.3e}, "
                f"ratio {e.ratio:.2f} {e.note}"
                for e in sorted(self.failures, key=lambda e: -e.ratio)[:12]
            ]
            raise AssertionError(
                f"{len(self.failures)} of {len(self.errors)} tensors are further from fp64 than "
                f"{self.k} x eager:\n" + "\n".join(lines)
            )
        return self


def pooled(reports: Sequence[GradientReport]) -> GradientReport:
    """Several runs as one, in which a tensor is judged by all of its ratios.

    For steps through half types: what one of them gives is a few errors, carried to all elements.
    The ratio is the root mean square over runs and steps; one that is not finite stands alone.
    """
    errors: list[TensorError] = []
    same: dict[str, list[TensorError]] = {}
    for error in (e for report in reports for e in report.errors):
        (same.setdefault(error.name, []) if math.isfinite(error.ratio) else errors).append(error)
    for found in same.values():
        worst = max(found, key=lambda e: e.ratio)
        ratio = math.sqrt(statistics.fmean(e.ratio**2 for e in found))
        note = f"of {len(found)}, at worst {worst.ratio:.2f}"
        errors.append(replace(worst, ratio=ratio, note=note))
    moved = [report.moved for report in reports if report.moved is not None]
    return GradientReport(tuple(errors), max(r.k for r in reports), min(moved, default=None))


def limit(k: float, elements: int) -> float:
    """How large the ratio of a tensor may be: k, or of very few elements what chance makes of one.

    Equally good roundings of so many elements exceed it about once in 1e5. It is k from 10 on.
    Source: Wilson and Hilferty's quantile of chi-square, doi:10.1073/pnas.17.12.684.
    """
    spread = 2.0 / (9.0 * max(elements, 1))
    return max(k, (1.0 - spread + _ONCE_IN_1E5 * math.sqrt(spread)) ** 1.5)


_ONCE_IN_1E5 = 4.265
"""Standard deviations that a normal number exceeds with that probability."""


def luck(count: int) -> float:
    """How far a ratio of two equally good RMS errors of so many elements may stray from 1.

    The logarithm of such a ratio has a standard deviation of about 1 / sqrt(count); this is five of
    them. The suite's fixed seeds need none; a check of whatever a user trains on does.
    """
    return math.exp(5.0 / math.sqrt(max(count, 1)))


def _floor(dtype: torch.dtype, size: float, scale: float) -> float:
    """Error that no rounding of the result can undercut.

    size: RMS of the reference; scale: the largest such of the comparison, which bounds the noise
    in a tensor whose true value is zero (a bias before batch norm).
    """
    # in fp64 the reference is no better than eager: another order of summation differs from both
    relative = {torch.float64: 32.0, torch.float32: 1.0}.get(dtype, 0.25)
    noise = torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).eps
    return relative * torch.finfo(dtype).eps * size + 0.25 * noise * scale


def _alike(x: torch.Tensor | None, y: torch.Tensor | None) -> bool:
    if x is None or y is None:
        return x is y
    return x.shape == y.shape and x.dtype is y.dtype


def _meta(x: torch.Tensor | None) -> str:
    return "None" if x is None else f"{tuple(x.shape)} {x.dtype}"


def relative_errors(eager: Tensors, fp64: Tensors) -> list[float]:
    """Eager's error over the reference's size, of every floating tensor that isn't nearly zero."""
    names = [n for n, t in fp64.items() if _floats(t) and eager[n] is not None]
    return _relative(measure([(eager[n], fp64[n]) for n in names]))  # type: ignore[misc]  # no None is left


def _relative(figures: Sequence[tuple[float, ...]]) -> list[float]:
    least = 1e-6 * max((size for size, *_ in figures), default=0.0)
    return [own / size for size, own, *_ in figures if size > least]


def _floats(x: torch.Tensor | None) -> bool:
    return x is not None and x.is_floating_point()


def judge(
    ours: Tensors,
    eager: Tensors,
    fp64: Tensors,
    *,
    k: float = 2.0,
    step: int = 0,
    usual: Sequence[float] = (),
    known: Mapping[str, Figures] | None = None,
    at_least: Mapping[str, float] | None = None,
) -> tuple[TensorError, ...]:
    """Errors of three runs' tensors, by name.

    known: what `measure` gave for eager and fp64 by name, or for all three, where that was asked
    before. at_least: errors that are eager's own where they are larger than what it has here.

    A tensor of fewer than SMALL_TENSOR elements (a loss, a bias) may have been lucky in eager: it
    is measured against eager's median relative error where that is larger, of `usual` if given,
    else of these tensors.
    """
    assert ours.keys() == eager.keys() == fp64.keys(), "the runs gave different tensors"
    measured = {
        n: (ours[n], eager[n], fp64[n])
        for n, theirs in eager.items()
        if theirs is not None and _floats(fp64[n]) and _alike(ours[n], theirs)
    }
    before = [known.get(name) for name in measured] if known else None
    found = measure(list(measured.values()), before)  # type: ignore[arg-type]  # no None is left
    figures = dict(zip(measured, found, strict=True))
    scale = max((size for size, *_ in figures.values()), default=0.0)
    relative = usual or _relative(list(figures.values()))
    typical = statistics.median(relative) if relative else 0.0
    errors = []
    for name, theirs in eager.items():
        mine = ours[name]
        if not _alike(mine, theirs):
            note = f"ours is {_meta(mine)}, eager's {_meta(theirs)}"
            errors.append(TensorError(name, step, math.inf, 0.0, math.inf, note))
        elif mine is None or theirs is None:
            continue
        elif name not in figures:
            same = torch.equal(mine, theirs)
            errors.append(TensorError(name, step, 0.0, 0.0, 0.0 if same else math.inf, "exact"))
        else:
            size, own, error = figures[name]
            allowed = max(own, at_least.get(name, 0.0) if at_least else 0.0)
            if theirs.numel() < SMALL_TENSOR:
                allowed = max(allowed, typical * size)
            ratio = excess(error, allowed, theirs.dtype, size, scale, k)
            count = theirs.numel()
            errors.append(TensorError(name, step, error, own, ratio, elements=count, size=size))
    return tuple(errors)


def excess(
    error: float, own: float, dtype: torch.dtype, size: float, scale: float, k: float
) -> float:
    """An error over eager's own and the floor: to be held to k."""
    allowed = own + _floor(dtype, size, scale) / k
    return error / allowed if allowed else (0.0 if error == 0 else math.inf)


def least(error: TensorError, dtype: torch.dtype, scale: float, k: float, most: float) -> float:
    """What eager's own error must be, so that a tensor's `excess` is at most `most`."""
    if not math.isfinite(error.ours):
        return math.inf
    # more than enough: what has it must not fail by the last bit
    return (1.0 + 1e-9) * error.ours / most - _floor(dtype, error.size, scale) / k
