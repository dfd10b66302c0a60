"""Gradients of gradients: a WGAN with gradient penalty, a physics-informed network."""

from __future__ import annotations

import torch
from torch import nn

from tests.gradients.cases import sgd
from trainfuse.testing import Training

NOISE, PIXELS = 5, 12


def gan(device: str) -> Training:
    """WGAN-GP: the critic's loss holds the norm of its own gradient; two optimizers.

    Both gradients are taken before either update: a step that reads parameters it has updated is no
    whole step. The interpolated samples take their weights from the batch, so that every run draws
    the same.
    """
    generator = nn.Sequential(
        nn.Linear(NOISE, 14), nn.LeakyReLU(0.2), nn.LayerNorm(14), nn.Linear(14, PIXELS), nn.Tanh()
    )
    critic = nn.Sequential(
        nn.Linear(PIXELS, 15), nn.SiLU(), nn.Linear(15, 11), nn.Softplus(), nn.Linear(11, 1)
    )
    model = nn.ModuleDict({"generator": generator, "critic": critic}).to(device)
    optimizers = [sgd(part, 0.02, momentum=0.5) for part in (generator, critic)]

    def penalty(real: torch.Tensor, fake: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
        between = (mix * real + (1 - mix) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        return ((slope.norm(2, dim=1) - 1) ** 2).mean()

    def step(
        real: torch.Tensor, noise: torch.Tensor, mix: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for optimizer in optimizers:
            optimizer.zero_grad()
        fake = generator(noise)
        loss = -critic(fake).mean()
        loss.backward()
        optimizers[1].zero_grad()  # the critic takes nothing from the generator's loss
        fake = fake.detach()
        apart = critic(fake).mean() - critic(real).mean() + 10.0 * penalty(real, fake, mix)
        apart.backward()
        for optimizer in optimizers:
            optimizer.step()
        return apart, loss

    batches = [(torch.randn(6, PIXELS), torch.randn(6, NOISE), torch.rand(6, 1)) for _ in range(3)]
    return Training(step, model, [tuple(t.to(device) for t in batch) for batch in batches])


def pinn(device: str) -> Training:
    """Burgers' equation: u_t + u u_x - 0.05 u_xx = 0 inside, u = -sin(pi x) at t = 0."""
    model = nn.Sequential(
        nn.Linear(2, 13), nn.Tanh(), nn.Linear(13, 11), nn.Tanh(), nn.Linear(11, 1)
    ).to(device)
    optimizer = sgd(model, 0.1, momentum=0.9)

    def slope(u: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(u.sum(), of, create_graph=True)[0]

    def step(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        x, t = x.detach().requires_grad_(), t.detach().requires_grad_()
        u = model(torch.cat((x, t), dim=1))
        u_x = slope(u, x)
        residual = slope(u, t) + u * u_x - 0.05 * slope(u_x, x)
        start = model(torch.cat((x, torch.zeros_like(t)), dim=1))
        loss = (residual**2).mean() + ((start + torch.sin(torch.pi * x)) ** 2).mean()
        loss.backward()
        optimizer.step()
        return loss

    batches = [(torch.rand(9, 1) * 2 - 1, torch.rand(9, 1)) for _ in range(3)]
    return Training(step, model, [tuple(b.to(device) for b in batch) for batch in batches])
