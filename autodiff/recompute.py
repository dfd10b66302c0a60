"""What the backward phase saves and what it computes again: one minimum cut over real bytes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from . import ops
from .budget import Cut, relieved, search, take
from .cut import CutProblem, Plan
from .graph import TrainingGraph
from .liveness import maker_of, peak_bytes
from .reads import num_bytes

Measure = Callable[[TrainingGraph], int]
"""The most bytes of a step's own that are alive at once, in the plan that a graph leads to."""

_ATTEMPTS = 4


@dataclass(frozen=True, slots=True)
class ValueNote:
    """One forward value that the backward needs. why: the reason it is kept, or made again."""

    name: str
    op: str
    kind: str
    num_bytes: int
    where: str | None
    why: str


@dataclass(frozen=True, slots=True)
class RecomputeReport:
    """What recompute chose.

    kept, again: forward values saved, and computed again; views and constants aside. saved_bytes:
    of what is saved, inputs that live anyway not counted. baseline_bytes: the same for saving all
    that the derivative formulas read. Under a memory budget, in bytes of the step's own alive at
    once: limit, peak, and baseline_peak with everything saved; else None.
    """

    saved: tuple[str, ...]
    saved_bytes: int
    recomputed: tuple[str, ...]
    baseline_bytes: int
    kept: tuple[ValueNote, ...] = ()
    again: tuple[ValueNote, ...] = ()
    limit: int | None = None
    peak: int | None = None
    baseline_peak: int | None = None

    @property
    def within_budget(self) -> bool:
        """False when no plan that was found needs as little as the memory budget."""
        return self.limit is None or self.peak is None or self.peak <= self.limit


@dataclass(frozen=True, slots=True)
class Choice:
    """Forward nodes (and inputs) that cross into the backward, and those computed again."""

    saved: tuple[fx.Node, ...]
    recomputed: tuple[fx.Node, ...]
    report: RecomputeReport


def plan_recompute(
    tg: TrainingGraph, memory_budget: float | None = None, measure: Measure | None = None
) -> tuple[TrainingGraph, RecomputeReport]:
    """Duplicate the recomputed forward nodes into the backward phase of a whole step.

    memory_budget: None, a fraction (a float up to 1) of what the step's own values take with
    everything saved, or bytes. measure: None to estimate that. A copy stands just before its first
    reader, in that reader's phase, links to what its readers derive from (a recomputed node belongs
    to the backward that needs it) and keeps its source line.
    """
    problem = CutProblem(tg, None, ())
    if memory_budget is None:
        cut, peaks = take(problem, Plan()), None
    else:
        cut, peaks = _within(problem, memory_budget, measure or _estimate, relieved)
    return cut.graph, _choice(problem, cut, peaks).report


def choose(
    tg: TrainingGraph,
    memory_budget: float | None = None,
    *,
    static_inputs: Collection[fx.Node] | None = None,
    demanded: Collection[fx.Node] = (),
) -> Choice:
    """Choose what to save, with the least effort that meets the budget by the estimate.

    static_inputs: placeholders that live through the step anyway (None: all of them).
    demanded: forward values that the backward returns unchanged. Every value is made again at most
    once: a region's backward is cut out by what it saves.
    """
    problem = CutProblem(tg, static_inputs, demanded)
    if memory_budget is None:
        return _choice(problem, take(problem, Plan()))
    cut, peaks = _within(problem, memory_budget, _estimate)
    return _choice(problem, cut, peaks)


def save_all(
    tg: TrainingGraph,
    *,
    static_inputs: Collection[fx.Node] | None = None,
    demanded: Collection[fx.Node] = (),
) -> Choice:
    """Save what the derivative formulas read, and compute nothing again; see `choose`."""
    problem = CutProblem(tg, static_inputs, demanded)
    saved = tuple(node for node in problem.forward if node in problem.needed)
    total = sum(problem.held_bytes(node) for node in saved)
    names = tuple(node.name for node in saved if node.op == "call_function")
    kept = tuple(_note(tg, n, "recompute is off") for n in saved if problem.held_bytes(n))
    return Choice(saved, (), RecomputeReport(names, total, (), total, kept))


