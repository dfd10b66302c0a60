"""Where a whole step can't be captured: compile the module, and keep autograd's hooks.

Two ways: `torch.compile(module, backend="trainfuse")`, and `trainfuse.compile(module)`, which
compiles it in place (same type, same state_dict keys). Parameter hooks, a data-dependent branch in
the loop and any optimizer at all stay ordinary Python.

    python examples/regions.py
    python -m trainfuse explain examples/regions.py:model
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

import trainfuse

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def network() -> nn.Module:
    """A small residual-free network with a norm."""
    layers = [nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 1)]
    return nn.Sequential(*layers).to(DEVICE)


torch.manual_seed(0)
model = network()


def example_inputs() -> tuple[torch.Tensor]:
    """A batch of 64 rows of 32 features."""
    return (torch.randn(64, 32, device=DEVICE),)


def train(module: nn.Module, run: nn.Module, steps: int) -> list[float]:
    """Train `module` through `run` (itself, or torch.compile's wrapper of it).

    Its gradients are halved by a hook, and a step is left out when its loss is too small.
    """
    optimizer = torch.optim.Adagrad(module.parameters(), lr=0.05)
    handles = [p.register_hook(lambda grad: grad * 0.5) for p in module.parameters()]
    losses = []
    for _ in range(steps):
        (x,) = example_inputs()
        loss = functional.mse_loss(run(x).squeeze(-1), x[:, 0].sin())
        losses.append(loss.item())
        if losses[-1] < 1e-4:
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for handle in handles:
        handle.remove()
    return losses


def main(steps: int = 200) -> list[float]:
    """Train both ways and return the second one's losses."""
    first = network()
    losses = train(first, torch.compile(first, backend="trainfuse"), steps)
    print(f"torch.compile(backend='trainfuse')  loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    trainfuse.compile(model)
    losses = train(model, model, steps)
    print(f"trainfuse.compile(module)           loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    trainfuse.restore(model)
    return losses


if __name__ == "__main__":
    main()
