"""What a schedule leaves open: sizes that decide its speed, and never its results' meaning."""

from __future__ import annotations

import itertools
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Choice:
    """Knobs of one kernel; None leaves a knob to the schedule's own cost model.

    warps: warps a program. rows: rows of a tile, or rows a step. block: columns of a tile or of a
    chunk, or elements a program. per_sm: programs a multiprocessor, where programs persist or
    keep rows. held: whether a row stays in registers; with a block, as it is read.
    ahead: whether a loop loads the rows of its next step before it computes this one's.
    """

    warps: int | None = None
    rows: int | None = None
    block: int | None = None
    per_sm: int | None = None
    held: bool | None = None
    ahead: bool | None = None

    def __str__(self) -> str:
        knobs = ((name, getattr(self, name)) for name in self.__slots__)
        return ", ".join(f"{name}={value}" for name, value in knobs if value is not None) or "model"


MODEL = Choice()
"""Every knob as the cost model has it."""


def products(**knobs: tuple[int | bool | None, ...]) -> list[Choice]:
    """Every combination of the values of some knobs."""
    rows = itertools.product(*knobs.values())
    return [Choice(**dict(zip(knobs, row, strict=True))) for row in rows]  # type: ignore[arg-type]  # held alone is a bool
