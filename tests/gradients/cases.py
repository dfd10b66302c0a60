"""The training set-ups whose gradients must hold, each tiny, with sizes that fill no block."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from examples.block import TransformerBlock
from trainfuse.testing import Training

Make = Callable[[], Training]
Loss = Callable[..., torch.Tensor]


_MIXED: ContextVar[bool] = ContextVar("mixed", default=False)


@contextlib.contextmanager
def mixed_precision() -> Iterator[None]:
    """Trainings that are built inside run their forward and loss under bf16 autocast."""
    token = _MIXED.set(True)
    try:
        yield
    finally:
        _MIXED.reset(token)


def _in_bf16(loss_of: Loss, device: str) -> Loss:
    def mixed(model: nn.Module, *batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            return loss_of(model, *batch)

    return mixed


def training(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Loss,
    batches: Iterable[tuple[torch.Tensor, ...]],
    device: str,
    clip: float | None = None,
) -> Training:
    """The ordinary step: zero_grad, forward, backward, optional clipping, update."""
    if _MIXED.get():
        loss_of = _in_bf16(loss_of, device)

    def step(*batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return loss

    return Training(step, model, [tuple(t.to(device) for t in batch) for batch in batches])


def classify(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    logits = model(x)
    return functional.cross_entropy(logits.flatten(0, -2), y.flatten())


def sgd(model: nn.Module, lr: float, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, **options)


def _vectors(count: int, rows: int, width: int, classes: int) -> list[tuple[torch.Tensor, ...]]:
    return [(torch.randn(rows, width), torch.randint(classes, (rows,))) for _ in range(count)]


def mlp(device: str) -> Training:
    """Linear, GELU and ReLU; 7 rows and 13 columns fill no block."""
    model = nn.Sequential(
        nn.Linear(13, 19), nn.GELU(), nn.Linear(19, 17), nn.ReLU(), nn.Linear(17, 5)
    ).to(device)
    optimizer = sgd(model, 0.5, momentum=0.9, nesterov=True, weight_decay=1e-2)
    return training(model, optimizer, classify, _vectors(3, 7, 13, 5), device)


def block(device: str, dropout: float = 0.1, attention_dropout: bool = True) -> Training:
    """The transformer block with dropout in attention, network and residual."""
    model = TransformerBlock(12, 2, 28, dropout).to(device)
    if not attention_dropout:
        model.attention.dropout = 0.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    batches = [(torch.randn(2, 7, 12), torch.randn(2, 7, 12)) for _ in range(3)]

    def loss_of(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(model(x), target)

    return training(model, optimizer, loss_of, batches, device)


def block_gpu(device: str) -> Training:
    """The same without attention dropout, which a GPU draws inside ATen's attention kernel."""
    return block(device, attention_dropout=False)


class TinyGPT(nn.Module):
    """Embeddings, causal attention, network, and a head tied to the token embedding."""

    def __init__(self, vocabulary: int = 11, width: int = 16, heads: int = 2, time: int = 6):
        super().__init__()
        self.heads = heads
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(time, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.network = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU("tanh"), nn.Linear(2 * width, width)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: [B, T]; logits: [B, T, vocabulary]."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        batch, time, width = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, time, width))
        x = x + self.network(self.norms[1](x))
        return self.head(self.norms[2](x))


def gpt(device: str) -> Training:
    """Tied embedding: the head's gradient and the embedding's add up in one parameter."""
    model = TinyGPT().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    batches = [(torch.randint(11, (2, 6)), torch.randint(11, (2, 6))) for _ in range(3)]
    return training(model, optimizer, classify, batches, device)


def convnet(device: str) -> Training:
    """Convolution, batch norm with running statistics, dropout and pooling."""
    model = nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1, bias=False),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(5 * 3 * 3, 3),
    ).to(device)
    batches = [(torch.randn(32, 2, 6, 6), torch.randint(3, (32,))) for _ in range(3)]
    return training(model, sgd(model, 0.05, momentum=0.9), classify, batches, device)


class Recurrent(nn.Module):
    """A fused stretch before and after nn.LSTM, which stays opaque."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(5, 6), nn.SiLU(), nn.LayerNorm(6))
        self.lstm = nn.LSTM(6, 7, batch_first=True)
        self.after = nn.Sequential(nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [B, T, 5]; logits: [B, 3]."""
        states, _ = self.lstm(self.before(x))
        return self.after(states[:, -1])


def lstm(device: str) -> Training:
    """A model around nn.LSTM."""
    model = Recurrent().to(device)
    batches = [(torch.randn(12, 4, 5), torch.randint(3, (12,))) for _ in range(3)]
    return training(model, torch.optim.Adam(model.parameters(), lr=2e-2), classify, batches, device)


class Partial(nn.Module):
    """One layer never used, one frozen, one frozen bias, one detached branch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(9, 11), nn.Linear(11, 11), nn.Linear(11, 4)
        self.unused = nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.first.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [N, 9]; logits: [N, 4]."""
        h = torch.sigmoid(self.first(x))
        h = h * torch.exp(-h.detach()) + functional.softplus(self.frozen(h))
        return self.last(h)


def partial(device: str) -> Training:
    """Unused and frozen parameters keep a gradient of None."""
    model = Partial().to(device)
    return training(model, sgd(model, 0.5), classify, _vectors(3, 6, 9, 4), device)


def clipped(device: str) -> Training:
    """Gradient clipping inside the step, at a norm that does clip."""
    model = nn.Sequential(nn.Linear(9, 15), nn.Tanh(), nn.LayerNorm(15), nn.Linear(15, 4))
    model = model.to(device)
    optimizer = sgd(model, 1.0, momentum=0.9)
    return training(model, optimizer, classify, _vectors(3, 6, 9, 4), device, clip=0.1)


def autocast(device: str) -> Training:
    """bf16 autocast around an MLP with a norm and a softmax."""
    model = nn.Sequential(
        nn.Linear(24, 40), nn.GELU(), nn.LayerNorm(40), nn.Linear(40, 33), nn.Softmax(-1)
    ).to(device)

    def loss_of(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            out = model(x)
        return 33 * functional.mse_loss(out.float(), target)

    batches = [(torch.randn(32, 24), torch.rand(32, 33)) for _ in range(3)]
    return training(model, sgd(model, 0.5), loss_of, batches, device)


CASES: dict[str, Callable[[str], Training]] = {
    "mlp": mlp,
    "block": block,
    "gpt": gpt,
    "convnet": convnet,
    "lstm": lstm,
    "partial": partial,
    "clipped": clipped,
    "autocast": autocast,
}
