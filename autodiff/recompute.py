"""What the backward phase saves and what it computes again: one minimum cut over real bytes."""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from . import ops
from .duplication import duplicate
from .exact import between, exact_pairs
from .graph import TrainingGraph
from .mincut import INFINITE, FlowNetwork
from .reads import (
    fixed_readers,
    is_fusible,
    is_view,
    num_bytes,
    readers_of,
    takes_registers,
)

# Costs are in units of a sixteenth of a byte moved, so that cheap arithmetic has a price.
_BYTE = 16


@dataclass(frozen=True, slots=True)
class Effort:
    """How far recompute goes.

    pointwise: price of computing one byte again in a fused kernel. materialize: price of writing
    a recomputed value that a GEMM of the backward reads. lasting: price of a value that the
    forward keeps across a GEMM, such as a residual stream: computing it again keeps it across
    the backward too. moderate, contraction: price of a reduction, norm or gather, and of a GEMM.
    None forbids it.
    """

    pointwise: int
    materialize: int
    lasting: int | None = None
    moderate: int | None = None
    contraction: int | None = None


# Tried in this order until the memory budget is met; the first is what runs without a budget.
EFFORTS: tuple[Effort, ...] = (
    Effort(pointwise=1, materialize=24),
    Effort(pointwise=0, materialize=2),
    Effort(pointwise=0, materialize=0, moderate=4),
    *(
        Effort(pointwise=0, materialize=0, lasting=24, moderate=1, contraction=price)
        for price in (24, 12, 6, 3, 1)
    ),
    Effort(pointwise=0, materialize=0, lasting=0, moderate=0, contraction=0),
)


@dataclass(frozen=True, slots=True)
class RecomputeReport:
    """What recompute chose.

    saved, recomputed: names of forward nodes. saved_bytes: of what is saved, inputs that live
    anyway not counted. baseline_bytes: the same for saving all that the derivative formulas read.
    within_budget: False when even the greatest effort exceeds the memory budget.
    """

    saved: tuple[str, ...]
    saved_bytes: int
    recomputed: tuple[str, ...]
    baseline_bytes: int
    within_budget: bool = True


@dataclass(frozen=True, slots=True)
class Choice:
    """Forward nodes (and inputs) that cross into the backward, and those computed again."""

    saved: tuple[fx.Node, ...]
    recomputed: tuple[fx.Node, ...]
    report: RecomputeReport


def plan_recompute(
    tg: TrainingGraph, memory_budget: float | None = None
) -> tuple[TrainingGraph, RecomputeReport]:
    """Duplicate the recomputed forward nodes into the backward phase of a whole step.

    memory_budget: None, a fraction (a float up to 1) of the baseline's bytes, or bytes. A copy
    stands just before its first reader, in that reader's phase, links to what its readers derive
    from (a recomputed node belongs to the backward that needs it) and keeps its source line.
    """
    choice = choose(tg, memory_budget)
    if not choice.recomputed:
        return tg, choice.report
    return duplicate(tg, choice.recomputed), choice.report


def choose(
    tg: TrainingGraph,
    memory_budget: float | None = None,
    *,
    static_inputs: Collection[fx.Node] | None = None,
    demanded: Collection[fx.Node] = (),
) -> Choice:
    """Choose what to save, with the least effort that meets the budget.

    static_inputs: placeholders that live through the step anyway (None: all of them).
    demanded: forward values that the backward returns unchanged.
    """
    problem = _Problem(tg, static_inputs, demanded)
    baseline = problem.baseline_bytes()
    limit = _limit(memory_budget, baseline)
    best: tuple[int, list[fx.Node], list[fx.Node]] | None = None
    for effort in EFFORTS:
        saved, recomputed = problem.cut(effort)
        cost = sum(problem.held_bytes(node) for node in saved)
        if best is None or cost < best[0]:
            best = cost, saved, recomputed
        if limit is None or cost <= limit:
            break
    assert best is not None
    cost, saved, recomputed = best
    report = RecomputeReport(
        saved=tuple(node.name for node in saved if node.op == "call_function"),
        saved_bytes=cost,
        recomputed=tuple(node.name for node in recomputed),
        baseline_bytes=baseline,
        within_budget=limit is None or cost <= limit,
    )
    return Choice(tuple(saved), tuple(recomputed), report)


