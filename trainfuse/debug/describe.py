"""One planned graph as rows of an `Explanation`: plain data, no nodes kept alive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from autodiff import ops, reads
from autodiff.graph import TrainingGraph
from autodiff.recompute import RecomputeReport, ValueNote
from autodiff.slicing import Slices
from trainfuse.codegen.ir import GroupKernel
from trainfuse.debug.explain import GroupRow, NodeRow, SavedRow, SubgraphRow
from trainfuse.fusion.cost import group_cost
from trainfuse.fusion.plan import FusionGroup, FusionPlan


@dataclass(frozen=True, slots=True)
class Description:
    """What one graph contributes to an explanation."""

    subgraphs: tuple[SubgraphRow, ...]
    groups: tuple[GroupRow, ...]
    aten_nodes: tuple[NodeRow, ...]
    saved: tuple[SavedRow, ...] = ()


def describe(
    tg: TrainingGraph,
    fusion: FusionPlan,
    slices: Slices | None,
    recompute: RecomputeReport | None,
    kernels: Mapping[str, GroupKernel],
    prefix: str = "",
) -> Description:
    """Rows of one planned graph.

    kernels: by group name; a group without one runs as ATen, or inside Inductor's code. prefix:
    put before the names of groups and subgraphs where several graphs are explained together.
    """
    groups = tuple(_group(tg, group, kernels.get(group.name), prefix) for group in fusion.groups)
    subgraphs = () if slices is None else tuple(_subgraphs(tg, fusion, slices, recompute, prefix))
    saved = () if recompute is None else _saved(recompute)
    return Description(subgraphs, groups, tuple(_node(tg, n) for n in fusion.aten), saved)


def _saved(report: RecomputeReport) -> tuple[SavedRow, ...]:
    """What is kept, then what is computed again, the largest first."""
    alike: dict[tuple[Any, ...], list[ValueNote]] = {}
    for kept, notes in ((True, report.kept), (False, report.again)):
        for note in notes:
            alike.setdefault((kept, note.op, note.kind, note.why), []).append(note)
    rows = [
        SavedRow(
            kept=kept,
            op=op,
            value=kind,
            times=len(notes),
            bytes=sum(note.num_bytes for note in notes),
            where=tuple(dict.fromkeys(note.where for note in notes if note.where)),
            why=why,
        )
        for (kept, op, kind, why), notes in alike.items()
    ]
    return tuple(sorted(rows, key=lambda row: (not row.kept, -row.bytes)))


def _node(tg: TrainingGraph, node: fx.Node) -> NodeRow:
    return NodeRow(node.name, ops.op_name(node.target), tg.phase(node), tg.where(node))


def _group(
    tg: TrainingGraph, group: FusionGroup, kernel: GroupKernel | None, prefix: str
) -> GroupRow:
    return GroupRow(
        name=prefix + group.name,
        phase=group.phase,
        nodes=tuple(_node(tg, node) for node in group.nodes),
        schedule=group.domain.kind,
        bytes=group_cost(group).effective_bytes,
        kernel=None if kernel is None else kernel.key,
    )


def _subgraphs(
    tg: TrainingGraph,
    fusion: FusionPlan,
    slices: Slices,
    recompute: RecomputeReport | None,
    prefix: str,
) -> Iterable[SubgraphRow]:
    again = frozenset(recompute.recomputed if recompute is not None else ())
    for index in range(len(slices.subgraphs)):
        nodes = [n for n in tg.nodes("forward") if slices.owner.get(n) == index]
        saved = [n for n in nodes if any(tg.phase(user) == "backward" for user in n.users)]
        yield SubgraphRow(
            name=f"{prefix}subgraph_{index}",
            nodes=tuple(node.name for node in nodes),
            forward_groups=_owned(fusion.groups, slices, index, "forward", prefix),
            backward_groups=_owned(fusion.groups, slices, index, "backward", prefix),
            saved_bytes=num_bytes(saved),
            recomputed=tuple(node.name for node in nodes if node.name in again),
        )


def _owned(
    groups: Sequence[FusionGroup], slices: Slices, index: int, phase: str, prefix: str
) -> tuple[str, ...]:
    return tuple(
        prefix + group.name
        for group in groups
        if group.phase == phase and any(slices.owner.get(node) == index for node in group.nodes)
    )


def num_bytes(nodes: Iterable[fx.Node]) -> int:
    """Bytes of the nodes' values, each node once; an expanded dimension is one element."""
    return sum(map(reads.num_bytes, dict.fromkeys(nodes)))
