"""Decompositions of composite operators, written so that each becomes one row kernel.

Statistics and sums of half-precision inputs are taken in fp32 and rounded once at the end, as
ATen's kernels do. A formula that doesn't cover a call returns NotImplemented: the node then
stays ATen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .channel_norms import channel_norms
from .joins import joins
from .widening import is_empty as _is_empty
from .widening import widened as _work

Formula = Callable[..., Any]


def _inner(value: Tensor, normalized_shape: list[int]) -> list[int]:
    return list(range(value.dim() - len(normalized_shape), value.dim()))


def softmax(x: Tensor, dim: int, half_to_float: bool) -> Any:
    """aten._softmax: exp(x - max) / sum."""
    if x.dim() == 0 or _is_empty(x):
        return NotImplemented
    work, dim = _work(x), dim % x.dim()
    exponential = torch.exp(work - torch.amax(work, [dim], True))
    result = exponential / torch.sum(exponential, [dim], True)
    return result if half_to_float else result.to(x.dtype)


def softmax_backward(gradient: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Any:
    """aten._softmax_backward_data: y * (g - sum(g * y)), by ATen's formula g*y - y*sum(g*y)."""
    if output.dim() == 0 or _is_empty(output):
        return NotImplemented
    y = _work(output)
    weighted = _work(gradient) * y
    return (weighted - y * torch.sum(weighted, [dim], True)).to(input_dtype)


def log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Any:
    """aten._log_softmax: x - max - log(sum(exp(x - max)))."""
    if x.dim() == 0 or _is_empty(x):
        return NotImplemented
    work, dim = _work(x), dim % x.dim()
    shifted = work - torch.amax(work, [dim], True)
    result = shifted - torch.log(torch.sum(torch.exp(shifted), [dim], True))
    return result if half_to_float else result.to(x.dtype)


def log_softmax_backward(
    gradient: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype
) -> Any:
    """aten._log_softmax_backward_data: g - exp(y) * sum(g)."""
    if output.dim() == 0 or _is_empty(output):
        return NotImplemented
    g = _work(gradient)
    return (g - torch.exp(_work(output)) * torch.sum(g, [dim], True)).to(input_dtype)


def logsumexp(x: Tensor, dim: list[int], keepdim: bool = False) -> Any:
    """aten.logsumexp: max + log(sum(exp(x - max))), the parts of a softmax; infinite where max is.

    A softmax of the same values shares them.
    """
    if x.dim() == 0 or _is_empty(x) or not x.is_floating_point():
        return NotImplemented
    work, dim = _work(x), [d % x.dim() for d in dim]  # a softmax's own, that they be one
    top = torch.amax(work, dim, True)
    total = torch.sum(torch.exp(work - top), dim, True)
    result = torch.where(torch.abs(top) == math.inf, top, top + torch.log(total)).to(x.dtype)
    if not keepdim:
        kept = [size for axis, size in enumerate(x.shape) if axis not in dim]
        result = result.reshape(kept)
    return result


