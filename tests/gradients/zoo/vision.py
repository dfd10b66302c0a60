"""Image models: ViT, ConvNeXt, a diffusion UNet."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from tests.gradients.cases import classify, sgd, training
from trainfuse.testing import Training


def _images(side: int, classes: int, rows: int = 3) -> list[tuple[torch.Tensor, ...]]:
    return [(torch.randn(rows, 3, side, side), torch.randint(classes, (rows,))) for _ in range(3)]


class ViTLayer(nn.Module):
    """Pre-norm layer; attention through F.scaled_dot_product_attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.network = nn.Sequential(
            nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [B, T, width]."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.network(self.norm2(x))


class ViT(nn.Module):
    """Patches by a strided convolution, a class token, learned positions."""

    def __init__(self, side: int = 8, patch: int = 4, width: int = 14, classes: int = 5) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, (side // patch) ** 2 + 1, width) * 0.1)
        self.layers = nn.Sequential(*(ViTLayer(width, 2) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [N, 3, side, side]; logits: [N, classes]."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), dim=1) + self.positions
        return self.head(self.norm(self.layers(x))[:, 0])


def vit(device: str) -> Training:
    """Class token and positions are parameters that are broadcast; labels are smoothed."""
    model = ViT().to(device)

    def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(x), y, label_smoothing=0.1)

    return training(model, sgd(model, 0.1, momentum=0.9), loss_of, _images(8, 5), device)


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution, layer norm over channels in the last place, layer scale.

    Stochastic depth: a sample keeps the branch with probability 1 - p, and it is then scaled up.
    The draw is of integers, which fp32 and fp64 runs have in common.
    """

    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 5, padding=2, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.5))
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [N, width, H, W]."""
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(functional.gelu(self.up(y)))
        if self.training:
            draws = torch.randint(100, (x.shape[0], 1, 1, 1), device=x.device)
            y = y * (draws >= 100 * self.p) / (1.0 - self.p)
        return x + y.permute(0, 3, 1, 2)


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of [N, C, H, W]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [N, C, H, W]; the same shape."""
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def convnext(device: str) -> Training:
    """Two stages in channels-last memory, as ConvNeXt is usually trained."""
    model = nn.Sequential(
        nn.Conv2d(3, 6, 2, stride=2),
        ChannelNorm(6),
        ConvNeXtBlock(6, 0.1),
        ChannelNorm(6),
        nn.Conv2d(6, 10, 2, stride=2),
        ConvNeXtBlock(10, 0.4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.LayerNorm(10),
        nn.Linear(10, 5),
    ).to(device, memory_format=torch.channels_last)
    batches = [
        (x.contiguous(memory_format=torch.channels_last), y) for x, y in _images(12, 5, rows=4)
    ]
    optimizer = sgd(model, 0.2, momentum=0.9, weight_decay=0.05)
    return training(model, optimizer, classify, batches, device)


class ResidualBlock(nn.Module):
    """Group norm, SiLU and convolution twice; the time embedding is added in between."""

    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(2, inputs), nn.GroupNorm(2, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """x: [N, inputs, H, W]; time: [N, time]."""
        h = self.conv1(functional.silu(self.norm1(x)))
        h = h + self.time(functional.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(functional.silu(self.norm2(h)))


class UNet(nn.Module):
    """Predicts noise: down once, up once by nearest neighbours, a skip joined by cat."""

    def __init__(self, width: int = 6, time: int = 8) -> None:
        super().__init__()
        self.register_buffer("rates", 100.0 ** -torch.linspace(0, 1, time // 2))
        self.time = nn.Sequential(nn.Linear(time, time), nn.SiLU(), nn.Linear(time, time))
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.enter = ResidualBlock(width, width, time)
        self.shrink = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.middle = ResidualBlock(width, 2 * width, time)
        self.grow = nn.Conv2d(2 * width, width, 3, padding=1)
        self.leave = ResidualBlock(2 * width, width, time)
        self.norm, self.last = nn.GroupNorm(3, width), nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """x: [N, 3, H, W]; time: int64 [N]."""
        angles = time[:, None] * self.rates
        time = self.time(torch.cat((angles.sin(), angles.cos()), dim=-1))
        kept = self.enter(self.first(x), time)
        h = self.middle(self.shrink(kept), time)
        h = self.grow(functional.interpolate(h, scale_factor=2.0, mode="nearest"))
        h = self.leave(torch.cat((h, kept), dim=1), time)
        return self.last(functional.silu(self.norm(h)))


def unet(device: str) -> Training:
    """A denoising step: noise is mixed in by a schedule that the step looks up."""
    model = UNet().to(device)
    alphas = torch.cumprod(torch.linspace(0.99, 0.7, 10), 0).to(device)

    def loss_of(
        model: nn.Module, x: torch.Tensor, noise: torch.Tensor, time: torch.Tensor
    ) -> torch.Tensor:
        kept = alphas.to(x.dtype)[time][:, None, None, None]
        return functional.mse_loss(model(kept.sqrt() * x + (1 - kept).sqrt() * noise, time), noise)

    shape = (2, 3, 6, 6)
    batches = [(torch.randn(shape), torch.randn(shape), torch.randint(10, (2,))) for _ in range(3)]
    return training(model, sgd(model, 0.1, momentum=0.9), loss_of, batches, device)
