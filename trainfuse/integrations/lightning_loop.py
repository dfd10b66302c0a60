"""The seam in Lightning: one attribute of the optimization loop, set for a fit and removed after.

`_AutomaticOptimization.run` gets the batch and returns what `on_train_batch_end` sees; all hooks,
schedulers and counters around it stay Lightning's. A whole step replaces it and moves the loop's
own progress counters as it would. Regions replace only the call of `training_step` inside it.
"""

from __future__ import annotations

import contextlib
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainfuse import api
from trainfuse.errors import CaptureError, CudaGraphUnavailable
from trainfuse.integrations import lightning_progress, lightning_verdict
from trainfuse.integrations.lightning_step import (
    GATE_REASONS,
    LogCapture,
    StepFacts,
    Tape,
    TrainerGate,
    build_step,
    facts_of,
)
from trainfuse.integrations.lightning_tree import library_folder, part

_UNTIMED_PLAIN = 1
"""Plain steps before the timed ones: the first allocates, picks algorithms, makes the state."""

_UNTIMED_FUSED = 2
"""Fused steps before the timed ones: the first compiles and checks, the second may record."""

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_NOT_USERS = ("/site-packages/", "/trainfuse/integrations/", "/trainfuse/capture/")

_MAX_REPEATS = 2
"""New plans in a row, for sizes already seen, after which a step isn't captured whole any more."""


def _reason(error: CaptureError, library: str) -> str:
    """Why a whole step was refused, with the user's line.

    Our own gates name the reason inside Dynamo's text, and sit deeper than the line at fault.
    library: folder of the Lightning in use.
    """
    texts, cause = [str(error)], error.__cause__
    while cause is not None:
        texts.append(str(cause))
        cause = cause.__cause__
    text = "\n".join(texts)
    reason = next((reason for reason in GATE_REASONS if reason in text), None)
    if reason is None:
        reason, where = str(error.facts.get("reason", error)), error.where
    else:
        skipped = (library, *_NOT_USERS)
        frames = [f for f in _FRAME.findall(text) if not any(part in f[0] for part in skipped)]
        where = f"{Path(frames[-1][0]).name}:{frames[-1][1]}" if frames else None
    return f"{reason} ({where})" if where else reason


def _sizes(batch: Any) -> Any:
    """What of a batch may fairly ask for a plan of its own: shapes, dtypes and structure."""
    if isinstance(batch, torch.Tensor):
        return tuple(batch.shape), batch.dtype
    if isinstance(batch, Mapping):
        return tuple((key, _sizes(value)) for key, value in batch.items())
    if isinstance(batch, list | tuple):
        return tuple(_sizes(value) for value in batch)
    return type(batch)


@dataclass(slots=True)
class Meter:
    """Milliseconds of the first few steps of one kind; nothing is synchronised once it is full."""

    device: torch.device | None
    untimed: int
    wanted: int
    seen: int = 0
    times_ms: list[float] = field(default_factory=list)

    @property
    def full(self) -> bool:
        """True when all wanted steps were timed."""
        return self.seen >= self.untimed + self.wanted

    @property
    def median_ms(self) -> float | None:
        """Median of the timed steps, or None if there are none."""
        return statistics.median(self.times_ms) if self.times_ms else None

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        """Time a step if it is one of the wanted ones; a step that raises does not count."""
        timed = self.untimed <= self.seen and not self.full
        start = self._now() if timed else 0.0
        yield
        if timed:
            self.times_ms.append((self._now() - start) * 1e3)
        if not self.full:
            self.seen += 1

    def _now(self) -> float:
        if self.device is not None:
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


