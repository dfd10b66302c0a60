"""Picks among a schedule's candidates by timing them, once a kernel and GPU; remembered on disk.

Candidates differ in sizes only (`codegen.choices`), so whichever wins computes the same values up
to the order of its sums, and passes the same gate.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from trainfuse.capture import compat
from trainfuse.codegen.choices import MODEL, Choice
from trainfuse.codegen.ir import GroupKernel
from trainfuse.fusion.plan import FusionGroup
from trainfuse.log import get_logger
from trainfuse.runtime.cache import KernelCache
from trainfuse.runtime.compile_worker import write_atomically
from trainfuse.runtime.launch import GroupLauncher

_ROUNDS = 7
_SHORT_US = 50.0
_MARGIN = 0.98
"""Share of the model's time that another candidate must stay under: less is noise."""

_log = get_logger("cache")


@dataclass(frozen=True, slots=True)
class Trial:
    """A group with its kernels: the cost model's first, then the ones to compare it with."""

    group: FusionGroup
    kernels: tuple[tuple[Choice, GroupKernel], ...]

    @property
    def key(self) -> str:
        """Key of the model's kernel: what the outcome is remembered by."""
        return self.kernels[0][1].key


def tune(
    trials: Sequence[Trial], cache: KernelCache, arch: str, *, depth: str, fma: bool
) -> dict[str, Choice]:
    """The fastest choice of each trial, by the key of its model's kernel.

    depth: how the candidates were picked; the outcome of another depth is not taken over. Needs
    the GPU that the kernels are for. A candidate that doesn't compile or launch loses. Device
    memory for one group's tensors is taken and given back; a group that doesn't fit keeps the
    model's choice. The random state is not touched.
    """
    unique = {trial.key: trial for trial in trials}
    notes = {key: _note(trial, cache, arch, depth) for key, trial in unique.items()}
    found = {key: choice for key, path in notes.items() if (choice := _read(path)) is not None}
    open_ = [trial for key, trial in unique.items() if key not in found]
    launchers = {
        trial.key: [
            (choice, GroupLauncher(trial.group, kernel, cache, arch, fma=fma))
            for choice, kernel in trial.kernels
        ]
        for trial in open_
    }
    every = [launcher for many in launchers.values() for _, launcher in many]
    failed = cache.compile((w for launcher in every for w in launcher.wanted), arch)
    with compat.real_tensors(), torch.no_grad():
        for trial in open_:
            usable = [
                (choice, launcher)
                for choice, launcher in launchers[trial.key]
                if not any(w in failed for w in launcher.wanted)
            ]
            times = _times(trial.group, usable)
            found[trial.key] = best = _fastest(times)
            _write(notes[trial.key], best, times)
            _log.info("%s: %s of %d candidates", trial.group.name, best, len(times))
        if open_:
            torch.cuda.empty_cache()  # a CUDA graph's pool can't use what is cached here
    return found


def _fastest(times: Mapping[Choice, float]) -> Choice:
    if not times:
        return MODEL
    best = min(times, key=lambda choice: times[choice])
    return best if times[best] < _MARGIN * times.get(MODEL, float("inf")) else MODEL


def _times(
    group: FusionGroup, launchers: Sequence[tuple[Choice, GroupLauncher]]
) -> dict[Choice, float]:
    """Microseconds of each, taking turns; empty when there is nothing to compare or no room."""
    values = [node.meta["val"] for node in (*group.inputs, *group.outputs)]
    needed = sum(v.untyped_storage().nbytes() for v in values)
    device = values[-1].device
    if len(launchers) < 2 or 2 * needed > torch.cuda.mem_get_info(device)[0]:
        return {}
    random = torch.Generator(device).manual_seed(0)
    inputs = [_stand_in(node, random) for node in group.inputs]
    outputs = [_stand_in(node, random) for node in group.outputs]
    times: dict[Choice, list[float]] = {choice: [] for choice, _ in launchers}
    for turn in range(_ROUNDS):
        for choice, launcher in launchers:
            run = lambda launcher=launcher: launcher(inputs, outputs)  # noqa: E731  # one line
            took = _clock(run, 1 if not times[choice] or times[choice][0] > _SHORT_US else 8)
            if turn != 1:  # the first tells how long it is, the second warms up what that needs
                times[choice].append(took)
    return {choice: statistics.median(many[1:]) for choice, many in times.items()}


def _clock(run: Callable[[], None], repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / repeats


def _stand_in(node: fx.Node, random: torch.Generator) -> Tensor:
    """A tensor like a node's value: noise, indices that are always in range, true masks."""
    value: Tensor = node.meta["val"]
    size = value.untyped_storage().nbytes() // value.dtype.itemsize
    flat = torch.zeros(size, dtype=value.dtype, device=value.device)
    if value.dtype.is_floating_point:
        flat.normal_(generator=random)
    elif value.dtype == torch.bool:
        flat.fill_(True)
    return flat.as_strided(value.shape, value.stride(), value.storage_offset())


def _note(trial: Trial, cache: KernelCache, arch: str, depth: str) -> Path:
    model = trial.kernels[0][1]
    folder = cache.entry(model.key, model.source, arch)
    name = torch.cuda.get_device_name(trial.group.outputs[0].meta["val"].device)
    return folder / f"tuned-{depth}-{name.replace(' ', '-').replace('/', '-')}.json"


def _read(path: Path) -> Choice | None:
    """What was found before, or None when nothing valid is there."""
    try:
        knobs = json.loads(path.read_text())["choice"]
        return Choice(**{name: _knob(value) for name, value in knobs.items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _knob(value: Any) -> int | bool | None:
    if value is None or isinstance(value, int):
        return value
    raise ValueError(value)


def _write(path: Path, choice: Choice, times: Mapping[Choice, float]) -> None:
    us = {str(candidate): round(took, 2) for candidate, took in times.items()}
    text = json.dumps({"choice": asdict(choice), "us": us}, indent=1)
    write_atomically(path, text.encode())
