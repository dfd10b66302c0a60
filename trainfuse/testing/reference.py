"""The world in which the reference runs: fp64 throughout, and the compiled program's masks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autodiff.masks import Masks, installed

_LOWERING = frozenset({torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16})


class _Double(TorchFunctionMode):
    """Casts to a lower floating type, written in the user's code, become casts to fp64."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _LOWERING:
            return args[0].double()
        lifted = [_lift(a) for a in args]
        return func(*lifted, **{name: _lift(a) for name, a in kwargs.items()})


def _lift(value: Any) -> Any:
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return torch.float64
    return value


@contextlib.contextmanager
def double_precision() -> Iterator[None]:
    """Everything floating that is made or cast inside is fp64; autocast leaves fp64 alone."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Double():
            yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def fused_masks(enabled: bool = True) -> Iterator[None]:
    """Dropout inside draws the masks that one compiled program with `rng="fast"` would draw.

    Serves `nn.Dropout`, `F.dropout` and the dropout of `F.scaled_dot_product_attention` (so
    `nn.MultiheadAttention`); dropout inside `nn.LSTM` stays torch's, compiled or not.
    """
    if not enabled:
        yield
        return
    with installed(Masks()):
        yield
