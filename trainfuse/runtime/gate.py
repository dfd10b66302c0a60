"""The gate: each new kernel is compared with ATen, on its first inputs, before it is trusted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from autodiff.jitter import AS_FAR, ROUNDINGS, Jitter
from autodiff.mismatch import WORKING_BYTES, Comparison, mismatch
from autodiff.reference import Environment
from trainfuse.runtime import ties
from trainfuse.runtime.fallback import Boundary
from trainfuse.runtime.reference import Native, Widened, evaluate
from trainfuse.runtime.reference_schedule import schedule
from trainfuse.runtime.room import SHARE, device_of, free_bytes

if TYPE_CHECKING:
    from trainfuse.fusion.plan import FusionGroup

Again = Callable[[int], "list[Tensor] | None"]


@dataclass(frozen=True, slots=True)
class References:
    """One group's outputs by ATen: in its own precision, and one higher (fp64 for fp32).

    They are on the device or, where that is short of memory, on the host. slack: how far a result
    may be off because a comparison is as good as tied.
    """

    native: list[Tensor]
    exact: list[Tensor]
    slack: list[Tensor | None]


@dataclass
class Gate:
    """Compares kernels with ATen. factor: how much worse than eager's own error one may be.

    passed: keys of the kernels that did; one set serves every plan of a process.
    """

    factor: float = 2.0
    passed: set[str] = field(default_factory=set)

    def references(
        self, nodes: Sequence[fx.Node], env: Environment, outputs: Sequence[fx.Node]
    ) -> References | None:
        """ATen's results, to be had before the kernel runs: it may overwrite an input.

        Takes half of the device's free memory at most, the widest node's operands included; None
        where that does not do.
        """
        return self.all_references(nodes, [env], outputs)[0]

    def all_references(
        self, nodes: Sequence[fx.Node], envs: Sequence[Environment], outputs: Sequence[fx.Node]
    ) -> list[References | None]:
        """The same of several inputs, where sizes differ at most in what the nodes don't see."""
        tied = ties.decisions(nodes)
        inside = set(nodes)
        compared = [n for decision in tied for n in decision.operands if n in inside]
        wanted, device = [*outputs, *compared], device_of(envs[0].values())
        as_is, wide = (_Evaluation(nodes, wanted, device, wide=wide) for wide in (False, True))
        found: list[References | None] = []
        for env in envs:
            try:
                native, exact = as_is(env), wide(env)
            except torch.OutOfMemoryError:
                found.append(None)
                continue
            results = [exact[node] for node in outputs]
            room = self._room(nodes, env, outputs, tied, (native, exact), results)
            found.append(References([native[node] for node in outputs], results, room))
        return found

    def _room(
        self,
        nodes: Sequence[fx.Node],
        env: Environment,
        outputs: Sequence[fx.Node],
        tied: Sequence[ties.Decision],
        values: tuple[Environment, Environment],
        results: Sequence[Tensor],
    ) -> list[Tensor | None]:
        """How far each result may be off because comparisons are as good as tied."""

        def again(skipped: Collection[fx.Node], given: Environment) -> list[Tensor]:
            rest = [node for node in nodes if node not in skipped]
            made = _Evaluation(rest, outputs, device, wide=True)({**env, **given})
            return [made[node] for node in outputs]

        if tied:
            device = device_of(env.values())
            native, exact = ({**env, **made} for made in values)
            with contextlib.suppress(torch.OutOfMemoryError):
                return ties.slack(tied, native, exact, results, again, device)
        return [None] * len(results)

    def compare(
        self, ours: Sequence[Tensor], refs: References, again: Again | None = None
    ) -> str | None:
        """What is wrong with the kernel's outputs, or None.

        again: as `rounded_otherwise` gives it. What seems wrong is compared with that, too: ATen's
        one result may be exact by luck.
        """
        wrong = self.compare_all([(ours, refs)])
        if wrong is None or again is None:
            return wrong
        near = 0
        for seed in range(ROUNDINGS):
            native = again(seed)
            if native is None:
                break
            near += self.compare_all([(ours, replace(refs, native=native))]) is None
            if near == AS_FAR:
                return None
        return wrong

    def rounded_otherwise(
        self, nodes: Sequence[fx.Node], env: Environment, outputs: Sequence[fx.Node]
    ) -> Again:
        """ATen's results as other roundings might have made them, by seed; None: no memory."""

        def again(seed: int) -> list[Tensor] | None:
            try:
                evaluation = _Evaluation(nodes, outputs, device_of(env.values()), wide=False)
                with Jitter(seed, operands=True):
                    made = evaluation(env)
            except torch.OutOfMemoryError:
                return None
            return [made[node] for node in outputs]

        return again

    def compare_all(self, pairs: Sequence[tuple[Sequence[Tensor], References]]) -> str | None:
        """The same of several launches' outputs; the device is waited for once."""
        asked = [
            (i, three, Comparison(*three, self.factor), room)
            for ours, refs in pairs
            for i, (*three, room) in enumerate(
                zip(ours, refs.native, refs.exact, refs.slack, strict=True)
            )
        ]
        for i, (out, native, exact), comparison, room in asked:
            wrong = comparison.wrong()
            if wrong is not None and room is not None:
                near = [ties.forgiven(value, exact, room) for value in (out, native)]
                wrong = mismatch(*near, exact, self.factor)
            if wrong is not None:
                return f"output {i}: {wrong}"
        return None


class _Evaluation:
    """Nodes made ready to be evaluated by ATen; wide: one precision higher."""

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        wanted: Sequence[fx.Node],
        device: torch.device,
        *,
        wide: bool,
    ) -> None:
        free = free_bytes(device)
        budget = None if free is None else int(SHARE * free)
        keep = None if budget is None else budget // 4
        self._plan = schedule(nodes, wanted, wide=wide, budget=budget, keep=keep)
        self._run = Widened(Boundary()) if wide else Native()

    def __call__(self, env: Environment) -> Environment:
        """Values of what is wanted."""
        values = evaluate(self._plan, env, self._run)
        return {node: _at_least(value, node.meta.get("val")) for node, value in values.items()}


def _at_least(value: Any, like: Any) -> Any:
    """A value in no narrower a type than the graph's: a cast passes on what it reads."""
    if not isinstance(value, Tensor) or value.dtype.itemsize >= like.dtype.itemsize:
        return value
    return value.to(like.dtype)


def bytes_to_check(group: FusionGroup) -> int:
    """The least that a check of its kernel takes: its widest operator, and its results twice."""
    widest = schedule(group.nodes, group.outputs, wide=True, budget=0, keep=0).peak_bytes
    results = schedule(group.nodes, group.outputs, wide=False).kept_bytes
    return widest + 2 * results + WORKING_BYTES


def group_environment(group: FusionGroup, inputs: Sequence[Tensor]) -> dict[fx.Node, Tensor]:
    """Values by node of what a group reads."""
    return dict(zip(group.inputs, inputs, strict=True))
