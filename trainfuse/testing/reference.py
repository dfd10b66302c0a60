"""The world in which the reference runs: fp64 throughout, and the compiled program's masks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import autodiff.rng  # noqa: F401  # registers torch.ops.trainfuse.seed and keep_mask

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


@dataclass(slots=True)
class _Masks:
    """The dropout masks of one program: a seed drawn once, then one offset a dropout."""

    seed: torch.Tensor | None = None
    count: int = 0

    def keep(self, x: torch.Tensor, p: float) -> torch.Tensor:
        if self.seed is None:
            self.seed = torch.ops.trainfuse.seed(x)
        mask = torch.ops.trainfuse.keep_mask(self.seed, self.count, p, list(x.shape))
        self.count += 1
        return mask

    def dropout(
        self,
        input: torch.Tensor,  # noqa: A002  # the name that F.dropout gives it
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> torch.Tensor:
        if not training or p == 0.0:
            return input
        wide = torch.promote_types(input.dtype, torch.float32)
        scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
        return (input.to(wide) * self.keep(input, p) * scale).to(input.dtype)

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        """Attention with dropout, as ATen's math kernel computes it."""
        if scale is None:
            scale = 1.0 / math.sqrt(query.size(-1))
        scores = (query * math.sqrt(scale)) @ (key.transpose(-2, -1) * math.sqrt(scale))
        if is_causal:
            shape = scores.shape[-2:]
            attn_mask = torch.ones(shape, dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        return self.dropout(scores.softmax(-1), dropout_p) @ value


@contextlib.contextmanager
def fused_masks(enabled: bool = True) -> Iterator[None]:
    """Dropout inside draws the masks that one compiled program with `rng="fast"` would draw.

    Serves `nn.Dropout`, `F.dropout` and the dropout of `F.scaled_dot_product_attention` (so
    `nn.MultiheadAttention`); dropout inside `nn.LSTM` stays torch's, compiled or not.
    """
    if not enabled:
        yield
        return
    masks = _Masks()
    real = functional.scaled_dot_product_attention

    def attention(  # the signature of F.scaled_dot_product_attention
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if dropout_p == 0.0:
            return real(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        assert not enable_gqa, "the reference has no grouped queries with dropout"
        return masks.attention(query, key, value, attn_mask, dropout_p, is_causal, scale)

    with (
        mock.patch.object(functional, "dropout", masks.dropout),
        mock.patch.object(functional, "scaled_dot_product_attention", attention),
    ):
        yield
