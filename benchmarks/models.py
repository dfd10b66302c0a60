"""Models of the step cases, in plain PyTorch: no dependency beyond torch, no hidden options."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn import functional


def mlp(sizes: tuple[int, ...] = (784, 512, 512, 10)) -> nn.Module:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Attention(nn.Module):
    """Multi-head self-attention through scaled_dot_product_attention."""

    def __init__(self, width: int, heads: int, *, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.causal, self.p = heads, causal, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [B, T, width]."""
        batch, time, width = x.shape
        qkv = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        p = self.p if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(batch, time, width))


class Layer(nn.Module):
    """Pre-norm (GPT, ViT) or post-norm (BERT) transformer layer with a GELU network."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        causal: bool,
        dropout: float = 0.0,
        post_norm: bool = False,
    ) -> None:
        super().__init__()
        self.post_norm = post_norm
        self.attention = Attention(width, heads, causal=causal, dropout=dropout)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.network = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [B, T, width]."""
        if self.post_norm:
            x = self.norm1(x + self.dropout(self.attention(x)))
            return self.norm2(x + self.dropout(self.network(x)))
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.network(self.norm2(x)))


class Language(nn.Module):
    """Decoder (causal, pre-norm: GPT) or encoder (post-norm: BERT) with a tied head."""

    def __init__(
        self,
        vocabulary: int,
        time: int,
        layers: int,
        width: int,
        heads: int,
        *,
        causal: bool,
        dropout: float,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(time, width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(
                Layer(width, heads, causal=causal, dropout=dropout, post_norm=not causal)
                for _ in range(layers)
            )
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: [B, T]; logits: [B, T, vocabulary]."""
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.dropout(self.tokens(ids) + self.positions(places))
        return self.head(self.norm(self.blocks(x)))


class LlamaLayer(nn.Module):
    """RMS norm, rotary attention and a SiLU-gated network."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x: [B, T, width]; cos, sin: [T, head width]."""
        batch, time, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, time, width))
        h = self.norm2(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Llama(nn.Module):
    """Llama decoder; rotary tables are buffers."""

    def __init__(
        self, vocabulary: int, time: int, layers: int, width: int, heads: int, hidden: int
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.layers = nn.ModuleList(LlamaLayer(width, heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocabulary, bias=False)
        size = width // heads
        rates = 500000.0 ** (-torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(time), rates).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: [B, T]; logits: [B, T, vocabulary]."""
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.head(self.norm(x))


class ViT(nn.Module):
    """Vision transformer with a class token."""

    def __init__(
        self, side: int, patch: int, layers: int, width: int, heads: int, classes: int
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, (side // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.Sequential(*(Layer(width, heads, causal=False) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [N, 3, side, side]; logits: [N, classes]."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), dim=1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class Bottleneck(nn.Module):
    """ResNet's 1x1, 3x3, 1x1 block."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [N, inputs, H, W]."""
        return functional.relu(self.body(x) + self.shortcut(x))


def resnet(depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000):
    """ResNet of bottleneck blocks; the default is ResNet-50."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    inputs = width
    for stage, depth in enumerate(depths):
        for i in range(depth):
            layers.append(Bottleneck(inputs, width << stage, 2 if i == 0 and stage else 1))
            inputs = 4 * (width << stage)
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]
    return nn.Sequential(*layers)
