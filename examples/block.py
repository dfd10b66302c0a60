"""A pre-norm transformer block with dropout, trained as a whole step under bf16 autocast.

python examples/block.py
python -m trainfuse explain examples/block.py:train_step
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

import trainfuse

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The full size on a GPU; on a CPU a size that finishes while one watches.
D_MODEL, HEADS, D_FF, SHAPE = (
    (768, 12, 3072, (8, 512)) if DEVICE == "cuda" else (64, 4, 256, (4, 32))
)


class TransformerBlock(nn.Module):
    """Attention and a GELU network, each after a layer norm and around a residual."""

    def __init__(
        self, d_model: int = 768, n_heads: int = 12, d_ff: int = 3072, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(
            embed_dim=d_model, num_heads=n_heads, dropout=dropout, batch_first=True
        )
        self.ffn = nn.Sequential(
            nn.Linear(d_model, d_ff),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(d_ff, d_model),
            nn.Dropout(dropout),
        )
        self.norm1 = nn.LayerNorm(d_model)
        self.norm2 = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, time, d_model]; the same shape comes back."""
        normed = self.norm1(x)
        attended, _ = self.attention(normed, normed, normed, need_weights=False)
        x = x + self.dropout(attended)
        return x + self.ffn(self.norm2(x))


torch.manual_seed(0)
model = TransformerBlock(D_MODEL, HEADS, D_FF).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def train_step(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """One step towards target; both [batch, time, d_model]; returns the loss."""
    optimizer.zero_grad()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        out = model(x)
    loss = functional.mse_loss(out.float(), target)
    loss.backward()
    optimizer.step()
    return loss


def example_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Random input, and the same shifted by one position as the target."""
    x = torch.randn(*SHAPE, D_MODEL, device=DEVICE)
    return x, x.roll(1, dims=1)


def main(steps: int = 100) -> list[float]:
    """Train and return each step's loss."""
    step = trainfuse.compile(train_step)
    losses = []
    for i in range(steps):
        losses.append(step(*example_inputs()).item())
        if i % 20 == 0 or i == steps - 1:
            print(f"step {i:4d}  loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
