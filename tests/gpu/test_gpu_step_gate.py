"""verify="step" on a GPU: half precision, attention without an fp64 form, replay afterwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trainfuse

Step = Callable[[Tensor], Tensor]


class Attention(nn.Module):
    """Causal attention between two projections, with a norm, dropout and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(128), nn.Dropout(0.1)
        self.project, self.out = nn.Linear(128, 384), nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.project(self.norm(x)).unflatten(-1, (3, 2, 64)).unbind(-3)
        q, k, v = (part.transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.drop(self.out(mixed.transpose(1, 2).flatten(-2)))


def make_step() -> tuple[nn.Module, Step, Tensor]:
    torch.manual_seed(0)
    model = Attention().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return model, step, torch.randn(4, 64, 128, device="cuda")


@pytest.mark.parametrize("verify", ["step", 3])
def test_half_precision_with_attention_passes_and_replays(verify: str | int) -> None:
    _, step, x = make_step()
    compiled = trainfuse.compile(step, verify=verify)
    losses = [float(compiled(x)) for _ in range(30)]
    stats = compiled.stats()
    assert stats["gate"] == "pass"
    assert stats["cuda_graphs"] == 1, "repeated checks cost the graph"
    assert losses[-1] < losses[0]


def test_doctor_passes_and_puts_the_state_back() -> None:
    model, step, x = make_step()
    before = [p.detach().clone() for p in model.parameters()]
    diagnosis = trainfuse.doctor(step, x)
    assert diagnosis.stage("checks").value == "pass"
    assert diagnosis.stage("CUDA graph").value == "used"
    assert all(map(torch.equal, before, model.parameters()))
