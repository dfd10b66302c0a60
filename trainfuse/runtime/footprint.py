"""How many bytes of its own a planned step holds at once, statement by statement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import fx

from autodiff import ops
from autodiff.graph import TrainingGraph
from autodiff.reads import num_bytes
from trainfuse.runtime.memory import (
    MemoryPlan,
    Step,
    fold_results,
    memory_owners,
    place_mutations,
)
from trainfuse.runtime.reuse import place_reuse

if TYPE_CHECKING:
    from trainfuse.codegen.ir import GroupKernel
    from trainfuse.fusion.plan import FusionGroup


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of a step's own values: not its inputs, nor what it gives back.

    peak: the most alive at once, while statement `at` runs. between: alive from forward to
    backward, 0 where there is no backward. results: of what it gives back: outputs, new values of
    inputs that have memory of their own, gradients that an update reads.
    """

    peak: int
    at: str
    between: int
    results: int


def planned_steps(order: Sequence[FusionGroup | fx.Node]) -> list[Step]:
    """The statements of a fusion plan, if every group has its kernel."""
    steps = []
    for item in order:
        if not isinstance(item, fx.Node):
            steps.append(Step("group", item.inputs, item.outputs, name=item.name, group=item))
        elif ops.lookup(item.target).kind == "effect":
            steps.append(Step("update", tuple(item.all_input_nodes), (), node=item))
        else:
            steps.append(Step("aten", tuple(item.all_input_nodes), (item,), node=item))
    return fold_results(steps)


def footprint(
    tg: TrainingGraph, steps: Sequence[Step], kernels: Mapping[str, GroupKernel]
) -> Footprint:
    """Account the values that are alive at each statement, by the memory that they own.

    kernels: by group name, for what they write over their operands. Memory inside an operator or a
    compiled segment is not seen, nor what an allocator rounds up.
    """
    plan = place_reuse(tg, place_mutations(tg, steps), kernels)
    owners = memory_owners(tg)
    results = _results(tg, plan, owners)
    owners = _handed_on(plan, owners, results)
    foreign = {node for node in tg.graph.nodes if node.op != "call_function"}
    foreign |= plan.in_place.keys()
    last: dict[fx.Node, int] = {}
    for i, step in enumerate(plan.steps):
        last.update((owners[node], i) for node in (*step.reads, *step.writes))
    dying: dict[int, list[fx.Node]] = {}
    for node, i in last.items():
        dying.setdefault(i, []).append(node)
    made: set[fx.Node] = set()
    live = peak = between = given = 0
    at = ""
    backward = _first_backward(tg, plan.steps)
    for i, step in enumerate(plan.steps):
        if i == backward:
            between = live
        for owner in {owners[node] for node in step.writes} - made - foreign:
            made.add(owner)
            size = num_bytes(owner)
            given += size if owner in results else 0
            live += 0 if owner in results else size
        if live > peak:
            peak, at = live, _title(step)
        live -= sum(num_bytes(n) for n in dying.get(i, ()) if n in made and n not in results)
    return Footprint(peak, at, between, given)


def _results(
    tg: TrainingGraph, plan: MemoryPlan, owners: Mapping[fx.Node, fx.Node]
) -> set[fx.Node]:
    found = {owners[node] for node in tg.output_nodes if isinstance(node, fx.Node)}
    for step in plan.steps:
        if step.kind == "update":
            found |= {owners[node] for node in step.reads}
    return found


def _handed_on(
    plan: MemoryPlan, owners: Mapping[fx.Node, fx.Node], results: set[fx.Node]
) -> Mapping[fx.Node, fx.Node]:
    """The owners, with the first owner of memory in the place of those that it is handed on to."""
    first: dict[fx.Node, fx.Node] = {}
    for value, donor in plan.reused.items():
        if owners[value] not in results:
            first[owners[value]] = first.get(owners[donor], owners[donor])
    return {node: first.get(owner, owner) for node, owner in owners.items()}


def _first_backward(tg: TrainingGraph, steps: Sequence[Step]) -> int:
    for i, step in enumerate(steps):
        node = step.node if step.group is None else step.group.nodes[0]
        if node is not None and tg.phase(node) == "backward":
            return i
    return -1


def _title(step: Step) -> str:
    return step.name or (str(step.node.target) if step.node is not None else step.kind)
