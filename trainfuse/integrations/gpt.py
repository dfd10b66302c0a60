"""A character-level GPT and its text, small enough to read in one sitting (after nanoGPT)."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Sizes of the model, and of the batches it is trained on."""

    layers: int = 4
    heads: int = 4
    width: int = 128
    context: int = 64
    batch: int = 12
    dropout: float = 0.0
    vocabulary: int = 128


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and MLP, each after a norm and around a residual."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """A decoder whose head is tied to its token embedding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # residual branches are summed 2 * layers times: keep the sum's variance
                residual = name.endswith(("out.weight", "mlp.2.weight"))
                depth = (2 * config.layers) ** -0.5 if residual else 1.0
                nn.init.normal_(parameter, std=0.02 * depth)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean cross-entropy of predicting y [B, T] from x [B, T], both character codes."""
        hidden = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def text() -> Tensor:
    """About 700 kB of English that every Python carries, as character codes below 128."""
    joined = "\n".join(pydoc_data.topics.topics.values())
    return torch.tensor(list(joined.encode("ascii", errors="ignore")), dtype=torch.long)


def batches(
    codes: Tensor, config: GPTConfig, device: torch.device, seed: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Random windows (x, y) of the text, y one character later, without end."""
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(config.context + 1)
    while True:
        starts = torch.randint(len(codes) - len(window), (config.batch, 1), generator=generator)
        chunk = codes[starts + window]
        x, y = chunk[:, :-1].contiguous(), chunk[:, 1:].contiguous()
        yield x.to(device), y.to(device)
