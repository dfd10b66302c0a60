"""The kernel cases: ordinary PyTorch functions, their sizes, and the bytes that each must move.

A floor is what a phase must read once and write once, values saved for backward included; inputs
that backward reads again count as read, not as saved. Where a kernel may choose what to save, the
floor is of the choice that moves least in both phases together: dropout's masks are drawn again,
a sum before a norm is saved. R rows, N columns, s bytes an element. Sources: the table in the
design paper on kernels (nvFuser's benchmark formulas), with the exceptions said at the op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import kernel_functions as f

Dims = tuple[int, ...]
Floors = Callable[..., Mapping[str, int]]

ROWS = ((16, 768), (512, 4096), (2048, 4099), (16384, 1024), (16384, 4096), (16384, 5120),
        (16384, 16384))  # fmt: skip
"""From launch-bound to a floor of 1 GiB and more; 4099: odd, so that no row but the first is
aligned; 5120: no power of two."""
IMAGES = ((8, 32, 7, 7), (16, 160, 57, 57), (32, 64, 56, 56), (64, 256, 56, 56),
          (128, 64, 112, 112), (256, 256, 56, 56))  # fmt: skip
ON_CHIP = 32 << 20
"""Bytes that a kernel can hope to find again in L2 (50 MB on an H100 or H200)."""


@dataclass(frozen=True, slots=True)
class Maker:
    """Makes one case's inputs: normally distributed values, uniform indices."""

    dims: Dims
    dtype: torch.dtype
    device: str

    def normal(self, *shape: int, grad: bool = True) -> Tensor:
        values = torch.randn(shape, dtype=self.dtype, device=self.device)
        return values.requires_grad_(grad)

    def near_one(self, *shape: int) -> Tensor:
        """A norm's weight."""
        values = 1.0 + 0.1 * torch.randn(shape, device=self.device)
        return values.to(self.dtype).requires_grad_()

    def indices(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, device=self.device)


@dataclass(frozen=True, slots=True)
class Op:
    """One benchmark function. make: its arguments. floors: bytes by phase, of (s, *dims).

    phases: what is timed; "both" is forward and backward in one call. only: inputs whose gradients
    are asked for are those that require them. liger: name of Liger-Kernel's function and how to
    call it with the same arguments. fp32: further sizes, in that type. tiny: for a CPU.
    """

    name: str
    fn: Callable[..., Any]
    make: Callable[[Maker], tuple[Tensor, ...]]
    floors: Floors
    sizes: tuple[Dims, ...]
    tiny: Dims
    phases: tuple[str, ...] = ("forward", "backward")
    dropout: bool = False
    fp32: tuple[Dims, ...] = ()
    liger: tuple[str, Callable[..., Any]] | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """One op at one size and type."""

    op: Op
    dims: Dims
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        """OP-ROWSxCOLUMNS, and the type if it is not bf16."""
        suffix = "" if self.dtype is torch.bfloat16 else "-fp32"
        return f"{self.op.name}-{'x'.join(map(str, self.dims))}{suffix}"

    def make(self, device: str) -> tuple[Tensor, ...]:
        """The arguments, the same at every call."""
        torch.manual_seed(0)
        return self.op.make(Maker(self.dims, self.dtype, device))

    @property
    def floors(self) -> Mapping[str, int]:
        """Bytes by phase; a phase without a roof of memory is missing."""
        return self.op.floors(self.dtype.itemsize, *self.dims)


# -- arguments -----------------------------------------------------------------------------------


def _matrices(count: int, *, weights: int = 0, biases: int = 0, grads: str = "all") -> Any:
    """count matrices, then row vectors near one, then around zero; grads: "all", "last", "first".

    "last": only the last vector's gradient is asked for; "first": only the first matrix's.
    """

    def make(m: Maker) -> tuple[Tensor, ...]:
        rows, columns = m.dims
        made = [m.normal(rows, columns) for _ in range(count)]
        made += [m.near_one(columns) for _ in range(weights)]
        made += [m.normal(columns) for _ in range(biases)]
        keep = {"all": made, "last": made[-1:], "first": made[:1]}[grads]
        return tuple(t if any(t is k for k in keep) else t.detach() for t in made)

    return make


