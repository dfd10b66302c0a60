"""A program: the steps of a training graph, printed as Python, and run as printed."""

from __future__ import annotations

import itertools
import linecache
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import fx

from autodiff import ops
from autodiff.graph import TrainingGraph
from trainfuse.log import get_logger
from trainfuse.runtime.cache import KernelCache
from trainfuse.runtime.calls import GroupCall, group_failure
from trainfuse.runtime.emit import Printer
from trainfuse.runtime.fallback import Boundary
from trainfuse.runtime.foreach import UpdateCall
from trainfuse.runtime.gate import Gate
from trainfuse.runtime.inductor import (
    Segment,
    SegmentCall,
    compile_segment,
    cut,
    worth_compiling,
)
from trainfuse.runtime.launch import INTERPRETER, GroupLauncher
from trainfuse.runtime.memory import Step, fold_results, place_mutations
from trainfuse.runtime.reuse import place_reuse

if TYPE_CHECKING:
    from trainfuse.capture.optimizers import UpdateHandle
    from trainfuse.codegen.ir import GroupKernel
    from trainfuse.fusion.plan import FusionPlan

Backend = Literal["triton", "inductor", "eager"]
_log = get_logger("program")
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class RuntimeOptions:
    """What a plan was built with; settings are read before, never while it runs.

    arch: "sm_90" and the like, or "interpreter". cache: where kernels live; without one there are
    none, and optimizers take torch's own step. gate: None trusts
    every kernel. boundary: what failed so far. repro_folder: None for a temporary one. fma: whether
    kernels may round a product and a sum together. torch_updates: our update was found wrong.
    """

    backend: Backend
    arch: str = INTERPRETER
    cache: KernelCache | None = None
    gate: Gate | None = None
    boundary: Boundary = field(default_factory=Boundary)
    repro_folder: Path | None = None
    fma: bool = True
    torch_updates: bool = False

    @property
    def updates_by_torch(self) -> bool:
        """Whether optimizers take their own step: the eager reference, or no kernels to be had."""
        return self.torch_updates or self.backend == "eager" or self.cache is None


class Program:
    """Executable text. `source` is what runs; pdb and tracebacks show it.

    groups, segments, updates: what the text calls, by name; namespace: all that it refers to.
    Called with a list of inputs, which it empties, so that each can be freed at its last use;
    returns the user's outputs. Mutated inputs are written in place.
    """

    def __init__(
        self,
        source: str,
        namespace: Mapping[str, Any],
        groups: Mapping[str, GroupCall],
        segments: Mapping[str, SegmentCall],
        updates: Mapping[str, UpdateCall],
    ) -> None:
        self.source = source
        self.groups, self.segments, self.updates = dict(groups), dict(segments), dict(updates)
        self.filename = f"<trainfuse program {next(_numbers)}>"
        lines = source.splitlines(keepends=True)
        linecache.cache[self.filename] = (len(source), None, lines, self.filename)
        weakref.finalize(self, linecache.cache.pop, self.filename, None)
        self.namespace = dict(namespace)
        scope = dict(namespace)
        exec(compile(source, self.filename, "exec"), scope)
        self._step: Callable[[list[Any]], list[Any]] = scope["step"]

    def __call__(self, args: list[Any]) -> list[Any]:
        """Run one step on the current stream."""
        with torch.no_grad():
            return self._step(args)

    @property
    def failed(self) -> list[str]:
        """Groups and segments that turned out to need ATen since the text was printed."""
        calls = {**self.groups, **self.segments}
        return [name for name, call in calls.items() if call.failed]


def build_program(
    tg: TrainingGraph,
    plan: FusionPlan | None,
    kernels: Mapping[str, GroupKernel],
    handles: Mapping[int, UpdateHandle],
    options: RuntimeOptions,
) -> Program:
    """Print and load the program of a training graph.

    plan, kernels: needed by the triton backend only; a group without a kernel, or whose kernel has
    failed before, runs as its ATen nodes. handles: by the number in each update node.
    """
    builder = _Builder(tg, kernels, handles, options)
    match options.backend:
        case "triton":
            assert plan is not None, "the triton backend runs a fusion plan"
            builder.fused(plan)
        case "inductor":
            builder.segments()
        case "eager":
            builder.nodes(tg.nodes())
    memory = place_mutations(tg, fold_results(builder.steps))
    memory = place_reuse(tg, memory, kernels)
    printer = Printer(tg, memory, builder.callables)
    source = printer.render()
    _log.info("Optimized Graph:\n%s", source)
    return Program(
        source, printer.namespace, builder.groups, builder.segment_calls, builder.updates
    )


