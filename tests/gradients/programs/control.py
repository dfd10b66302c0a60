"""Is a program a fair question? Eager itself, rounded otherwise, must pass the rule.

The rule compares with eager's own error. Where that error is luck (a cancellation, a mask decided
by a rounding), an equally good program may err more. So a program is asked only if eager runs with
each result moved by a fraction of its last place stay within a part of the rule. Nothing of
trainfuse runs here.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autodiff.compare import GradientReport
from tests.gradients.programs.render import definitions, draws_eagerly
from tests.gradients.programs.tree import Program
from trainfuse.testing import double_precision, fused_masks
from trainfuse.testing.functions import Run, compare_runs, differentiate, fresh
from trainfuse.testing.seeds import seed_all
from trainfuse.testing.steps import PARTS, StepTrace, Training, compare_traces, step_gradients

# Operators that give their operands' bits, or zeros and draws: nothing is rounded there.
_EXACT = frozenset(
    """
    abs alias arange as_strided bernoulli_ bernoulli cat clamp clamp_ clamp_max clamp_min clone
    constant_pad_nd copy_ detach diagonal empty empty_like empty_strided eq expand fill_ flip full
    full_like gather ge gt index index_copy index_copy_ index_fill index_fill_ index_put index_put_
    index_select keep_mask le lift_fresh lt masked_fill masked_fill_ max maximum min minimum amax
    amin ne neg neg_ new_empty new_empty_strided new_ones new_zeros ones ones_like permute rand
    randint randn randperm relu relu_ repeat roll scalar_tensor scatter scatter_ seed select
    select_backward sign slice slice_backward sort split split_with_sizes squeeze stack t
    threshold_backward topk transpose tril triu unbind unfold unsqueeze view where zero_ zeros
    zeros_like _unsafe_view _local_scalar_dense _reshape_alias value_selecting_reduction_backward
    """.split()
)
PART = 0.75
"""Of the rule's k, how much eager's other roundings may use when a program is made."""
SAMPLES = 4


class Jitter(TorchDispatchMode):
    """Moves one floating result in twelve by a unit in its last place; of sums, more than half.

    The variance is that of rounding itself, so that errors come to sqrt(2) times eager's. A sum in
    another order is rounded otherwise at every addition, and a loss is often the only one.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not _rounds(func):
            return result
        most = max((v.numel() for v in args if isinstance(v, Tensor)), default=0)
        if func._schema.is_mutable:
            for value in _floats(result):
                value.copy_(self._moved(value, most))
            return result
        if isinstance(result, tuple | list):
            return type(result)(self._moved(value, most) for value in result)
        return self._moved(result, most)

    def _moved(self, value: Any, most: int) -> Any:
        """The value, rounded otherwise. most: elements of the largest operand."""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        if most > value.numel():
            draw = torch.randn(value.shape, generator=self.generator, dtype=torch.float64)
            step = (0.8 * draw).round()
        else:
            chance = torch.rand(value.shape, generator=self.generator, dtype=torch.float64)
            step = (chance < 1 / 24).double() - (chance > 23 / 24).double()
        # 0.7 to 1.4 units in the last place, which rounds to one
        by = 1.0 + 0.7 * torch.finfo(value.dtype).eps * step
        moved = torch.empty_like(value)
        return moved.copy_(value.double() * by)


@functools.cache
def _rounds(func: Any) -> bool:
    """Whether an operator computes what a type may not hold."""
    name = func._schema.name.partition("::")[2]
    aliases = [r.alias_info for r in func._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in aliases)
    return not (name in _EXACT or name.startswith("_foreach") or is_view)


def _floats(result: Any) -> Iterator[Tensor]:
    for value in result if isinstance(result, tuple | list) else (result,):
        if isinstance(value, Tensor) and value.is_floating_point():
            yield value


def jittered(call: Callable[..., Any], seed: int, rng: str) -> Callable[..., Any]:
    """The same under other roundings."""

    def run(*args: Any) -> Any:
        with fused_masks(rng == "fast"), Jitter(seed):
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

    def _run(self, dtype: torch.dtype | None = None, jitter: int | None = None) -> Any:
        with warnings.catch_warnings():
            # a reentrant checkpoint may have no argument that requires a gradient: that is tested
            warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
            if self._function:
                return self._differentiated(dtype, jitter)
            return self._steps(dtype, jitter)

    def _steps(self, dtype: torch.dtype | None, jitter: int | None) -> StepTrace:
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

    def _differentiated(self, dtype: torch.dtype | None, jitter: int | None) -> Run:
        seed_all(self.program.seed)
        fn, args = fresh(self.names["function"], self.names["arguments"](), dtype)
        if jitter is not None:
            with fused_masks(self.rng == "fast"), Jitter(jitter):
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

    def strayed(self, jitter: int) -> GradientReport:
        """Eager under other roundings, judged as a compiled program would be."""
        compare: Callable[..., GradientReport] = compare_runs if self._function else compare_traces
        return compare(self._run(jitter=jitter), self.eager, self.fp64, k=self.k)

    def fair(self, samples: int = SAMPLES) -> bool:
        """Whether eager's other roundings keep the rule, with something to spare."""
        return all(self.strayed(i).ratio <= PART * self.k for i in range(samples))

    def explains(self, ratio: float, samples: int = 60) -> bool:
        """Whether eager itself, rounded otherwise, is beyond the rule, and by about as much."""
        worst = max(self.strayed(1000 + i).ratio for i in range(samples))
        return worst > self.k and ratio <= 2.0 * worst
