"""Step times of several contenders, interleaved so that all meet the same machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Timing:
    """Median of one contender's steps, and the distance between its quartiles."""

    ms: float
    spread_ms: float


def interleave(
    contenders: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    rounds: int = 21,
    steps: int = 1,
    warmup: int = 3,
) -> dict[str, Timing]:
    """Time each contender once a round, in turn, after warming all of them up.

    steps: calls in one sample, between two synchronisations; one sample is one division of time
    by steps, so launches that hide behind the GPU's work stay hidden, as in training.
    """
    for run in contenders.values():
        for _ in range(warmup):
            run()
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            _synchronize(device)
            start = time.perf_counter()
            for _ in range(steps):
                run()
            _synchronize(device)
            samples[name].append((time.perf_counter() - start) / steps * 1e3)
    return {name: _summary(values) for name, values in samples.items()}


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _summary(values: list[float]) -> Timing:
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values * 3)
    return Timing(statistics.median(values), high - low)
