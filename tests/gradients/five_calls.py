"""Five calls of one compiled function, each compared with eager and fp64, its kernels counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import trainfuse
from trainfuse.testing import assert_gradients_match

Fn = Callable[..., Any]
Make = Callable[[], Sequence[Any]]


def t(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> Tensor:
    """A random tensor, trainable where its type allows it."""
    value = torch.randn(shape)
    if dtype is torch.bool:
        return value > 0
    if not dtype.is_floating_point:
        return (value * 5).to(dtype)
    return value.to(dtype).requires_grad_(grad)


def kernels(step: Any) -> dict[str, int]:
    """Kernels of each kind of plan; of several plans of a kind, the last one's."""
    return {plan.kind: len(plan.plan.program.groups) for plan in step.plans}


def assert_no_fallback(step: Any) -> None:
    """No kernel failed its check, or to compile, and none was replaced."""
    assert step.stats()["gate"] == "pass"
    for plan in step.plans:
        assert not plan.plan.failures
        assert not plan.plan.program.failed
        assert len(plan.plan.program.groups) == len(plan.state.fusion.groups)


def five_calls(
    fn: Fn,
    make: Make,
    forward: int,
    backward: int | None,
    *,
    calls: int = 5,
    plans: int | None = None,
    **options: Any,
) -> Any:
    """Values, dtypes, sizes, strides, flags and gradients of five calls, and the kernel counts.

    make: the arguments, new at each call. backward: None where nothing is differentiated. plans:
    how many are made, one a phase by default. Returns the compiled function.
    """
    step = trainfuse.compile(fn, backend="triton", whole_step=False)
    for seed in range(calls):
        torch.manual_seed(100 + seed)
        assert_gradients_match(fn, make(), compile_fn=lambda _: step, seed=seed, **options)
    assert_no_fallback(step)
    found = kernels(step)
    wanted = {"forward": forward, "backward": backward}
    assert found == ({"inference": forward} if backward is None else wanted), found
    assert len(step.plans) == (plans or len(found)), "planned again"
    return step
