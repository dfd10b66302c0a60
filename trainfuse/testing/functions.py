"""Functions and modules: outputs and gradients under random cotangents."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autodiff.compare import GradientReport, judge, relative_errors
from trainfuse.testing.reference import double_precision, fused_masks
from trainfuse.testing.seeds import seed_all
from trainfuse.testing.steps import clones, misplaced, strides
from trainfuse.testing.trees import map_tensors, tensors

Step = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Run:
    """One differentiation: results by name, and the tensors that it worked on, kept alive so that
    no two runs can be given the same memory one after the other. strides: of outputs.
    learns: which outputs require a gradient."""

    results: dict[str, torch.Tensor | None]
    state: tuple[torch.Tensor, ...]
    strides: dict[str, tuple[int, ...]] = field(default_factory=dict)
    learns: dict[str, bool] = field(default_factory=dict)

    @property
    def storage(self) -> frozenset[int]:
        """Addresses of the state."""
        return frozenset(t.untyped_storage().data_ptr() for t in self.state if t.numel())


def fresh(fn: Step, args: Any, dtype: torch.dtype | None = None) -> tuple[Step, Any]:
    """A copy of fn (if a module) and args, in dtype, sharing no storage with the originals."""

    def own(t: torch.Tensor) -> torch.Tensor:
        changed = t.detach().clone()
        if dtype is not None and t.is_floating_point():
            changed = changed.to(dtype)
        return changed.requires_grad_(t.requires_grad)

    if isinstance(fn, nn.Module):
        fn = copy.deepcopy(fn)
        fn = fn if dtype is None else fn.to(dtype)
    return fn, map_tensors(own, args)


def differentiate(
    fn: Step, args: Any, seed: int, call: Step | None = None, *, like: Run | None = None
) -> Run:
    """Call fn (or, in its place, call) and take its gradients under random cotangents.

    Of several outputs, one alone has a backward of its own first: what else it doesn't depend on
    has no gradient then. like: a run whose outputs say which are differentiated; in fp64 a cast to
    fp64 under no_grad, say, is its operand, history and all.
    """
    leaves = tensors(args)
    state = _state(fn, args)
    inputs = {f"d_arg{i}": a for i, a in enumerate(leaves) if a.requires_grad}
    others = {f"arg{i}": a for i, a in enumerate(leaves) if not a.requires_grad}
    if isinstance(fn, nn.Module):
        inputs |= {f"d_{n}": p for n, p in fn.named_parameters() if p.requires_grad}
    seed_all(seed)
    outputs = {f"output{i}": o for i, o in enumerate(tensors((call or fn)(*args)))}
    learns = {name: o.requires_grad for name, o in outputs.items()}
    results = clones(outputs.items())
    chosen = learns if like is None else like.learns
    names = [name for name, o in outputs.items() if o.requires_grad and chosen[name]]
    roots = [outputs[name] for name in names]
    if inputs and roots:
        generator = torch.Generator().manual_seed(seed)
        cotangents = [
            torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o) for o in roots
        ]
        uses = {"": slice(None)}
        if len(roots) > 1:
            index = seed % len(roots)
            uses = {f" of {names[index]}": slice(index, index + 1), **uses}
        for of, use in uses.items():
            grads = torch.autograd.grad(
                roots[use],
                list(inputs.values()),
                cotangents[use],
                retain_graph=bool(of),
                allow_unused=True,
            )
            results |= clones(zip([f"{name}{of}" for name in inputs], grads, strict=True))
    if isinstance(fn, nn.Module):
        results |= {f"buffer_{n}": b.detach().clone() for n, b in fn.named_buffers()}
    # what the call wrote to its arguments
    results |= {name: a.detach().clone() for name, a in others.items()}
    return Run(results, state, strides(outputs), learns)


def assert_gradients_match(
    fn: Step,
    args: Sequence[Any],
    *,
    dtype: torch.dtype | None = None,
    k: float = 2.0,
    compile_fn: Callable[[Step], Step] | None = None,
    seed: int = 0,
    rng: str = "fast",
) -> GradientReport:
    """Check that trainfuse's outputs and gradients of fn are as near to fp64 as eager's.

    fn: a function of tensors, or a module (copied; never changed). args: its arguments, cloned;
    gradients are taken of those that require them and of the module's parameters, under random
    cotangents, of all outputs and of one alone. dtype: run in this type instead of the arguments'
    own. compile_fn: how to compile (default `trainfuse.compile`). rng: "eager" where dropout's
    masks are to be torch's own.
    Raises AssertionError; returns the report otherwise.
    """
    if compile_fn is None:
        from trainfuse import compile as compile_fn
    with fused_masks(rng == "fast"):
        eager = differentiate(*fresh(fn, args, dtype), seed)
    with fused_masks(rng == "fast"), double_precision():
        fp64 = differentiate(*fresh(fn, args, torch.float64), seed, like=eager)
    own_fn, own_args = fresh(fn, args, dtype)
    ours = differentiate(own_fn, own_args, seed, compile_fn(own_fn))
    callers = Run({}, _state(fn, args))
    runs = (ours, eager, fp64, callers)
    for i, one in enumerate(runs):
        for two in runs[:i]:
            assert not one.storage & two.storage, "runs share storage: the comparison is void"
    return compare_runs(ours, eager, fp64, k=k).check()


def compare_runs(ours: Run, eager: Run, fp64: Run, *, k: float = 2.0) -> GradientReport:
    """Judge three runs of one function."""
    assert ours.learns == eager.learns, (
        f"outputs that require a gradient: ours {ours.learns}, eager's {eager.learns}"
    )
    computed = {n: t for n, t in fp64.results.items() if not n.startswith("arg")}
    usual = relative_errors(eager.results, computed)
    errors = judge(ours.results, eager.results, fp64.results, k=k, usual=usual)
    return GradientReport((*errors, *misplaced(ours.strides, eager.strides)), k)


def _state(fn: Step, args: Any) -> tuple[torch.Tensor, ...]:
    """Tensors that a call of fn reads: arguments, parameters, buffers."""
    own = [*fn.parameters(), *fn.buffers()] if isinstance(fn, nn.Module) else []
    return (*tensors(args), *own)
