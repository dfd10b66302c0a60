"""The least recompute that keeps a step within a memory budget."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from .cut import DEFAULT, CutProblem, Effort, Plan
from .duplication import duplicate
from .graph import TrainingGraph
from .liveness import peak_bytes
from .reads import fixed_readers
from .relief import relieve
from .waists import Waists

RUNGS = (DEFAULT, Effort(pointwise=0, materialize=2), Effort(0, 0, moderate=4))
"""Efforts without a contraction, the cheapest first."""
FREE = Effort(pointwise=0, materialize=0, lasting=0, moderate=0, contraction=0)
"""Between two checkpoints everything is computed again."""
PARTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
FINENESS = 64
"""A mixture of two efforts is chosen to one such part of the forward."""


@dataclass(frozen=True, slots=True)
class Cut:
    """One way to save and recompute.

    graph: the step with it. peak: the most bytes that it needs, estimated. once_more: copies in the
    graph of what is made again later still, see `relief`.
    """

    plan: Plan
    saved: tuple[fx.Node, ...]
    recomputed: tuple[fx.Node, ...]
    graph: TrainingGraph
    peak: int = 0
    once_more: tuple[fx.Node, ...] = ()


def take(problem: CutProblem, plan: Plan) -> Cut:
    """Cut at these prices, and estimate what the graph then needs."""
    saved, recomputed = problem.cut(plan)
    graph = duplicate(problem.tg, recomputed) if recomputed else problem.tg
    return Cut(plan, tuple(saved), tuple(recomputed), graph, peak_bytes(graph).num_bytes)


def search(problem: CutProblem, limit: int) -> Cut:
    """The cut of least effort whose peak is within the limit; else the one of the lowest peak.

    Efforts grow from rung to rung. The rung that is enough is applied to no more of the forward
    than it must, from the start on: its later part is differentiated first, when memory is full,
    and what is recomputed there would have to be held beside all the rest.
    """
    before = take(problem, Plan())
    lowest = before
    if before.peak <= limit:
        return before
    for effort in RUNGS[1:]:
        reached = take(problem, Plan(late=effort))
        if reached.peak <= limit:
            return _mixed(problem, limit, before, reached)
        lowest = min(lowest, reached, key=lambda cut: cut.peak)
        before = reached
    waists = Waists(problem, before.saved)
    reached = _checkpointed(problem, waists, before)
    if reached.peak <= limit:
        return _mixed(problem, limit, before, reached, waists)
    return min(lowest, reached, key=lambda cut: cut.peak)


def relieved(problem: CutProblem, cut: Cut, limit: int) -> Cut:
    """The same with values made again later where memory is full, until it is within the limit."""
    gradients = {node.name for node in problem.tg.nodes() if problem.tg.phase(node) != "forward"}
    found = relieve(cut.graph, limit, gradients)
    crossing = _crossing(found.graph)
    return replace(
        cut,
        saved=tuple(node for node in problem.forward if node.name in crossing),
        graph=found.graph,
        peak=found.peak,
        once_more=found.again,
    )


def _crossing(tg: TrainingGraph) -> set[str]:
    """Names of the forward's values that later phases read."""
    fixed = fixed_readers(tg)
    later = (n for n in tg.nodes() if tg.phase(n) != "forward" and n not in fixed)
    return {p.name for n in later for p in n.all_input_nodes if tg.phase(p) == "forward"}


def _checkpointed(problem: CutProblem, waists: Waists, without: Cut) -> Cut:
    """Checkpoints at waists, as many as need the least memory."""
    best, worse = without, 0
    tried: set[frozenset[fx.Node]] = set()
    for parts in PARTS:
        kept = waists.checkpoints(parts)
        if kept in tried:
            continue
        tried.add(kept)
        reached = take(problem, Plan(late=FREE, kept=kept))
        if reached.peak < best.peak:
            best, worse = reached, 0
        elif best is not without:
            worse += 1
        if worse == 2:
            break
    return best


def _mixed(
    problem: CutProblem, limit: int, before: Cut, enough: Cut, waists: Waists | None = None
) -> Cut:
    """The shortest start of the forward that has to take the greater effort.

    waists: where that has checkpoints: what crosses the end of the start is one, too.
    """
    late, early, kept = before.plan.late, enough.plan.late, enough.plan.kept
    low, high = 0, len(problem.forward)
    while high - low > max(1, len(problem.forward) // FINENESS):
        middle = (low + high) // 2
        end = waists.crossing(middle - 1) if waists is not None else frozenset[fx.Node]()
        cut = take(problem, Plan(late, early, middle, kept | end))
        if cut.peak <= limit:
            enough, high = cut, middle
        else:
            low = middle
    return enough
