"""Is a program a fair question? Eager itself, rounded otherwise, must pass the rule.

The rule compares with eager's own error. Where that error is luck (a cancellation, a mask decided
by a rounding), an equally good program may err more. So a program is asked only if eager runs with
each result moved by a fraction of its last place stay within a part of the rule, and if no norm is
of equal values, whose deviations are rounding alone. Nothing of trainfuse runs here.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autodiff.compare import GradientReport
from autodiff.jitter import Jitter
from tests.gradients.programs.render import definitions, draws_eagerly
from tests.gradients.programs.tree import Program
from trainfuse.testing import double_precision, fused_masks
from trainfuse.testing.functions import Run, compare_runs, differentiate, fresh
from trainfuse.testing.seeds import seed_all
from trainfuse.testing.steps import PARTS, StepTrace, Training, compare_traces, step_gradients

PART = 0.75
"""Of the rule's k, how much eager's other roundings may use when a program is made."""
SAMPLES = 4


class _Norms(TorchDispatchMode):
    """Sees norms of equal values: what rounding makes of 0, three hundred times as large."""

    def __init__(self) -> None:
        super().__init__()
        self.of_nothing = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _NORMS and result[2].numel():
            self.of_nothing |= float(result[2].double().max()) * math.sqrt(args[-1]) > 0.99
        return result


_aten = torch.ops.aten
_NORMS = (
    _aten.native_layer_norm.default,
    _aten.native_group_norm.default,
    _aten.native_batch_norm.default,
)
"""Their third result is 1 / sqrt(variance + epsilon), their last argument the epsilon."""


def jittered(call: Callable[..., Any], jitter: Jitter, rng: str) -> Callable[..., Any]:
    """The same under other roundings."""

    def run(*args: Any) -> Any:
        with fused_masks(rng == "fast"), jitter:
            return call(*args)

    return run


class Reference:
    """A program's eager and fp64 runs, and how far eager's other roundings stray from them."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.rng = "eager" if draws_eagerly(program) else "fast"
        self.k = 3.0 if program.has_half else 2.0
        self.names: dict[str, Any] = {"__name__": "program"}
        exec(compile(definitions(program), f"<program {program.seed}>", "exec"), self.names)
        self.eager = self._run()
        self.fp64 = self._run(torch.float64)

    @property
    def _function(self) -> bool:
        return self.program.compile.capture == "function"

    def _run(self, dtype: torch.dtype | None = None, jitter: Jitter | None = None) -> Any:
        with warnings.catch_warnings():
            # a reentrant checkpoint may have no argument that requires a gradient: that is tested
            warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
            if self._function:
                return self._differentiated(dtype, jitter)
            return self._steps(dtype, jitter)

    def _steps(self, dtype: torch.dtype | None, jitter: Jitter | None) -> StepTrace:
        def moved(training: Training) -> Callable[..., Any]:
            assert jitter is not None
            return jittered(training.step, jitter, self.rng)

        return step_gradients(
            self.names["make"],
            None if jitter is None else moved,
            steps=self.program.steps,
            dtype=dtype,
            seed=self.program.seed,
            rng=self.rng,
        )

    def _differentiated(self, dtype: torch.dtype | None, jitter: Jitter | None) -> Run:
        seed_all(self.program.seed)
        fn, args = fresh(self.names["function"], self.names["arguments"](), dtype)
        if jitter is not None:
            with fused_masks(self.rng == "fast"), jitter:
                return differentiate(fn, args, 0)
        if dtype is not None:
            with fused_masks(self.rng == "fast"), double_precision():
                return differentiate(fn, args, 0, like=self.eager)
        with fused_masks(self.rng == "fast"):
            return differentiate(fn, args, 0)

    @property
    def finite(self) -> bool:
        """Whether eager's results are numbers."""
        if self._function:
            parts = [self.eager.results]
        else:
            parts = [part for name in PARTS for part in getattr(self.eager, name)]
        return all(
            bool(t.isfinite().all()) for part in parts for t in part.values() if t is not None
        )

    def strayed(self, jitter: Jitter) -> GradientReport:
        """Eager under other roundings, judged as a compiled program would be."""
        compare: Callable[..., GradientReport] = compare_runs if self._function else compare_traces
        return compare(self._run(jitter=jitter), self.eager, self.fp64, k=self.k)

    def fair(self, samples: int = SAMPLES) -> bool:
        """Whether eager's other roundings keep the rule, with something to spare."""
        with _Norms() as norms:
            kept = all(self.strayed(Jitter(i)).ratio <= PART * self.k for i in range(samples))
        return kept and not norms.of_nothing

    def explains(self, ratio: float, samples: int = 60) -> bool:
        """Whether eager itself, rounded otherwise, is beyond the rule, and by about as much."""
        worst = max(self.strayed(Jitter(1000 + i, operands=True)).ratio for i in range(samples))
        return worst > self.k and ratio <= 2.0 * worst
