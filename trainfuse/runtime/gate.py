"""The gate: each new kernel is compared with ATen, on its first inputs, before it is trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx

from autodiff.mismatch import mismatch
from trainfuse.runtime.fallback import Boundary
from trainfuse.runtime.reference import Widened, evaluate, natively, schedule
from trainfuse.runtime.room import SHARE, device_of, free_bytes

if TYPE_CHECKING:
    from trainfuse.fusion.plan import FusionGroup


@dataclass(frozen=True, slots=True)
class References:
    """One group's outputs by ATen: in its own precision, and one higher (fp64 for fp32).

    They are on the device or, where that is short of memory, on the host.
    """

    native: list[Tensor]
    exact: list[Tensor]


@dataclass
class Gate:
    """Compares kernels with ATen. factor: how much worse than eager's own error one may be.

    passed: keys of the kernels that did; one set serves every plan of a process.
    """

    factor: float = 2.0
    passed: set[str] = field(default_factory=set)

    def references(
        self, nodes: Sequence[fx.Node], env: dict[fx.Node, Tensor], outputs: Sequence[fx.Node]
    ) -> References | None:
        """ATen's results, to be had before the kernel runs: it may overwrite an input.

        Takes half of the device's free memory at most, the widest node's operands included; None
        where that does not do.
        """
        found: list[list[Tensor]] = []
        try:
            for wide in (False, True):
                free = free_bytes(device_of(env.values()))
                budget = None if free is None else int(SHARE * free)
                keep = None if budget is None else budget // 4
                plan = schedule(nodes, outputs, wide=wide, budget=budget, keep=keep)
                run = Widened(Boundary()) if wide else natively
                values = evaluate(plan, env, run)
                found.append([values[node] for node in outputs])
        except torch.OutOfMemoryError:
            return None
        return References(*found)

    def compare(self, ours: Sequence[Tensor], refs: References) -> str | None:
        """What is wrong with the kernel's outputs, or None."""
        for i, (out, native, exact) in enumerate(zip(ours, refs.native, refs.exact, strict=True)):
            wrong = mismatch(out, native, exact, self.factor)
            if wrong is not None:
                return f"output {i}: {wrong}"
        return None


def group_environment(group: FusionGroup, inputs: Sequence[Tensor]) -> dict[fx.Node, Tensor]:
    """Values by node of what a group reads."""
    return dict(zip(group.inputs, inputs, strict=True))
