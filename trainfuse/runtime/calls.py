"""A group as the program calls it: gated on its first call, a bare launch from then on."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx

from autodiff.reference import run_nodes
from trainfuse.log import get_logger
from trainfuse.runtime.emit import operators
from trainfuse.runtime.fallback import Boundary, Failure, Stage
from trainfuse.runtime.gate import Again, Gate, References, group_environment
from trainfuse.runtime.launch import GroupLauncher
from trainfuse.runtime.layout import as_planned, copy_to, strayed, varied
from trainfuse.runtime.repro import write_repro

if TYPE_CHECKING:
    from trainfuse.codegen.ir import GroupKernel
    from trainfuse.fusion.plan import FusionGroup

_log = get_logger("gate")


class GroupCall:
    """Launches one group. `failed` is set once it runs as ATen; the plan then prints it so.

    gate: None trusts the kernel. where: the user's source line. suspected_by: a gate that compares
    at every call, whatever passed before: kernels are shared, and a value may break only one use.
    insists: raise OutOfMemoryError where there is no memory for a comparison, instead of going on
    without.
    """

    def __init__(
        self,
        group: FusionGroup,
        kernel: GroupKernel,
        launcher: GroupLauncher,
        boundary: Boundary,
        gate: Gate | None,
        repro_folder: Path | None,
        where: str | None = None,
    ) -> None:
        self.group, self.kernel, self.launcher = group, kernel, launcher
        self._boundary, self._gate, self._repro_folder = boundary, gate, repro_folder
        self._where = where
        self._trusted = False
        self._strayed: tuple[int, ...] = ()
        self.failed = False
        self.suspected_by: Gate | None = None
        self.insists = False

    def __call__(self, *inputs: Tensor, out: Sequence[Tensor]) -> None:
        """Write the group's outputs into `out`, in the order of group.outputs."""
        if self._trusted and self.suspected_by is None:
            self.launcher(as_planned(self.group.inputs, inputs, self._strayed), out)
        else:
            self._strayed = strayed(self.group.inputs, inputs)
            self._checked(as_planned(self.group.inputs, inputs, self._strayed), out)

    def _checked(self, inputs: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        key = self.kernel.key
        if key in self._boundary.failures:
            self._run_aten(inputs, out, None)
            return
        gate = None if self._gate is None or key in self._gate.passed else self._gate
        gate = self.suspected_by or gate
        refs = None if gate is None else self._references(gate, inputs)
        kept = _keep_overwritten(inputs, out) if refs is not None else inputs
        stage: Stage = "launch"
        problem = self._boundary.attempt(lambda: self.launcher(inputs, out), stage)
        shown = kept
        if problem is None and refs is not None and gate is not None:
            try:
                stage, problem = "gate", gate.compare(out, refs, self._again(gate, kept))
                if problem is None and self.suspected_by is None:
                    problem, shown = self._trial(gate, kept, inputs, out)
            except torch.OutOfMemoryError:
                self._not_compared()
        if problem is not None:
            places = {t.data_ptr(): i for i, t in enumerate(inputs)}
            shared = {i: places[t.data_ptr()] for i, t in enumerate(out) if t.data_ptr() in places}
            self._fail(stage, problem, shown, shared)
            self._run_aten(kept, out, refs)
            return
        if gate is not None and refs is not None:
            gate.passed.add(key)
        self._trusted = True

    def _references(self, gate: Gate, inputs: Sequence[Tensor]) -> References | None:
        group = self.group
        refs = gate.references(group.nodes, group_environment(group, inputs), group.outputs)
        if refs is None:
            self._not_compared()
        return refs

    def _again(self, gate: Gate, inputs: Sequence[Tensor]) -> Again:
        group = self.group
        env = group_environment(group, inputs)
        return gate.rounded_otherwise(group.nodes, env, group.outputs)

    def _not_compared(self) -> None:
        if self.insists:
            raise torch.OutOfMemoryError(f"no memory to compare {self.group.name}")
        _log.warning("%s was not compared: no memory for its reference", self.group.name)

    def _trial(
        self, gate: Gate, kept: list[Tensor], inputs: Sequence[Tensor], out: Sequence[Tensor]
    ) -> tuple[str | None, list[Tensor]]:
        """What is wrong where constant inputs are none, or None; and the inputs that show it.

        kept: the inputs as they were. A new network is full of zeros and ones.
        """
        instead = [varied(t) for t in kept]
        if all(t is None for t in instead):
            return None, kept
        given = [k if v is None else v for k, v in zip(kept, instead, strict=True)]
        written = {t.data_ptr() for t in out}
        refs = self._references(gate, given)
        if refs is None:
            return None, kept
        read = [
            copy_to(new, new.device) if t.data_ptr() in written else new
            for t, new in zip(inputs, given, strict=True)
        ]
        places = {t.data_ptr(): new for t, new in zip(inputs, read, strict=True)}
        made = [places.get(t.data_ptr(), torch.empty_strided(t.shape, t.stride(),
                dtype=t.dtype, device=t.device)) for t in out]  # fmt: skip
        problem = self._boundary.attempt(lambda: self.launcher(read, made), "launch")
        problem = problem or gate.compare(made, refs, self._again(gate, given))
        return problem and f"{problem}, where constant inputs are varied", given

    def _fail(
        self, stage: Stage, problem: str, inputs: Sequence[Tensor], shared: Mapping[int, int]
    ) -> None:
        write = functools.partial(
            write_repro, self._repro_folder, self.group, self.kernel, inputs, problem, shared
        )
        repro = self._boundary.attempt(write, stage)  # a full disk, say, must not stop the run
        self._boundary.record(
            self.kernel.key, group_failure(self.group, stage, problem, self._where, repro)
        )

    def _run_aten(
        self, inputs: Sequence[Tensor], out: Sequence[Tensor], refs: References | None
    ) -> None:
        self.failed = True
        if refs is None:
            values = run_nodes(self.group.nodes, group_environment(self.group, inputs))
            results = [values[n] for n in self.group.outputs]
        else:
            results = refs.native  # copied from the host where they wait there
        for target, value in zip(out, results, strict=True):
            target.copy_(value)


def group_failure(
    group: FusionGroup, stage: Stage, problem: str, where: str | None, repro: str = ""
) -> Failure:
    """A failure with the group's name, operators and line."""
    nodes: Sequence[fx.Node] = group.nodes
    return Failure(group.name, stage, problem, operators(nodes), where, repro)


def _keep_overwritten(inputs: Sequence[Tensor], out: Sequence[Tensor]) -> list[Tensor]:
    """The inputs, with clones of those that the kernel writes in place."""
    written = {t.untyped_storage().data_ptr() for t in out}
    return [
        t.clone(memory_format=torch.preserve_format)
        if t.untyped_storage().data_ptr() in written
        else t
        for t in inputs
    ]