def _estimate(tg: TrainingGraph) -> int:
    return peak_bytes(tg).num_bytes


@dataclass(frozen=True, slots=True)
class _Peaks:
    """Of a budget, in bytes: as in the report."""

    limit: int
    peak: int
    baseline: int


def _within(
    problem: CutProblem,
    memory_budget: float,
    measure: Measure,
    relieved: Callable[[CutProblem, Cut, int], Cut] | None = None,
) -> tuple[Cut, _Peaks]:
    """The cut of least effort within the budget, by `measure`; else the one that needs least.

    The search estimates; where a measurement says that its choice needs more, it is repeated for
    so much less. relieved: what may be done to a cut that needs too much.
    """
    baseline = measure(problem.tg)
    limit = _limit(memory_budget, baseline)
    wanted = limit * _estimate(problem.tg) // max(baseline, 1)
    best: tuple[Cut, int] | None = None
    for _ in range(_ATTEMPTS):
        cut = search(problem, wanted)
        if cut.peak > wanted and relieved is not None:
            cut = relieved(problem, cut, wanted)
        peak = measure(cut.graph)
        if best is None or peak < best[1]:
            best = cut, peak
        if peak <= limit or cut.peak > wanted:
            break
        wanted = int(min(wanted, cut.peak) * limit / peak * 0.98)
    assert best is not None
    return best[0], _Peaks(limit, best[1], baseline)


def _limit(memory_budget: float, baseline: int) -> int:
    if isinstance(memory_budget, float) and memory_budget <= 1.0:
        return int(memory_budget * baseline)
    return int(memory_budget)


def _choice(problem: CutProblem, cut: Cut, peaks: _Peaks | None = None) -> Choice:
    cheap = frozenset(cut.recomputed if peaks is None else problem.cut(Plan())[1])
    report = RecomputeReport(
        saved=tuple(node.name for node in cut.saved if node.op == "call_function"),
        saved_bytes=sum(problem.held_bytes(node) for node in cut.saved),
        recomputed=tuple(node.name for node in cut.recomputed),
        baseline_bytes=problem.baseline_bytes(),
        kept=tuple(
            _note(problem.tg, node, problem.why_saved(node, cut.plan))
            for node in cut.saved
            if problem.held_bytes(node)
        ),
        again=(
            *_notes(problem.tg, cut.recomputed, lambda n: problem.why_again(n, n in cheap)),
            *_notes(cut.graph, cut.once_more, lambda _: "memory_budget: once more, for later"),
        ),
        limit=None if peaks is None else peaks.limit,
        peak=None if peaks is None else peaks.peak,
        baseline_peak=None if peaks is None else peaks.baseline,
    )
    return Choice(cut.saved, cut.recomputed, report)


def _notes(
    tg: TrainingGraph, nodes: Sequence[fx.Node], why: Callable[[fx.Node], str]
) -> Iterator[ValueNote]:
    """Of values made again, views and constants aside."""
    for node in nodes:
        if ops.lookup(node.target).kind not in ("view", "creation"):
            yield _note(tg, node, why(node))


def _note(tg: TrainingGraph, node: fx.Node, why: str) -> ValueNote:
    value = node.meta.get("val")
    kind = ""
    if isinstance(value, torch.Tensor):
        sizes = "x".join(str(size) for size in value.shape)
        kind = f"{str(value.dtype).removeprefix('torch.')}[{sizes}]"
    maker = maker_of(node)
    name = ops.op_name(maker.target) if maker.op == "call_function" else maker.op
    return ValueNote(node.name, name, kind, num_bytes(node), tg.where(maker), why)


def saved_values(choice: Choice) -> tuple[list[fx.Node], list[Any]]:
    """The saved nodes as AOTAutograd wants them: tensors, then sizes."""
    tensors = [n for n in choice.saved if isinstance(n.meta.get("val"), torch.Tensor)]
    sizes = [n for n in choice.saved if isinstance(n.meta.get("val"), torch.SymInt)]
    return tensors, sizes
