"""The step cases: model, data, loss and precision of each, at full and at tiny size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks import models
from examples.block import TransformerBlock

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """One training set-up; every contender builds its own from the same seed.

    model: builds it on the CPU. batch: one batch on the CPU, (input, target).
    precision: "tf32", "bf16-autocast" or "bf16". check: whether the fp64 run fits in memory.
    note: what a reader must know of the set-up.
    """

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    loss: Loss
    precision: str
    note: str
    check: bool = True
    channels_last: bool = False
    learning_rate: float = 1e-3

    def build(self, device: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        """Model and batch on the device, the same at each call."""
        torch.manual_seed(0)
        model, batch = self.model(), self.batch()
        if self.precision == "bf16":
            model = model.to(torch.bfloat16)
        layout: dict[str, Any] = {}
        if self.channels_last:
            layout["memory_format"] = torch.channels_last
            batch = (batch[0].to(**layout), batch[1])
        return model.to(device, **layout), tuple(t.to(device) for t in batch)


def classes(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross-entropy over the last dimension; target -100 is ignored."""
    return functional.cross_entropy(logits.view(-1, logits.size(-1)), target.view(-1))


def regression(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean squared error in fp32."""
    return functional.mse_loss(out.float(), target)


def _tokens(batch: int, time: int, vocabulary: int, masked: bool = False):
    ids = torch.randint(vocabulary, (batch, time + 1))
    target = ids[:, 1:].contiguous()
    if masked:  # as a masked language model: 15% of positions count
        target = torch.where(torch.rand(batch, time) < 0.15, target, -100)
    return ids[:, :-1].contiguous(), target


def _images(batch: int, side: int, number: int):
    return torch.randn(batch, 3, side, side), torch.randint(number, (batch,))


def _language(name: str, note: str, sizes: tuple[int, ...], **options: Any) -> Case:
    vocabulary, time, layers, width, heads, batch = sizes
    causal, dropout = options.pop("causal", True), options.pop("dropout", 0.0)

    def build() -> nn.Module:
        return models.Language(
            vocabulary, time, layers, width, heads, causal=causal, dropout=dropout
        )

    def data() -> tuple[torch.Tensor, torch.Tensor]:
        return _tokens(batch, time, vocabulary, masked=not causal)

    return Case(name, build, data, classes, "bf16-autocast", note, **options)


def _mlp(name: str, sizes: tuple[int, ...], batch: int) -> Case:
    def data() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(batch, sizes[0]), torch.randint(sizes[-1], (batch,))

    note = f"MLP {'-'.join(map(str, sizes))}, batch {batch}, TF32"
    return Case(name, lambda: models.mlp(sizes), data, classes, "tf32", note)


def _block(name: str, width: int, heads: int, batch: int, time: int) -> Case:
    def data() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(batch, time, width)
        return x, x.roll(1, dims=1)

    note = (
        f"TransformerBlock d{width} h{heads} ff{4 * width}, dropout 0.1 (attention too), "
        f"{batch}x{time}, bf16 autocast, MSE loss"
    )
    build = lambda: TransformerBlock(width, heads, 4 * width, 0.1)  # noqa: E731  # one line
    return Case(name, build, data, regression, "bf16-autocast", note)


def _llama(name: str, sizes: tuple[int, ...], batch: int) -> Case:
    vocabulary, time = sizes[:2]
    note = f"Llama {sizes[2]} layers d{sizes[3]} V{vocabulary}, {batch}x{time}, bf16 weights"
    return Case(
        name,
        lambda: models.Llama(*sizes),
        lambda: _tokens(batch, time, vocabulary),
        classes,
        "bf16",
        note,
        check=False,
        learning_rate=1e-4,
    )


def full_cases() -> dict[str, Case]:
    """The cases at the sizes whose figures are published."""
    cases = (
        _mlp("mlp", (784, 512, 512, 10), 128),
        _block("block", 768, 12, 8, 512),
        _language(
            "gpt-small",
            "GPT 6 layers d384 h6 V65 tied, 64x256, dropout 0, bf16 autocast",
            (65, 256, 6, 384, 6, 64),
        ),
        _language(
            "gpt2",
            "GPT-2 124M V50304 tied, 16x1024, dropout 0, bf16 autocast",
            (50304, 1024, 12, 768, 12, 16),
            check=False,
        ),
        _llama("llama", (128256, 2048, 4, 2048, 16, 8192), 4),
        Case(
            "vit",
            lambda: models.ViT(224, 16, 12, 384, 6, 1000),
            lambda: _images(128, 224, 1000),
            classes,
            "bf16-autocast",
            "ViT-S/16, batch 128, bf16 autocast",
            check=False,
        ),
        Case(
            "resnet50",
            models.resnet,
            lambda: _images(192, 224, 1000),
            classes,
            "bf16-autocast",
            "ResNet-50, batch 192, channels-last, bf16 autocast",
            check=False,
            channels_last=True,
        ),
        _language(
            "bert",
            "BERT-base, masked language model, 32x512, dropout 0.1, bf16 autocast",
            (30522, 512, 12, 768, 12, 32),
            causal=False,
            dropout=0.1,
            check=False,
        ),
    )
    return {case.name: case for case in cases}


def tiny_cases() -> dict[str, Case]:
    """The same code paths in seconds on a CPU; their times mean nothing."""
    cases = (
        _mlp("mlp", (20, 16, 16, 4), 8),
        _block("block", 16, 2, 2, 8),
        _language("gpt-small", "tiny", (13, 8, 2, 16, 2, 4)),
        _language("gpt2", "tiny", (17, 8, 2, 16, 2, 2)),
        _llama("llama", (19, 8, 1, 16, 2, 32), 2),
        Case(
            "vit",
            lambda: models.ViT(8, 4, 1, 16, 2, 5),
            lambda: _images(2, 8, 5),
            classes,
            "bf16-autocast",
            "tiny",
        ),
        Case(
            "resnet50",
            lambda: models.resnet((1, 1), 4, 5),
            lambda: _images(2, 32, 5),
            classes,
            "bf16-autocast",
            "tiny",
            channels_last=True,
        ),
        _language("bert", "tiny", (17, 8, 1, 16, 2, 2), causal=False, dropout=0.1),
    )
    return {c.name: replace(c, note=f"tiny, CPU: {c.note}") for c in cases}
