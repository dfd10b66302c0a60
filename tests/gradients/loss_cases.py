"""The losses over logits that people train with, as functions of (logits, target, extra)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

IGNORED = -100


@dataclass(frozen=True)
class Loss:
    """A loss over [R, C] logits.

    value: (logits, target, extra) -> scalar. extra: (rows, classes) -> further tensors, or none.
    """

    value: Callable[..., Tensor]
    extra: Callable[[int, int], tuple[Tensor, ...]] = lambda rows, classes: ()


def _cross_entropy(**options: Any) -> Loss:
    return Loss(lambda x, y: functional.cross_entropy(x, y, **options))


def _per_token(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    losses = functional.cross_entropy(x, y, reduction="none")
    return (losses * w).sum() / w.sum()


def _z_loss(x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(x, y) + 1e-2 * torch.logsumexp(x, -1).square().mean()


def _softcap(x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(torch.tanh(x / 5.0) * 5.0, y)


def _gathered(x: Tensor, y: Tensor) -> Tensor:
    picked = functional.log_softmax(x, -1).gather(-1, y.clamp_min(0).unsqueeze(-1))
    return -(picked.squeeze(-1) * (y != IGNORED)).mean()


def _distillation(x: Tensor, y: Tensor, teacher: Tensor) -> Tensor:
    own, other = (functional.log_softmax(t / 2.0, -1) for t in (x, teacher))
    return functional.kl_div(own, other, reduction="batchmean", log_target=True) * 4.0


def _weights(rows: int, classes: int) -> tuple[Tensor, ...]:
    return (torch.rand(classes) + 0.5,)


def _probabilities(rows: int, classes: int) -> tuple[Tensor, ...]:
    return (torch.randn(rows, classes).softmax(-1),)


LOSSES: dict[str, Loss] = {
    "mean": _cross_entropy(),
    "sum": _cross_entropy(reduction="sum"),
    "another ignored class": Loss(
        lambda x, y: functional.cross_entropy(x, torch.where(y < 0, 3, y), ignore_index=3)
    ),
    "label smoothing": _cross_entropy(label_smoothing=0.1),
    "class weights": Loss(lambda x, y, w: functional.cross_entropy(x, y, weight=w), _weights),
    "class weights, smoothing": Loss(
        lambda x, y, w: functional.cross_entropy(x, y, weight=w, label_smoothing=0.2), _weights
    ),
    "class weights, sum": Loss(
        lambda x, y, w: functional.cross_entropy(x, y, weight=w, reduction="sum") / 16, _weights
    ),
    "soft targets": Loss(lambda x, y, t: functional.cross_entropy(x, t), _probabilities),
    "soft targets, smoothing": Loss(
        lambda x, y, t: functional.cross_entropy(x, t, label_smoothing=0.1), _probabilities
    ),
    "per-token weights": Loss(_per_token, lambda rows, classes: (torch.rand(rows),)),
    "z-loss": Loss(_z_loss),
    "softcap": Loss(_softcap),
    "log_softmax and gather": Loss(_gathered),
    "distillation": Loss(_distillation, lambda rows, classes: (torch.randn(rows, classes),)),
}


def targets(rows: int, classes: int) -> Tensor:
    """Classes, a quarter of the rows ignored, the first and last class among the rest."""
    y = torch.randint(classes, (rows,))
    y[1], y[2] = 0, classes - 1
    y[3::4] = IGNORED
    return y
