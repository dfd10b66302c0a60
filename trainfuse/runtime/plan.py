"""A plan: one captured step made executable, from its first, checked call to replay."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor, fx

from autodiff import ops
from autodiff.graph import TrainingGraph
from trainfuse.errors import CudaGraphUnavailable
from trainfuse.log import get_logger
from trainfuse.runtime.cuda_graph import (
    GraphState,
    Replay,
    capture_stream,
    is_static,
    uploaded,
    why_not,
)
from trainfuse.runtime.foreach import UpdateCall
from trainfuse.runtime.gate import Gate, bytes_to_check
from trainfuse.runtime.program import Program, RuntimeOptions, build_program
from trainfuse.runtime.reference_schedule import bytes_of
from trainfuse.runtime.room import EVERYTHING, device_of, empty, free_bytes
from trainfuse.runtime.snapshot import Snapshot, entries_restored_on_failure

if TYPE_CHECKING:
    from trainfuse.capture.optimizers import UpdateHandle
    from trainfuse.codegen.ir import GroupKernel
    from trainfuse.fusion.plan import FusionPlan
    from trainfuse.runtime.checks import Checks

CudaGraphMode = Literal["auto", "require", "off"]
Look = Callable[[Snapshot], Callable[[Sequence[Any], Sequence[Any]], None]]
T = TypeVar("T")
_MAX_CAPTURES = 8
_UNUSABLE = 1.125
"""Memory that a step's values take of an allocator, of their own bytes."""
_log, _gate_log = get_logger("cuda_graph"), get_logger("gate")


def _look_at_nothing(_: Snapshot) -> Callable[[Sequence[Any], Sequence[Any]], None]:
    return lambda args, outputs: None


@dataclass(slots=True)
class PlanStats:
    """Counters of one plan."""

    calls: int = 0
    captures: int = 0
    replays: int = 0