def layer_norm(
    x: Tensor, normalized_shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Any:
    """aten.native_layer_norm: output, mean, 1 / sqrt(var + eps); var by var_mean, in two passes."""
    if _is_empty(x):
        return NotImplemented
    work = _work(x)
    variance, mean = torch.var_mean(work, _inner(x, normalized_shape), correction=0, keepdim=True)
    rstd = torch.rsqrt(variance + eps)
    result = (work - mean) * rstd
    if weight is not None:
        result = result * weight
    if bias is not None:
        result = result + bias
    return result.to(x.dtype), mean, rstd


def layer_norm_backward(
    gradient: Tensor,
    x: Tensor,
    normalized_shape: list[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: list[bool],
) -> Any:
    """aten.native_layer_norm_backward: gradients of input, weight and bias.

    dx = rstd * (h - mean(h) - xhat * mean(h * xhat)) with h = g * weight.
    Source: Ba et al., arXiv:1607.06450, differentiated.
    """
    if _is_empty(x):
        return NotImplemented
    inner = _inner(x, normalized_shape)
    g, scale = _work(gradient), _work(rstd)
    normalized = (_work(x) - _work(mean)) * scale
    dx = dw = db = None
    if mask[0]:
        h = g if weight is None else g * weight
        correction = torch.mean(h, inner, True) + normalized * torch.mean(
            h * normalized, inner, True
        )
        dx = ((h - correction) * scale).to(x.dtype)
    if mask[1] and weight is not None:
        dw = _sum_outer(g * normalized, inner).to(weight.dtype)
    if mask[2] and bias is not None:
        db = _sum_outer(g, inner).to(bias.dtype)
    return dx, dw, db


def _sum_outer(value: Tensor, inner: list[int]) -> Tensor:
    outer = list(range(value.dim() - len(inner)))
    # An empty list would mean all dimensions.
    return torch.sum(value, outer) if outer else value


def rms_norm(
    x: Tensor, normalized_shape: list[int], weight: Tensor | None, eps: float | None
) -> Any:
    """aten._fused_rms_norm: output, 1 / sqrt(mean(x * x) + eps)."""
    if _is_empty(x):
        return NotImplemented
    work = _work(x)
    floor = torch.finfo(work.dtype).eps if eps is None else eps
    rstd = torch.rsqrt(torch.mean(work * work, _inner(x, normalized_shape), True) + floor)
    result = work * rstd
    if weight is not None:
        result = result * weight
    return result.to(x.dtype), rstd


def rms_norm_backward(
    gradient: Tensor,
    x: Tensor,
    normalized_shape: list[int],
    rstd: Tensor,
    weight: Tensor | None,
    mask: list[bool],
) -> Any:
    """aten._fused_rms_norm_backward: dx = rstd * (h - xhat * mean(h * xhat)), h = g * weight."""
    if _is_empty(x):
        return NotImplemented
    inner = _inner(x, normalized_shape)
    g, scale = _work(gradient), _work(rstd)
    normalized = _work(x) * scale
    dx = dw = None
    if mask[0]:
        h = g if weight is None else g * weight
        dx = ((h - normalized * torch.mean(h * normalized, inner, True)) * scale).to(x.dtype)
    if mask[1] and weight is not None:
        dw = _sum_outer(g * normalized, inner).to(weight.dtype)
    return dx, dw


_NONE, _MEAN = 0, 1


def nll_loss_forward(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> Any:
    """aten.nll_loss_forward on [R, C]: loss and total weight.

    One entry a row is picked, by an index that is valid in every row. total_weight is 0 without
    reduction, as in ATen. A target that is no class, for which ATen stops the program, makes the
    loss NaN.
    """
    if x.dim() != 2 or _is_empty(x):
        return NotImplemented
    work = _work(x)
    counted = _is_counted(x, target, ignore_index)
    place = torch.where(counted, target, 0).unsqueeze(1)
    loss = -torch.gather(work, 1, place).squeeze(1)
    if weight is None:
        weights = counted.to(work.dtype)
    else:
        per_class = _work(weight).expand(x.shape)
        picked = torch.gather(per_class, 1, place).squeeze(1)
        weights = torch.where(counted, picked, 0.0)
        loss = loss * picked
    missing = torch.where(target == ignore_index, 0.0, math.nan).to(work.dtype)
    loss = torch.where(counted, loss, missing)
    if reduction == _NONE:
        return loss.to(x.dtype), torch.zeros((), dtype=x.dtype, device=x.device)
    total = torch.sum(weights)
    loss = torch.sum(loss)
    if reduction == _MEAN:
        loss = loss / total
    return loss.to(x.dtype), total.to(x.dtype)


def nll_loss_backward(
    gradient: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Any:
    """aten.nll_loss_backward on [R, C]: -weight * g / total at the target, 0 elsewhere.

    Pointwise with broadcasts, so that it fuses with the log-softmax backward after it.
    """
    if x.dim() != 2 or _is_empty(x):
        return NotImplemented
    g = _work(gradient)
    if reduction == _NONE:
        g = g.unsqueeze(1)
    elif reduction == _MEAN:
        g = g / _work(total_weight)
    at_target = -g if weight is None else -g * _work(weight)
    # Compared in 32 bits, which hold every class: 64 take twice the arithmetic of each element.
    # Narrowed before the choice: compilers see through a cast of the choice, and compare 64.
    place = torch.where(_is_counted(x, target, ignore_index), target.to(torch.int32), -1)
    classes = torch.arange(x.shape[1], dtype=torch.int32, device=x.device)
    return torch.where(place.unsqueeze(1) == classes, at_target, 0.0).to(x.dtype)


def _is_counted(x: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Rows whose target is a class, and not the one to ignore."""
    return (target >= 0) & (target < x.shape[1]) & (target != ignore_index)


def dropout_backward(gradient: Tensor, mask: Tensor, scale: float) -> Any:
    """aten.native_dropout_backward: g * mask * scale."""
    return gradient * mask * scale


def losses() -> dict[Any, Formula]:
    """The part of the composites that is better cut in pieces.

    Log-probabilities are as large as the logits, which are in memory anyway: with the two numbers
    a row that the pieces show to the cut, the backward has them again in registers.
    """
    names = ("_log_softmax", "nll_loss", "scatter_add", "logsumexp")
    return {op: rule for op, rule in composites().items() if any(n in str(op) for n in names)}


def composites() -> dict[Any, Formula]:
    """Every operator that is kept whole until recompute has run, with its formula."""
    aten = torch.ops.aten
    return {
        **joins(),
        **channel_norms(),
        aten._softmax.default: softmax,
        aten._softmax_backward_data.default: softmax_backward,
        aten._log_softmax.default: log_softmax,
        aten._log_softmax_backward_data.default: log_softmax_backward,
        aten.logsumexp.default: logsumexp,
        aten.native_layer_norm.default: layer_norm,
        aten.native_layer_norm_backward.default: layer_norm_backward,
        aten._fused_rms_norm.default: rms_norm,
        aten._fused_rms_norm_backward.default: rms_norm_backward,
        aten.nll_loss_forward.default: nll_loss_forward,
        aten.nll_loss_backward.default: nll_loss_backward,
        aten.native_dropout_backward.default: dropout_backward,
    }
