"""The loss heads that people train with: a linear layer over a vocabulary, and what follows it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainfuse.testing import Training

BATCH, TIME, WIDTH, CLASSES = 4, 6, 5, 48
IGNORED = -100
Batch = tuple[Tensor, ...]


class Model(nn.Module):
    """A layer and a head. bias: of the head. tied: the head's weight embeds the input."""

    def __init__(self, *, bias: bool = False, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH) if tied else None
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)
        self.dtype: torch.dtype | None = None
        if self.embedding is not None:
            self.head.weight = self.embedding.weight
        if frozen:
            self.head.requires_grad_(False)

    def hidden(self, x: Tensor) -> Tensor:
        """x: [B, T, H], or [B, T] tokens when the head is tied; [B, T, H]."""
        if self.embedding is not None:
            x = self.embedding(x)
        return torch.tanh(self.body(x.to(self.body.weight.dtype)))

    def forward(self, x: Tensor) -> Tensor:
        """Logits: [B, T, V], in `dtype` where one is set and the model is no reference."""
        return self.logits(self.hidden(x))

    def logits(self, hidden: Tensor) -> Tensor:
        """The head alone."""
        if self.dtype is None or hidden.dtype is torch.float64:
            return self.head(hidden)
        with torch.autocast("cpu", self.dtype):
            return self.head(hidden)


@dataclass(frozen=True)
class Case:
    """One head. refused: words of the reason why it isn't made in chunks, None where it is.

    loss: (model, x, y, *extra) -> the loss, or (loss, other outputs). tokens: x is [B, T] tokens.
    dtype: of the head under autocast; parameters: their type. backwards: calls of `backward()` in a
    step, each for a part of the batch. heads: layers that are chunked.
    """

    loss: Callable[..., Any]
    model: Callable[[], Model] = Model
    extra: Callable[[], Batch] = tuple
    refused: str | None = None
    tokens: bool = False
    dtype: torch.dtype | None = None
    parameters: torch.dtype = torch.float32
    backwards: int = 1
    heads: int = 1

    @property
    def half(self) -> bool:
        """Whether logits are half."""
        return self.dtype is not None or self.parameters is not torch.float32


def _ce(logits: Tensor, y: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1), **options)


def _padded_labels(model: Model, x: Tensor, y: Tensor) -> Tensor:
    """HF's ForCausalLMLoss: labels shifted and padded, logits whole."""
    logits = model(x).float() if model.dtype else model(x)
    labels = F.pad(y, (0, 1), value=IGNORED)[..., 1:].contiguous()
    return _ce(logits, labels, ignore_index=IGNORED)


def _shifted_logits(model: Model, x: Tensor, y: Tensor) -> Tensor:
    """HF's older heads: the last position's logits cut off, then copied dense."""
    shifted = model(x)[..., :-1, :].contiguous()
    return _ce(shifted, y[..., 1:].contiguous())


def _z_loss(model: Model, x: Tensor, y: Tensor) -> Tensor:
    logits = model(x)
    return _ce(logits, y) + 1e-2 * torch.logsumexp(logits, -1).square().mean()


def _returned(model: Model, x: Tensor, y: Tensor) -> Any:
    logits = model(x)
    return _ce(logits, y), logits


def _accuracy(model: Model, x: Tensor, y: Tensor) -> Any:
    logits = model(x)
    right = (logits.argmax(-1) == y).float()
    return _ce(logits, y), right.mean()


