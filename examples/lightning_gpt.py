"""Train a character-level GPT with Lightning, its training step compiled by `FusionCallback`.

    python examples/lightning_gpt.py --steps 200            # through trainfuse
    python examples/lightning_gpt.py --steps 200 --plain    # the same without it

The text is the help that every Python carries, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import time
from pydoc_data import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

try:
    import lightning.pytorch as pl
except ImportError:
    import pytorch_lightning as pl

from trainfuse.lightning import FusionCallback


class Text(Dataset[tuple[Tensor, Tensor]]):
    """Windows of text as character numbers: (input, the same one character on), int64 [length]."""

    def __init__(self, length: int) -> None:
        text = "\n".join(topics.topics.values())
        self.alphabet = sorted(set(text))
        number = {character: i for i, character in enumerate(self.alphabet)}
        self.data = torch.tensor([number[character] for character in text])
        self.length = length

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.length
        piece = self.data[start : start + self.length + 1]
        return piece[:-1], piece[1:]


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(y.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(pl.LightningModule):
    """A GPT with tied embeddings that logs its loss and accuracy."""

    def __init__(
        self,
        vocabulary: int,
        length: int = 64,
        width: int = 64,
        layers: int = 2,
        heads: int = 4,
        dropout: float = 0.0,
        lr: float = 3e-3,
        warmup: int = 20,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.tokens(x) + self.places(places))))

    def loss(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, y = batch
        logits = self(x)
        accuracy = (logits.argmax(-1) == y).float().mean()
        return F.cross_entropy(logits.flatten(0, 1), y.flatten()), accuracy

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss, accuracy = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log("train_accuracy", accuracy)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        loss, accuracy = self.loss(batch)
        self.log_dict({"val_loss": loss, "val_accuracy": accuracy})

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.1)
        warmup = self.hparams.warmup
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / warmup)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def main(argv: list[str] | None = None) -> GPT:
    """Train, and say what was reached; returns the trained model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--precision", default="32-true", choices=["32-true", "bf16-mixed"])
    parser.add_argument("--plain", action="store_true", help="train without trainfuse")
    args = parser.parse_args(argv)

    pl.seed_everything(0)
    text = Text(length=64)
    model = GPT(len(text.alphabet))
    # a few plain steps first, to say how much faster the compiled ones are; none in a short run
    callback = FusionCallback(compare_steps=min(3, args.steps // 10))
    trainer = pl.Trainer(
        devices=1,
        max_steps=args.steps,
        precision=args.precision,
        gradient_clip_val=1.0,
        limit_val_batches=4,
        log_every_n_steps=10,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[] if args.plain else [callback],
    )
    start = time.perf_counter()
    trainer.fit(
        model,
        DataLoader(text, batch_size=args.batch, shuffle=True, drop_last=True),
        DataLoader(text, batch_size=args.batch),
    )
    print(f"{trainer.global_step} steps in {time.perf_counter() - start:.1f} s")
    print({name: round(float(value), 3) for name, value in trainer.callback_metrics.items()})
    if callback.report is not None:
        print(callback.report)
    return model


if __name__ == "__main__":
    main()
