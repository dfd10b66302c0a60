"""Where a new value may be written over one that dies in the same step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import fx

from autodiff.graph import TrainingGraph
from trainfuse.runtime.memory import IN_PLACE, MemoryPlan, Step, alias_roots, same_layout

if TYPE_CHECKING:
    from trainfuse.codegen.ir import GroupKernel


def place_reuse(
    tg: TrainingGraph, plan: MemoryPlan, kernels: Mapping[str, GroupKernel]
) -> MemoryPlan:
    """Let results take the memory of operands that nothing reads later, where kernels allow it.

    The operand is a computed value (never an input, nor what is returned), read by this step for
    the last time and through this one view only; both have one layout, and start where memory
    does. kernels: by group name, for what may be written over what.
    """
    roots = alias_roots(tg)
    owned = _Ownership(tg, plan, roots)
    reused: dict[fx.Node, fx.Node] = {}
    for number, step in enumerate(plan.steps):
        taken: set[fx.Node] = set()
        for value, donor in _offers(step, kernels):
            free = value not in reused and value not in plan.in_place and roots[value] is value
            if free and roots[donor] not in taken and owned.dies(donor, step, number):
                if same_layout(value, donor) and donor.meta["val"].storage_offset() == 0:
                    reused[value] = donor
                    taken.add(roots[donor])
    return replace(plan, reused=reused)


def _offers(step: Step, kernels: Mapping[str, GroupKernel]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(result, operand) of a step where the one may be written over the other."""
    if step.group is not None:
        for output, source in sorted(kernels[step.name].in_place):
            yield step.group.outputs[output], step.group.inputs[source]
    elif step.kind == "aten" and step.node is not None and step.node.target in IN_PLACE:
        carry = step.node.args[0]
        if isinstance(carry, fx.Node):
            yield step.node, carry


class _Ownership:
    """Who owns memory, and which step reads it last."""

    def __init__(
        self, tg: TrainingGraph, plan: MemoryPlan, roots: Mapping[fx.Node, fx.Node]
    ) -> None:
        self.roots = roots
        outputs = [n for n in tg.output_nodes[: tg.num_outputs] if isinstance(n, fx.Node)]
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
        return sum(self.roots[node] is root for node in step.reads) == 1
