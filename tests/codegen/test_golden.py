"""Generated sources, reviewed as code: one of each schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from codegen_support import lowered, trace
from torch import Tensor
from torch._decomp import get_decompositions
from torch._subclasses import FakeTensorMode

import autodiff.rng  # noqa: F401 -- registers trainfuse.keep_mask
import trainfuse.fusion.segment_ops  # noqa: F401 -- registers trainfuse.segment_sum
from trainfuse.codegen.targets import H200

aten = torch.ops.aten
NORMS = get_decompositions(
    [aten.native_layer_norm, aten.native_layer_norm_backward, aten._softmax, aten._log_softmax]
)


def dropout_add_norm(seed: Tensor, x: Tensor, residual: Tensor, w: Tensor, b: Tensor) -> Any:
    kept = torch.ops.trainfuse.keep_mask(seed, 3, 0.1, list(x.shape)) * x / 0.9
    total = kept + residual
    return total, F.layer_norm(total, (x.shape[-1],), w, b)


def norm_backward(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor) -> Any:
    return aten.native_layer_norm_backward(
        g, x, [x.shape[-1]], mean, rstd, w, w, [True, True, True]
    )


def gelu_backward(g: Tensor, x: Tensor) -> Any:
    slope = aten.gelu_backward(g, x)
    return slope, slope.sum(0)


def norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), w, b)


def embedding_positions(ids: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    where = torch.arange(ids.shape[-1])
    return F.embedding(ids, table) + F.embedding(where, positions)


ROWS = (16384, 4096)
IDS, ORDER = ((16, 1024), torch.int64), ((16384,), torch.int64)
KEYS = ((16384,), torch.int16)
Shape = tuple[int, ...]
CASES: dict[str, tuple[Callable[..., Any], list[Shape | tuple[Shape, torch.dtype]]]] = {
    "bias_gelu": (lambda x, b: F.gelu(x + b), [ROWS, (4096,)]),
    "transpose_add": (lambda x, y: x.t() + y, [ROWS, (4096, 16384)]),
    "softmax": (lambda x: F.softmax(x, -1), [(32, 12, 512, 512)]),
    "softmax_long": (lambda x: F.softmax(x, -1), [(4096, 50257)]),
    "dropout_add_norm": (dropout_add_norm, [(1,), ROWS, ROWS, (4096,), (4096,)]),
    "norm_backward": (norm_backward, [ROWS, ROWS, (16384, 1), (16384, 1), (4096,)]),
    "norm_backward_768": (
        norm_backward,
        [(16384, 768), (16384, 768), (16384, 1), (16384, 1), (768,)],
    ),
    "gelu_backward_bias": (gelu_backward, [ROWS, ROWS]),
    "loss": (lambda a, b: (a - b).square().mean(), [ROWS, ROWS]),
    "embedding_positions": (embedding_positions, [IDS, (50304, 768), (1024, 768)]),
    "embedding_positions_norm": (
        lambda *args: norm(embedding_positions(*args[:3]), *args[3:]),
        [IDS, (50304, 768), (1024, 768), (768,), (768,)],
    ),
    "embedding_backward": (
        lambda s, k, o, w: torch.ops.trainfuse.segment_sum(s, k, o, 50304, -1) + w,
        [(16384, 768), KEYS, ORDER, (50304, 768)],
    ),
    "pad_roll": (
        lambda x: torch.roll(x, 1, 0) + F.pad(x, (-1, 1)),
        [(4096, 1024)],
    ),
}


def fakes(shapes: list[Any]) -> list[Tensor]:
    """bf16 tensors, but for seeds [1], row statistics [R, 1], and where a type is given."""
    with FakeTensorMode():
        return [torch.empty(shape, dtype=dtype) for shape, dtype in map(typed, shapes)]


def typed(shape: Any) -> tuple[Shape, torch.dtype]:
    if isinstance(shape[0], tuple):
        return shape
    if shape == (1,):
        return shape, torch.int64
    return shape, torch.float32 if shape[-1] == 1 else torch.bfloat16


@pytest.mark.parametrize("name", CASES)
def test_source(name: str, golden: Callable[[str, str], None]) -> None:
    fn, shapes = CASES[name]
    kernel = lowered(trace(fn, fakes(shapes), NORMS), H200)
    launches = "".join(
        f"# {step.function}: grid {step.grid}, {step.num_warps} warps\n" for step in kernel.launches
    )
    golden(f"kernels/{name}.txt", launches + kernel.source)
