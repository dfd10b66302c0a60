"""The pipeline: from a captured graph to kernels, as one flat list of named passes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from autodiff.channel_norms import channel_norms
from autodiff.creations import detach_creations, part_ranges
from autodiff.derive import cleanup, decompose
from autodiff.formulas import composites
from autodiff.graph import Refusal, TrainingGraph
from autodiff.inlining import dissolve_unfused
from autodiff.joins import padded_joins
from autodiff.pools import save_less_of_pools
from autodiff.recompute import RecomputeReport, plan_recompute
from autodiff.rereads import reread_less
from autodiff.rng import functionalize_dropout
from autodiff.signs import save_less_of_signs
from autodiff.slicing import Slices, slice_graph
from autodiff.softmaxes import save_less_of_softmaxes
from autodiff.verify import verify
from trainfuse import log
from trainfuse.codegen.ir import GroupKernel
from trainfuse.codegen.lower import candidates, lower
from trainfuse.codegen.support import unsupported
from trainfuse.codegen.targets import CodegenOptions, Target
from trainfuse.debug import dump
from trainfuse.fields import Settings
from trainfuse.fusion.cost import group_cost
from trainfuse.fusion.grouping import plan_fusion
from trainfuse.fusion.plan import FusionOptions, FusionPlan
from trainfuse.fusion.rewrites.chunked_head import chunk_heads, heads_in_regions
from trainfuse.fusion.rewrites.early_gradients import gradients_in_forward
from trainfuse.fusion.rewrites.index_maps import move_indexing_up, nested_joins
from trainfuse.fusion.rewrites.row_statistics import recompute_from_statistics
from trainfuse.fusion.rewrites.row_sums import simplify_sums
from trainfuse.fusion.rewrites.scatter_sums import sum_sorted_segments
from trainfuse.fusion.rewrites.update_casts import fold_update_casts
from trainfuse.fusion.rewrites.weight_casts import batch_weight_casts
from trainfuse.runtime.cache import shared_cache
from trainfuse.runtime.footprint import Footprint, footprint, planned_steps
from trainfuse.runtime.tune import Trial, Tuner


@dataclass(frozen=True, slots=True)
class State:
    """What the passes hand on: the graph, and what was decided about it so far."""

    graph: TrainingGraph
    facts: Facts
    recompute: RecomputeReport | None = None
    slices: Slices | None = None
    fusion: FusionPlan | None = None
    kernels: Mapping[str, GroupKernel] = field(default_factory=dict)
    refusals: tuple[Refusal, ...] = ()


@dataclass(frozen=True, slots=True)
class Facts:
    """What a pass may ask: settings, target, backend, and how the graph was captured."""

    settings: Settings
    target: Target
    backend: str
    kind: str


def _dropout(state: State) -> State:
    if state.facts.settings.rng != "fast" or state.facts.backend == "inductor":
        return state
    return replace(state, graph=functionalize_dropout(state.graph))


def _channel_norms(state: State) -> State:
    # elsewhere a norm stays ATen's, to the bit: its pieces gain nothing outside our kernels
    if state.facts.backend != "triton":
        return state
    return replace(state, graph=tidy(decompose(state.graph, channel_norms())))


def _decompose(state: State) -> State:
    rules, graph = composites(), state.graph
    if state.facts.backend != "triton":
        rules = {op: rule for op, rule in rules.items() if op not in channel_norms()}
    else:
        graph = decompose(graph, padded_joins(parts=False), only=nested_joins(graph))
    return replace(state, graph=decompose(graph, rules))


def _rereads(state: State) -> State:
    facts = state.facts
    if facts.kind != "whole_step" or not facts.settings.recompute:
        return state
    graph = save_less_of_signs(reread_less(save_less_of_softmaxes(state.graph)))
    return replace(state, graph=graph)


def _recompute(state: State) -> State:
    facts = state.facts
    if facts.kind != "whole_step" or not facts.settings.recompute:
        return state
    measure = functools.partial(_planned_peak, state)
    graph, report = plan_recompute(state.graph, facts.settings.memory_budget, measure)
    return replace(state, graph=graph, recompute=report)


def _planned_peak(state: State, graph: TrainingGraph) -> int:
    """The most bytes of its own that a step holds at once if recompute gives this graph."""
    names = [name for name, _, _ in PASSES]
    state = replace(state, graph=graph)
    for _, function, _ in PASSES[names.index("recompute") + 1 : names.index("tune")]:
        state = function(state)
    return planned_footprint(state).peak


def with_masks(graph: TrainingGraph, facts: Facts) -> TrainingGraph:
    """The graph with the masks that a plan of it has, and no other pass."""
    return _dropout(State(graph, facts)).graph


def planned_footprint(state: State) -> Footprint:
    """What a grouped graph needs, run as the backend runs it (Inductor: as our kernels would)."""
    assert state.fusion is not None
    eager = state.facts.backend == "eager"
    steps = planned_steps(state.graph.nodes() if eager else state.fusion.order)
    ours = state.kernels if state.facts.backend == "triton" else {}
    return footprint(state.graph, steps, ours)


def _early(state: State) -> State:
    facts = state.facts
    if facts.backend != "triton" or facts.kind != "whole_step":
        return state
    return replace(state, graph=gradients_in_forward(state.graph, unsupported))


def _chunks(state: State) -> State:
    facts = state.facts
    budget = facts.settings.chunk_memory
    if facts.backend != "triton" or not budget:
        return state
    if facts.kind == "whole_step":
        graph, refusals = chunk_heads(state.graph, unsupported, budget)
    else:
        graph, refusals = state.graph, heads_in_regions(state.graph, budget)
    return replace(state, graph=graph, refusals=(*state.refusals, *refusals))


def _sums(state: State) -> State:
    return (
        replace(state, graph=simplify_sums(state.graph))
        if state.facts.backend == "triton"
        else state
    )


def _statistics(state: State) -> State:
    facts = state.facts
    wanted = facts.backend == "triton" and facts.kind == "whole_step" and facts.settings.recompute
    return replace(state, graph=recompute_from_statistics(state.graph)) if wanted else state


def _scatters(state: State) -> State:
    # only our own kernels sum by sorted keys
    if state.facts.backend != "triton":
        return state
    graph, refusals = sum_sorted_segments(
        state.graph,
        state.facts.settings.skip_ops,
        launches_cost=not state.facts.target.interpreted,
    )
    return replace(state, graph=graph, refusals=(*state.refusals, *refusals))


def _index_maps(state: State) -> State:
    # elsewhere a padding is a copy
    if state.facts.backend != "triton":
        return state
    joined = decompose(state.graph, padded_joins())
    return replace(state, graph=tidy(move_indexing_up(joined)))


def _fold(state: State) -> State:
    # only our own update kernels read a gradient of another type than its parameter's
    if state.facts.backend != "triton":
        return state
    return replace(state, graph=fold_update_casts(state.graph))


def _casts(state: State) -> State:
    # Inductor and the eager interpreter fuse, or check, node by node
    if state.facts.backend != "triton" or state.facts.settings.single_node:
        return state
    return replace(state, graph=batch_weight_casts(state.graph))


def _slice(state: State) -> State:
    settings = state.facts.settings
    slices = slice_graph(
        state.graph, settings.threshold, settings.skip_ops, horizontal=settings.horizontal
    )
    return replace(state, slices=slices, refusals=(*state.refusals, *slices.refusals))


def _fuse(state: State) -> State:
    settings = state.facts.settings
    plan = plan_fusion(
        state.graph,
        None if state.slices is None else state.slices.owner,
        supports=unsupported,
        options=FusionOptions(
            horizontal=settings.horizontal,
            single_node=settings.single_node,
            skip_ops=settings.skip_ops,
            fuse_first=settings.fuse_first,
        ),
    )
    slices = state.slices
    if slices is not None and settings.autodiff_inlining:
        slices = dissolve_unfused(slices, {n for group in plan.groups for n in group.nodes})
    return replace(state, fusion=plan, slices=slices, refusals=(*state.refusals, *plan.refusals))


def _lower(state: State) -> State:
    assert state.fusion is not None
    kernels, refusals = {}, []
    options = CodegenOptions()
    for group in state.fusion.groups:
        kernel = lower(group, state.facts.target, options)
        if isinstance(kernel, Refusal):
            refusals.append(kernel)
        else:
            kernels[group.name] = kernel
    return replace(state, kernels=kernels, refusals=(*state.refusals, *refusals))


_TUNED_BYTES = 128 << 20
"""Bytes that a group moves, from which a search among a few kernels pays: some 30 us on an H200."""


def _tune(state: State) -> State:
    facts, depth = state.facts, state.facts.settings.autotune
    if depth == "off" or facts.target.interpreted or facts.backend != "triton":
        return state
    assert state.fusion is not None
    full = depth == "full"
    trials = [
        Trial(
            group,
            state.kernels[group.name],
            functools.partial(candidates, group, facts.target, CodegenOptions(), thorough=full),
            timed=full or group_cost(group).effective_bytes >= _TUNED_BYTES,
        )
        for group in state.fusion.groups
        if group.name in state.kernels
    ]
    cache = shared_cache(facts.settings.cache_dir, os.cpu_count() or 1)
    better = Tuner(cache, facts.target.arch, depth, facts.settings.fma)(trials)
    return replace(state, kernels={**state.kernels, **better})


def tidy(graph: TrainingGraph) -> TrainingGraph:
    """Drop what computes nothing: identities, repeats, dead nodes, reads for a shape alone."""
    return cleanup(detach_creations(graph))


def _graph_pass(function: Callable[[TrainingGraph], TrainingGraph]) -> Callable[[State], State]:
    return lambda state: replace(state, graph=function(state.graph))


PASSES: tuple[tuple[str, Callable[[State], State], str], ...] = (
    ("clean", _graph_pass(tidy), "no identities, repeats, dead nodes, nor reads for a shape alone"),
    (
        "dropout",
        _dropout,
        "masks become functions of one seed; before recompute, which copies them",
    ),
    ("early gradients", _early, "a row loss's gradient is forward, where one kernel makes both"),
    ("chunks", _chunks, "a head and its loss by chunks of rows, where the logits are too large"),
    ("channel norms", _channel_norms, "batch and group norms in pieces: recompute sees into them"),
    ("rereads", _rereads, "the backward makes masks of what it reads, rather than read them, too"),
    ("pools", _graph_pass(save_less_of_pools), "a byte of a maximum's place, no input for a shape"),
    ("recompute", _recompute, "whole steps: chooses what the backward saves; composites are whole"),
    ("decompose", _decompose, "composites become pointwise and reduction nodes"),
    ("tidy", _graph_pass(tidy), "the same of what decomposition left"),
    ("row sums", _sums, "sums along rows in closed form where there is one"),
    ("row statistics", _statistics, "log-probabilities are recomputed from saved row statistics"),
    ("scatters", _scatters, "scatter-adds of rows become sums of sorted segments"),
    ("index maps", _index_maps, "joins are paddings; slices and lookups read what is in memory"),
    ("update casts", _fold, "the update reads half gradients itself"),
    ("weight casts", _casts, "casts that no kernel of ours can take in are made together"),
    ("ranges", _graph_pass(part_ranges), "each reader has its own: a kernel reads it by one map"),
    ("slice", _slice, "differentiable subgraphs, small ones dissolved; nodes are final now"),
    ("fuse", _fuse, "groups per phase, each with its iteration domain"),
    ("lower", _lower, "one kernel source a group, or a refusal"),
    ("tune", _tune, "on a GPU: no kernel that spills, and for large groups the fastest of a few"),
)
"""Every pass in order: its name, itself, and what it requires or ensures."""


def run_passes(graph: TrainingGraph, facts: Facts) -> State:
    """Run every pass over a captured graph, verified in between where that is asked for."""
    state = State(graph, facts)
    if facts.settings.verifies:
        verify(state.graph, "capture")
    for name, function, _ in PASSES:
        before = state.graph
        state = function(state)
        if state.graph is not before:
            if facts.settings.verifies:
                verify(state.graph, name)
            dump.emit(facts.settings, "graph", f"after {name}", lambda s=state: str(s.graph.graph))
    for refusal in state.refusals:
        at = f" ({refusal.where})" if refusal.where else ""
        log.get_logger("grouping").debug("%s: %s%s", refusal.node, refusal.reason, at)
    return state
