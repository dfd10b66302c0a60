"""The gate: each new kernel is compared with ATen, on its first inputs, before it is trusted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx

from autodiff.reference import run_nodes
from trainfuse.log import get_logger

if TYPE_CHECKING:
    from trainfuse.fusion.plan import FusionGroup

_log = get_logger("gate")
_WRONG_FRACTION = 1e-3
"""Share of integer or boolean elements that may differ where fp64 itself decides otherwise."""
_EPSILON = {
    torch.float64: 1e-12,
    torch.float32: 2e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}
"""Relative slack: a few roundings of the result's own dtype."""


@dataclass(frozen=True, slots=True)
class References:
    """One group's outputs by ATen: in its own precision, and in fp64."""

    native: list[Tensor]
    exact: list[Tensor]


@dataclass
class Gate:
    """Compares kernels with ATen. factor: how much worse than eager's own error one may be.

    passed: keys of the kernels that did; one set serves every plan of a process.
    """

    factor: float = 2.0
    passed: set[str] = field(default_factory=set)

    def references(
        self, nodes: Sequence[fx.Node], env: dict[fx.Node, Tensor], outputs: Sequence[fx.Node]
    ) -> References | None:
        """ATen's results, to be had before the kernel runs: it may overwrite an input.

        None when the device has no room for them.
        """
        with torch.no_grad():
            try:
                native = run_nodes(nodes, env)
                kept = [_own(native[n], env.values()) for n in outputs]
                del native
                exact = run_nodes(nodes, env, dtype=torch.float64)
                return References(kept, [_own(exact[n], env.values()) for n in outputs])
            except torch.OutOfMemoryError:
                _log.warning("a kernel was not gated: no memory for its reference")
                return None

    def compare(self, ours: Sequence[Tensor], refs: References) -> str | None:
        """What is wrong with the kernel's outputs, or None."""
        for i, (out, native, exact) in enumerate(zip(ours, refs.native, refs.exact, strict=True)):
            wrong = mismatch(out, native, exact, self.factor)
            if wrong is not None:
                return f"output {i}: {wrong}"
        return None


def group_environment(group: FusionGroup, inputs: Sequence[Tensor]) -> dict[fx.Node, Tensor]:
    """Values by node of what a group reads."""
    return dict(zip(group.inputs, inputs, strict=True))


def _own(value: Tensor, inputs: Iterable[Tensor]) -> Tensor:
    shared = {t.untyped_storage().data_ptr() for t in inputs if isinstance(t, Tensor)}
    return value.clone() if value.untyped_storage().data_ptr() in shared else value


def mismatch(ours: Tensor, native: Tensor, exact: Tensor, factor: float) -> str | None:
    """How `ours` is worse than `factor` times eager's own error against fp64, or None.

    Three norms, as each is blind to something: the largest error (spread errors), the root mean
    square (a single wrong element), and the mean relative error (small values beside an outlier).
    """
    if ours.shape != native.shape or ours.dtype != native.dtype:
        return f"{ours.dtype} {tuple(ours.shape)} for {native.dtype} {tuple(native.shape)}"
    if ours.numel() == 0:
        return None
    if not ours.dtype.is_floating_point:
        return _wrong_elements(ours, native, exact, factor)
    o, n, r = ours.double(), native.double(), exact.double()
    if (where := _wrong_specials(o, n, r)) is not None:
        return where
    finite = o.isfinite() & n.isfinite() & r.isfinite()
    o, n, r = o[finite], n[finite], r[finite]
    if r.numel() == 0:
        return None
    eps = _EPSILON.get(ours.dtype, 1e-1)
    a, b, size = (o - r).abs(), (n - r).abs(), r.abs()
    floor = size + size.mean() * eps + torch.finfo(torch.float64).tiny
    relative = (a / floor).clamp(max=1).mean(), (b / floor).clamp(max=1).mean()
    checks = (
        ("largest error", a.max(), b.max(), eps * size.max()),
        ("rms error", _rms(a), _rms(b), eps * _rms(size)),
        ("mean relative error", *relative, torch.full_like(relative[0], 4 * eps)),
    )
    for name, mine, theirs, slack in checks:
        got, allowed = mine.item(), factor * theirs.item() + slack.item()
        if not got <= allowed:
            return f"{name} {got:.3g}, eager's own {theirs.item():.3g}, allowed {allowed:.3g}"
    return None


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


def _wrong_specials(o: Tensor, n: Tensor, r: Tensor) -> str | None:
    """NaN and infinity must be where fp64 or eager has them; both having one forces it."""
    for name, test in (("NaN", torch.isnan), ("inf", torch.isposinf), ("-inf", torch.isneginf)):
        mine, eager, exact = test(o), test(n), test(r)
        wrong = (mine & ~eager & ~exact) | (~mine & eager & exact)
        if bool(wrong.any()):
            return f"{name} in {int(mine.sum())} elements, eager {int(eager.sum())}"
    return None


def _wrong_elements(ours: Tensor, native: Tensor, exact: Tensor, factor: float) -> str | None:
    exact = exact.to(ours.dtype)
    wrong, eager = int((ours != exact).sum()), int((native != exact).sum())
    allowed = math.floor(factor * eager + _WRONG_FRACTION * ours.numel())
    return None if wrong <= allowed else f"{wrong} elements differ, eager's own {eager}"
