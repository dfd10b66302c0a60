"""The first fused group whose kernel is wrong, found by fusing ever fewer of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autodiff.norms import rms, rmse
from trainfuse.debug.explain import GroupRow, line_summary, op_summary
from trainfuse.debug.preserve import leaves_of, preserved, run_through

if TYPE_CHECKING:
    from trainfuse.api import CompiledStep

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_HALF = 3e-2
"""Relative RMS difference from ATen that rounding explains, by the narrowest type in the step."""
_LEAST_SIZE = 1e-3
"""A tensor this much smaller than the largest counts as if it were so large: it may be noise."""


@dataclass(frozen=True, slots=True)
class Culprit:
    """What a bisection found.

    group: the first wrong group, or None: right with all fused, or wrong with none (then the
    optimizer's kernel, or what stays ATen). number: how many groups must be fused to see it.
    error: largest relative RMS difference from ATen; tolerance: what rounding explains.
    """

    group: GroupRow | None
    number: int
    groups: int
    runs: int
    error: float
    tolerance: float

    def __str__(self) -> str:
        found = f"error {self.error:.2g}, rounding explains {self.tolerance:.2g}; {self.runs} runs"
        if self.group is None and self.error <= self.tolerance:
            return f"no group of {self.groups} is wrong ({found})"
        if self.group is None:
            return f"wrong with no group fused: not a group's kernel ({found})"
        at = line_summary(self.group.nodes) or "no line known"
        return (
            f"{self.group.name} ({op_summary(self.group.nodes)}) at {at} is wrong, group"
            f" {self.number} of {self.groups} ({found})"
        )


def search(
    compile_step: Callable[..., CompiledStep],
    target: Any,
    args: Sequence[Any],
    tolerance: float | None = None,
) -> Culprit:
    """Run a target with its first n groups fused against its plan on ATen, log2 of n times.

    compile_step: makes a compiled step of the target under options. The state is put back after
    each run. Groups come in the order of the plan; in a step of several graphs, n of each.
    """
    reference = compile_step(backend="eager", **_QUIET)
    expected, _ = _run(reference, target, args)
    allowed = _allowed(reference) if tolerance is None else tolerance
    reference.close()
    runs = 0
    errors: dict[int, float] = {}
    rows: dict[int, list[GroupRow]] = {}

    def wrong(count: int | None) -> bool:
        nonlocal runs
        runs += 1
        step = compile_step(fuse_first=count, **_QUIET)
        results, groups = _run(step, target, args)
        step.close()
        number = len(groups) if count is None else count
        rows[number], errors[number] = groups, _difference(results, expected)
        return not errors[number] <= allowed

    if not wrong(None):
        (total,) = rows
        return Culprit(None, 0, total, runs, errors[total], allowed)
    (total,) = rows
    if wrong(0):
        return Culprit(None, 0, total, runs, errors[0], allowed)
    low, high = 0, total  # right with `low` groups, wrong with `high`
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if wrong(middle) else (middle, high)
    names = {group.name for group in rows[low]}
    group = next((g for g in rows[high] if g.name not in names), rows[high][-1])
    return Culprit(group, high, total, runs, errors[high], allowed)


_QUIET = {"verify": "off", "keep_gradients": True, "cuda_graph": "off"}


def _run(
    step: CompiledStep, target: Any, args: Sequence[Any]
) -> tuple[list[Tensor], list[GroupRow]]:
    """One call's outputs and gradients, and the groups that ran."""
    leaves = leaves_of(target, args)
    with preserved(target, args):
        outputs = run_through(step, args, leaves)
        grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
        results = [t.detach().clone() for t in (*outputs, *grads)]
    groups = [group for group in step.explain().groups if group.schedule != "foreach"]
    return results, groups


def _allowed(step: CompiledStep) -> float:
    """What rounding explains, by the narrowest type that the step computes in."""
    values = [n.meta.get("val") for plan in step.plans for n in plan.graph.graph.nodes]
    dtypes = {v.dtype for v in values if isinstance(v, Tensor) and v.is_floating_point()}
    return max((_TOLERANCE.get(dtype, _HALF) for dtype in dtypes), default=0.0)


def _difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The largest relative RMS difference; infinite where other tensors came out."""
    if [t.shape for t in ours] != [t.shape for t in theirs]:
        return float("inf")
    sizes = [rms(t) for t in theirs]
    least = _LEAST_SIZE * max(sizes, default=0.0)
    pairs = zip(ours, theirs, sizes, strict=True)
    return max((rmse(a, b, b) / (max(size, least) or 1.0) for a, b, size in pairs), default=0.0)
