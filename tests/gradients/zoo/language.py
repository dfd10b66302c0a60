"""Language models: Llama, BERT, a T5-like encoder-decoder."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from tests.gradients.cases import classify, sgd, training
from trainfuse.testing import Training

VOCABULARY = 13


def _heads(x: torch.Tensor, count: int) -> torch.Tensor:
    """[B, T, count * d] -> [B, count, T, d]."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def _joined(x: torch.Tensor) -> torch.Tensor:
    """[B, heads, T, d] -> [B, T, heads * d]."""
    return x.transpose(1, 2).flatten(2)


class RMSNorm(nn.Module):
    """The norm of Llama and T5 as their code writes it: statistics in fp32, the gain last."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., width]."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * scaled.to(x.dtype)


class LlamaLayer(nn.Module):
    """Rotary attention with grouped keys and values, and a SwiGLU network."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, size = heads, kv_heads, width // heads
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_heads * size, bias=False)
        self.v = nn.Linear(width, kv_heads * size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x: [B, T, width]; cos, sin: [T, head width]."""
        h = self.norm1(x)
        q = _rotated(_heads(self.q(h), self.heads), cos, sin)
        k = _rotated(_heads(self.k(h), self.kv_heads), cos, sin)
        v = _heads(self.v(h), self.kv_heads)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(_joined(mixed))
        h = self.norm2(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Llama(nn.Module):
    """Two layers; the rotary tables are buffers."""

    def __init__(self, width: int = 16, heads: int = 4, kv_heads: int = 2, time: int = 6) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(LlamaLayer(width, heads, kv_heads, 22) for _ in range(2))
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        size = width // heads
        rates = 10000.0 ** (-torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(time), rates).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: [B, T]; logits: [B, T, vocabulary]."""
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.head(self.norm(x))


def llama(device: str) -> Training:
    """RMS norm, rotary positions, SwiGLU, grouped queries."""
    model = Llama().to(device)
    optimizer = sgd(model, 0.5, momentum=0.9, weight_decay=0.1)
    batches = [tuple(torch.randint(VOCABULARY, (2, 2, 6))) for _ in range(3)]
    return training(model, optimizer, classify, batches, device, clip=1.0)


class BertLayer(nn.Module):
    """Post-norm; dropout of attention weights, of the residuals, and a padding mask."""

    def __init__(self, width: int, heads: int, hidden: int, p: float) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out, self.up, self.down = (
            nn.Linear(width, width),
            nn.Linear(width, hidden),
            nn.Linear(hidden, width),
        )
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-12), nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(p)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """x: [B, T, width]; bias: [B, 1, 1, T], very negative where the token is padding."""
        q, k, v = (_heads(part(x), self.heads) for part in (self.q, self.k, self.v))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]) + bias
        mixed = _joined(self.dropout(scores.softmax(-1)) @ v)
        x = self.norm1(x + self.dropout(self.out(mixed)))
        return self.norm2(x + self.dropout(self.down(functional.gelu(self.up(x)))))


