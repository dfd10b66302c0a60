"""The optimizer's update: one launch a bucket of parameters that share a template."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, fx

from autodiff.graph import Refusal
from trainfuse.codegen.schedules.foreach import ForeachKernel, lower_foreach
from trainfuse.codegen.schedules.foreach_tables import (
    all_aligned,
    chunk_for,
    walk_together,
)
from trainfuse.codegen.targets import Target
from trainfuse.log import get_logger
from trainfuse.runtime.cache import Variant
from trainfuse.runtime.fallback import Failure, Stage
from trainfuse.runtime.foreach_launch import ForeachLauncher
from trainfuse.runtime.gate import Gate
from trainfuse.runtime.repro_steps import write_update_repro
from trainfuse.runtime.update_trial import Entry, compare_update, sample_of, update_by_aten

if TYPE_CHECKING:
    from trainfuse.capture.optimizers import Bucket, StateWatch, UpdateHandle
    from trainfuse.capture.update_templates import UpdateTemplate
    from trainfuse.runtime.program import RuntimeOptions

_ALIGNMENT_BYTES = 16
_log = get_logger("program")


class Watcher(Protocol):
    """Looks at an update, and raises for one that is wrong."""

    def before(self, call: UpdateCall, grads: Sequence[Tensor]) -> None:
        """Called before anything is written."""
        ...

    def after(self, call: UpdateCall, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Called when everything has been."""
        ...


