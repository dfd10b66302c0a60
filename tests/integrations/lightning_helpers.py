"""Small Lightning modules and a quiet Trainer for the tests of `FusionCallback`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

try:
    import lightning.pytorch as pl
    from lightning.pytorch import loggers as pl_loggers
except ImportError:
    import pytorch_lightning as pl
    from pytorch_lightning import loggers as pl_loggers

from trainfuse.lightning import FusionCallback
from trainfuse.testing.steps import clones

BATCHES, ROWS = 8, 4


class Net(pl.LightningModule):
    """An MLP with batch norm; logs on step and epoch."""

    def __init__(self, lr: float = 0.05, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU()
        )
        self.head = nn.Linear(8, 2)
        self.lr, self.optimizer = lr, optimizer

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"twice": 2 * loss, "three": 3.0})
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.mse_loss(self(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.7)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Recorder(pl.Callback):
    """Keeps what every batch left: gradients, outputs, lr, counters and the logged values."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, Tensor | None]] = []
        self.outputs: list[Any] = []
        self.counters: list[tuple[int, int, int]] = []
        self.rates: list[float] = []
        self.metrics: list[dict[str, float]] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.gradients.append(clones((n, p.grad) for n, p in pl_module.named_parameters()))
        self.outputs.append(outputs)
        progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress
        self.counters.append((trainer.global_step, batch_idx, hash(repr(progress))))
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        self.metrics.append({k: float(v) for k, v in trainer.callback_metrics.items()})


def loaders(rows: int = ROWS * BATCHES) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Equal data at every call: train and validation loaders of float32 (x [4, 5], y [4, 2])."""
    generator = torch.Generator().manual_seed(7)
    x, y = (torch.randn(rows, n, generator=generator) for n in (5, 2))
    data = TensorDataset(x, y)
    return DataLoader(data, batch_size=ROWS), DataLoader(data, batch_size=ROWS)


def fusion(**arguments: Any) -> FusionCallback:
    """A callback that compiles at the first batch, runs on ATen and leaves gradients behind."""
    arguments.setdefault("backend", "eager")
    arguments.setdefault("compare_steps", 0)
    arguments["options"] = {"keep_gradients": True, **arguments.get("options", {})}
    return FusionCallback(**arguments)


def trainer_with(*callbacks: Any, **arguments: Any) -> Any:
    """A Trainer on the CPU that prints nothing and saves nothing unless asked."""
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
    }
    return pl.Trainer(**{**quiet, **arguments}, callbacks=list(callbacks))


def fit(module: Any, *callbacks: Any, ckpt_path: str | None = None, **arguments: Any) -> Any:
    """Train the module on `loaders()` and return the Trainer."""
    trainer = trainer_with(*callbacks, **arguments)
    trainer.fit(module, *loaders(), ckpt_path=ckpt_path)
    return trainer


def fresh(kind: type[Any] = Net, **arguments: Any) -> Any:
    """A module with the same weights at every call."""
    torch.manual_seed(3)
    return kind(**arguments)


@contextlib.contextmanager
def said() -> Iterator[list[str]]:
    """Collect the lines that trainfuse says: on its own logger and on Lightning's."""
    lines: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            line = record.getMessage()
            if record.name == "trainfuse.lightning" or line.startswith("trainfuse"):
                lines.append(line)

    handler = Collect()
    names = ["trainfuse.lightning", pl.__name__]
    for name in names:
        logging.getLogger(name).addHandler(handler)
    try:
        yield lines
    finally:
        for name in names:
            logging.getLogger(name).removeHandler(handler)


__all__ = [
    "BATCHES",
    "Net",
    "Recorder",
    "fit",
    "fresh",
    "fusion",
    "loaders",
    "pl",
    "pl_loggers",
    "said",
    "trainer_with",
]
