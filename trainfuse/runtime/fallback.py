"""The fallback boundary: where a failing kernel becomes ATen, once, remembered, and said once.

The only place that catches everything: a compiler or a driver may raise anything, and no failure of
ours may stop a training run. What is caught is logged with its traceback.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import torch

from trainfuse.errors import FusionError
from trainfuse.log import get_logger

T = TypeVar("T")
Stage = Literal["lowering", "compile", "launch", "gate", "cuda_graph", "inductor", "step"]
_log = get_logger("fallback")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why something runs as ATen. name: the group; repro: a script that shows it, or ""."""

    name: str
    stage: Stage
    error: str
    operators: str = ""
    where: str | None = None
    repro: str = ""

    @property
    def line(self) -> str:
        """One line for the user: id, operators, hint."""
        at = f" at {self.where}" if self.where else ""
        repro = f"; repro: {self.repro}" if self.repro else ""
        return (
            f"{self.name} ({self.operators}){at} runs as ATen from now on, {self.stage}:"
            f" {self.error}{repro}; TRAINFUSE_DISABLE=fallback raises instead"
        )


@dataclass
class Boundary:
    """Remembers what failed, by kernel key, so that nothing is tried twice.

    allowed: False raises FusionError at the first failure.
    """

    allowed: bool = True
    failures: dict[str, Failure] = field(default_factory=dict)

    def attempt(self, action: Callable[[], T], stage: Stage) -> T | str:
        """The action's result, or one line on what it raised.

        Running out of memory is no fault of a kernel and is raised, but for a graph's capture.
        """
        try:
            return action()
        except torch.OutOfMemoryError:
            if stage != "cuda_graph":
                raise
            _log.info("%s failed", stage, exc_info=True)
            return "out of memory"
        except Exception as error:
            _log.info("%s failed", stage, exc_info=True)
            return f"{type(error).__name__}: {first_line(str(error))}"

    def record(self, key: str, failure: Failure) -> None:
        """Remember a failure and warn about it once; raises FusionError if not allowed."""
        if not self.allowed:
            raise FusionError(
                where=failure.where,
                group=failure.name,
                stage=failure.stage,
                error=failure.error,
                operators=failure.operators,
                repro=failure.repro or "none was written",
            )
        if key not in self.failures:
            _log.warning("%s", failure.line)
        self.failures.setdefault(key, failure)


def first_line(text: str, limit: int = 300) -> str:
    """The first line that says something."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no message")
    return line if len(line) <= limit else line[: limit - 3] + "..."
