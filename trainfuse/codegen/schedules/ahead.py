"""Loops that load what their next step reads before they compute this one.

A step ends in reductions, at whose barriers a program's warps wait for one another with nothing in
flight. Loaded a step ahead, as they lie in memory, halves take half the registers of what is
computed with them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from trainfuse.codegen.ir import Define, Load, Loop, Statement

_INDICES = re.compile(r"row(_first)?|mid|(place|col)(_\d+)?|ROWS|COLS|tl|int64|cast")
_MASKS = re.compile(r"(row|mid|col(_\d+)?)_mask")
_ALONG = re.compile(r"(place|col)(_\d+)?")


@dataclass(frozen=True, slots=True)
class Walk:
    """How a loop walks an index.

    index: its name, which the loop defines at each step. first: its value in the first step.
    step: what is added to it from one step to the next. inside: the condition that it is within
    the axis, of "{}", for steps after the last and lanes outside.
    """

    index: str
    first: str
    step: str
    inside: str


def ahead(loop: Loop, walk: Walk) -> tuple[Statement, ...]:
    """The loop with its large loads a step ahead: what stands before it, and itself.

    Nothing is loaded for a step after the last.
    """
    moved = [s for s in loop.body if isinstance(s, Load) and _moves(s, walk)]
    if not moved:
        return (loop,)
    first, following = f"{walk.index}_first", f"{walk.index}_following"
    before = (Define(first, walk.first), *(_loaded(load, walk, first) for load in moved))
    place = next(i for i, statement in enumerate(loop.body) if statement is moved[0])
    held = [Define(load.name, f"{load.name}_ahead{_cast(load)}", load.note) for load in moved]
    more = [
        Define(following, f"{walk.index} + {walk.step}", "loaded now for the next step"),
        *(_loaded(load, walk, following) for load in moved),
    ]
    rest = [s for s in loop.body[place:] if not any(s is load for load in moved)]
    return (*before, replace(loop, body=(*loop.body[:place], *held, *more, *rest)))


def _moves(load: Load, walk: Walk) -> bool:
    """Whether a load is of a row's elements, where indices and their masks alone say which."""
    names = re.findall(r"[A-Za-z_]\w*", load.offset)
    spans = walk.index in names and any(_ALONG.fullmatch(name) for name in names)
    masks = re.findall(r"[A-Za-z_]\w*", load.mask)
    known = all(_INDICES.fullmatch(name) for name in names)
    return spans and known and all(_MASKS.fullmatch(name) for name in masks)


def _cast(load: Load) -> str:
    return f".to({load.cast})" if load.cast else ""


def _loaded(load: Load, walk: Walk, index: str) -> Load:
    """The same at another index, as it lies in memory."""
    masks = [m for m in load.mask.split(" & ") if m not in ("", f"{walk.index}_mask")]
    moved = replace(
        load,
        name=f"{load.name}_ahead",
        offset=re.sub(rf"\b{walk.index}\b", index, load.offset),
        cast="",
        note="",
    )
    if load.row:
        return replace(moved, row=re.sub(rf"\b{walk.index}\b", index, load.row))
    return replace(moved, mask=" & ".join([f"({walk.inside.format(index)})", *masks]))
