"""Norms over the positions of channels, as reductions and pointwise pieces: batch and group norm.

Statistics are fp32 (fp64 of fp64), variance is taken about the mean. Backwards are written so that
what is summed over positions is two sums a channel; everything else follows from those. They are
cut in pieces before recompute chooses what to save: the backward then has a norm's output, for a
mask or an activation, from its input and two numbers a channel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .rewrite import is_row_major
from .widening import is_empty, widened


def _others(x: Tensor) -> list[int]:
    """Dimensions of [N, C, ...] but the channels'."""
    return [0, *range(2, x.dim())]


def _spread(value: Tensor, x: Tensor) -> Tensor:
    """A value a channel, shaped to broadcast over x."""
    return widened(value).reshape([1, x.shape[1], *[1] * (x.dim() - 2)])


def _affine(normalized: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    result = normalized
    if weight is not None:
        result = result * _spread(weight, x)
    if bias is not None:
        result = result + _spread(bias, x)
    return result.to(x.dtype)


def _moving(old: Tensor, new: Tensor, momentum: float) -> Tensor:
    return (momentum * new + (1 - momentum) * widened(old)).to(old.dtype)


def batch_norm_no_stats(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """aten._native_batch_norm_legit.no_stats: output, mean [C], 1 / sqrt(var + eps) [C]."""
    if x.dim() < 2 or is_empty(x) or not training:
        return NotImplemented
    return _batch_norm(x, weight, bias, eps)[:3]


def _batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, mean [C], 1 / sqrt(var + eps) [C] and var [C]."""
    channels = [x.shape[1]]
    wide = widened(x)
    variance, mean = torch.var_mean(wide, _others(x), correction=0, keepdim=True)
    rstd = torch.rsqrt(variance + eps)
    output = _affine((wide - mean) * rstd, x, weight, bias)
    return output, mean.reshape(channels), rstd.reshape(channels), variance.reshape(channels)


def batch_norm_functional(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """aten._native_batch_norm_legit_functional: the above, then the new running statistics."""
    if not training:
        made = batch_norm_inference(x, weight, bias, running_mean, running_var, momentum, eps)
        kept = (running_mean.clone(), running_var.clone())
        return made if made is NotImplemented else (*made, *kept)
    count = x.numel() // x.shape[1] if x.dim() >= 2 and not is_empty(x) else 0
    if not isinstance(count, int) or count < 2:
        return NotImplemented  # the unbiased variance divides by count - 1
    output, mean, rstd, variance = _batch_norm(x, weight, bias, eps)
    new_mean = _moving(running_mean, mean, momentum)
    new_var = _moving(running_var, variance * (count / (count - 1)), momentum)
    return output, mean, rstd, new_mean, new_var


def batch_norm_inference(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> Any:
    """aten._native_batch_norm_legit_no_training: normalised by the running statistics.

    What it saves besides the output is empty on a CPU, and the running statistics elsewhere.
    """
    if x.dim() < 2 or is_empty(x):
        return NotImplemented
    mean, rstd = widened(running_mean), torch.rsqrt(widened(running_var) + eps)
    output = _affine((widened(x) - _spread(mean, x)) * _spread(rstd, x), x, weight, bias)
    if x.device.type == "cpu":
        return output, x.new_zeros((0,)), x.new_zeros((0,))
    return output, mean, rstd


def batch_norm_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    training: bool,
    eps: float,
    mask: list[bool],
) -> Any:
    """aten.native_batch_norm_backward: gradients of input, weight and bias.

    With s = sum(g) and d = sum(g * (x - mean)) over n positions a channel, in training
    dx = (g - s / n - (x - mean) * d * rstd^2 / n) * rstd * w. Source: ATen's kernels.
    """
    if x.dim() < 2 or is_empty(x):
        return NotImplemented
    if not training:
        if running_mean is None or running_var is None:
            return NotImplemented
        mean, rstd = running_mean, torch.rsqrt(widened(running_var) + eps)
    if mean is None or rstd is None:
        return NotImplemented
    others, count = _others(x), x.numel() // x.shape[1]
    g, scale = widened(gradient), _spread(rstd, x)
    centred = widened(x) - _spread(mean, x)
    dx = dw = db = None
    sums = dots = None
    if mask[2] or (mask[0] and training):
        sums = torch.sum(g, others, True)
    if mask[1] or (mask[0] and training):
        dots = torch.sum(g * centred, others, True)
    if mask[0]:
        if training:
            assert sums is not None
            assert dots is not None
            g = g - sums / count - centred * (dots * scale * scale / count)
        dx = (g * (scale if weight is None else scale * _spread(weight, x))).to(x.dtype)
    affine_dtype = x.dtype if weight is None else weight.dtype
    channels = [x.shape[1]]
    if mask[1]:
        assert dots is not None
        dw = (dots * scale).to(affine_dtype).reshape(channels)
    if mask[2]:
        assert sums is not None
        db = sums.to(affine_dtype).reshape(channels)
    return dx, dw, db


def group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    batch: int,
    channels: int,
    positions: int,
    groups: int,
    eps: float,
) -> Any:
    """aten.native_group_norm: output, mean [N, G], 1 / sqrt(var + eps) [N, G]."""
    if is_empty(x) or not is_row_major(x):
        return NotImplemented
    wide = widened(x).reshape(batch, groups, channels // groups, positions)
    variance, mean = torch.var_mean(wide, [2, 3], correction=0, keepdim=True)
    rstd = torch.rsqrt(variance + eps)
    result = (wide - mean) * rstd
    affine = (1, groups, channels // groups, 1)
    if weight is not None:
        result = result * weight.reshape(affine)
    if bias is not None:
        result = result + bias.reshape(affine)
    statistics = (batch, groups)
    return (
        result.to(x.dtype).reshape(x.shape),
        mean.reshape(statistics),
        rstd.reshape(statistics),
    )


def group_norm_backward(
    gradient: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    batch: int,
    channels: int,
    positions: int,
    groups: int,
    mask: list[bool],
) -> Any:
    """aten.native_group_norm_backward, by two sums over the positions of each channel of a sample.

    Those of a group give its means, as layer norm's; those of a channel give dw and db. Source:
    ATen's ComputeInternalGradients.
    """
    if is_empty(x) or not (is_row_major(x) and is_row_major(gradient)):
        return NotImplemented
    each = channels // groups
    shape, affine = (batch, groups, each, positions), (1, groups, each, 1)
    g = widened(gradient).reshape(shape)
    scale = widened(rstd).reshape(batch, groups, 1, 1)
    normalized = (widened(x).reshape(shape) - widened(mean).reshape(batch, groups, 1, 1)) * scale
    affine_dtype = x.dtype if weight is None else weight.dtype
    dx = dw = db = sums = dots = None
    if mask[0] or mask[2]:
        sums = torch.sum(g, [3], True)
    if mask[0] or mask[1]:
        dots = torch.sum(g * normalized, [3], True)
    if mask[0]:
        factor = None if weight is None else widened(weight).reshape(affine)
        means = [
            torch.sum(value if factor is None else value * factor, [2], True) / (each * positions)
            for value in (sums, dots)
            if value is not None
        ]
        h = g if factor is None else g * factor
        dx = ((h - means[0] - normalized * means[1]) * scale).to(x.dtype).reshape(x.shape)
    if mask[1]:
        assert dots is not None
        dw = torch.sum(dots, [0, 3]).to(affine_dtype).reshape(channels)
    if mask[2]:
        assert sums is not None
        db = torch.sum(sums, [0, 3]).to(affine_dtype).reshape(channels)
    return dx, dw, db


def repeat(x: Tensor, repeats: list[int]) -> Any:
    """aten.repeat: an index map of expanded dimensions, and one copy.

    Instance norm repeats its parameters and statistics over the batch.
    """
    if is_empty(x) or not all(isinstance(count, int) and count > 0 for count in repeats):
        return NotImplemented
    old = [1] * (len(repeats) - x.dim()) + list(x.shape)
    between = [size for pair in zip([1] * len(old), old, strict=True) for size in pair]
    expanded = [size for pair in zip(repeats, old, strict=True) for size in pair]
    copied = x.reshape(between).expand(expanded).clone(memory_format=torch.contiguous_format)
    return copied.reshape([count * size for count, size in zip(repeats, old, strict=True)])


def channel_norms() -> dict[Any, Callable[..., Any]]:
    """Operators of this module with their formulas."""
    aten = torch.ops.aten
    return {
        aten._native_batch_norm_legit_functional.default: batch_norm_functional,
        aten._native_batch_norm_legit.no_stats: batch_norm_no_stats,
        aten._native_batch_norm_legit_no_training.default: batch_norm_inference,
        aten.native_batch_norm_backward.default: batch_norm_backward,
        aten.native_group_norm.default: group_norm,
        aten.native_group_norm_backward.default: group_norm_backward,
        aten.repeat.default: repeat,
    }