def _images(*, channels_last: bool = False, statistics: bool = False) -> Any:
    def make(m: Maker) -> tuple[Tensor, ...]:
        channels = m.dims[1]
        x = m.normal(*m.dims, grad=False)
        if channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        if not statistics:
            return x.requires_grad_(), m.near_one(channels), m.normal(channels)
        full = Maker(m.dims, torch.float32, m.device)  # batch norm's own are fp32 under autocast
        running = torch.zeros(channels, device=m.device), torch.ones(channels, device=m.device)
        return x.requires_grad_(), full.near_one(channels), full.normal(channels), *running

    return make


def _scores(m: Maker) -> tuple[Tensor, ...]:
    batch, heads, time = m.dims
    mask = torch.ones(1, 1, time, time, device=m.device).tril()
    return m.normal(batch, heads, time, time), mask


def _logits(m: Maker) -> tuple[Tensor, ...]:
    rows, classes = m.dims
    return m.normal(rows, classes), m.indices(classes, rows)


def _head(m: Maker) -> tuple[Tensor, ...]:
    rows, hidden, classes = m.dims
    weight = (m.normal(classes, hidden, grad=False) / hidden**0.5).requires_grad_()
    return m.normal(rows, hidden), weight, m.indices(classes, rows)


def _rotary(m: Maker) -> tuple[Tensor, ...]:
    batch, time, heads, width = m.dims
    angles = torch.outer(
        torch.arange(time, device=m.device),
        10000.0 ** -(torch.arange(0, width, 2, device=m.device) / width),
    )
    angles = torch.cat((angles, angles), -1)[None]
    q, k = m.normal(batch, heads, time, width), m.normal(batch, heads, time, width)
    return q, k, angles.cos().to(m.dtype), angles.sin().to(m.dtype)


def _table(m: Maker) -> tuple[Tensor, ...]:
    tokens, vocabulary, width = m.dims
    return m.indices(vocabulary, tokens), m.normal(vocabulary, width)


def _scatter(m: Maker) -> tuple[Tensor, ...]:
    tokens, rows, width = m.dims
    return m.normal(rows, width, grad=False), m.indices(rows, tokens), m.normal(tokens, width)


# -- floors --------------------------------------------------------------------------------------


def _linear(forward: tuple[float, ...], backward: tuple[float, ...]) -> Floors:
    """Bytes of a 2-D op: coefficients of (RNs, Ns, R, RN) by phase."""

    def floors(s: int, rows: int, columns: int) -> Mapping[str, int]:
        terms = (rows * columns * s, columns * s, rows, rows * columns)
        sums = (sum(c * t for c, t in zip(cs, terms, strict=False)) for cs in (forward, backward))
        return dict(zip(("forward", "backward"), map(int, sums), strict=True))

    return floors


def _batch_norm(s: int, batch: int, channels: int, height: int, width: int) -> Mapping[str, int]:
    """Statistics come before the first write: beyond L2 that is a second reading of all."""
    size = batch * channels * height * width * s
    again = 1 if size > ON_CHIP else 0
    rest = 24 * channels
    forward, backward = (2 + again) * size + rest, (3 + 2 * again) * size + rest
    return {"forward": forward, "backward": backward}


def _plane_norm(groups: int) -> Floors:
    """Instance and group norm: one group fits on chip. groups: 0 for one a channel."""

    def floors(s: int, batch: int, channels: int, height: int, width: int) -> Mapping[str, int]:
        size = batch * channels * height * width * s
        rest = 2 * channels * s + 8 * batch * (min(groups, channels) or channels)
        return {"forward": 2 * size + rest, "backward": 3 * size + rest}

    return floors


def _attention(s: int, batch: int, heads: int, time: int) -> Mapping[str, int]:
    """Backward reads the scores again, or saved probabilities written for nothing else."""
    size = batch * heads * time * time
    return {"forward": 2 * s * size + 4 * time**2, "backward": 3 * s * size + 4 * time**2}


