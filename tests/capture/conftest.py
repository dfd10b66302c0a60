"""A build callback that runs a captured graph as it is: capture alone is under test here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from autodiff.verify import verify
from trainfuse.capture.lift import Captured


class Recorder:
    """Builds the plainest program of each captured graph, and keeps the graphs."""

    def __init__(self) -> None:
        self.captured: list[Captured] = []

    def __call__(self, captured: Captured) -> Callable[[list[Any]], Sequence[Any]]:
        verify(captured.graph)
        self.captured.append(captured)
        tg = captured.graph
        names = [fact.name for fact in tg.inputs]
        gm = tg.gm

        def program(args: list[Any]) -> list[Any]:
            kept = list(args)
            results = gm(*kept)
            for name, value in zip(tg.mutations, results[tg.num_outputs :], strict=True):
                kept[names.index(name)].copy_(value)
            return list(results[: tg.num_outputs])

        return program


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()
