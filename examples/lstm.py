"""A network around nn.LSTM: the recurrence stays ATen, what surrounds it is fused.

python examples/lstm.py
python -m trainfuse explain examples/lstm.py:train_step
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

import trainfuse

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Recurrent(nn.Module):
    """Projection, LSTM, norm and a head on the last state."""

    def __init__(self, features: int = 8, hidden: int = 32, classes: int = 2) -> None:
        super().__init__()
        self.project = nn.Sequential(nn.Linear(features, hidden), nn.GELU(), nn.LayerNorm(hidden))
        self.lstm = nn.LSTM(hidden, hidden, batch_first=True)
        self.head = nn.Sequential(nn.LayerNorm(hidden), nn.SiLU(), nn.Linear(hidden, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, time, features]; returns logits [batch, classes]."""
        states, _ = self.lstm(self.project(x))
        return self.head(states[:, -1])


torch.manual_seed(0)
model = Recurrent().to(DEVICE)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)


def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """One step; x: [batch, time, features], y: [batch]; returns the loss."""
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def example_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences, labelled by the sign of their first feature's sum."""
    x = torch.randn(32, 12, 8, device=DEVICE)
    return x, (x[:, :, 0].sum(1) > 0).long()


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
