"""Plans: a captured graph through the pipeline, into something that runs; kept to be looked at."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autodiff.graph import Refusal, TrainingGraph
from autodiff.recompute import RecomputeReport
from autodiff.split import partition
from trainfuse.capture.compat import unobserved
from trainfuse.capture.lift import Captured
from trainfuse.capture.optimizers import find_handle
from trainfuse.debug import dump, gather
from trainfuse.debug.explain import Explanation
from trainfuse.errors import UnfusedOperator
from trainfuse.fields import Settings
from trainfuse.pipeline import Facts, State, planned_footprint, run_passes, with_masks
from trainfuse.runtime.cache import KernelCache, shared_cache
from trainfuse.runtime.captured import CapturedStep
from trainfuse.runtime.checks import Checks
from trainfuse.runtime.choice import choose_backend, device_of, target_of
from trainfuse.runtime.fallback import Boundary
from trainfuse.runtime.footprint import Footprint
from trainfuse.runtime.gate import Gate
from trainfuse.runtime.plan import Plan
from trainfuse.runtime.program import RuntimeOptions
from trainfuse.runtime.step_gate import StepGate


class PlanOnly(BaseException):
    """Stops a call whose plan was all that was wanted, before its first statement."""


@dataclass(slots=True)
class PlanRecord:
    """One plan: the captured graph as it was planned, and what executes it.

    plan: None when only a plan was asked for, of Inductor.
    """

    kind: str
    state: State
    compile_s: float
    plan: Plan | None = None
    calls: int = 0

    @property
    def graph(self) -> TrainingGraph:
        """The training graph that the plan executes."""
        return self.state.graph

    @property
    def backend(self) -> str:
        """The code generator that runs it."""
        return self.state.facts.backend

    @property
    def footprint(self) -> Footprint:
        """How many bytes of its own the plan holds at once."""
        return planned_footprint(self.state)

    def stats(self) -> dict[str, Any]:
        """Calls, distinct kernels, compile seconds, CUDA graphs and the gate's verdict."""
        failures = {} if self.plan is None else self.plan.failures
        failed = [failure.line for failure in failures.values()]
        keys = {kernel.key for kernel in self.state.kernels.values()}
        return {
            "calls": 0 if self.plan is None else self.plan.stats.calls,
            "kernels": len(keys) if self.backend == "triton" else 0,
            "compile_s": self.compile_s,
            "cuda_graphs": int(self.plan is not None and self.plan.cuda_graph.used),
            "gate": failed[0] if failed else "pass",
        }

    def source(self) -> str:
        """The program, then the text of each kernel that it launches, once."""
        parts = [] if self.plan is None else [self.plan.source]
        if self.backend == "triton":
            texts = {kernel.key: kernel.source for kernel in self.state.kernels.values()}
            parts += texts.values()
        return "\n\n".join(parts)

    def graph_text(self) -> str:
        """The grouped graph: one line a statement, kernels by their cache id."""
        return gather.graph_text(self.kind, self.state)


