"""Convolution, batch norm and dropout, with a learning-rate schedule and evaluation between epochs.

python examples/convnet.py
python -m trainfuse explain examples/convnet.py:train_step
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

import trainfuse

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def stage(inputs: int, outputs: int) -> nn.Sequential:
    """Convolution, norm, activation, half the resolution."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


torch.manual_seed(0)
model = nn.Sequential(
    stage(3, 16), stage(16, 32), nn.Flatten(), nn.Dropout(0.2), nn.Linear(32 * 4 * 4, 4)
).to(DEVICE)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)


def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """One step; x: [N, 3, 16, 16], y: [N] class indices; returns the loss."""
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def example_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Images whose class is the brightest quadrant."""
    y = torch.randint(4, (32,), device=DEVICE)
    x = torch.randn(32, 3, 16, 16, device=DEVICE)
    for i, quadrant in enumerate(y.tolist()):
        row, column = divmod(quadrant, 2)
        x[i, :, row * 8 : row * 8 + 8, column * 8 : column * 8 + 8] += 1.0
    return x, y


@torch.no_grad()
def accuracy() -> float:
    """Share of a fresh batch that the model gets right, in evaluation mode."""
    model.eval()
    x, y = example_inputs()
    right = (model(x).argmax(-1) == y).float().mean().item()
    model.train()
    return right


def main(steps: int = 100) -> list[float]:
    """Train and return each step's loss."""
    step = trainfuse.compile(train_step)
    losses = []
    for i in range(steps):
        losses.append(step(*example_inputs()).item())
        scheduler.step()  # the learning rate is a device scalar: no new plan
        if i % 25 == 0 or i == steps - 1:
            print(f"step {i:4d}  loss {losses[-1]:.4f}  accuracy {accuracy():.2f}")
    return losses


if __name__ == "__main__":
    main()