class Plan:
    """Runs one training graph. The first call is a training step like any other.

    Call 1 runs the program with every new kernel gated; should it not finish, the training state
    is what it was. Call 2 captures a CUDA graph where that is allowed, later calls replay it.
    Kernels that failed are replaced by ATen in the text. `cuda_graph` says what happened and why.
    checks: what is asked of calls beside the gate's check of kernels; None for nothing.
    Raises CudaGraphUnavailable when one is required and can't be had, FusionError when a kernel
    fails and fallback is off.
    """

    def __init__(
        self,
        tg: TrainingGraph,
        plan: FusionPlan | None,
        kernels: Mapping[str, GroupKernel],
        handles: Mapping[int, UpdateHandle],
        options: RuntimeOptions,
        *,
        cuda_graph: CudaGraphMode = "auto",
        no_graph_because: str | None = None,
        checks: Checks | None = None,
    ) -> None:
        self.tg, self.options, self.checks = tg, options, checks
        self._plan, self._kernels, self._handles = plan, kernels, handles
        self._mode = cuda_graph
        self._static = is_static(tg)
        names = [fact.name for fact in tg.inputs]
        self._mutated = frozenset(names.index(name) for name in tg.mutations)
        uploads = uploaded(tg)
        placeholders = tg.graph.find_nodes(op="placeholder")
        self._uploads = {i: uploads[n] for i, n in enumerate(placeholders) if n in uploads}
        self._device = _cuda_device(tg)
        self._replay: Replay | None = None
        self._step_bytes: int | None = None
        self.tight = False
        self.stats = PlanStats()
        self.calls_since_check = self._captures_since_check = 0
        reason = no_graph_because or ("it is off" if cuda_graph == "off" else self._why_not())
        self.cuda_graph = GraphState(False, reason or "not captured yet")
        self._wanted = reason is None
        if reason is not None:
            self.no_graph(reason)
        self.program = self._build()

    # -- inspection ---------------------------------------------------------------------------

    @property
    def source(self) -> str:
        """The Python text that runs."""
        return self.program.source

    @property
    def failures(self) -> dict[str, Any]:
        """Kernels that run as ATen, by key."""
        return self.options.boundary.failures

    # -- running ------------------------------------------------------------------------------

    def __call__(self, args: list[Any]) -> list[Any]:
        """One step: args in the order of the graph's inputs; returns the user's outputs.

        The list may be emptied, so that inputs that nobody else holds die at their last use.
        """
        with self._on_device():
            if self.checks is not None:
                outputs = self.checks(self, args)
            else:
                first = self.calls_since_check == 0
                outputs = self.roomy(lambda: self.first(args)) if first else self.later(args)
        self.stats.calls += 1
        self.calls_since_check += 1
        for update in self.program.updates.values():
            update.after()
        return outputs

    def later(self, args: list[Any]) -> list[Any]:
        """A call of a plan whose kernels are gated: the CUDA graph, or the program."""
        return self._graphed(args) if self._wanted else self.program(args)

    def verify_next(self) -> None:
        """Make the next call a first call: undone should it fail, and without the CUDA graph.

        Kernels keep the verdicts that they have.
        """
        self.drop_replay()
        self.calls_since_check = self._captures_since_check = 0

    @contextlib.contextmanager
    def suspecting(self) -> Iterator[None]:
        """Within the block every kernel is compared at each call, whatever passed before."""
        suspects = [*self.program.groups.values()]
        for call in suspects:
            call.suspected_by = Gate()
        try:
            yield
        finally:
            for call in suspects:
                call.suspected_by = None

    def close(self) -> None:
        """Free the CUDA graph and its memory."""
        self.drop_replay()

    def _why_not(self) -> str | None:
        effects = any(ops.lookup(node.target).kind == "effect" for node in self.tg.nodes())
        if effects and self.options.updates_by_torch:
            return "the optimizer's own step runs on the host"
        return why_not(self.tg)

    def _build(self) -> Program:
        return build_program(self.tg, self._plan, self._kernels, self._handles, self.options)

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        if self._device is None or self._device == torch.cuda.current_device():
            return contextlib.nullcontext()
        return torch.cuda.device(self._device)

    def first(self, args: Sequence[Any], look: Look = _look_at_nothing) -> list[Any]:
        """A step whose kernels are compiled and gated; a failure changes nothing.

        look: called with the snapshot before the step, and its result with what the step made
        after it; either may raise.
        """
        with entries_restored_on_failure(self._handles.values()), self._insisting():
            params = self._prepare(args)
            snapshot = Snapshot(self.written(args), params, self.needed(args))
            with snapshot.restored_on_failure() as saved:
                judge = look(saved)
                outputs = self._run_aside(args) if self._wanted else self.program(list(args))
                judge(args, outputs)
        if self.program.failed:
            updates = self.program.updates
            self.program = self._build()
            for name, update in self.program.updates.items():
                update.adopt(updates[name])
        return outputs

    def written(self, args: Sequence[Any]) -> list[Tensor]:
        """Everything that a step writes: inputs, parameters, optimizer state."""
        return [*(args[i] for i in self._mutated), *self.trained(args)]

    def trained(self, args: Sequence[Any], other_than: Collection[UpdateCall] = ()) -> list[Tensor]:
        """What the updates write, but for some of them: parameters and optimizer state."""
        values = dict(zip(self.tg.graph.find_nodes(op="placeholder"), args, strict=True))
        found: list[Tensor] = []
        for update in self.program.updates.values():
            if update not in other_than:
                found += self._params_of(update, values) + update.state()
        return found

    def roomy(self, call: Callable[[], T]) -> T:
        """A checked call; should memory run out, the same again with what checks hold on the host.

        The first attempt insists on every comparison, the second does without where it must.
        """
        assert not self.tight, "one attempt in little memory is enough"
        try:
            return call()
        except torch.OutOfMemoryError:
            _gate_log.info("a checked call ran out of memory: once more, in less", exc_info=True)
        empty()  # not in the handler: the exception holds what the attempt has allocated
        self.tight = True
        try:
            return call()
        finally:
            self.tight = False

    @contextlib.contextmanager
    def _insisting(self) -> Iterator[None]:
        calls = [*self.program.groups.values()]
        for call in calls:
            call.insists = not self.tight
        try:
            yield
        finally:
            for call in calls:
                call.insists = False

    def needed(self, args: Sequence[Any]) -> int:
        """Bytes of the device to leave free for a checked call, beside what its checks keep.

        The step if nothing is fused, the kernel whose check takes most, and a share for memory that
        is free in pieces too small to use.
        """
        if free_bytes(device_of(args)) is None:
            return 0
        if self.tight:
            return EVERYTHING
        if self._step_bytes is None:
            made = [n for n in self.tg.output_nodes if isinstance(n, fx.Node)]
            effects = (n for n in self.tg.nodes() if ops.lookup(n.target).kind == "effect")
            grads = [g for n in effects for g in n.args[1]]  # type: ignore[union-attr]  # by the operator's schema
            self._step_bytes = bytes_of(self.tg.nodes(), [*made, *grads])
        gate = self.options.gate
        passed = set() if gate is None else gate.passed
        calls = {c.kernel.key: c for c in self.program.groups.values()} if gate else {}
        checks = (bytes_to_check(c.group) for key, c in calls.items() if key not in passed)
        return int(_UNUSABLE * self._step_bytes) + max(checks, default=0)

    def run_instead(self, tg: TrainingGraph, because: str) -> None:
        """Run another graph, with the same inputs and results, by ATen from now on."""
        self.tg, self._plan, self._kernels = tg, None, {}
        self._step_bytes = None
        self.options = replace(self.options, backend="eager")
        self._rebuild(because)

    def update_by_torch(self, because: str) -> None:
        """Let optimizers take torch's own step from now on."""
        self.options = replace(self.options, torch_updates=True)
        self._rebuild(because)

    def _rebuild(self, because: str) -> None:
        self.drop_replay()
        self.no_graph(because)
        self.program = self._build()

    def _prepare(self, args: Sequence[Any]) -> list[Tensor]:
        """Bind each update to its parameters, compile its kernels; returns all of them."""
        values = dict(zip(self.tg.graph.find_nodes(op="placeholder"), args, strict=True))
        wanted, params = [], []
        for update in self.program.updates.values():
            mine = self._params_of(update, values)
            wanted += update.prepare(mine)
            params += mine
        if wanted and self.options.cache is not None and self._device is not None:
            self.options.cache.compile(wanted, self.options.arch)
        return params

    def _params_of(self, update: UpdateCall, values: Mapping[fx.Node, Any]) -> list[Tensor]:
        nodes: Any = update.node.args[0]
        return [values[node] for node in nodes]

    def _run_aside(self, args: Sequence[Any]) -> list[Any]:
        """Run on the stream that will capture, so that libraries set up their workspaces there."""
        assert self._device is not None, "only a graph of GPU work is captured"
        stream, current = capture_stream(self._device), torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            outputs = self.program(list(args))
        current.wait_stream(stream)
        for output in outputs:
            # attention's seeds are on the host even where its fake values say otherwise
            if isinstance(output, Tensor) and output.is_cuda:
                # by its storage: of a conjugated view, torch would record a resolved copy
                storage = output.untyped_storage()
                torch.empty(0, device=output.device).set_(storage).record_stream(current)
        return outputs

    # -- CUDA graph ---------------------------------------------------------------------------

    def _graphed(self, args: list[Any]) -> list[Any]:
        replay = self._replay
        if replay is None or replay.moved(args) or not self._state_holds():
            self.drop_replay()
            replay = self._capture(args)
            if replay is None:
                return self.program(args)
            self._replay = replay
        self.stats.replays += 1
        return replay(args)

    def _state_holds(self) -> bool:
        for update in self.program.updates.values():
            if not update.unmoved():
                return False
        return True

    def _capture(self, args: Sequence[Any]) -> Replay | None:
        if self._captures_since_check == _MAX_CAPTURES:
            self.no_graph("parameters or optimizer state keep moving in memory")
            return None
        values = dict(zip(self.tg.graph.find_nodes(op="placeholder"), args, strict=True))
        for update in self.program.updates.values():
            update.refresh(self._params_of(update, values))
            update.watch()
        made = self.options.boundary.attempt(lambda: self._replay_of(args), "cuda_graph")
        self.stats.captures += 1
        self._captures_since_check += 1
        if isinstance(made, str):
            self.no_graph(f"capture failed: {made}")
            return None
        self.cuda_graph = GraphState(True, "one graph of the whole step")
        _log.info("captured the step as one CUDA graph")
        return made

    def _replay_of(self, args: Sequence[Any]) -> Replay:
        assert self._device is not None, "only a graph of GPU work is captured"
        for call in self.program.groups.values():
            call.launcher.load()
        stream = capture_stream(self._device)
        return Replay(self.program, args, self._static, self._mutated, self._uploads, stream)

    def no_graph(self, reason: str) -> None:
        """Never capture; raises CudaGraphUnavailable where a graph is required."""
        self._wanted = False
        self.cuda_graph = GraphState(False, reason)
        _log.info("no CUDA graph: %s", reason)
        if self._mode == "require":
            raise CudaGraphUnavailable(reason=reason)

    def drop_replay(self) -> None:
        """Give up the CUDA graph; a later call captures another."""
        if self._replay is not None:
            self._replay.close()
            self._replay = None


def _cuda_device(tg: TrainingGraph) -> int | None:
    """The one GPU that the graph's tensors are on, or None."""
    for node in tg.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.device.type == "cuda":
            return value.device.index or 0
    return None
