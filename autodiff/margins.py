"""Margin losses of several classes as ATen's kernels have them: what is not above zero is nothing.

torch's decompositions clamp, which hands NaN on, where ATen's kernels ask `z > 0` and leave it out
(aten/src/ATen/native/LossMultiMargin.cpp and LossMultiLabelMargin.cpp).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .widening import widened

_MEAN, _SUM = 1, 2  # aten::Reduction


def multi_margin_loss(
    x: Tensor,
    target: Tensor,
    p: float = 1,
    margin: float = 1,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
) -> Tensor:
    """aten.multi_margin_loss: of rows [N, C] or one row [C] and a class for each; p is 1 or 2.

    weight: of the target's class, [C].
    """
    rows, classes = torch.atleast_2d(x), torch.atleast_1d(target)
    torch._check(p in (1, 2), lambda: "only p == 1 and p == 2 supported")
    torch._check(rows.ndim == 2, lambda: f"not rows of classes: {x.shape}")
    count, width = rows.shape
    torch._check(width != 0, lambda: f"not rows of classes: {x.shape}")
    torch._check(
        classes.ndim == 1 and classes.shape[0] == count,
        lambda: f"inconsistent target size, expected {count} but got {target.shape}",
    )
    # in rows, as the kernel for the derivative lays that out
    work, column = widened(rows.contiguous()), classes.unsqueeze(1)
    over = _above_zero(margin - work.gather(1, column) + work)
    over = over if p == 1 else over * over
    if weight is not None:
        weight = torch.atleast_1d(weight)
        torch._check(
            weight.ndim == 1 and weight.shape[0] == width,
            lambda: f"inconsistent weight size, expected {width} but got {weight.shape}",
        )
        over = over * widened(weight)[classes].unsqueeze(1)
    over = torch.where(torch.arange(width, device=x.device) != column, over, 0)
    loss = (over.sum(1) / width).reshape(target.shape)
    return _reduced(loss, reduction).to(x.dtype)


def multilabel_margin_loss(x: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """aten.multilabel_margin_loss_forward: of rows [N, C] or one row [C], and their labels.

    target: of x's shape; a row's labels end before its first -1. Returns the loss, and which
    classes are labels, in x's shape and type.
    """
    torch._check(
        x.ndim <= 2 and target.shape == x.shape,
        lambda: f"inconsistent target size: {target.shape} for input of size: {x.shape}",
    )
    rows, labels = widened(torch.atleast_2d(x)), torch.atleast_2d(target)
    width = rows.shape[1]
    torch._check(width != 0, lambda: f"not rows of classes: {x.shape}")
    number = torch.arange(width, device=x.device)
    end = torch.where(labels == -1, number, width).amin(1, keepdim=True)
    given = number < end
    label = torch.where(given, labels, 0)
    among = ((number == label.unsqueeze(2)) & given.unsqueeze(2)).any(1)
    # [N, label, class]
    over = _above_zero(1.0 - rows.gather(1, label).unsqueeze(2) + rows.unsqueeze(1))
    over = torch.where(given.unsqueeze(2) & ~among.unsqueeze(1), over, 0)
    loss = (over.sum((1, 2)) / width).reshape(x.shape[:-1])
    return _reduced(loss, reduction).to(x.dtype), among.to(x.dtype).reshape(x.shape)


def _above_zero(value: Tensor) -> Tensor:
    return torch.where(value > 0, value, 0)


def _reduced(loss: Tensor, reduction: int) -> Tensor:
    if reduction == _MEAN:
        return loss.mean()
    return loss.sum() if reduction == _SUM else loss
