"""The kernel contenders, and whether each is as right as eager.

eager: plain PyTorch. compile, compile-max-autotune: `torch.compile` of the function. liger:
Liger-Kernel's function of that name, where it has one and is installed. trainfuse:
`trainfuse.compile` of the function, its forward and backward run by autograd as regions; where
both are timed in one call, of a step that does both; trainfuse-max-autotune: the same with
`mode="max-autotune"`. Every backward may run again: no donated
buffers, for all.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import trainfuse
from benchmarks.kernel_cases import Case
from trainfuse.api import CompiledStep
from trainfuse.runtime.fallback import Boundary
from trainfuse.testing import TensorError, double_precision, fused_masks, judge

DEFAULT = ("eager", "compile", "trainfuse")
ALL = (*DEFAULT, "compile-max-autotune", "liger", "trainfuse-max-autotune")
Call = Callable[..., Any]
Results = Mapping[str, Tensor | None]
_SEED = 11
_SMALL = 1000


@dataclass(slots=True)
class Entrant:
    """One contender of one case.

    call: the forward. whole: forward and backward in one call, or None. args: its own copy of the
    inputs. compile_s: seconds of the first calls. notes: what a reader must know.
    """

    name: str
    case: Case
    call: Call
    whole: Call | None
    args: tuple[Tensor, ...]
    compile_s: float | None = None
    notes: list[str] = field(default_factory=list)

    def first_calls(self) -> None:
        """Compile by running each phase once."""
        began = time.perf_counter()
        differentiate(self.call, self.args)
        if self.whole is not None:
            self.whole(*self.args)
        if self.args[0].is_cuda:
            torch.cuda.synchronize()
        self.compile_s = None if self.name == "eager" else round(time.perf_counter() - began, 3)
        for step in self._steps:
            self._look_at(step)

    def _look_at(self, part: CompiledStep) -> None:
        """Say so where what runs is not what one would expect."""
        if (verdict := part.stats()["gate"]) != "pass":
            self.notes.append(verdict)
        if part is self.whole and part.explain().capture != "whole_step":
            self.notes.append(f"not captured whole: {part.explain().capture_reason}")
        left = sorted({node.op for node in part.explain().aten_nodes})
        note = f"ATen: {', '.join(left)}"
        if left and note not in self.notes:
            self.notes.append(note)

    @property
    def kernels(self) -> tuple[int, float]:
        """trainfuse's: how many kernels its plans have, and what making these plans took."""
        stats = [part.stats() for part in self._steps]
        return sum(s["kernels"] for s in stats), sum(s["compile_s"] for s in stats)

    @property
    def _steps(self) -> list[CompiledStep]:
        return [part for part in (self.call, self.whole) if isinstance(part, CompiledStep)]

    def close(self) -> None:
        """Free what the compiler keeps."""
        for step in self._steps:
            step.close()


NO_MEMORY = "out of memory"


def attempt(action: Callable[[], Any]) -> Any:
    """The action's result, or a line on why there is none: one failure must not end a long run."""
    try:
        return Boundary().attempt(action, "launch")
    except torch.OutOfMemoryError:
        return NO_MEMORY


def liger_function(case: Case) -> Call | None:
    """Liger-Kernel's function of a case, or None."""
    if case.op.liger is None or not liger_version():
        return None
    name, adapt = case.op.liger
    found = getattr(importlib.import_module("liger_kernel.transformers.functional"), name, None)
    return None if found is None else adapt(found)


def liger_version() -> str | None:
    """Liger-Kernel's version, or None where it can't be imported."""
    try:
        importlib.import_module("liger_kernel.transformers.functional")
    except ImportError:
        return None
    return importlib.metadata.version("liger_kernel")


def build(name: str, case: Case, args: tuple[Tensor, ...], *, verify: str = "kernels") -> Entrant:
    """A contender that has compiled nothing yet. verify: trainfuse's."""
    fn, both = case.op.fn, "both" in case.op.phases
    ours = name.startswith("trainfuse")
    mode = "max-autotune" if name.endswith("max-autotune") else "default"
    more: dict[str, Any] = {"dynamic": False, "mode": mode, "verify": verify} if ours else {}
    match name:
        case "eager":
            call = fn
        case "compile":
            call = torch.compile(fn, dynamic=False)
        case "compile-max-autotune":
            call = torch.compile(fn, dynamic=False, mode="max-autotune-no-cudagraphs")
        case "liger":
            call = liger_function(case)
            assert call is not None, f"{case.name} has no function of Liger-Kernel's"
        case "trainfuse" | "trainfuse-max-autotune":
            call = trainfuse.compile(fn, whole_step=False, **more)
        case _:
            raise ValueError(f"{name!r} is none of {ALL}")
    whole = None
    if both and ours:
        # captured like all others, not by trainfuse itself
        step = both_of(fn)
        whole = trainfuse.compile(step, cuda_graph="off", **more)
    elif both:
        whole = both_of(call)
    # its own inputs: batch norm writes to its statistics, some of Liger's kernels to their inputs
    return Entrant(name, case, call, whole, clones(args))


