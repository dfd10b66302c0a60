"""`FusionCallback`: a Lightning training step compiled by trainfuse, and nothing else changed."""

from __future__ import annotations

import json
import logging
from typing import Any, Literal

import torch

from trainfuse import options as call_options
from trainfuse.errors import BadOption, CaptureError
from trainfuse.integrations.lightning_loop import FusedLoop
from trainfuse.integrations.lightning_report import FusionReport
from trainfuse.integrations.lightning_tree import callback_bases, tree_of
from trainfuse.integrations.lightning_verdict import Verdict, decide, unsupported
from trainfuse.log import get_logger

_STATE_VERSION = 1

Scalar = str | int | float | bool | None


class StandsDown(CaptureError):
    """Strict mode, or a CUDA graph that was required, and a fit that can't have it."""

    message = "the training step can't be fused as asked: {reason}"
    fix = "FusionCallback(mode='default', strict=False) trains another way and says so"


class FusionCallback(*callback_bases()):  # type: ignore[misc]  # the bases depend on what is loaded
    """Compile the training step of a `Trainer`, whole where no hook stands in between.

    mode, verify, dynamic, backend, cuda_graph, memory_budget, options: as in `trainfuse.compile`.
    compare_steps: plain steps timed at the start of a fit, against which the summary gives the
    speed; 0 compiles at the first batch. metrics: log `trainfuse/...` every `log_every_n_steps`.
    strict: raise CaptureError where a plain or split step would be used instead; so does
    mode="reduce-overhead".
    All arguments are JSON values, so that a YAML config can hold them. What the Trainer asks for
    beyond automatic optimization on one device in 32-true or bf16-mixed runs as plain Lightning,
    and one line says why. Raises OptionError for unknown options.
    """

    def __init__(
        self,
        mode: Literal["default", "reduce-overhead", "max-autotune"] = "default",
        verify: Literal["off", "kernels", "step"] | int = "kernels",
        dynamic: bool | None = None,
        backend: Literal["triton", "inductor", "eager"] | None = None,
        cuda_graph: Literal["auto", "require", "off"] = "auto",
        memory_budget: float | int | None = None,
        options: dict[str, Scalar] | None = None,
        compare_steps: int = 3,
        metrics: bool = False,
        strict: bool = False,
    ) -> None:
        super().__init__()
        if compare_steps < 0:
            raise BadOption(name="compare_steps", value=compare_steps, expected="0 or more")
        self.arguments: dict[str, Any] = {
            "mode": mode,
            "verify": verify,
            "dynamic": dynamic,
            "backend": backend,
            "cuda_graph": cuda_graph,
            "memory_budget": memory_budget,
            "options": options,
            "compare_steps": compare_steps,
            "metrics": metrics,
            "strict": strict,
        }
        json.dumps(self.arguments)
        self._compile_options = {
            name: self.arguments[name]
            for name in ("dynamic", "backend", "memory_budget", "options")
            if self.arguments[name] is not None
        }
        # a default that nobody chose must not beat the settings around the fit
        for name, default in (("mode", "default"), ("verify", "kernels"), ("cuda_graph", "auto")):
            if self.arguments[name] != default:
                self._compile_options[name] = self.arguments[name]
        call_options.resolve(**self._compile_options)
        self._strict = strict or mode == "reduce-overhead" or cuda_graph == "require"
        self._loop: FusedLoop | None = None
        self._verdict: Verdict | None = None
        self._report: FusionReport | None = None
        self._restored: dict[str, Any] = {}

    @property
    def report(self) -> FusionReport | None:
        """What became of the current or last fit; None before one."""
        if self._loop is not None and self._verdict is not None:
            return FusionReport.of(self._verdict, self._loop)
        return self._report

    @property
    def state_key(self) -> str:
        """Key of this callback's state in a checkpoint."""
        return "trainfuse.FusionCallback"

    def state_dict(self) -> dict[str, Any]:
        """A few plain values for whoever reads the checkpoint; no plan depends on them."""
        if self.report is None:
            return self._restored
        return {
            "version": _STATE_VERSION,
            "torch": str(torch.__version__),
            "mode": self.arguments["mode"],
            **self.report.to_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep what another run, of any version, said of itself; nothing is compiled for it."""
        self._restored = dict(state_dict)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse early what strict mode forbids, before anything is loaded."""
        if stage == "fit" and self._strict:
            reason = unsupported(trainer, pl_module)
            if reason is not None:
                raise StandsDown(reason=reason)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Decide how steps run, say so if not whole, and take the loop's seam."""
        self._release()
        self._report = None
        self._verdict = decide(trainer, pl_module)
        if self._verdict.kind == "plain":
            self._report = FusionReport.of(self._verdict, None)
            self._stand_down(trainer)
            return
        if self._verdict.kind == "regions":
            self._stand_down(trainer)
        self._loop = FusedLoop(
            trainer,
            pl_module,
            whole=self._verdict.kind == "whole_step",
            options=self._compile_options,
            compare_steps=self.arguments["compare_steps"],
            on_reason=lambda reason: self._split(trainer, reason),
            on_warm=lambda: self._summarise(trainer),
        )
        self._loop.install()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log our own metrics, when asked to."""
        loop = self._loop
        if not self.arguments["metrics"] or loop is None:
            return
        if trainer.global_step % max(trainer.log_every_n_steps, 1) == 0:
            for logger in trainer.loggers:
                logger.log_metrics(
                    {"trainfuse/plans": loop.num_plans, "trainfuse/whole_step": int(loop.whole)},
                    step=trainer.global_step,
                )

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Give the loop back before the strategy takes the module off its device."""
        self._release()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Give the loop back before a checkpoint of the failed run is saved."""
        self._release()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Give the loop back when a fit ended in another way."""
        self._release()

    def _split(self, trainer: Any, reason: str) -> None:
        self._verdict = Verdict("regions", reason)
        self._stand_down(trainer)

    def _stand_down(self, trainer: Any) -> None:
        assert self._verdict is not None
        assert self._verdict.reason is not None
        if self._strict:
            raise StandsDown(reason=self._verdict.reason)
        how = "as plain Lightning" if self._verdict.kind == "plain" else "as regions"
        if trainer.is_global_zero:
            get_logger("lightning").warning("training runs %s: %s", how, self._verdict.reason)

    def _summarise(self, trainer: Any) -> None:
        assert self.report is not None
        # Lightning's own logger: shown where its other lines about the run are
        if trainer.is_global_zero:
            logging.getLogger(tree_of(trainer)).info(self.report.line())

    def _release(self) -> None:
        if self._loop is not None:
            self._report = self.report
            self._loop.close()
            self._loop = None
