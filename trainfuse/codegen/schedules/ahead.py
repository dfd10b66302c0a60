"""Loops that load the rows of their next step before they compute this one's.

A step ends in reductions, at whose barriers a program's warps wait for one another with nothing in
flight. Loaded a step ahead, as they lie in memory, rows take half the registers of what is computed
with them.
"""

from __future__ import annotations

import re
from dataclasses import replace

from trainfuse.codegen.ir import Define, Load, Loop, Statement


def ahead(loop: Loop, first: str) -> tuple[Statement, ...]:
    """The loop with its large loads a step ahead: what stands before it, and itself.

    first: the rows of the first step, as `row` is defined in the loop. Of a step after the last
    nothing is loaded.
    """
    moved = [s for s in loop.body if isinstance(s, Load) and _spans_rows(s)]
    if not moved:
        return (loop,)
    before = (Define("first", first), *(_loaded(load, "first") for load in moved))
    body: list[Statement] = []
    for statement in loop.body:
        if not isinstance(statement, Load) or statement not in moved:
            body.append(statement)
            continue
        cast = f".to({statement.cast})" if statement.cast else ""
        body.append(Define(statement.name, f"{statement.name}_ahead{cast}", statement.note))
        if statement is moved[-1]:
            body.append(Define("following", f"row + {loop.step}", "loaded now for the next step"))
            body += [_loaded(load, "following") for load in moved]
    return (*before, replace(loop, body=tuple(body)))


def _spans_rows(load: Load) -> bool:
    """Whether a load is of a step's rows along all columns."""
    return all(re.search(rf"\b{name}\b", load.offset) for name in ("row", r"col(_\d+)?"))


def _loaded(load: Load, row: str) -> Load:
    """The same of other rows, as they lie in memory."""
    masks = [f"({row} < ROWS)", *(m for m in load.mask.split(" & ") if m not in ("", "row_mask"))]
    return replace(
        load,
        name=f"{load.name}_ahead",
        offset=re.sub(r"\brow\b", row, load.offset),
        mask=" & ".join(masks),
        cast="",
        note="",
    )