def both_of(call: Call) -> Call:
    """Loss and gradients of a function that returns a loss."""

    def both(*args: Tensor) -> tuple[Tensor, ...]:
        loss = call(*args)
        grads = torch.autograd.grad(loss, [a for a in args if a.requires_grad])
        return (loss.detach(), *grads)

    return both


# -- differentiation -----------------------------------------------------------------------------


def clones(args: Sequence[Tensor], dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    """Copies, floating ones in dtype if given, that ask for the same gradients."""
    return tuple(
        a.detach()
        .clone()
        .to(dtype if dtype is not None and a.is_floating_point() else a.dtype)
        .requires_grad_(a.requires_grad)
        for a in args
    )


def outputs_of(results: Any) -> tuple[Tensor, ...]:
    """A call's results as a tuple."""
    return results if isinstance(results, tuple) else (results,)


def cotangents(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Random cotangents of the outputs, the same for all dtypes."""
    generator = torch.Generator(outputs[0].device).manual_seed(_SEED)
    return [
        torch.empty_like(o).copy_(
            # bf16, whose values every dtype can hold
            torch.randn(o.shape, generator=generator, device=o.device, dtype=torch.bfloat16)
        )
        for o in outputs
    ]


def leaves(args: Sequence[Tensor]) -> list[Tensor]:
    """The inputs whose gradients are asked for."""
    return [a for a in args if a.requires_grad]


def differentiate(call: Call, args: Sequence[Tensor]) -> dict[str, Tensor | None]:
    """Outputs and gradients under random cotangents, by name."""
    outputs = outputs_of(call(*args))
    grads = torch.autograd.grad(outputs, leaves(args), cotangents(outputs), retain_graph=True)
    named: dict[str, Tensor | None] = {f"output{i}": o.detach() for i, o in enumerate(outputs)}
    return named | {f"gradient{i}": g for i, g in enumerate(grads)}


# -- the gradient rule ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class References:
    """Eager's results and fp64's: of random cotangents, and of a loss alone where that is timed."""

    eager: Results
    exact: Results
    whole: tuple[Results, Results] | None


def references(case: Case, args: tuple[Tensor, ...]) -> References:
    """Both references; dropout in them draws trainfuse's masks."""
    eager = _reference(case, differentiate, args)
    exact = _reference(case, differentiate, args, torch.float64)
    whole = None
    if "both" in case.op.phases:
        one, two = (_reference(case, _of_loss, args, dtype) for dtype in (None, torch.float64))
        whole = one, two
    return References(eager, exact, whole)


def _reference(
    case: Case, run: Any, args: tuple[Tensor, ...], dtype: torch.dtype | None = None
) -> Results:
    torch.manual_seed(_SEED)
    world = contextlib.nullcontext if dtype is None else double_precision

    def call(*own: Tensor) -> Any:
        # the function alone: in double_precision() cotangents would be drawn in fp64, others
        with world(), fused_masks(case.op.dropout):
            return case.op.fn(*own)

    return run(call, clones(args, dtype))


def _of_loss(call: Call, args: Sequence[Tensor]) -> Results:
    return _named(both_of(call)(*args))


def _named(results: Sequence[Tensor]) -> Results:
    loss, *grads = results
    return {"output0": loss, **{f"gradient{i}": g for i, g in enumerate(grads)}}


def check(entrant: Entrant, refs: References) -> dict[str, tuple[float | None, str]]:
    """By phase: the largest error over eager's own, and which tensor is beyond the limit.

    The ratio is scaled so that 2 is the limit for every tensor: half types of fewer than 1000
    elements are allowed 3.
    """
    case = entrant.case
    if case.op.dropout and not entrant.name.startswith("trainfuse"):
        return dict.fromkeys(case.op.phases, (None, "gradients unchecked: other masks"))
    torch.manual_seed(_SEED)
    ours = differentiate(entrant.call, clones(entrant.args))
    errors = judge(ours, refs.eager, refs.exact)
    verdicts: dict[str, tuple[float | None, str]] = {
        "forward": _verdict([e for e in errors if e.name.startswith("output")], ours),
        "backward": _verdict([e for e in errors if e.name.startswith("gradient")], ours),
    }
    if entrant.whole is not None and refs.whole is not None:
        torch.manual_seed(_SEED)
        ours = _named(entrant.whole(*clones(entrant.args)))
        verdicts["both"] = _verdict(judge(ours, *refs.whole), ours)
    return verdicts


def _verdict(errors: Sequence[TensorError], results: Results) -> tuple[float, str]:
    worst, note = 0.0, ""
    for error in errors:
        tensor = results[error.name]
        assert tensor is not None
        half = tensor.dtype in (torch.bfloat16, torch.float16)
        limit = 3.0 if half and tensor.numel() < _SMALL else 2.0
        ratio = math.inf if math.isnan(error.ratio) else error.ratio * 2.0 / limit
        if ratio > max(worst, 2.0):
            note = f"WRONG: {error.name} {error.ratio:.2f} x eager's error {error.note}".rstrip()
        worst = max(worst, ratio)
    return (round(worst, 3) if math.isfinite(worst) else 1e9), note
