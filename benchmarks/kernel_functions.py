"""The kernel benchmark's functions: ordinary PyTorch, as people write it."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

DROPOUT = 0.1
"""Dropout's rate, in all of them."""


def layernorm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.layer_norm(x, weight.shape, weight, bias)


def rmsnorm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, 1e-6)


def dropout_add_layernorm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return layernorm(residual + functional.dropout(x, DROPOUT), weight, bias)


def dropout_add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return rmsnorm(residual + functional.dropout(x, DROPOUT), weight)


def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rmsnorm(total, weight), total


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return functional.gelu(x + bias, approximate="tanh")


def scale_bias_relu(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return functional.relu(x * scale + bias)


def swiglu(gate: Tensor, x: Tensor) -> Tensor:
    return functional.silu(gate) * x


def batch_norm_relu(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor
) -> Tensor:
    y = functional.batch_norm(x, mean, variance, weight, bias, training=True)
    return functional.relu(y)


def instance_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.instance_norm(x, weight=weight, bias=bias)


def groupnorm_silu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.silu(functional.group_norm(x, min(32, x.size(1)), weight, bias))


def mask_softmax_dropout(scores: Tensor, mask: Tensor) -> Tensor:
    """As nanoGPT writes it; its 1/sqrt(d) belongs to the GEMM."""
    time = scores.size(-1)
    scores = scores.masked_fill(mask[:, :, :time, :time] == 0, -math.inf)
    return functional.dropout(scores.softmax(-1), DROPOUT)


def _rotate_half(x: Tensor) -> Tensor:
    half = x.size(-1) // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As Llama in Hugging Face's transformers writes it."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin


def softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


def softmax_columns(x: Tensor) -> Tensor:
    return x.softmax(0)


def mul(x: Tensor, y: Tensor) -> Tensor:
    return x * y


def broadcast_add(x: Tensor, bias: Tensor) -> Tensor:
    return x + bias


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits, target)


def embedding(index: Tensor, table: Tensor) -> Tensor:
    return functional.embedding(index, table)


def index_add(base: Tensor, index: Tensor, x: Tensor) -> Tensor:
    return base.index_add(0, index, x)


def reduction_epilogue(x: Tensor, bias: Tensor) -> Tensor:
    return functional.relu(x.sum(0) + bias)


def transpose_add(x: Tensor, y: Tensor) -> Tensor:
    return functional.relu(x + y).t().contiguous()


def slice_cat_pad(x: Tensor, y: Tensor) -> Tensor:
    half = x.size(-1) // 2
    return functional.pad(torch.cat((x[:, half:] * 2.0, -y[:, :half]), -1), (0, 16))


def linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(x, weight), target)