class _Builder:
    """Collects steps and the callables that they name."""

    def __init__(
        self,
        tg: TrainingGraph,
        kernels: Mapping[str, GroupKernel],
        handles: Mapping[int, UpdateHandle],
        options: RuntimeOptions,
    ) -> None:
        self.tg, self.kernels, self.handles, self.options = tg, kernels, handles, options
        self.steps: list[Step] = []
        self.callables: dict[str, Any] = {}
        self.reserved: set[str] = set()  # groups of the update phase are called as optimizers are
        self.groups: dict[str, GroupCall] = {}
        self.segment_calls: dict[str, SegmentCall] = {}
        self.updates: dict[str, UpdateCall] = {}

    def nodes(self, nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            if ops.lookup(node.target).kind == "effect":
                self._update(node)
            else:
                reads = tuple(node.all_input_nodes)
                self.steps.append(Step("aten", reads, (node,), node=node))

    def fused(self, plan: FusionPlan) -> None:
        launchers = self._launchers(plan)
        self.reserved |= launchers.keys()
        for item in plan.order:
            if isinstance(item, fx.Node):
                self.nodes([item])
            elif item.name not in launchers:
                self.nodes(item.nodes)
            else:
                where = next(filter(None, map(self.tg.where, item.nodes)), None)
                call = GroupCall(
                    item,
                    self.kernels[item.name],
                    launchers[item.name],
                    self.options.boundary,
                    self.options.gate,
                    self.options.repro_folder,
                    where,
                )
                self.groups[item.name] = self.callables[item.name] = call
                step = Step("group", item.inputs, item.outputs, name=item.name, group=item)
                self.steps.append(step)

    def _launchers(self, plan: FusionPlan) -> dict[str, GroupLauncher]:
        """Launchers of the groups whose kernels compile; everything is compiled side by side."""
        cache, boundary, arch = self.options.cache, self.options.boundary, self.options.arch
        assert cache is not None, "the triton backend needs a kernel cache"
        fma = self.options.fma
        launchers: dict[str, GroupLauncher] = {}
        groups = {i.name: i for i in plan.order if not isinstance(i, fx.Node)}
        for name, group in groups.items():
            kernel = self.kernels.get(name)
            if kernel is None or kernel.key in boundary.failures:
                continue
            made = boundary.attempt(
                lambda g=group, k=kernel: GroupLauncher(g, k, cache, arch, fma=fma), "compile"
            )
            if isinstance(made, str):
                self._refused(group, made)
            else:
                launchers[name] = made
        if arch == INTERPRETER:
            return launchers
        wanted = {name: launcher.wanted for name, launcher in launchers.items()}
        errors = cache.compile((w for many in wanted.values() for w in many), arch)
        for name, many in wanted.items():
            error = next((errors[w] for w in many if w in errors), None)
            if error is not None:
                self._refused(groups[name], error)
                del launchers[name]
        return launchers

    def _refused(self, group: Any, error: str) -> None:
        where = next(filter(None, map(self.tg.where, group.nodes)), None)
        failure = group_failure(group, "compile", error, where)
        self.options.boundary.record(self.kernels[group.name].key, failure)

    def segments(self) -> None:
        for part in cut(self.tg):
            if isinstance(part, fx.Node):
                self.nodes([part])
                continue
            code = None
            if worth_compiling(part):
                code = compile_segment(self.tg, part, self.options.boundary)
            if code is None:
                self.nodes(part.nodes)
            else:
                self._segment(part, code)

    def _segment(self, part: Segment, code: SegmentCall) -> None:
        self.segment_calls[part.name] = self.callables[part.name] = code
        step = Step("graph", part.inputs, part.outputs, node=part.nodes[0], name=part.name)
        self.steps.append(step)

    def _update(self, node: fx.Node) -> None:
        number = node.args[2]
        assert isinstance(number, int)
        name = base = f"update_{number}"
        for count in itertools.count(2):
            if name not in self.callables and name not in self.reserved:
                break
            name = f"{base}_{count}"
        call = UpdateCall(name, node, self.handles[number], self.options)
        self.updates[name] = self.callables[name] = call
        step = Step("update", tuple(node.all_input_nodes), (), node=node, name=name)
        self.steps.append(step)
