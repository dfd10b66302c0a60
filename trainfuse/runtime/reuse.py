"""Where a new value may be written over one that dies in the same step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx

from autodiff import ops
from autodiff.graph import TrainingGraph
from autodiff.liveness import maker_of
from autodiff.reads import num_bytes
from trainfuse.runtime.memory import IN_PLACE, MemoryPlan, Step, memory_owners, same_layout

if TYPE_CHECKING:
    from trainfuse.codegen.ir import GroupKernel


def place_reuse(
    tg: TrainingGraph, plan: MemoryPlan, kernels: Mapping[str, GroupKernel]
) -> MemoryPlan:
    """Let results take the memory of operands that nothing reads later, where kernels allow it.

    The operand is a computed value (never an input, nor what is returned), read by this step for
    the last time and through this one view only; both have one layout, and are all of their
    memory. kernels: by group name, for what may be written over what.
    """
    roots = memory_owners(tg)
    owned = _Ownership(tg, plan, roots)
    times = Counter(node for step in plan.steps for node in step.writes)
    reused: dict[fx.Node, fx.Node] = {}
    for number, step in enumerate(plan.steps):
        taken: set[fx.Node] = set()
        for value, donor in _offers(step, kernels):
            if value in reused or value in plan.in_place or times[value] > 1:
                continue  # a cheap value may be made by several kernels, each time anew
            if roots[value] is value and roots[donor] not in taken:
                whole = num_bytes(roots[donor]) == num_bytes(value)
                if whole and same_layout(value, donor) and owned.dies(donor, step, number):
                    reused[value] = donor
                    taken.add(roots[donor])
    return replace(plan, reused=reused)


def memory_of(dead: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A dead value's memory for a new one; other memory if it doesn't lie as it was planned to.

    An operator's shape function may promise another layout than its kernel gives.
    """
    planned = zip(dead.shape, dead.stride(), strides, strict=True)
    if all(size == 1 or found == wanted for size, found, wanted in planned):
        return dead
    return torch.empty_strided(dead.shape, strides, dtype=dead.dtype, device=dead.device)


def _offers(step: Step, kernels: Mapping[str, GroupKernel]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(result, operand) of a step where the one may be written over the other."""
    if step.group is not None:
        kernel = kernels.get(step.name)
        for output, source in () if kernel is None else sorted(kernel.in_place):
            yield step.group.outputs[output], step.group.inputs[source]
    elif step.kind == "aten" and step.node is not None and step.node.target in IN_PLACE:
        carry = step.node.args[0]
        if isinstance(carry, fx.Node):
            yield step.node, carry


_FRESH = frozenset({"contraction", "pointwise"})
"""Operators that never return an operand; dropout does in evaluation, without saying so."""


class _Ownership:
    """Who owns memory, and which step reads it last."""

    def __init__(
        self, tg: TrainingGraph, plan: MemoryPlan, roots: Mapping[fx.Node, fx.Node]
    ) -> None:
        self.roots = roots
        outputs = [n for n in tg.output_nodes[: tg.num_outputs] if isinstance(n, fx.Node)]
        self.ours = {node for step in plan.steps if step.group for node in step.writes}
        self.kept = {roots[n] for n in (*outputs, *plan.in_place, *plan.kept)}
        self.last: dict[fx.Node, int] = {}
        for number, step in enumerate(plan.steps):
            for node in step.reads:
                self.last[roots[node]] = number

    def dies(self, donor: fx.Node, step: Step, number: int) -> bool:
        """Whether a step is the last to read a computed value, through one view of it."""
        root = self.roots[donor]
        if root.op != "call_function" or root in self.kept or self.last.get(root) != number:
            return False
        if root not in self.ours and ops.lookup(maker_of(root).target).kind not in _FRESH:
            return False
        return sum(self.roots[node] is root for node in step.reads) == 1
