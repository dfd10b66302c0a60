"""An ordinary training step, compiled whole: MLP on synthetic digits.

python examples/mlp.py
python -m trainfuse explain examples/mlp.py:train_step
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

import trainfuse

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Forward, backward and update; x: [N, 784], y: [N] class indices; returns the loss."""
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def example_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """A batch whose label can be read off the input, so the loss falls."""
    y = torch.randint(10, (128,), device=DEVICE)
    x = torch.randn(128, 784, device=DEVICE)
    x[torch.arange(128, device=DEVICE), y] += 6.0
    return x, y


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
