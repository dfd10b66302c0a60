"""Whole training steps, run eagerly, in fp64 and compiled, with every gradient kept."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autodiff.compare import GradientReport, TensorError, judge, relative_errors
from trainfuse.settings import settings
from trainfuse.testing.reference import double_precision, fused_masks
from trainfuse.testing.seeds import seed_all
from trainfuse.testing.trees import map_tensors, tensors

Step = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Training:
    """One training set-up, which a factory builds afresh and equal at each call.

    step: runs forward, backward and optimizer on one batch; gradients must be left in `.grad`
    (zero them at the start of the step, not at its end).
    """

    step: Step
    model: nn.Module
    batches: Sequence[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class StepTrace:
    """What a few training steps computed: one mapping a step, name to tensor, or None for no
    gradient. inputs: the batch after the step, which may write to it. strides: of outputs and
    gradients. moved: the parameters' relative RMS change over the run."""

    outputs: list[dict[str, torch.Tensor | None]]
    gradients: list[dict[str, torch.Tensor | None]]
    buffers: list[dict[str, torch.Tensor | None]]
    inputs: list[dict[str, torch.Tensor | None]]
    strides: list[dict[str, tuple[int, ...]]]
    moved: float


PARTS = ("outputs", "gradients", "buffers", "inputs")
"""What a trace holds of each step, to be judged."""


def _to_double(tree: Any) -> Any:
    return map_tensors(lambda t: t.detach().double() if t.is_floating_point() else t, tree)


def clones(
    pairs: Iterable[tuple[str, torch.Tensor | None]],
) -> dict[str, torch.Tensor | None]:
    """Detached copies by name; None stays None."""
    return {name: None if t is None else t.detach().clone() for name, t in pairs}


def strides(named: Mapping[str, torch.Tensor | None]) -> dict[str, tuple[int, ...]]:
    """Strides by name; 0 where a size of 1 or an empty tensor leaves them open."""
    return {
        name: tuple(
            stride if size > 1 and t.numel() else 0
            for size, stride in zip(t.shape, t.stride(), strict=True)
        )
        for name, t in named.items()
        if t is not None
    }


def _moved(before: Mapping[str, torch.Tensor], model: nn.Module) -> float:
    after = dict(model.named_parameters())
    change = sum(float((after[n].detach() - p).double().square().sum()) for n, p in before.items())
    size = sum(float(p.double().square().sum()) for p in before.values())
    return math.sqrt(change / size) if size else 0.0


def step_gradients(
    make: Callable[[], Training],
    compile_fn: Callable[[Training], Step] | None = None,
    *,
    steps: int = 3,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    rng: str = "fast",
) -> StepTrace:
    """Run training steps from a fixed state and generator, and keep each step's gradients.

    make: builds the training afresh, called under `torch.manual_seed(seed)`.
    compile_fn: training -> the step to run, compiled by trainfuse (whole, or its model in place);
    None runs it eagerly. dtype: torch.float64 for the reference. rng: "fast" if dropout's masks
    are to be trainfuse's own, "eager" for torch's (as the inductor backend draws them). Batches
    are used in turn.
    """
    seed_all(seed)
    training = make()
    if dtype is torch.float64:
        training.model.double()
    before = {n: p.detach().clone() for n, p in training.model.named_parameters()}
    step = training.step if compile_fn is None else compile_fn(training)
    trace = StepTrace([], [], [], [], [], 0.0)
    for i in range(steps):
        batch = training.batches[i % len(training.batches)]
        batch = map_tensors(torch.clone, batch)
        if dtype is torch.float64:
            batch = _to_double(batch)
        with contextlib.ExitStack() as stack:
            if compile_fn:
                stack.enter_context(settings.patch(keep_gradients=True))
            else:
                stack.enter_context(fused_masks(rng == "fast"))
            if dtype is torch.float64:
                stack.enter_context(double_precision())
            seed_all(seed + 1 + i)
            output = step(*batch)
        grads = {n: p.grad for n, p in training.model.named_parameters()}
        results = {f"output{j}": t for j, t in enumerate(tensors(output))}
        trace.strides.append(strides({**results, **grads}))
        trace.outputs.append(clones(results.items()))
        trace.gradients.append(clones(grads.items()))
        trace.buffers.append(clones(training.model.named_buffers()))
        trace.inputs.append(clones((f"input{j}", t) for j, t in enumerate(tensors(batch))))
    return dataclasses.replace(trace, moved=_moved(before, training.model))


def compare_traces(
    ours: StepTrace, eager: StepTrace, fp64: StepTrace, *, k: float = 2.0
) -> GradientReport:
    """Judge three runs of the same steps."""
    errors: list[TensorError] = []
    for i in range(len(eager.outputs)):
        runs = {p: [getattr(trace, p)[i] for trace in (ours, eager, fp64)] for p in PARTS}
        # a batch that the step only reads is exact: it says nothing of eager's rounding
        computed = [runs[p] for p in PARTS if p != "inputs"]
        usual = [e for _, theirs, exact in computed for e in relative_errors(theirs, exact)]
        for three in runs.values():
            errors += judge(*three, k=k, step=i, usual=usual)
        errors += misplaced(ours.strides[i], eager.strides[i], i)
    return GradientReport(tuple(errors), k, eager.moved)


def misplaced(
    ours: Mapping[str, tuple[int, ...]], eager: Mapping[str, tuple[int, ...]], step: int = 0
) -> list[TensorError]:
    """Tensors with other strides than eager's."""
    return [
        TensorError(
            name, step, math.inf, 0.0, math.inf, f"strides are {ours[name]}, eager's {theirs}"
        )
        for name, theirs in eager.items()
        if name in ours and len(ours[name]) == len(theirs) and ours[name] != theirs
    ]


def gradient_report(
    make: Callable[[], Training],
    compile_fn: Callable[[Training], Step],
    *,
    steps: int = 3,
    k: float = 2.0,
    seed: int = 0,
    rng: str = "fast",
) -> GradientReport:
    """Compare every gradient, output and buffer of training steps with eager and fp64.

    Call `.check()` on the result to raise. See `step_gradients` for the arguments.
    """
    eager = step_gradients(make, None, steps=steps, seed=seed, rng=rng)
    fp64 = step_gradients(make, None, steps=steps, dtype=torch.float64, seed=seed, rng=rng)
    ours = step_gradients(make, compile_fn, steps=steps, seed=seed)
    return compare_traces(ours, eager, fp64, k=k)