def _gathered(model: Model, x: Tensor, y: Tensor) -> Tensor:
    picked = F.log_softmax(model(x), -1).gather(-1, y.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return -(picked * (y != IGNORED)).sum() / (y != IGNORED).sum()


class WithLoss(Model):
    """A model that returns its loss: a region has both."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """The loss of a batch."""
        logits = super().forward(x)
        return logits if y is None else _ce(logits, y)


class Distilled(Model):
    """A student and a frozen teacher, which reads the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(WIDTH, CLASSES)
        self.teacher.requires_grad_(False)


def _distillation(model: Distilled, x: Tensor, y: Tensor) -> Tensor:
    own = F.log_softmax(model(x) / 2.0, -1)
    with torch.no_grad():
        other = F.log_softmax(model.teacher(x) / 2.0, -1)
    divergence = F.kl_div(own.flatten(0, 1), other.flatten(0, 1), reduction="batchmean",
                          log_target=True)  # fmt: skip
    return divergence * 4.0 + 0.5 * _ce(model(x), y)


def _given_teacher(model: Model, x: Tensor, y: Tensor, teacher: Tensor) -> Tensor:
    own = F.log_softmax(model(x), -1)
    return F.kl_div(own, F.log_softmax(teacher, -1), reduction="sum", log_target=True) / x.shape[0]


def _dpo(model: Model, x: Tensor, y: Tensor, reference: Tensor) -> Tensor:
    """The first half of the batch is preferred to the second."""
    logp = F.log_softmax(model(x), -1).gather(-1, y.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    gain = (logp * (y != IGNORED)).sum(-1) - reference
    chosen, rejected = gain.chunk(2)
    return -F.logsigmoid(0.5 * (chosen - rejected)).mean()


def _entropy_bonus(model: Model, x: Tensor, y: Tensor) -> Tensor:
    logits = model(x)
    logp = F.log_softmax(logits, -1)
    entropy = -(logp.exp() * logp).sum(-1)
    return _ce(logits, y) - 0.05 * entropy.mean()


def _batch_entropy(model: Model, x: Tensor, y: Tensor) -> Tensor:
    """The entropy of the mean prediction: it sums over rows, not along them."""
    logits = model(x)
    mean = logits.softmax(-1).mean((0, 1))
    return _ce(logits, y) + 0.1 * (mean * mean.clamp_min(1e-9).log()).sum()


def _weighted(model: Model, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    losses = _ce(model(x), y, reduction="none")
    return (losses * weights.reshape(-1)).sum() / weights.sum()


def _loss_on_hidden(model: Model, x: Tensor, y: Tensor) -> Tensor:
    hidden = model.hidden(x)
    return _ce(model.head(hidden), y) + 0.1 * hidden.square().mean()


def _perplexity(model: Model, x: Tensor, y: Tensor) -> Tensor:
    """Of what guessing has: its own gradients are so large that rounding makes steps diverge."""
    return _ce(model(x), y).exp() / CLASSES


def _in_place(model: Model, x: Tensor, y: Tensor) -> Tensor:
    """A temperature, and classes that only pad the vocabulary."""
    logits = model(x).float() if model.head.weight.dtype.itemsize == 2 else model(x)
    logits.div_(1.5)
    logits.masked_fill_(torch.arange(CLASSES, device=x.device) >= CLASSES - 3, -math.inf)
    return _ce(logits, y.clamp_max(CLASSES - 4))


def _padding_cut(model: Model, x: Tensor, y: Tensor) -> Tensor:
    return _ce(model(x)[..., : CLASSES - 3], y.clamp_max(CLASSES - 4))


def _row_metrics(model: Model, x: Tensor, y: Tensor) -> Any:
    """What others report of logits: their largest, their mean square, the loss of each token."""
    logits = model(x)
    losses = _ce(logits, y, reduction="none").view(y.shape)
    seen = logits.detach()
    return losses.mean(), losses.detach().t(), seen.amax(-1), seen.square().mean(-1).sum()


def _five_best(model: Model, x: Tensor, y: Tensor) -> Any:
    logits = model(x)
    found = (logits.topk(5, -1).indices == y.unsqueeze(-1)).any(-1)
    return _ce(logits, y), found.float().mean()


def _time_major(model: Model, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """A batch as a time-major loss reads it."""
    logits = model(x).transpose(0, 1)
    losses = _ce(logits, y.t(), reduction="none").view(TIME, -1)
    return (losses * weights.t()).mean()


def _added_by_row(model: Model, x: Tensor, y: Tensor, prior: Tensor) -> Tensor:
    hidden = model.hidden(x).flatten(0, 1)
    return _ce(torch.addmm(prior.flatten(0, 1), hidden, model.head.weight.t()), y)


def _smoothing_of_half_loss(model: Model, x: Tensor, y: Tensor) -> Tensor:
    return _ce(model(x), y, label_smoothing=0.1) * 0.5


class Twice(Model):
    """Two heads, of the next token and of the one after."""

    def __init__(self) -> None:
        super().__init__(bias=True)
        self.second = nn.Linear(WIDTH, CLASSES)


def _two_heads(model: Twice, x: Tensor, y: Tensor) -> Tensor:
    hidden = model.hidden(x)
    return _ce(model.head(hidden), y) + 0.3 * _ce(model.second(hidden), y.flip(1))


def _teacher() -> Batch:
    return (torch.randn(BATCH, TIME, CLASSES),)


CASES: dict[str, Case] = {
    "plain": Case(lambda m, x, y: _ce(m(x), y)),
    "bias": Case(lambda m, x, y: _ce(m(x), y), lambda: Model(bias=True)),
    "bf16, then float": Case(lambda m, x, y: _ce(m(x).float(), y), dtype=torch.bfloat16),
    "nanogpt": Case(
        lambda m, x, y: F.cross_entropy(m(x).view(-1, CLASSES), y.view(-1), ignore_index=-100)
    ),
    "sum over num_items": Case(
        lambda m, x, y, n: _ce(m(x), y, reduction="sum") / n, extra=lambda: (torch.tensor(17.0),)
    ),
    "softcap": Case(lambda m, x, y: _ce(torch.tanh(m(x) / 3.0) * 3.0, y)),
    "tied embedding": Case(lambda m, x, y: _ce(m(x), y), lambda: Model(tied=True), tokens=True),
    "frozen head": Case(lambda m, x, y: _ce(m(x), y), lambda: Model(frozen=True)),
    "padded labels": Case(_padded_labels),
    "shifted logits": Case(_shifted_logits, lambda: Model(bias=True)),
    "label smoothing": Case(lambda m, x, y: _ce(m(x), y, label_smoothing=0.1)),
    "z-loss": Case(_z_loss),
    "logits returned": Case(_returned, refused="P3: values as large as the logits are returned"),
    "accuracy": Case(_accuracy),
    "log_softmax and gather": Case(_gathered),
    "distillation": Case(_distillation, Distilled),
    "distillation, given teacher": Case(_given_teacher, extra=_teacher),
    "dpo": Case(_dpo, extra=lambda: (torch.randn(BATCH),), refused="P4"),
    "entropy bonus": Case(_entropy_bonus),
    "entropy of the batch": Case(_batch_entropy, refused="P4"),
    "soft targets": Case(
        lambda m, x, y, t: F.cross_entropy(m(x).flatten(0, 1), t.flatten(0, 1).softmax(-1)),
        extra=_teacher,
    ),
    "per-token weights": Case(_weighted, extra=lambda: (torch.rand(BATCH, TIME),)),
    "loss on hidden state": Case(_loss_on_hidden),
    "perplexity": Case(_perplexity, refused="P4"),
    # what else people write
    "loss in the model": Case(lambda m, x, y: m(x, y), WithLoss),
    "class weights": Case(
        lambda m, x, y, w: _ce(m(x), y, weight=w), extra=lambda: (torch.rand(CLASSES) + 0.5,)
    ),
    "no reduction, then mean": Case(lambda m, x, y: _ce(m(x), y, reduction="none").mean()),
    "scaled loss": Case(lambda m, x, y, s: _ce(m(x), y) * s, extra=lambda: (torch.tensor(1.7),)),
    "tied, with bias": Case(
        lambda m, x, y: _ce(m(x), y), lambda: Model(tied=True, bias=True), tokens=True
    ),
    "hidden detached": Case(lambda m, x, y: _ce(m.logits(m.hidden(x).detach()), y)),
    "several backwards": Case(lambda m, x, y: _ce(m(x), y), backwards=2, heads=2),
    "two heads": Case(_two_heads, Twice, heads=2),
    "in place on logits": Case(_in_place),
    "padding classes cut": Case(_padding_cut, refused="P"),
    "metrics of rows": Case(_row_metrics),
    "best five": Case(_five_best, refused="P3"),
    "time-major": Case(_time_major, extra=lambda: (torch.rand(BATCH, TIME),), refused="P2"),
    "added by row": Case(_added_by_row, extra=_teacher, refused="P2: what is added"),
    "bf16 parameters": Case(
        lambda m, x, y: _ce(m(x).float(), y),
        lambda: Model(bias=True),
        parameters=torch.bfloat16,
    ),
    "bf16 all through": Case(
        _smoothing_of_half_loss, lambda: Model(tied=True), tokens=True, parameters=torch.bfloat16
    ),
    "fp16, in place": Case(_in_place, parameters=torch.float16),
}


def training(name: str, batch: int = BATCH) -> Training:
    """A whole step of the case; a quarter of the targets is ignored."""
    case = CASES[name]
    model = case.model().to(case.parameters)
    model.dtype = case.dtype
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.3)

    def step(x: Tensor, y: Tensor, *extra: Tensor) -> Any:
        optimizer.zero_grad()
        results = []
        for part in range(case.backwards):
            mine = slice(part, None, case.backwards)
            result = case.loss(model, x[mine], y[mine], *extra)
            loss = result[0] if isinstance(result, tuple) else result
            loss.backward()
            results.append(result)
        optimizer.step()
        return results

    batches = []
    for _ in range(3):
        y = torch.randint(CLASSES, (batch, TIME))
        y[:, 2] = torch.where(torch.arange(batch) % 2 == 0, IGNORED, y[:, 2])
        y[0, 3:5] = IGNORED
        x = (
            torch.randint(CLASSES, (batch, TIME))
            if case.tokens
            else torch.randn(batch, TIME, WIDTH)
        )
        batches.append((x, y, *case.extra()))
    return Training(step, model, batches)
