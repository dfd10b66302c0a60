"""How faults are planted: real code is patched, or generated text rewritten, for one test."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest
from torch import fx

from autodiff.graph import TrainingGraph
from autodiff.rewrite import GraphEdit
from trainfuse import pipeline
from trainfuse.codegen import lower as lowering
from trainfuse.codegen.targets import CodegenOptions
from trainfuse.runtime import foreach

Hits = list[str]
Plant = Callable[[pytest.MonkeyPatch, Hits], None]
Replacement = str | Callable[[re.Match[str]], str]
Kind = Literal["kernel", "schedule", "derivation", "recompute", "rng", "optimizer", "capture"]


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. verify: what must see it, as an option of `compile`; 1 looks at every call.

    training: what it is planted into. plant: plants it, and notes where each time it is met.
    """

    name: str
    kind: Kind
    verify: Literal["kernels", "step", 1]
    training: str
    plant: Plant
    options: Mapping[str, Any] = field(default_factory=dict)


# -- generated text -----------------------------------------------------------------------------


def text(
    *rewrites: tuple[str, Replacement],
    phase: str = "backward",
    count: int = 1,
    chunks: bool = False,
) -> Plant:
    """Rewrite the first matches of patterns in every kernel of a phase that has them all.

    chunks: rows are walked in chunks of at most 64 columns.
    """

    def plant(monkeypatch: pytest.MonkeyPatch, hits: Hits) -> None:
        now: list[str] = []
        lower, print_module = pipeline.lower, lowering.print_module

        def lower_in_phase(group: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            now.append(group.phase)
            if chunks:
                args = (CodegenOptions(max_row_in_registers=0, chunk=64), *args[1:])
            try:
                return lower(group, target, *args, **kwargs)
            finally:
                now.pop()

        def print_wrong(module: Any, target: Any) -> str:
            right = wrong = print_module(module, target)
            if now[-1:] != [phase]:
                return right
            for pattern, replacement in rewrites:
                wrong, number = re.subn(pattern, replacement, wrong, count=count)
                if not number:
                    return right
            hits.append(module.kernels[0].name)
            return wrong

        monkeypatch.setattr(pipeline, "lower", lower_in_phase)
        monkeypatch.setattr(lowering, "print_module", print_wrong)

    return plant


def update_text(*rewrites: tuple[str, Replacement]) -> Plant:
    """Rewrite patterns, wherever they are, in the optimizer's kernel."""

    def plant(monkeypatch: pytest.MonkeyPatch, hits: Hits) -> None:
        lower = foreach.lower_foreach

        def wrong(*args: Any, **kwargs: Any) -> Any:
            kernel = lower(*args, **kwargs)
            source = kernel.source
            for pattern, replacement in rewrites:
                source, number = re.subn(pattern, replacement, source)
                assert number, f"{pattern} is nowhere in the update"
            hits.append(kernel.name)
            return replace(kernel, source=source, key=f"{kernel.key[:-8]}-planted")

        monkeypatch.setattr(foreach, "lower_foreach", wrong)

    return plant


# -- graphs -------------------------------------------------------------------------------------


Edit = Callable[[GraphEdit, fx.Node], bool]


def edited(edit_node: Edit, *, after: str = "tidy", first: bool = True) -> Plant:
    """A pass that does one wrong thing to the plan's graph: kernels are right for a wrong graph.

    edit_node: given every node in turn, says whether it has planted the fault there.
    first: stop at the first.
    """

    def plant(monkeypatch: pytest.MonkeyPatch, hits: Hits) -> None:
        def wrong(state: Any) -> Any:
            edit = GraphEdit(state.graph)
            for node in list(edit.graph.nodes):
                if node.op == "call_function" and edit_node(edit, node):
                    hits.append(node.name)
                    if first:
                        break
            edit.eliminate_dead()
            return replace(state, graph=edit.finish())

        names = [name for name, _, _ in pipeline.PASSES]
        planted = [*pipeline.PASSES]
        planted.insert(names.index(after) + 1, ("planted", wrong, "a fault"))
        monkeypatch.setattr(pipeline, "PASSES", tuple(planted))

    return plant


def phase_of(edit: GraphEdit, node: fx.Node) -> str:
    """Phase of a node under edit; inputs count as forward."""
    return edit.facts[node].phase if node in edit.facts else "forward"


# -- code ---------------------------------------------------------------------------------------


def patched(
    owner: Any, name: str, make: Callable[[Callable[..., Any], Callable[[], None]], Any]
) -> Plant:
    """Put something else in a function's place.

    make: given the function and a way to note that the fault was met.
    """

    def plant(monkeypatch: pytest.MonkeyPatch, hits: Hits) -> None:
        monkeypatch.setattr(owner, name, make(getattr(owner, name), lambda: hits.append(name)))

    return plant


def lifted(change: Callable[[fx.Graph], Sequence[str]]) -> Plant:
    """Change what AOTAutograd traced, before it is lifted; `change` names the nodes it met."""
    from trainfuse.capture import whole_step

    def plant(monkeypatch: pytest.MonkeyPatch, hits: Hits) -> None:
        lift = whole_step.lift

        def wrong(gm: fx.GraphModule, *args: Any) -> Any:
            hits.extend(change(gm.graph))
            return lift(gm, *args)

        monkeypatch.setattr(whole_step, "lift", wrong)

    return plant


def captured(change: Callable[[TrainingGraph], TrainingGraph | None]) -> Plant:
    """Change the captured graph, right after the lift; None where the fault has no place."""
    from trainfuse.capture import whole_step

    def plant(monkeypatch: pytest.MonkeyPatch, hits: Hits) -> None:
        lift = whole_step.lift

        def wrong(*args: Any) -> Any:
            right = lift(*args)
            graph = change(right.graph)
            if graph is None:
                return right
            hits.append("captured")
            return replace(right, graph=graph)

        monkeypatch.setattr(whole_step, "lift", wrong)

    return plant
