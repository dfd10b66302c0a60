"""From plans to what the user reads: the explanation's rows, and the grouped graph as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import fx

from autodiff import ops
from autodiff.graph import Refusal, TrainingGraph
from trainfuse.debug.describe import Description, describe
from trainfuse.debug.explain import Explanation, GroupRow, MemoryRow, NodeRow

if TYPE_CHECKING:
    from trainfuse.pipeline import State
    from trainfuse.plans import PlanRecord

_FREE = frozenset({"view", "creation"})
_NO_PLAN = "decided when the step runs"


def gather(
    plans: Sequence[PlanRecord],
    refusals: Sequence[Refusal],
    backend: str,
    *,
    left_whole: bool = False,
) -> Explanation:
    """What the plans of one target say of themselves; of all of them for regions, else the latest.

    backend: what to show when there is no plan. refusals: of the capture. left_whole: whether the
    target's whole steps are no longer run.
    """
    whole = [plan for plan in plans if plan.kind == "whole_step" and not left_whole]
    shown = whole[-1:] or [plan for plan in plans if plan.kind != "whole_step"]
    reason = refusals[-1].reason if refusals and not whole else ""
    where = refusals[-1].where if refusals and not whole else None
    told = [_describe(plan) for plan in shown]
    forwards = [plan for plan in shown if plan.kind != "backward"]
    return Explanation(
        capture="whole_step" if whole else "regions",
        capture_reason=reason + (f", {where}" if where else ""),
        backend=shown[0].backend if shown else backend,
        graph_count=len(forwards),
        graph_break_count=max(0, len(forwards) - 1),
        break_reasons=(f"{reason} ({where})",) if len(forwards) > 1 and reason else (),
        subgraphs=tuple(row for one in told for row in one.subgraphs),
        groups=tuple(row for one in told for row in one.groups),
        refusals=(*refusals, *(r for plan in shown for r in plan.state.refusals)),
        cuda_graph=_cuda_graph(shown),
        aten_nodes=tuple(row for one in told for row in one.aten_nodes),
        saved=tuple(row for one in told for row in one.saved),
        memory=_memory(whole[-1]) if whole else None,
    )


def _memory(plan: PlanRecord) -> MemoryRow:
    used, report = plan.footprint, plan.state.recompute
    limit = None if report is None else report.limit
    unlimited = None if report is None else report.baseline_peak
    return MemoryRow(used.peak, used.at, used.between, used.results, limit, unlimited)


def _cuda_graph(plans: Sequence[PlanRecord]) -> str:
    states = [plan.plan.cuda_graph for plan in plans if plan.plan is not None]
    if not states:
        return _NO_PLAN
    return "used" if states[-1].used else f"not used: {states[-1].reason}"


def _describe(plan: PlanRecord) -> Description:
    """One plan's rows; what codegen refused counts as ATen, views and constants as nothing."""
    state = plan.state
    assert state.fusion is not None
    told = describe(state.graph, state.fusion, state.slices, state.recompute, state.kernels)
    fused = tuple(g for g in told.groups if g.kernel is not None)
    refused = tuple(n for g in told.groups if g.kernel is None for n in g.nodes)
    kinds = {n.name: ops.lookup(n.target).kind for n in state.graph.nodes()}
    free = _FREE | {"effect"} if plan.backend == "triton" else _FREE
    left = tuple(node for node in (*told.aten_nodes, *refused) if kinds[node.name] not in free)
    return Description(told.subgraphs, (*fused, *_update_rows(plan)), left, told.saved)


def _update_rows(plan: PlanRecord) -> tuple[GroupRow, ...]:
    """The optimizer's buckets: one foreach launch each, where our kernels run it."""
    if plan.plan is None or plan.backend != "triton":
        return ()
    return tuple(
        GroupRow(
            bucket.name,
            "update",
            tuple(
                NodeRow(n.name, ops.op_name(n.target), "update")
                for n in bucket.template.gm.graph.nodes
                if n.op == "call_function"
            ),
            "foreach",
            bucket.num_bytes,
            bucket.kernel.key,
        )
        for update in plan.plan.program.updates.values()
        for bucket in update.buckets
        if bucket.kernel is not None
    )


def graph_text(kind: str, state: State) -> str:
    """The grouped graph in execution order: groups with their kernel's id, ATen nodes as they are.

    The form follows TorchScript's print of fused graphs: `FusionGroup_k[cache_id]`, then each
    group's own statements.
    """
    tg = state.graph
    assert state.fusion is not None
    lines = [f"graph({kind}):"]
    bodies = []
    for number, item in enumerate(i for i in state.fusion.order if not isinstance(i, fx.Node)):
        kernel = state.kernels.get(item.name)
        title = f"FusionGroup_{number}[{kernel.key[:12] if kernel else 'ATen'}]"
        bodies += [f"with {title} = {item.name}({_names(item.inputs)}):"]
        bodies += [f"  {_statement(tg, n)}" for n in item.nodes]
        bodies += [f"  return ({_names(item.outputs)})"]
    numbers = iter(range(len(state.fusion.groups)))
    phase = ""
    for item in state.fusion.order:
        first = item if isinstance(item, fx.Node) else item.nodes[0]
        if tg.phase(first) != phase:
            phase = tg.phase(first)
            lines.append(f"  # {phase}")
        if isinstance(item, fx.Node):
            lines.append(f"  {_statement(tg, item)}")
        else:
            kernel = state.kernels.get(item.name)
            name = f"FusionGroup_{next(numbers)}[{kernel.key[:12] if kernel else 'ATen'}]"
            lines.append(f"  {_names(item.outputs)} = {name}({_names(item.inputs)})")
    outputs = [n for n in tg.output_nodes[: tg.num_outputs] if isinstance(n, fx.Node)]
    return "\n".join([*lines, f"  return ({_names(outputs)})", *bodies])


def _names(nodes: Iterable[fx.Node]) -> str:
    return ", ".join(f"%{node.name}" for node in nodes)


def _statement(tg: TrainingGraph, node: fx.Node) -> str:
    value = node.meta.get("val")
    kind = ""
    if isinstance(value, torch.Tensor):
        kind = f" : {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    args = ", ".join(
        [*(f"%{a}" if isinstance(a, fx.Node) else str(a) for a in node.args)]
        + [f"{key}={item}" for key, item in node.kwargs.items()]
    )
    where = tg.where(node)
    return f"%{node.name}{kind} = {ops.op_name(node.target)}({args})" + (
        f"  # {where}" if where else ""
    )
