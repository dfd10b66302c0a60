"""Loggers of the rooms, and the TRAINFUSE_LOG grammar: `program:>grouping:>>cache`."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Mapping

from trainfuse.errors import BadTokenList, UnknownToken
from trainfuse.tokens import near

AREAS = (
    "capture",
    "slicing",
    "recompute",
    "grouping",
    "codegen",
    "program",
    "cache",
    "cuda_graph",
    "gate",
    "fallback",
    "lightning",
)
"""What can be logged, in pipeline order; each is the logger `trainfuse.AREA`."""

TORCHSCRIPT_NAMES: Mapping[str, str] = {
    "profiling_graph_executor_impl": "program",
    "graph_fuser": "grouping",
    "partition": "slicing",
    "kernel_cache": "cache",
}
"""PYTORCH_JIT_LOG_LEVEL's file names, and the area that shows the same thing here."""

GRAPHS, DECISIONS, INTERNALS, EVERYTHING = logging.INFO, logging.DEBUG, 5, 3
_LEVELS = (GRAPHS, DECISIONS, INTERNALS, EVERYTHING)
_SOURCE = "TRAINFUSE_LOG"

_said: set[str] = set()
_lock = threading.Lock()


class _Stderr(logging.StreamHandler):
    """Writes to the stderr of the moment, so that captured and redirected output is right."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(logging.Formatter("[%(name)s] %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def get_logger(area: str) -> logging.Logger:
    """Logger of one area: info shows graphs, debug decisions, INTERNALS the rest."""
    assert area in AREAS, area
    return logging.getLogger(f"trainfuse.{area}")


def say_once(area: str, key: str, line: str) -> None:
    """Tell the user one thing that changes what they get, once a process.

    key: what makes two messages the same. The line is a warning of the area's logger, so it is
    seen without any configuration.
    """
    with _lock:
        if key in _said:
            return
        _said.add(key)
    get_logger(area).warning(line)


def parse(text: str) -> dict[str, int]:
    """Levels by area from the TRAINFUSE_LOG grammar.

    Parts are joined by ":"; a bare name shows graphs, ">" also decisions, ">>" and ">>>" also
    internals. Names are areas or TorchScript's file names. Raises UnknownToken, BadTokenList.
    """
    levels: dict[str, int] = {}
    for part in filter(None, (piece.strip() for piece in text.split(":"))):
        name = part.lstrip(">")
        depth = len(part) - len(name)
        if depth >= len(_LEVELS):
            raise BadTokenList(
                source=_SOURCE, text=text, reason="at most three '>'", example="program:>grouping"
            )
        area = TORCHSCRIPT_NAMES.get(name, name)
        if area not in AREAS:
            raise UnknownToken(
                source=_SOURCE, name=name, near=near(name, AREAS), valid=", ".join(AREAS)
            )
        levels[area] = min(_LEVELS[depth], levels.get(area, _LEVELS[depth]))
    return levels


def apply(levels: Mapping[str, int]) -> None:
    """Set the level of every area; areas not named go back to warnings only."""
    root = logging.getLogger("trainfuse")
    ours = [handler for handler in root.handlers if isinstance(handler, _Stderr)]
    if levels and not ours:
        root.addHandler(_Stderr())
        root.propagate = False
    elif not levels and ours:
        for handler in ours:
            root.removeHandler(handler)
        root.propagate = True
    for area in AREAS:
        get_logger(area).setLevel(levels.get(area, logging.NOTSET))