def _loss(s: int, rows: int, classes: int) -> Mapping[str, int]:
    logits, ends = rows * classes * s, 12 * rows
    return {"forward": logits + ends, "backward": 2 * logits + ends, "both": 2 * logits + ends}


def _rotation(s: int, batch: int, time: int, heads: int, width: int) -> Mapping[str, int]:
    both = 2 * 2 * batch * time * heads * width * s + 2 * time * width * s
    return {"forward": both, "backward": both}


def _lookup(s: int, tokens: int, vocabulary: int, width: int) -> Mapping[str, int]:
    rows = (min(tokens, vocabulary) + tokens) * width * s
    table = (tokens + vocabulary) * width * s
    return {"forward": rows + 8 * tokens, "backward": table + 8 * tokens}


def _scattered(s: int, tokens: int, rows: int, width: int) -> Mapping[str, int]:
    forward = (2 * rows + tokens) * width * s + 8 * tokens
    return {"forward": forward, "backward": (min(tokens, rows) + tokens) * width * s + 8 * tokens}


def _no_roof(*_: int) -> Mapping[str, int]:
    return {}


# -- the table -----------------------------------------------------------------------------------

_SMALL = (3, 20)
_FP32 = ((4096, 4096),)
_LIGER_NORM = ("liger_rms_norm", lambda fn: lambda x, w: fn(x, w, 1e-6, 0.0, "llama", False))


def _rows(name: str, fn: Any, make: Any, forward: Any, backward: Any, **more: Any) -> Op:
    return Op(name, fn, make, _linear(forward, backward), ROWS, _SMALL, **more)


