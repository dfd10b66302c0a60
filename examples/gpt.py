"""A character-level GPT with tied embeddings, in one file, on text that every Python carries.

python examples/gpt.py
python -m trainfuse explain examples/gpt.py:train_step
"""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional

import trainfuse

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS, HEADS, WIDTH, TIME, BATCH = (6, 6, 384, 256, 64) if DEVICE == "cuda" else (2, 4, 64, 32, 8)
DROPOUT = 0.1

text = "\n".join(topics.values())
characters = sorted(set(text))
index_of = {c: i for i, c in enumerate(characters)}
data = torch.tensor([index_of[c] for c in text], device=DEVICE)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [B, T, C]."""
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, HEADS, C // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dropout(self.out(y.transpose(1, 2).reshape(B, T, C)))


class Block(nn.Module):
    """Attention, then a GELU network, both residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.network = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH),
            nn.Dropout(DROPOUT),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [B, T, C]."""
        x = x + self.attention(self.norm1(x))
        return x + self.network(self.norm2(x))


class GPT(nn.Module):
    """Token and position embeddings, blocks, and a head that is the token embedding again."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(len(characters), WIDTH)
        self.positions = nn.Embedding(TIME, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(characters), bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: [B, T] integers; returns logits [B, T, characters]."""
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.dropout(self.tokens(ids) + self.positions(places))
        return self.head(self.norm(self.blocks(x)))


torch.manual_seed(0)
model = GPT().to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)


def train_step(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """One step of next-character prediction; ids, targets: [B, T]; returns the loss."""
    optimizer.zero_grad()
    with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda"):
        logits = model(ids)
        loss = functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


def example_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of random stretches of the text, and the same one character further."""
    starts = torch.randint(len(data) - TIME - 1, (BATCH, 1), device=DEVICE)
    places = starts + torch.arange(TIME, device=DEVICE)
    return data[places], data[places + 1]


def main(steps: int = 200) -> list[float]:
    """Train and return each step's loss."""
    step = trainfuse.compile(train_step)
    losses = []
    for i in range(steps):
        losses.append(step(*example_inputs()).item())
        if i % 50 == 0 or i == steps - 1:
            print(f"step {i:4d}  loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