class FusedLoop:
    """Runs one fit's training batches: some plain ones to compare with, then compiled ones.

    options: keywords for `trainfuse.compile`. on_reason: called with the reason when a whole step
    turns out to be impossible. on_warm: called once, after the timed steps.
    """

    def __init__(
        self,
        trainer: Any,
        module: Any,
        whole: bool,
        options: Mapping[str, Any],
        compare_steps: int,
        on_reason: Callable[[str], None],
        on_warm: Callable[[], None],
    ) -> None:
        self.trainer = trainer
        self.module = module
        self.whole = whole
        self.step: Any = None
        self.regions: Any = None
        self._device = device = lightning_verdict.cuda(trainer)
        self._plain_bytes: int | None = None
        self.plain_meter = Meter(device, _UNTIMED_PLAIN, compare_steps)
        self.fused_meter = Meter(device, _UNTIMED_FUSED, max(compare_steps, 1))
        if compare_steps == 0:
            self.plain_meter.untimed = 0
        self._options = dict(options)
        own = {**(options.get("options") or {}), "whole_step": False}
        self._region_options = {**options, "options": own}
        self._on_reason = on_reason
        self._on_warm: Callable[[], None] | None = on_warm
        self._loop = trainer.fit_loop.epoch_loop.automatic_optimization
        self._run = self._loop.run
        self._training_step = self._loop._training_step
        self._facts: StepFacts | None = None
        self._seen_plans, self._repeats = 0, 0
        self._seen_sizes: set[Any] = set()
        self._eager_frame = False
        root = part(trainer, "core").LightningModule
        nested = [child for child in module.modules() if isinstance(child, root)]
        gate = TrainerGate(trainer)
        self._whole_logs = LogCapture(nested, Tape(whole=True), gate)
        self._region_logs = LogCapture(nested, Tape(whole=False), gate)

    def install(self) -> None:
        """Take over the loop's `run` and `training_step` calls."""
        lightning_progress.delay(self.trainer)
        vars(self._loop).update(run=self.run, _training_step=self.training_step)

    def close(self) -> None:
        """Give the loop back and free the plans. Harmless when called again."""
        for name in ("run", "_training_step"):
            vars(self._loop).pop(name, None)
        lightning_progress.restore(self.trainer)
        for compiled in self.compiled:
            compiled.close()

    @property
    def compiled(self) -> tuple[Any, ...]:
        """The compiled steps in use: the whole one, the regions, or both."""
        return tuple(c for c in (self.step, self.regions) if c is not None)

    @property
    def num_plans(self) -> int:
        """Plans made so far for training."""
        return sum(len(compiled.plans) for compiled in self.compiled)

    @property
    def extra_bytes(self) -> int | None:
        """Device memory reserved since the last plain step; None on a CPU, or with none run."""
        if self._device is None or self._plain_bytes is None:
            return None
        return torch.cuda.memory_reserved(self._device) - self._plain_bytes

    def run(self, optimizer: Any, batch_idx: int, kwargs: Any) -> dict[str, Any]:
        """One batch: what Lightning's `run` does and returns."""
        if not self.plain_meter.full:
            with self.plain_meter.measure():
                outputs = self._run(optimizer, batch_idx, kwargs)
            if self.plain_meter.full and self._device is not None:
                self._plain_bytes = torch.cuda.memory_reserved(self._device)
                # a CUDA graph's pool can't use, and during capture not free, what these cached
                torch.cuda.empty_cache()
            return outputs
        with self.fused_meter.measure():
            outputs = self._whole_step(optimizer, kwargs) if self._applies() else None
            if outputs is None:
                outputs = self._run(optimizer, batch_idx, kwargs)
        if self._on_warm is not None and self.fused_meter.full:
            warm, self._on_warm = self._on_warm, None
            warm()
        return outputs

    def _applies(self) -> bool:
        # callbacks change these two between epochs
        return (
            self.whole
            and self.trainer.accumulate_grad_batches == 1
            and not self._loop._skip_backward
        )

    def _whole_step(self, optimizer: Any, kwargs: Any) -> dict[str, Any] | None:
        """Run the batch as one compiled step; None if it can't be, with nothing changed."""
        progress = self._loop.optim_progress.optimizer
        compiled = self._compiled(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters]
        for p in parameters:
            # Lightning does so a little later; here no trace depends on what a plain step left
            p.grad = None
        try:
            with self.trainer.profiler.profile("[trainfuse]whole_step"), self._whole_logs.active():
                result, logged = compiled(*kwargs.values())
        except CudaGraphUnavailable:
            raise  # it was required
        except CaptureError as error:
            self.whole = False
            self._on_reason(_reason(error, library_folder(self.trainer)))
            return None
        except BaseException:
            # as Lightning leaves it: the step was begun, and not completed
            for p, gradient in zip(parameters, gradients, strict=True):
                p.grad = gradient
            progress.step.increment_ready()
            raise
        progress.step.increment_ready()
        progress.zero_grad.increment_ready()
        progress.zero_grad.increment_started()
        progress.zero_grad.increment_completed()
        self._whole_logs.replay(logged)
        progress.step.increment_completed()
        self._watch(kwargs)
        extra = dict(result) if isinstance(result, Mapping) else {"loss": result}
        # the eager rescue, beyond max_plans, leaves the graph on it
        return {"loss": extra.pop("loss").detach(), **extra}

    def _watch(self, kwargs: Any) -> None:
        """Leave the whole step if equal batches keep making new plans.

        Then the step depends on a Python value that changes, such as the batch index.
        """
        if len(self.step.plans) == self._seen_plans:
            self._repeats = 0
            return
        self._seen_plans = len(self.step.plans)
        sizes = _sizes(kwargs["batch"])
        self._repeats = self._repeats + 1 if sizes in self._seen_sizes else 0
        self._seen_sizes.add(sizes)
        if self._repeats >= _MAX_REPEATS:
            self.whole = False
            self._eager_frame = True
            self._on_reason("training_step depends on a Python value that changes, as batch_idx")

    def _compiled(self, optimizer: Any) -> Any:
        facts = facts_of(self.trainer, optimizer)
        if self.step is None or facts != self._facts:
            if self.step is not None:
                self.step.close()
            function = build_step(self.module, optimizer, self._whole_logs.tape, facts)
            self.step = api.compile(function, fullgraph=True, **self._options)
            self._facts = facts
        return self.step

    def training_step(self, kwargs: Any) -> Any:
        """The closure's first part: `training_step` with its result processed, as regions."""
        if not self.plain_meter.full:
            return self._training_step(kwargs)
        if self.regions is None:
            function = self.module.training_step
            if self._eager_frame:
                # only what it calls is compiled: it would be traced anew at every batch
                function = torch.compiler.disable(function, recursive=False)
            self.regions = api.compile(function, **self._region_options)
        fields = vars(self.module)
        own = fields.get("training_step")
        logs = self._region_logs
        with logs.active():
            fields["training_step"] = self.regions
            try:
                outputs = self._training_step(kwargs)
            finally:
                if own is None:
                    del fields["training_step"]
                else:
                    fields["training_step"] = own
            logged = list(logs.tape.entries)
        logs.replay(logged)
        return outputs