class Builder:
    """Plans captured graphs under one set of settings; what capture calls back.

    plans: every plan made, oldest first. plans_only: nothing of the program may run.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.plans: list[PlanRecord] = []
        self.plans_only = False
        self._saved: RecomputeReport | None = None
        self._boundary = Boundary(allowed=settings.fallback)
        if torch.cuda.is_available() and settings.chosen_backend in (None, "triton"):
            self._cache().start_workers()

    def _cache(self) -> KernelCache:
        return shared_cache(self.settings.cache_dir, os.cpu_count() or 1)

    @contextlib.contextmanager
    def plan_only(self) -> Iterator[type[PlanOnly]]:
        """Within the block built programs raise PlanOnly instead of running."""
        self.plans_only = True
        try:
            yield PlanOnly
        finally:
            self.plans_only = False

    def joint_passes(self, joint: fx.GraphModule, inputs: Any, **more: Any) -> Any:
        """Cut a region's joint graph into forward and backward, as the settings ask."""
        settings = self.settings

        def note(report: RecomputeReport) -> None:
            self._saved = report  # the next graph to plan is this region's forward

        return partition(
            joint,
            inputs,
            memory_budget=settings.memory_budget,
            fast_rng=settings.rng == "fast" and settings.backend != "inductor",
            recompute=settings.recompute,
            note=note,
            **more,
        )

    def __call__(self, captured: Captured) -> Callable[[list[Any]], Sequence[Any]]:
        """Plan one captured graph; returns its program over a list of inputs."""
        began = time.perf_counter()
        device = device_of(captured.graph)
        facts = Facts(
            replace(self.settings, autotune="off") if self.plans_only else self.settings,
            target_of(device),
            choose_backend(self.settings, device),
            captured.kind,
        )
        state = run_passes(captured.graph, facts)
        if captured.kind == "forward":
            state, self._saved = replace(state, recompute=self._saved), None
        if self.settings.strict:
            refuse_unfused(state)
        record = PlanRecord(captured.kind, state, 0.0)
        self.plans.append(record)
        if self.plans_only and facts.backend == "inductor":
            return _stop  # Inductor compiles for seconds, and shows nothing of it
        record.plan = Plan(
            state.graph,
            state.fusion,
            state.kernels,
            {number: find_handle(number) for number, _ in captured.updates.values()},
            self._runtime_options(facts),
            cuda_graph=self.settings.cuda_graph,
            no_graph_because=None if captured.kind == "whole_step" else "regions run ungraphed",
            checks=self._checks(captured, facts),
        )
        record.compile_s = time.perf_counter() - began
        if self.plans_only:
            return _stop
        self._dump(record)
        return self._program(record)

    def _program(self, record: PlanRecord) -> Callable[[list[Any]], Sequence[Any]]:
        plan = record.plan
        assert plan is not None
        names = {getattr(node.target, "namespace", "") for node in record.graph.nodes()}
        custom = not names <= _BUILT_IN

        def program(args: list[Any]) -> Sequence[Any]:
            if plan.stats.calls:
                return plan(args)
            began = time.perf_counter()
            with contextlib.nullcontext() if custom else unobserved():
                results = plan(args)
            record.compile_s += time.perf_counter() - began
            return results

        return program

    def _checks(self, captured: Captured, facts: Facts) -> Checks | None:
        settings = self.settings
        if settings.verify == "off" and not settings.nan_check:
            return None
        masks = settings.rng == "fast" and facts.backend != "inductor"
        step = CapturedStep(captured, self._boundary, fast_rng=masks)
        strict = settings.strict or not settings.fallback
        compared = settings.verify not in ("off", "kernels")
        graph = captured.graph
        return Checks(
            step,
            StepGate(step, strict=strict) if compared else None,
            lambda: with_masks(graph, facts),
            every=settings.verify if isinstance(settings.verify, int) else None,
            nan_check=settings.nan_check,
        )

    def _runtime_options(self, facts: Facts) -> RuntimeOptions:
        # with Inductor on a GPU the update is still ours: on the host it would forbid a CUDA graph
        triton = facts.backend == "triton"
        ours = triton or (facts.backend == "inductor" and not facts.target.interpreted)
        return RuntimeOptions(
            backend=facts.backend,
            arch=facts.target.arch,
            cache=self._cache() if ours else None,
            gate=GATE if ours and self.settings.verify != "off" else None,
            boundary=self._boundary,
            fma=self.settings.fma,
        )

    def _dump(self, record: PlanRecord) -> None:
        settings, number = self.settings, len(self.plans)
        assert record.plan is not None
        dump.emit(settings, "program", f"program {number}", record.plan.source)
        dump.emit(settings, "plan", f"plan {number}", record.graph_text)
        for kernel in {k.key: k for k in record.state.kernels.values()}.values():
            dump.emit(settings, "kernel", f"{kernel.name}_{kernel.key[:8]}", kernel.source)

    def close(self) -> None:
        """Free what the plans hold and forget them."""
        for record in self.plans:
            if record.plan is not None:
                record.plan.close()
        self.plans.clear()


_BUILT_IN = frozenset({"", "aten", "prims", "trainfuse"})
"""Namespaces of operators that are known to give back no operand where they don't say so."""
GATE = Gate()
"""One gate for the process: a kernel that passed once is trusted in every plan."""


def _stop(args: list[Any]) -> Sequence[Any]:
    raise PlanOnly


def refuse_unfused(state: State) -> None:
    """Under strict_fusion: raise for the first node that could have been fused and was not."""
    for refusal in state.refusals:
        raise UnfusedOperator(node=refusal.node, reason=refusal.reason, where=refusal.where)


def explain_plans(
    plans: Sequence[PlanRecord],
    refusals: Sequence[Refusal],
    settings: Settings,
    *,
    left_whole: bool = False,
) -> Explanation:
    """Gather what the plans of one target say of themselves; see `gather`."""
    backend = settings.chosen_backend or "not chosen yet"
    return gather.gather(plans, refusals, backend, left_whole=left_whole)