class UpdateCall:
    """One update node as the program calls it: `update_7(params, grads)`.

    With kernels (or their ATen stand-in) state is read through the handle's device tensors, so the
    call can be captured; with the eager backend it is torch's own step.
    """

    def __init__(
        self, name: str, node: fx.Node, handle: UpdateHandle, options: RuntimeOptions
    ) -> None:
        self.name, self.node, self.handle, self._options = name, node, handle, options
        self.by_torch = options.updates_by_torch
        self.indices: tuple[int, ...] = ()
        self.buckets: list[BucketCall] = []
        self._watch: StateWatch | None = None
        self.watcher: Watcher | None = None

    def prepare(self, params: Sequence[Tensor]) -> list[tuple[Path, Variant]]:
        """Find the parameters' state and lower their buckets; returns what is to be compiled."""
        indices = tuple(self.handle.index_of(p) for p in params)
        known, self.indices = indices == self.indices, indices
        if self.by_torch:
            return []
        if known and self.buckets:
            for index in indices:  # a call that failed has taken back what it made
                self.handle.make_state(index)
            return []
        gradients: Any = self.node.args[1]
        dtypes = [g.meta["val"].dtype for g in gradients]
        self.buckets = [
            BucketCall(f"{self.name}_{i}" if i else self.name, bucket, self)
            for i, bucket in enumerate(self.handle.buckets(self.indices, dtypes))
        ]
        for bucket in self.buckets:
            bucket.lower(bucket.entries(params, None), self._options)
        return [w for bucket in self.buckets for w in bucket.wanted]

    def __call__(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Update parameters and state in place. `watcher` sees what comes in, and what came out."""
        if self.watcher is not None:
            self.watcher.before(self, grads)
        if self.by_torch:
            self.handle.run_eager(self.indices, grads)
        for bucket in self.buckets:
            bucket(params, grads)
        if self.watcher is not None:
            self.watcher.after(self, params, grads)

    def adopt(self, other: UpdateCall) -> None:
        """Take over what another call of the same node has prepared."""
        self.indices, self.buckets = other.indices, other.buckets

    def state(self) -> list[Tensor]:
        """Everything that the update writes beside the parameters."""
        if self.by_torch:
            optimizer = self.handle.optimizer
            states = [optimizer.state.get(self.handle.params[i], {}) for i in self.indices]
            return [t for state in states for t in state.values() if isinstance(t, Tensor)]
        return [t for bucket in self.buckets for t in bucket.state_tensors()]

    def refresh(self, params: Sequence[Tensor]) -> None:
        """Upload what a capture would otherwise have to."""
        for bucket in self.buckets:
            bucket.refresh(params)

    def unmoved(self) -> bool:
        """Whether the state is still the tensors that `watch` saw, which a capture has baked in."""
        return self.by_torch or (self._watch is not None and self._watch.holds())

    def watch(self) -> None:
        """Remember the state's tensors; at a capture."""
        if not self.by_torch:
            self._watch = self.handle.watch_state()

    def after(self) -> None:
        """Bring the host's view of the step up to date; after each execution or replay."""
        if not self.by_torch:
            self.handle.after_step(self.indices)


class BucketCall:
    """The parameters of one template: lowered, gated and launched together.

    far: of how many of torch's own steps a comparison found most of them further than a rounding.
    """

    def __init__(self, name: str, bucket: Bucket, call: UpdateCall) -> None:
        self.name, self.positions, self.call = name, bucket.positions, call
        self.template: UpdateTemplate = bucket.template
        self._launcher: ForeachLauncher | None = None
        self._options: RuntimeOptions | None = None
        self._trusted = False
        self.far = 0

    # -- tensors ------------------------------------------------------------------------------

    def entries(self, params: Sequence[Tensor], grads: Sequence[Tensor] | None) -> list[Entry]:
        """Role -> tensor of each parameter; gradients in the parameter's layout."""
        handle, indices = self.call.handle, self.call.indices
        own = [r for r in self.template.roles if r not in ("param", "grad")]
        found = []
        for position in self.positions:
            entry = {role: handle.tensor(indices[position], role) for role in own}
            entry["param"] = params[position].detach()
            if grads is not None:
                entry["grad"] = _like(grads[position], entry["param"])
            found.append(entry)
        return found

    def state_tensors(self) -> list[Tensor]:
        """The bucket's state and scalars, parameters excluded."""
        handle, indices = self.call.handle, self.call.indices
        roles = [r for r in self.template.roles if r not in ("param", "grad", "step")]
        found = [handle.tensor(indices[p], role) for p in self.positions for role in roles]
        if "step" in self.template.roles:
            found.append(handle.step_vector(handle.params[indices[self.positions[0]]].device))
        return found

    # -- making the kernel --------------------------------------------------------------------

    def lower(self, entries: list[Entry], options: RuntimeOptions) -> None:
        """Generate the kernel, or settle for ATen, with the reason logged."""
        self._options = options
        reason = next(filter(None, map(walk_together, entries)), None)
        if reason is not None:
            _log.info("%s runs as ATen: %s", self.name, reason)
            return
        kernel = options.boundary.attempt(lambda: self._kernel(entries, options.arch), "lowering")
        if isinstance(kernel, Refusal):
            _log.info("%s runs as ATen: %s (%s)", self.name, kernel.reason, kernel.node)
        elif isinstance(kernel, str):
            self._fail(self.name, "lowering", kernel)
        elif kernel.key not in options.boundary.failures:
            made = options.boundary.attempt(lambda: self._launcher_for(kernel, entries), "compile")
            if isinstance(made, str):
                self._fail(kernel.key, "compile", made)
            else:
                self._launcher = made

    def _kernel(self, entries: list[Entry], arch: str) -> ForeachKernel | Refusal:
        device = entries[0]["param"].device
        sms = 1
        if device.type == "cuda":
            sms = torch.cuda.get_device_properties(device).multi_processor_count
        return lower_foreach(
            self.template.gm,
            self.template.roles,
            self.template.written,
            shared=self.template.shared,
            dtypes={role: tensor.dtype for role, tensor in entries[0].items()},
            chunk=chunk_for(sum(entry["param"].numel() for entry in entries), sms),
            aligned=all_aligned(entries),
            target=Target(arch, sms),
        )

    def _launcher_for(self, kernel: ForeachKernel, entries: Sequence[Entry]) -> ForeachLauncher:
        options = self._options
        assert options is not None
        assert options.cache is not None
        return ForeachLauncher(kernel, entries, options.cache, options.arch, fma=options.fma)

    @property
    def kernel(self) -> ForeachKernel | None:
        """The kernel that updates the bucket; None where it runs as ATen."""
        return None if self._launcher is None else self._launcher.kernel

    @property
    def num_bytes(self) -> int:
        """What one update reads and writes."""
        if self._launcher is None:
            return 0
        params = (self.call.handle.params[self.call.indices[p]] for p in self.positions)
        return self._launcher.kernel.bytes_per_element * sum(p.numel() for p in params)

    @property
    def wanted(self) -> list[tuple[Path, Variant]]:
        """Compilations that the launches need."""
        return [] if self._launcher is None else self._launcher.wanted

    def refresh(self, params: Sequence[Tensor]) -> None:
        """Upload the addresses of parameters and state if one moved; before a capture."""
        if self._launcher is not None:
            self._launcher.refresh(self.entries(params, None))

    # -- running ------------------------------------------------------------------------------

    def __call__(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Update this bucket's parameters."""
        entries = self.entries(params, grads)
        if self._launcher is not None and not self._trusted:
            self._check(self._launcher.kernel, entries)
        if self._launcher is None:
            for entry in entries:
                update_by_aten(self.template, entry)
        else:
            self._launcher(entries)

    def _check(self, kernel: ForeachKernel, entries: list[Entry]) -> None:
        """Gate the kernel on copies of some parameters: a real one can't be updated twice."""
        options, launcher = self._options, self._launcher
        assert options is not None
        assert launcher is not None
        stage: Stage = "compile"
        wrong, repro = options.boundary.attempt(launcher.load, stage), ""
        gate = options.gate
        if wrong is None and gate is not None and kernel.key not in gate.passed:
            stage = "gate"
            for aged in (False, True):
                wrong = options.boundary.attempt(lambda: self._trial(entries, aged, gate), stage)  # noqa: B023  # called at once
                if wrong is not None:
                    repro = self._repro(kernel, entries, aged, wrong)
                    break
            else:
                gate.passed.add(kernel.key)
        if wrong is not None:
            self._fail(kernel.key, stage, wrong, repro)
            return
        self._trusted = True

    def _trial(self, entries: list[Entry], aged: bool, gate: Gate) -> str | None:
        """What is wrong with the kernel's update of copies, or None."""
        assert self._launcher is not None
        sample = sample_of(entries, self.template.shared, aged)
        launcher = self._launcher_for(self._launcher.kernel, sample)
        return compare_update(self.template, sample, launcher, gate)

    def _repro(self, kernel: ForeachKernel, entries: list[Entry], aged: bool, wrong: str) -> str:
        options = self._options
        assert options is not None
        sample = sample_of(entries, self.template.shared, aged)
        write = functools.partial(write_update_repro, options.repro_folder, self.name, kernel)
        return options.boundary.attempt(lambda: write(self.template, sample, wrong), "gate")

    def _fail(self, key: str, stage: Stage, error: str, repro: str = "") -> None:
        assert self._options is not None
        self._launcher = None
        operators = type(self.call.handle.optimizer).__name__
        failure = Failure(self.name, stage, error, operators, repro=repro)
        self._options.boundary.record(key, failure)


def _like(grad: Tensor, param: Tensor) -> Tensor:
    """The gradient with the parameter's strides and a 16-byte address, as kernels assume."""
    if grad.stride() == param.stride() and grad.data_ptr() % _ALIGNMENT_BYTES == 0:
        return grad
    return torch.empty_like(param, dtype=grad.dtype).copy_(grad)
