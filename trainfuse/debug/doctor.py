"""What became of a step, stage by stage, and the first stage that is not as it could be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autodiff.graph import PHASES
from trainfuse.capture.objects import find_objects
from trainfuse.debug.environment import CXX_FIX, OFF_FIX, Finding, default_backend
from trainfuse.debug.explain import Explanation, op_summary
from trainfuse.debug.preserve import leaves_of, preserved, run_through
from trainfuse.debug.timing import interleave
from trainfuse.errors import TrainfuseError
from trainfuse.settings import current, settings

if TYPE_CHECKING:
    from trainfuse.api import CompiledStep

_ROUNDS = 7
_SLOWER = 1.05
"""Ratio to eager's time from which a compiled step counts as slower."""
_MARKS = {True: "[green]ok[/]", False: "[red]here[/]", None: ""}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Stages in the order in which to look at them; later ones are missing where one stops all.

    explanation: of the plans that were made, None when there are none.
    """

    stages: tuple[Finding, ...]
    explanation: Explanation | None = None

    @property
    def failing(self) -> Finding | None:
        """The first stage that is not as it could be."""
        return next((stage for stage in self.stages if stage.ok is False), None)

    def stage(self, name: str) -> Finding:
        """One stage by name; KeyError when it was not reached."""
        return {stage.name: stage for stage in self.stages}[name]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, fit for JSON."""
        return {
            "stages": [asdict(stage) for stage in self.stages],
            "failing": None if self.failing is None else self.failing.name,
        }

    def print(self, console: Console | None = None) -> None:
        """Show it in the terminal."""
        console = console or Console()
        table = Table(box=None, show_header=False)
        for stage in self.stages:
            table.add_row(stage.name, _MARKS[stage.ok], Text(stage.value))
        console.print(table)
        failing = self.failing
        if failing is None:
            console.print("[green]nothing to mend[/]")
        else:
            console.print(Text.assemble((failing.name, "yellow"), f": {failing.fix}"))

    def __str__(self) -> str:
        console = Console(width=100, no_color=True)
        with console.capture() as capture:
            self.print(console)
        return capture.get()


def diagnose(
    compile_step: Callable[..., CompiledStep], target: Any, args: Sequence[Any]
) -> Diagnosis:
    """Compile a target anew, run it and time it against itself; its state is put back.

    compile_step: makes a compiled step of the target under options. Errors of the target itself
    are raised.
    """
    stages = [_settings(), _backend()]
    if stages[-1].ok is False and current().chosen_backend == "none":
        return Diagnosis(tuple(stages))
    step, leaves = compile_step(verify="step"), leaves_of(target, args)
    with preserved(target, args):
        try:
            for _ in range(2):  # the second one captures a CUDA graph
                run_through(step, args, leaves)
        except TrainfuseError as error:
            stages.append(Finding("run", str(error).splitlines()[0], False, str(error)))
            return Diagnosis(tuple(stages))
    told, stats = step.explain(), step.stats()
    trains = bool(find_objects(target, args).optimizers)
    stages += [_capture(told, trains), _groups(told), _refused(told), _checks(stats)]
    stages += [_cuda_graph(told), _speed(step, target, args, told)]
    step.close()
    return Diagnosis(tuple(stages), told)


def _settings() -> Finding:
    changed = settings.changed()
    shown = [f"{name}={value!r} ({source})" for name, (value, source, _) in changed.items()]
    return Finding("settings", ", ".join(shown) or "all at default")


def _backend() -> Finding:
    chosen = current().chosen_backend
    if chosen == "none":
        return Finding("backend", "none: fusion is off", False, OFF_FIX)
    if chosen is not None:
        return Finding("backend", f"{chosen}, asked for", True)
    name = default_backend()
    why = {
        "triton": "a GPU is there",
        "inductor": "no GPU: C++ code a phase",
        "eager": "neither a GPU nor a C++ compiler",
    }[name]
    return Finding("backend", f"{name} ({why})", name != "eager", CXX_FIX)


def _capture(told: Explanation, trains: bool) -> Finding:
    if told.capture == "whole_step":
        return Finding("capture", "one graph of forward, backward and update", True)
    breaks = f", {told.graph_break_count} breaks" if told.graph_break_count else ""
    value = f"{told.graph_count} regions{breaks}: {told.capture_reason}"
    fix = "change that line to have the step captured whole (docs/troubleshooting.md)"
    return Finding("capture", value, False if trains or breaks else None, fix)


def _groups(told: Explanation) -> Finding:
    counts = [f"{phase} {n}" for phase in PHASES if (n := told.count(phase))]
    fix = "`explain(...).print()` lists why not; ENABLE=single_node takes groups of one"
    return Finding("fused groups", ", ".join(counts) or "none", bool(told.groups), fix)


def _refused(told: Explanation) -> Finding:
    reasons = Counter(refusal.reason for refusal in told.refusals if refusal.stage != "capture")
    most = "; ".join(f"{reason} (x{count})" for reason, count in reasons.most_common(3))
    left = f"{len(told.aten_nodes)} nodes: {op_summary(told.aten_nodes, 4)}"
    return Finding(
        "left as ATen", (left if told.aten_nodes else "nothing") + (f"; {most}" * bool(most))
    )


def _checks(stats: Mapping[str, Any]) -> Finding:
    passed = stats["gate"] == "pass"
    fix = "the repro shows it; trainfuse.bisect(step, *args) finds a wrong group"
    return Finding("checks", "pass" if passed else stats["gate"], passed, fix)


def _cuda_graph(told: Explanation) -> Finding:
    used = told.cuda_graph == "used"
    on_gpu = torch.cuda.is_available() and told.capture == "whole_step"
    fix = "without one each launch costs host time: remove what the reason names"
    return Finding("CUDA graph", told.cuda_graph, used or (False if on_gpu else None), fix)


def _speed(step: CompiledStep, target: Any, args: Sequence[Any], told: Explanation) -> Finding:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    leaves = leaves_of(target, args)
    contenders = {
        "eager": lambda: run_through(target, args, leaves),
        "compiled": lambda: run_through(step, args, leaves),
    }
    with preserved(target, args):
        times = interleave(contenders, device, rounds=_ROUNDS, warmup=2)
    eager, ours = times["eager"].ms, times["compiled"].ms
    kinds = Counter(node.op for node in told.aten_nodes)
    heavy = ", ".join(op for op, _ in kinds.most_common(2)) or "nothing"
    value = f"eager {eager:.3g} ms, compiled {ours:.3g} ms: {eager / ours:.2f} times as fast"
    if told.backend == "eager":
        return Finding("speed", value, False, "the eager backend is a reference: choose another")
    fix = f"what stays ATen ({heavy}) may take the time; larger inputs gain more"
    return Finding("speed", value, ours <= _SLOWER * eager, fix)
