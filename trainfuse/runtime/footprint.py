"""How many bytes of its own a planned step holds at once, statement by statement."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import fx

from autodiff import ops
from autodiff.graph import TrainingGraph
from autodiff.reads import num_bytes
from trainfuse.runtime.memory import MemoryPlan, Step, fold_results, is_view, place_mutations

if TYPE_CHECKING:
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


def footprint(tg: TrainingGraph, steps: Sequence[Step]) -> Footprint:
    """Account the values that are alive at each statement, by the memory that they own.

    Memory inside an operator or a compiled segment is not seen, nor what an allocator rounds up.
    """
    plan = place_mutations(tg, steps)
    owners = _owners(tg)
    results = _results(tg, plan, owners)
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


def _owners(tg: TrainingGraph) -> Mapping[fx.Node, fx.Node]:
    """As `alias_roots`, with the parts of a tuple as values of their own."""
    owners: dict[fx.Node, fx.Node] = {}
    for node in tg.graph.nodes:
        base = node.all_input_nodes[0] if node.all_input_nodes else None
        shows = node.op == "call_function" and base is not None and is_view(node)
        if shows and node.target is operator.getitem:
            shows = not isinstance(base.meta.get("val"), tuple | list)
        owners[node] = owners[base] if shows and base is not None else node
    return owners


def _results(
    tg: TrainingGraph, plan: MemoryPlan, owners: Mapping[fx.Node, fx.Node]
) -> set[fx.Node]:
    found = {owners[node] for node in tg.output_nodes if isinstance(node, fx.Node)}
    for step in plan.steps:
        if step.kind == "update":
            found |= {owners[node] for node in step.reads}
    return found


def _first_backward(tg: TrainingGraph, steps: Sequence[Step]) -> int:
    for i, step in enumerate(steps):
        node = step.node if step.group is None else step.group.nodes[0]
        if node is not None and tg.phase(node) == "backward":
            return i
    return -1


def _title(step: Step) -> str:
    return step.name or (str(step.node.target) if step.node is not None else step.kind)