def _limit(memory_budget: float | None, baseline: int) -> int | None:
    if memory_budget is None:
        return None
    if isinstance(memory_budget, float) and memory_budget <= 1.0:
        return int(memory_budget * baseline)
    return int(memory_budget)


class _Problem:
    """One graph's cut problem: built once, cut at several efforts."""

    def __init__(
        self,
        tg: TrainingGraph,
        static_inputs: Collection[fx.Node] | None,
        demanded: Collection[fx.Node],
    ) -> None:
        self.tg = tg
        inputs = [fact for fact in tg.inputs if fact.kind != "tangent"]
        names = {fact.name for fact in inputs}
        self.forward = [
            node
            for node in tg.graph.nodes
            if node.op == "get_attr"
            or (node.op == "placeholder" and node.name in names)
            or (node.op == "call_function" and tg.phase(node) == "forward")
        ]
        members = set(self.forward)
        self.static = {
            node
            for node in self.forward
            if node.op == "get_attr"
            or (node.op == "placeholder" and (static_inputs is None or node in static_inputs))
        }
        fixed = fixed_readers(tg)
        self.needed = {
            node
            for node in self.forward
            if node in demanded
            or any(
                user not in members and user.op != "output" and user not in fixed
                for user in node.users
            )
        }
        self.members = members
        self.lasting = self._find_lasting()
        self.written = {node for node in tg.output_nodes if isinstance(node, fx.Node)}
        self.exact: dict[fx.Node, set[fx.Node]] = {}
        for compared, made in exact_pairs(tg):
            self.exact.setdefault(compared, set()).update(between(compared, made) & members)
        self._restrict()

    def _restrict(self) -> None:
        """Keep only what a needed value is computed from."""
        relevant: set[fx.Node] = set()
        pending = list(self.needed)
        while pending:
            node = pending.pop()
            if node not in relevant:
                relevant.add(node)
                pending.extend(node.all_input_nodes)
        self.forward = [node for node in self.forward if node in relevant]
        self.tagged = {node for node in self.forward if _must_recompute(node)}

    def _find_lasting(self) -> set[fx.Node]:
        """Values read again after a kernel boundary that they lead to, so held in memory."""
        position = {node: i for i, node in enumerate(self.forward)}
        boundary: dict[fx.Node, int] = {}
        last_read: dict[fx.Node, int] = {}
        for node in reversed(self.forward):
            first, last = len(position), -1
            for user in node.users:
                if user not in position:
                    continue
                through = is_view(user) or user.target is operator.getitem
                last = max(last, last_read[user] if through else position[user])
                passes = through or takes_registers(user)
                first = min(first, boundary[user] if passes else position[user])
            boundary[node], last_read[node] = first, last
        return {node for node in self.forward if last_read[node] > boundary[node]}

    def held_bytes(self, node: fx.Node) -> int:
        """Memory that saving a node costs."""
        return 0 if node in self.static else num_bytes(node)

    def baseline_bytes(self) -> int:
        """Bytes held if everything the derivative formulas read were saved."""
        bases: set[fx.Node] = set()
        for node in self.needed:
            base = node
            while base.op == "call_function" and is_view(base):
                parent = base.args[0]
                assert isinstance(parent, fx.Node)
                base = parent
            bases.add(base)
        return sum(self.held_bytes(node) for node in bases)

    def cut(self, effort: Effort) -> tuple[list[fx.Node], list[fx.Node]]:
        """(saved, recomputed) at one effort, in graph order."""
        source, sink = 2 * len(self.forward), 2 * len(self.forward) + 1
        network = FlowNetwork(2 * len(self.forward) + 2)
        index = {node: i for i, node in enumerate(self.forward)}
        for node, i in index.items():
            network.add_edge(2 * i, 2 * i + 1, self._save_cost(node))
            again = self._again_cost(node, effort)
            if again > 0:
                network.add_edge(source, 2 * i, again)
            if node in self.needed:
                network.add_edge(2 * i + 1, sink, INFINITE)
            for user in node.users:
                if user in index:
                    network.add_edge(2 * i + 1, 2 * index[user], INFINITE)
            for made in self.exact.get(node, ()):
                if made in index:  # computed again, it is compared with what is made of it again
                    network.add_edge(2 * index[made], 2 * i, INFINITE)
        reached = network.source_side(source, sink)
        assert reached is not None, "a value can be neither saved nor computed again"
        saved = [n for n, i in index.items() if 2 * i in reached and 2 * i + 1 not in reached]
        recomputed = [n for n, i in index.items() if 2 * i not in reached]
        return saved, recomputed

    def _save_cost(self, node: fx.Node) -> int:
        """Price of keeping a value: its read, and its write where no kernel stores it anyway."""
        if node in self.static:
            return 0
        value = node.meta.get("val")
        if isinstance(value, (tuple, list)) or (node.op == "call_function" and is_view(node)):
            return INFINITE  # the parts are saved, and the base: a view holds the whole storage
        if not isinstance(value, torch.Tensor):
            return 0
        if ops.lookup(node.target).name == "trainfuse.keep_mask.default":
            return INFINITE  # the seed is saved instead
        if node in self.tagged and not self._leaves_checkpoint(node) and not self._is_kept(node):
            return INFINITE
        maker = node.args[0] if node.target is operator.getitem else node
        assert isinstance(maker, fx.Node)
        stored = (
            node.op == "placeholder"
            or not is_fusible(maker)
            or node in self.written
            or node in self.lasting
            or any(
                user in self.members and not takes_registers(user)
                for user in readers_of(node)
                if user.op == "call_function"
            )
        )
        return max(num_bytes(node), 1) * _BYTE * (1 if stored else 2)

    def _leaves_checkpoint(self, node: fx.Node) -> bool:
        """Whether a tagged value is read outside its checkpointed region, where eager keeps it."""
        region = node.meta.get("ac_graph_id")
        source = node.args[0] if node.target is operator.getitem else node
        assert isinstance(source, fx.Node)
        return ops.draws_randomness(source) or any(
            user in self.members
            and (not _must_recompute(user) or user.meta.get("ac_graph_id") != region)
            for user in node.users
        )

    def _is_kept(self, node: fx.Node) -> bool:
        """Whether a value is compared with something that its checkpoint doesn't make again."""
        return not self.exact.get(node, set()) <= self.tagged

    def _again_cost(self, node: fx.Node, effort: Effort) -> int:
        """Price of computing a value again; INFINITE where that is wrong or forbidden."""
        if node.op != "call_function":
            return INFINITE
        if ops.draws_randomness(node) or ops.is_effect(node):
            return INFINITE
        if node in self.tagged:
            return 0
        if node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE:
            return INFINITE
        if node.target is operator.getitem:
            return 0  # its tuple has the price
        size = max(_total_bytes(node), 1)
        match ops.lookup(node.target).cost:
            case "free":
                return 0
            case "cheap":
                cost = size * effort.pointwise
            case "moderate" if effort.moderate is not None:
                cost = size * effort.moderate
            case "expensive" if effort.contraction is not None:
                cost = size * effort.contraction
            case _:
                return INFINITE
        if node in self.lasting:
            if effort.lasting is None:
                return INFINITE
            cost += size * effort.lasting
        if any(
            user not in self.members and user.op == "call_function" and not takes_registers(user)
            for user in readers_of(node)
        ):
            cost += size * effort.materialize
        return cost


def _total_bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        return sum(num_bytes(user) for user in node.users)
    return num_bytes(node)


def _must_recompute(node: fx.Node) -> bool:
    return node.meta.get("recompute") in (
        CheckpointPolicy.MUST_RECOMPUTE,
        CheckpointPolicy.PREFER_RECOMPUTE,
    )


def saved_values(choice: Choice) -> tuple[list[fx.Node], list[Any]]:
    """The saved nodes as AOTAutograd wants them: tensors, then sizes."""
    tensors = [n for n in choice.saved if isinstance(n.meta.get("val"), torch.Tensor)]
    sizes = [n for n in choice.saved if isinstance(n.meta.get("val"), torch.SymInt)]
    return tensors, sizes