OPS: tuple[Op, ...] = (
    _rows("softmax", f.softmax, _matrices(1), (2,), (3,), fp32=_FP32,
          liger=("liger_softmax", lambda fn: fn)),
    _rows("softmax_columns", f.softmax_columns, _matrices(1), (2,), (3,)),
    _rows("layernorm", f.layernorm, _matrices(1, weights=1, biases=1), (2, 2, 8), (3, 3, 8),
          fp32=_FP32, liger=("liger_layer_norm", lambda fn: lambda x, w, b: fn(x, w, b, 1e-5))),
    _rows("rmsnorm", f.rmsnorm, _matrices(1, weights=1), (2, 1, 4), (3, 2, 4), fp32=_FP32,
          liger=_LIGER_NORM),
    # nvFuser's formulas save dropout's mask and not the sum: 8 RNs + 2 RN in all, here 8 RNs
    _rows("dropout_add_layernorm", f.dropout_add_layernorm, _matrices(2, weights=1, biases=1),
          (4, 2, 8), (4, 3, 8), dropout=True, fp32=_FP32),
    _rows("dropout_add_rmsnorm", f.dropout_add_rmsnorm, _matrices(2, weights=1), (4, 1, 4),
          (4, 2, 4), dropout=True),
    _rows("add_rmsnorm", f.add_rmsnorm, _matrices(2, weights=1), (4, 1, 4), (4, 2, 4),
          liger=("liger_fused_add_rms_norm",
                 lambda fn: lambda x, r, w: fn(x, r, w, 1e-6, 0.0, "llama", False))),
    _rows("bias_gelu", f.bias_gelu, _matrices(1, biases=1), (2, 1), (3, 2)),
    _rows("gelu_bias_gradient", f.bias_gelu, _matrices(1, biases=1, grads="last"), (2, 1), (2, 2),
          phases=("backward",)),
    # nvFuser's saves relu's mask; as many bytes in all are moved when backward reads x instead
    _rows("scale_bias_relu", f.scale_bias_relu, _matrices(1, biases=2, grads="first"), (2, 2),
          (3, 2)),
    _rows("swiglu", f.swiglu, _matrices(2), (3,), (5,), fp32=_FP32,
          liger=("liger_swiglu", lambda fn: fn)),
    _rows("mul", f.mul, _matrices(2), (3,), (5,)),
    # the matrix's own gradient is the cotangent itself: nothing to do
    _rows("broadcast_add", f.broadcast_add, _matrices(1, biases=1, grads="last"), (2, 1), (1, 1)),
    # the matrix's gradient is one row, expanded: no bytes
    _rows("reduction_epilogue", f.reduction_epilogue, _matrices(1, biases=1), (1, 2), (0, 3)),
    # both matrices have one gradient, which is written once
    _rows("transpose_add", f.transpose_add, _matrices(2), (3,), (3,)),
    _rows("slice_cat_pad", f.slice_cat_pad, _matrices(2), (2, 0, 32), (3,)),
    Op("batch_norm_relu", f.batch_norm_relu, _images(statistics=True), _batch_norm, IMAGES,
       (2, 4, 3, 3)),
    Op("batch_norm_relu_nhwc", f.batch_norm_relu, _images(statistics=True, channels_last=True),
       _batch_norm, IMAGES, (2, 4, 3, 3)),
    Op("instance_norm", f.instance_norm, _images(), _plane_norm(0), IMAGES, (2, 4, 3, 3)),
    Op("groupnorm_silu", f.groupnorm_silu, _images(), _plane_norm(32), IMAGES, (2, 4, 3, 3)),
    Op("mask_softmax_dropout", f.mask_softmax_dropout, _scores, _attention,
       ((16, 12, 4), (16, 12, 128), (16, 16, 255), (16, 12, 512), (32, 16, 512), (32, 32, 512)),
       (2, 2, 5), dropout=True),
    Op("cross_entropy", f.cross_entropy, _logits, _loss,
       ((128, 1000), (2048, 8192), (1024, 50257), (8192, 32000), (4096, 128256), (8192, 65536)),
       (4, 21), phases=("forward", "backward", "both"),
       liger=("liger_cross_entropy", lambda fn: fn)),
    Op("linear_cross_entropy", f.linear_cross_entropy, _head, _no_roof, ((8192, 2048, 128256),),
       (6, 8, 21), phases=("both",),
       liger=("liger_fused_linear_cross_entropy", lambda fn: lambda x, w, t: fn(x, w, t))),
    Op("rope", f.rope, _rotary, _rotation,
       ((1, 64, 4, 64), (2, 1000, 12, 80), (1, 1024, 32, 128), (1, 8192, 32, 128),
        (4, 4096, 32, 128), (2, 32768, 32, 128)),
       (1, 5, 2, 6), liger=("liger_rope", lambda fn: fn)),
    Op("embedding", f.embedding, _table, _lookup,
       ((256, 1000, 64), (2048, 32000, 768), (4096, 50257, 768), (16384, 32000, 2048),
        (8192, 128256, 2048), (32768, 128256, 4096)),
       (7, 5, 6)),
    Op("index_add", f.index_add, _scatter, _scattered,
       ((256, 1000, 64), (4096, 4096, 1024), (5000, 2049, 1031), (16384, 8192, 4096),
        (32768, 16384, 4096), (65536, 32768, 4096)),
       (7, 5, 6)),
)  # fmt: skip
"""Every op, in the order of the report."""

NAMED = (
    "softmax-16384x4096", "dropout_add_layernorm-16384x4096", "cross_entropy-8192x32000",
    "layernorm-16384x16384", "layernorm-16384x5120", "groupnorm_silu-64x256x56x56",
    "batch_norm_relu_nhwc-64x256x56x56", "embedding-16384x32000x2048", "rope-1x8192x32x128",
    "linear_cross_entropy-8192x2048x128256",
)  # fmt: skip
"""Cases that are quoted by themselves; they run first, and with max-autotune."""


def full_cases() -> dict[str, Case]:
    """Every case by name: the named ones, then each op's sizes in turn, smaller ones first."""
    cases = [Case(op, dims) for op in OPS for dims in op.sizes]
    cases += [Case(op, dims, torch.float32) for op in OPS for dims in op.fp32]
    order = {c.name: (c.name not in NAMED, c.op.sizes.index(c.dims) if c.dims in c.op.sizes else 9)
             for c in cases}  # fmt: skip
    return {c.name: c for c in sorted(cases, key=lambda c: order[c.name])}


def tiny_cases() -> dict[str, Case]:
    """Every op once, in milliseconds on a CPU; the times mean nothing."""
    cases = [Case(op, op.tiny, torch.float32) for op in OPS]
    return {case.name: case for case in cases}
