"""The dropout masks of one program, drawn by whatever else runs it: the reference's side of rng.py.

Written apart from the pass that puts masks into a graph, so that a fault of the pass is seen.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.nn import functional

from . import _compat, philox

Draw = tuple[float, tuple[int, ...]]
"""A dropout's probability and shape."""
Drawn = dict[tuple[int, Draw], torch.Tensor]
"""Masks by offset, and what they were drawn for."""


@dataclass(slots=True)
class Masks:
    """A seed a device, drawn at the first dropout there, then one offset a dropout.

    count: how many have drawn. drawn: masks that runs of one step from one state of the generators
    share; None keeps none. expected: the dropouts to come, by offset: those that are alike are
    drawn with the first of them, where they are kept.
    """

    seeds: dict[torch.device, torch.Tensor] = field(default_factory=dict)
    count: int = 0
    drawn: Drawn | None = None
    expected: Sequence[Draw] = ()

    def keep(self, x: torch.Tensor, p: float) -> torch.Tensor:
        """The next dropout's mask: which elements of x stay."""
        if x.device not in self.seeds:
            self.seeds[x.device] = torch.ops.trainfuse.seed(x)
        offset, self.count = self.count, self.count + 1
        draw = p, tuple(x.shape)
        if self.drawn is None:
            return self._one(x, offset, draw)
        if (offset, draw) not in self.drawn:
            offsets = self._alike(offset, draw)
            if len(offsets) > 1:
                masks = philox.keep_masks(self.seeds[x.device], offsets, *draw)
            else:
                masks = [self._one(x, offset, draw)]
            self.drawn |= zip([(i, draw) for i in offsets], masks, strict=True)
        return self.drawn[offset, draw]

    def _one(self, x: torch.Tensor, offset: int, draw: Draw) -> torch.Tensor:
        p, shape = draw
        return torch.ops.trainfuse.keep_mask(self.seeds[x.device], offset, p, list(shape))

    def _alike(self, offset: int, draw: Draw) -> list[int]:
        """Offsets of the dropouts to come, from this one on, that are as it is."""
        later = range(offset + 1, len(self.expected))
        if offset >= len(self.expected) or self.expected[offset] != draw:
            return [offset]
        return [offset, *(i for i in later if self.expected[i] == draw)]

    def repeated(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What runs a function again, with the masks of its first run, which begins now."""
        first = self.count

        def again(*args: Any, **kwargs: Any) -> Any:
            later, self.count = self.count, first
            try:
                return function(*args, **kwargs)
            finally:
                self.count = later

        return again

    def dropout(
        self,
        input: torch.Tensor,  # noqa: A002  # the name that F.dropout gives it
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> torch.Tensor:
        """F.dropout with these masks."""
        if not training or p == 0.0:
            return input
        result = self.scaled(input, p)[0]  # one offset at p = 1, too, as in the graph
        return input.copy_(result) if inplace else result

    def scaled(self, x: torch.Tensor, p: float) -> tuple[torch.Tensor, torch.Tensor]:
        """aten.native_dropout: what stays of x, scaled, and which elements those are."""
        keep = self.keep(x, p)
        scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
        # a mask rounds nothing, and a half times a number is rounded once: no cast is needed
        return x * keep * scale, keep

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """F.scaled_dot_product_attention; with dropout, as ATen's math kernel computes it.

        A GPU's attention kernels draw their own masks, compiled or not: they are left to it.
        """
        if dropout_p == 0.0 or query.is_cuda:
            more = {"scale": scale, "enable_gqa": enable_gqa}
            return ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, **more)
        if enable_gqa:
            groups = query.size(-3) // key.size(-3)
            key, value = (t.repeat_interleave(groups, -3) for t in (key, value))
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


DROPOUT, ATTENTION = functional.dropout, functional.scaled_dot_product_attention
"""torch's own, whatever stands in their place."""


@contextlib.contextmanager
def installed(masks: Masks) -> Iterator[None]:
    """Within the block `F.dropout`, and the dropout of attention, take these masks.

    Serves `nn.Dropout` and `nn.MultiheadAttention` too; dropout inside `nn.LSTM` stays torch's. A
    checkpoint takes the same masks when it runs again.
    """
    with (
        mock.patch.object(functional, "dropout", masks.dropout),
        mock.patch.object(functional, "scaled_dot_product_attention", masks.attend),
        _compat.recomputing_through(masks.repeated),
    ):
        yield
