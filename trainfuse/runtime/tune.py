"""Picks among a schedule's candidates: one that doesn't spill; the fastest, where time is taken.

Once a kernel, and GPU; the outcome is remembered on disk.
Candidates differ in sizes only (`codegen.choices`), so whichever wins computes the same values up
to the order of its sums, and passes the same gate.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainfuse.capture import compat
from trainfuse.codegen.choices import MODEL, Choice
from trainfuse.codegen.ir import GroupKernel
from trainfuse.fusion.plan import FusionGroup
from trainfuse.log import get_logger
from trainfuse.runtime.cache import KernelCache
from trainfuse.runtime.compile_worker import write_atomically
from trainfuse.runtime.launch import GroupLauncher
from trainfuse.runtime.stand_ins import stand_in, stand_ins

_ROUNDS = 7
_SHORT_US = 200.0
_REPEATS, _FEW = 8, 3
_BUSY_BYTES, _BUSY_FILLS = 64 << 20, 30
"""What keeps a GPU busy for half a millisecond, while the host puts launches behind it."""
_MARGIN = 0.98
"""Share of the model's time that another candidate must stay under: less is noise."""

_log = get_logger("cache")


Candidates = Sequence[tuple[Choice, GroupKernel]]


@dataclass(frozen=True, slots=True)
class Trial:
    """A group, its kernel by the cost model, and how to get the ones to compare that with.

    search: the candidates, the model's first; called only when they are wanted. timed: whether the
    fastest is wanted, or only one that doesn't spill.
    """

    group: FusionGroup
    kernel: GroupKernel
    search: Callable[[], Candidates]
    timed: bool


@dataclass(frozen=True, slots=True)
class Tuner:
    """Where kernels are compiled and run, and how far the search goes (part of what is noted)."""

    cache: KernelCache
    arch: str
    depth: str
    fma: bool

    def __call__(self, trials: Sequence[Trial]) -> dict[str, GroupKernel]:
        """The kernel to use for each group whose model's choice is not the best, by group name.

        Needs the GPU that the kernels are for. A candidate that doesn't compile loses. Device
        memory for one group's tensors is taken and given back; a group that doesn't fit keeps the
        model's choice. The random state is not touched.
        """
        models = {trial.kernel.key: trial for trial in trials}
        timed = {key: trial for key, trial in models.items() if trial.timed}
        notes = {key: self._note(trial) for key, trial in timed.items()}
        found = {key: choice for key, path in notes.items() if (choice := _read(path)) is not None}
        searched = {key: t.search() for key, t in timed.items() if found.get(key) != MODEL}
        # all at once: whoever waits for one kernel waits for the slowest of a second round, too
        kernels = [(t.group, t.kernel) for t in models.values()]
        kernels += [
            (models[key].group, kernel)
            for key, many in searched.items()
            if key not in found
            for _, kernel in many
        ]
        launchers = [self._launcher(group, kernel) for group, kernel in kernels]
        self.cache.compile((w for each in launchers for w in each.wanted), self.arch)
        for (key, trial), launcher in zip(models.items(), launchers, strict=False):
            if not trial.timed and self._stack(launcher) > 0:
                notes[key], searched[key] = self._note(trial), trial.search()
                if (choice := _read(notes[key])) is not None:
                    found[key] = choice
        new = {key: many for key, many in searched.items() if key not in found}
        if new:
            found |= self._compare(models, new, notes)
        best = {
            key: kernel
            for key, many in searched.items()
            for choice, kernel in many
            if choice == found[key] != MODEL
        }
        return {
            trial.group.name: replace(best[trial.kernel.key], name=trial.group.name)
            for trial in trials
            if trial.kernel.key in best
        }

    def _compare(
        self,
        trials: Mapping[str, Trial],
        candidates: Mapping[str, Candidates],
        notes: Mapping[str, Path],
    ) -> dict[str, Choice]:
        launchers = {
            key: [(choice, self._launcher(trials[key].group, kernel)) for choice, kernel in many]
            for key, many in candidates.items()
        }
        every = [launcher for many in launchers.values() for _, launcher in many]
        failed = self.cache.compile((w for each in every for w in each.wanted), self.arch)
        found: dict[str, Choice] = {}
        with compat.real_tensors(), torch.no_grad():
            for key, many in launchers.items():
                usable = [(c, each) for c, each in many if not set(each.wanted) & set(failed)]
                measured: dict[Choice, float] = {}
                if trials[key].timed:
                    measured = _times(trials[key].group, usable)
                    found[key] = _fastest(measured)
                else:
                    found[key] = min(usable, key=lambda it: self._stack(it[1]), default=(MODEL,))[0]
                _write(notes[key], found[key], measured)
                _log.info("%s: %s of %d choices", trials[key].group.name, found[key], len(usable))
            torch.cuda.empty_cache()  # a CUDA graph's pool can't use what is cached here
        return found

    def _launcher(self, group: FusionGroup, kernel: GroupKernel) -> GroupLauncher:
        return GroupLauncher(group, kernel, self.cache, self.arch, fma=self.fma)

    def _stack(self, launcher: GroupLauncher) -> int:
        return max(self.cache.stack(*wanted) for wanted in launcher.wanted)

    def _note(self, trial: Trial) -> Path:
        """Where the outcome lies: beside the model's kernel, by GPU if it was timed."""
        folder = self.cache.entry(trial.kernel.key, trial.kernel.source, self.arch)
        if not trial.timed:
            return folder / "tuned-stack.json"
        name = torch.cuda.get_device_name(trial.group.outputs[0].meta["val"].device)
        return folder / f"tuned-{self.depth}-{re.sub(r'[^A-Za-z0-9]+', '-', name)}.json"


def _fastest(times: Mapping[Choice, float]) -> Choice:
    if not times:
        return MODEL
    best = min(times, key=lambda choice: times[choice])
    return best if times[best] < _MARGIN * times.get(MODEL, float("inf")) else MODEL


def _times(
    group: FusionGroup, launchers: Sequence[tuple[Choice, GroupLauncher]]
) -> dict[Choice, float]:
    """Microseconds of each, taking turns; empty when they can't be had.

    Fewer than two, no room for the tensors, or indices whose range nobody knows.
    """
    values = [node.meta["val"] for node in (*group.inputs, *group.outputs)]
    needed = sum(v.untyped_storage().nbytes() for v in values) + _BUSY_BYTES
    device = values[-1].device
    if len(launchers) < 2 or 2 * needed > torch.cuda.mem_get_info(device)[0]:
        return {}
    random = torch.Generator(device).manual_seed(0)
    inputs = stand_ins(group, random)
    if inputs is None:
        return {}
    outputs = [stand_in(node, random) for node in group.outputs]
    busy = torch.empty(_BUSY_BYTES, dtype=torch.uint8, device=device)
    times: dict[Choice, list[float]] = {choice: [] for choice, _ in launchers}
    for _, launcher in launchers:  # loads its code
        launcher(inputs, outputs)
    for _ in range(_ROUNDS):
        for choice, launcher in launchers:
            run = lambda launcher=launcher: launcher(inputs, outputs)  # noqa: E731  # one line
            short = times[choice] and times[choice][0] < _SHORT_US
            times[choice].append(_clock(run, _REPEATS if short else _FEW, busy))
    return {choice: statistics.median(many) for choice, many in times.items()}


def _clock(run: Callable[[], None], repeats: int, busy: Tensor) -> float:
    """Microseconds of a run among so many, one behind the other.

    Launching takes the host as long as many a kernel: all wait behind writes to `busy`.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(_BUSY_FILLS):
        busy.zero_()
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / repeats


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