class Bert(nn.Module):
    """Masked language model: three embeddings, two layers, a transform, a tied decoder."""

    def __init__(self, width: int = 16, heads: int = 2, time: int = 7, p: float = 0.1) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width, padding_idx=0)
        self.positions, self.segments = nn.Embedding(time, width), nn.Embedding(2, width)
        self.norm, self.dropout = nn.LayerNorm(width, eps=1e-12), nn.Dropout(p)
        self.layers = nn.ModuleList(BertLayer(width, heads, 28, p) for _ in range(2))
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.decoder = nn.Linear(width, VOCABULARY)
        self.decoder.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: [B, T], 0 is padding; logits: [B, T, vocabulary]."""
        places = torch.arange(ids.shape[1], device=ids.device)
        segments = (places >= 4).long().expand_as(ids)
        x = self.words(ids) + self.positions(places) + self.segments(segments)
        x = self.dropout(self.norm(x))
        bias = (ids == 0)[:, None, None, :].to(x.dtype) * torch.finfo(torch.float32).min
        for layer in self.layers:
            x = layer(x, bias)
        return self.decoder(self.transform(x))


def bert(device: str) -> Training:
    """Masked language model with dropout, padding, and targets that are ignored."""
    batches = []
    for _ in range(3):
        ids = torch.randint(1, VOCABULARY, (3, 7))
        target = torch.where(torch.rand(3, 7) < 0.4, ids, -100)
        target[:, 0] = ids[:, 0]
        ids = torch.where(torch.arange(7) < torch.tensor([[7], [5], [4]]), ids, 0)
        batches.append((ids, target.masked_fill(ids == 0, -100)))
    model = Bert().to(device)
    return training(model, sgd(model, 0.1, momentum=0.9), classify, batches, device)


class T5Attention(nn.Module):
    """Unscaled attention, plus a bias that depends on the distance or hides the future."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(
        self, x: torch.Tensor, memory: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x: [B, T, width]; memory: [B, S, width]; bias: [1, heads, T, S]."""
        q = _heads(self.q(x), self.heads)
        k, v = _heads(self.k(memory), self.heads), _heads(self.v(memory), self.heads)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        return self.out(_joined(mixed))


class T5Layer(nn.Module):
    """Pre-norm residual layer of an encoder, or of a decoder with cross attention."""

    def __init__(self, width: int, heads: int, hidden: int, cross: bool) -> None:
        super().__init__()
        self.attention = T5Attention(width, heads)
        self.cross = T5Attention(width, heads) if cross else None
        self.norms = nn.ModuleList(RMSNorm(width) for _ in range(3 if cross else 2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(
        self, x: torch.Tensor, bias: torch.Tensor, memory: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x: [B, T, width]; bias: [1, heads, T, T]; memory: the encoder's states."""
        h = self.norms[0](x)
        x = x + self.attention(h, h, bias)
        if self.cross is not None and memory is not None:
            x = x + self.cross(self.norms[1](x), memory)
        h = self.norms[-1](x)
        return x + self.down(functional.gelu(self.gate(h), approximate="tanh") * self.up(h))


class RelativeBias(nn.Embedding):
    """T5's learned bias: near distances one bucket each, far ones in logarithmic buckets."""

    def __init__(self, heads: int, two_sided: bool) -> None:
        super().__init__(8, heads)
        self.two_sided = two_sided

    def forward(self, time: int) -> torch.Tensor:
        """[1, heads, time, time]."""
        places = torch.arange(time, device=self.weight.device)
        distance = places[None, :] - places[:, None]
        buckets, side = 8, torch.zeros_like(distance)
        if self.two_sided:
            buckets, side = 4, (distance > 0).long() * 4
        far = distance.abs() if self.two_sided else (-distance).clamp(min=0)
        exact = buckets // 2
        # 17, not 16: no distance lies on the edge of a bucket, where one bit would decide
        ratio = torch.log(far.clamp(min=1).float() / exact) / math.log(17 / exact)
        coarse = (exact + (ratio * (buckets - exact)).long()).clamp(max=buckets - 1)
        bucket = side + torch.where(far < exact, far, coarse)
        return super().forward(bucket).permute(2, 0, 1).unsqueeze(0)


class T5(nn.Module):
    """Encoder-decoder with one embedding for the source, the target and the head."""

    def __init__(self, width: int = 12, heads: int = 2) -> None:
        super().__init__()
        self.width = width
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.encoder = T5Layer(width, heads, 20, cross=False)
        self.decoder = T5Layer(width, heads, 20, cross=True)
        self.near, self.past = RelativeBias(heads, True), RelativeBias(heads, False)
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """source: [B, S]; target: [B, T]; logits: [B, T, vocabulary]."""
        memory = self.norm1(self.encoder(self.tokens(source), self.near(source.shape[1])))
        shifted = functional.pad(target[:, :-1], (1, 0))
        time = target.shape[1]
        future = torch.ones(time, time, dtype=torch.bool, device=target.device).triu(1)
        bias = self.past(time).masked_fill(future, -math.inf)
        states = self.norm2(self.decoder(self.tokens(shifted), bias, memory))
        return functional.linear(states * self.width**-0.5, self.tokens.weight)


def t5(device: str) -> Training:
    """Relative positions, cross attention, and an embedding with three readers."""
    model = T5().to(device)

    def loss_of(model: nn.Module, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(source, target).flatten(0, 1), target.flatten())

    sizes = ((2, 9), (2, 5))
    batches = [tuple(torch.randint(VOCABULARY, size) for size in sizes) for _ in range(3)]
    return training(model, sgd(model, 0.05, momentum=0.9), loss_of, batches, device)
