"""What may be saved or computed again of a forward, at which price: one minimum-cut problem."""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from . import ops
from .exact import between, exact_pairs
from .graph import TrainingGraph
from .liveness import maker_of
from .mincut import INFINITE, FlowNetwork
from .philox import KEEP_MASK
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


DEFAULT = Effort(pointwise=1, materialize=24)
"""What runs without a memory budget: nothing that costs time again."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Prices of one cut: `early` for the first `bound` forward nodes, `late` for the others.

    kept: values that are saved if they are needed at all, as checkpoints are.
    """

    late: Effort = DEFAULT
    early: Effort = DEFAULT
    bound: int = 0
    kept: frozenset[fx.Node] = frozenset()


class CutProblem:
    """One graph's cut problem: built once, cut at several prices.

    forward: inputs and forward nodes that a later phase's values are computed from, in order.
    needed: those that a later phase reads. static: inputs that live through the step anyway
    (static_inputs None: all of them). demanded: forward values that the backward returns unchanged.
    """

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
        for compared, made in exact_pairs(tg, of_kernels=False):
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

    def cut(self, plan: Plan) -> tuple[list[fx.Node], list[fx.Node]]:
        """(saved, recomputed) at these prices, in graph order."""
        source, sink = 2 * len(self.forward), 2 * len(self.forward) + 1
        network = FlowNetwork(2 * len(self.forward) + 2)
        index = {node: i for i, node in enumerate(self.forward)}
        for node, i in index.items():
            network.add_edge(2 * i, 2 * i + 1, self._save_cost(node))
            again = self._again_cost(node, plan.early if i < plan.bound else plan.late)
            if node in plan.kept:
                again = INFINITE
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
        if ops.lookup(node.target).name == KEEP_MASK:
            return INFINITE  # the seed is saved instead
        if node in self.tagged and not self._leaves_checkpoint(node) and not self._is_kept(node):
            return INFINITE
        maker = maker_of(node)
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
        return ops.draws_randomness(maker_of(node)) or any(
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
        if self._materialized(node):
            cost += size * effort.materialize
        return cost

    def why_saved(self, node: fx.Node, plan: Plan) -> str:
        """The reason, in words, why a saved value is not computed again."""
        maker = maker_of(node)
        row = ops.lookup(maker.target)
        if maker.op != "call_function":
            return "an input of the region"
        if ops.draws_randomness(maker):
            return "random: drawn once"
        if node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE:
            return "the checkpoint's policy keeps it"
        if row.cost == "never":
            return f"{row.name} may not come out the same twice"
        if node in plan.kept:
            return "a checkpoint, for memory_budget"
        if node in self.tagged:
            return "read outside its checkpoint"
        if row.cost == "expensive":
            return "dearer to compute again than to keep"
        if maker in self.lasting or node in self.lasting:
            return "the forward keeps it across a contraction anyway"
        if row.cost == "moderate":
            return "a reduction or gather: dearer again than kept"
        if self._materialized(node):
            return "a contraction of the backward reads it"
        return "less than what it would be made of"

    def why_again(self, node: fx.Node, by_default: bool) -> str:
        """The reason, in words, why a value is computed again."""
        if ops.lookup(node.target).name == KEEP_MASK:
            return "drawn again from its saved seed"
        if node in self.tagged:
            return "inside a checkpoint"
        return "cheap, inside the kernels that read it" if by_default else "memory_budget"

    def _materialized(self, node: fx.Node) -> bool:
        """Whether an operator that is no kernel of ours reads the value after the forward."""
        return any(
            user not in self.members and user.op == "call_function" and not takes_registers(user)
            for user in readers_of(node)
        )


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
