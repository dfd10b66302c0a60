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
from tests.fusion.helpers import planned
from trainfuse.codegen.ir import GroupKernel
from trainfuse.codegen.lower import lower
from trainfuse.codegen.targets import H200, CodegenOptions

aten = torch.ops.aten
NORMS = get_decompositions(
    [aten.native_layer_norm, aten.native_layer_norm_backward, aten._softmax, aten._log_softmax]
)


def dropout(seed: Tensor, x: Tensor) -> Tensor:
    return torch.ops.trainfuse.keep_mask(seed, 3, 0.1, list(x.shape)) * x / 0.9


def dropout_add_norm(seed: Tensor, x: Tensor, residual: Tensor, w: Tensor, b: Tensor) -> Any:
    total = dropout(seed, x) + residual
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


def batch_norm_statistics(x: Tensor, old_mean: Tensor, old_var: Tensor) -> Any:
    var, mean = torch.var_mean(x.float(), (0, 1, 2), correction=0)
    moved = 0.1 * mean + 0.9 * old_mean, 0.1 * var + 0.9 * old_var
    return mean, torch.rsqrt(var + 1e-5), *moved


def behind_relu(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor, b: Tensor) -> Tensor:
    made = ((x - mean) * rstd * w + b).to(x.dtype)
    return torch.where(made.relu() <= 0, 0.0, g.float())


def batch_norm_sums(g: Tensor, x: Tensor, mean: Tensor, *rest: Tensor) -> Any:
    masked = behind_relu(g, x, mean, *rest)
    return masked.sum((0, 1, 2)), (masked * (x - mean)).sum((0, 1, 2))


def norm_gradient(
    g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor, b: Tensor, s: Tensor, d: Tensor
) -> Tensor:
    masked = behind_relu(g, x, mean, rstd, w, b)
    return ((masked - s / 1e5 - (x - mean) * (d * rstd * rstd / 1e5)) * (rstd * w)).to(x.dtype)


def group_norm_backward(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor) -> Any:
    normalized = (x.float() - mean) * rstd
    masked = torch.where((normalized * w).to(x.dtype) <= 0, 0.0, g.float()).to(x.dtype)
    sums, dots = masked.float().sum(2, True), (masked * normalized).sum(2, True)
    first, second = ((value * w).sum(1, True) / x[0].numel() for value in (sums, dots))
    return sums, dots, ((masked * w - first - normalized * second) * rstd).to(x.dtype)


IMAGE, CHANNELS = (32, 56, 56, 256), ((256,), torch.float32)
GROUPS, AFFINE = ((16, 32, 1, 1), torch.float32), ((1, 32, 10, 1), torch.float32)
ROWS, ODD = (16384, 4096), (2048, 4099)
IDS, ORDER = ((16, 1024), torch.int64), ((16384,), torch.int64)
KEYS = ((16384,), torch.int16)
Shape = tuple[int, ...]
CASES: dict[str, tuple[Callable[..., Any], list[Shape | tuple[Shape, torch.dtype]]]] = {
    "bias_gelu": (lambda x, b: F.gelu(x + b), [ROWS, (4096,)]),
    "transpose_add": (lambda x, y: x.t() + y, [ROWS, (4096, 16384)]),
    "softmax": (lambda x: F.softmax(x, -1), [(32, 12, 512, 512)]),
    "softmax_long": (lambda x: F.softmax(x, -1), [(4096, 50257)]),
    "dropout_add_norm": (dropout_add_norm, [(1,), ROWS, ROWS, (4096,), (4096,)]),
    "dropout_odd": (dropout, [(1,), ODD]),
    "dropout_add_norm_odd": (dropout_add_norm, [(1,), ODD, ODD, (4099,), (4099,)]),
    "norm_backward_odd": (norm_backward, [ODD, ODD, (2048, 1), (2048, 1), (4099,)]),
    "norm_backward": (norm_backward, [ROWS, ROWS, (16384, 1), (16384, 1), (4096,)]),
    "norm_backward_768": (
        norm_backward,
        [(16384, 768), (16384, 768), (16384, 1), (16384, 1), (768,)],
    ),
    "gelu_backward_bias": (gelu_backward, [ROWS, ROWS]),
    "batch_norm_statistics": (batch_norm_statistics, [IMAGE, CHANNELS, CHANNELS]),
    "batch_norm_sums": (batch_norm_sums, [IMAGE, IMAGE, *[CHANNELS] * 4]),
    "batch_norm_gradient": (norm_gradient, [IMAGE, IMAGE, *[CHANNELS] * 6]),
    "group_norm_gradient": (
        norm_gradient,
        [*[(16, 32, 10, 4096)] * 2, GROUPS, GROUPS, AFFINE, AFFINE, GROUPS, GROUPS],
    ),
    "group_norm_backward": (
        group_norm_backward,
        [*[((512, 8, 3136), torch.float32)] * 2, (512, 1, 1), (512, 1, 1), (8, 1)],
    ),
    "group_norm_backward_kept": (
        group_norm_backward,
        [*[(512, 4, 512)] * 2, (512, 1, 1), (512, 1, 1), (4, 1)],
    ),
    "softmax_columns": (lambda x: F.softmax(x, 0), [(512, 16384)]),
    "softmax_columns_long": (lambda x: F.softmax(x, 0), [(8192, 8192)]),
    "channels_norm_backward": (
        lambda g, x, mean, rstd, w: norm_backward(
            g.movedim(1, -1), x.movedim(1, -1), mean.movedim(1, -1), rstd.movedim(1, -1), w
        ),
        [*[(16, 96, 3136)] * 2, *[((16, 1, 3136), torch.float32)] * 2, (96,)],
    ),
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
    "embedding_backward_few": (
        lambda s, k: torch.ops.trainfuse.segment_sum(s, k, None, 50304, -1),
        [(2048, 768), ((2048,), torch.int16)],
    ),
    "embedding_backward_one": (
        lambda s, k: torch.ops.trainfuse.segment_sum(s, k, None, 1000, -1),
        [(256, 64), ((256,), torch.int64)],
    ),
    "index_add": (
        lambda s, k, o, x: torch.ops.trainfuse.segment_sum(s, k, o, 8192, -1) + x,
        [(16384, 4096), KEYS, ORDER, (8192, 4096)],
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


def rotary_backward(g: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As autograd writes it: two halves into zeros."""
    half = g.shape[-1] // 2
    turned, zeros = g * sin, torch.zeros_like(g)
    second = torch.slice_scatter(zeros, turned[..., :half].neg(), -1, half)
    return torch.slice_scatter(zeros, turned[..., half:], -1, 0, half) + second + g * cos


def slice_cat_pad(x: Tensor, y: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return F.pad(torch.cat((x[:, half:] * 2, -y[:, :half]), -1), (0, 16))


MOVED: dict[str, tuple[Callable[..., Any], list[Shape]]] = {
    "rotary_backward": (rotary_backward, [(2, 32, 1024, 128), (1024, 128), (1024, 128)]),
    "slice_cat_pad": (slice_cat_pad, [(1024, 4096), (1024, 4096)]),
}


@pytest.mark.parametrize("name", MOVED)
def test_source_of_moved_indexing(name: str, golden: Callable[[str, str], None]) -> None:
    fn, shapes = MOVED[name]
    _, plan = planned(fn, [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes])
    (group,) = plan.groups
    kernel = lower(group, H200, CodegenOptions())
    assert isinstance(kernel, GroupKernel)
    golden(f"kernels/{name}.txt", kernel.source)
