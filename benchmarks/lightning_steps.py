"""Steps through Lightning against the same steps in a plain loop, in one run, taking turns.

    python -m benchmarks.lightning_steps          # on the GPU: examples/lightning_gpt.py's model
    python -m benchmarks.lightning_steps --cpu    # the code path, tiny

Rows: case "gpt-loop" is the plain loop, "gpt-lightning" a `Trainer` with `FusionCallback` around
the same model, batch and precision. After every window of Lightning's steps as many of the loop
follow, from inside the fit. Batches are on the device already: what a data loader costs is not
measured.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import trainfuse
from benchmarks.environment import describe, write_results
from benchmarks.steps import RESULTS
from examples.lightning_gpt import GPT, pl
from trainfuse.lightning import FusionCallback

FULL = {"length": 256, "width": 384, "layers": 6, "heads": 6}
TINY = {"length": 8, "width": 16, "layers": 1, "heads": 2}
VOCABULARY = 65


class Loop:
    """The same training by hand: one compiled step."""

    def __init__(self, sizes: dict[str, int], batch: Any, device: str) -> None:
        model = GPT(VOCABULARY, **sizes).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            with torch.autocast(device, dtype=torch.bfloat16):
                loss, _ = model.loss((x, y))
            loss.backward()
            optimizer.step()
            return loss

        self.step, self.batch = trainfuse.compile(step), batch

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step(*self.batch)


class Turns(pl.Callback):
    """Times windows of the fit's steps, and after each a window of the loop's."""

    def __init__(self, loop: Loop, window: int, warm_up: int, device: str) -> None:
        self.loop, self.window, self.warm_up, self.device = loop, window, warm_up, device
        self.times: dict[str, list[float]] = {"gpt-loop": [], "gpt-lightning": []}
        self._began = 0.0

    def _wait(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        done = trainer.global_step
        if done < self.warm_up or (done - self.warm_up) % self.window:
            return
        if done > self.warm_up:
            self.times["gpt-lightning"].append((self._wait() - self._began) / self.window * 1e3)
        start = self._wait()
        self.loop.run(self.window)
        self.times["gpt-loop"].append((self._wait() - start) / self.window * 1e3)
        self._began = self._wait()


def measure(device: str, window: int, windows: int) -> list[dict[str, Any]]:
    """Both rows."""
    sizes, batch_size = (FULL, 64) if device == "cuda" else (TINY, 2)
    torch.manual_seed(0)
    ids = torch.randint(VOCABULARY, (batch_size, sizes["length"] + 1), device=device)
    batch = (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    loop = Loop(sizes, batch, device)
    loop.run(5)
    turns = Turns(loop, window, warm_up=10, device=device)
    fusion = FusionCallback()
    trainer = pl.Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        max_steps=10 + window * windows,
        precision="bf16-mixed",
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        callbacks=[fusion, turns],
    )
    batches = DataLoader([batch] * (10 + window * windows), batch_size=None)
    trainer.fit(GPT(VOCABULARY, **sizes), batches)
    print(fusion.report)
    note = f"GPT {sizes}, batch {batch_size}, bf16 autocast, AdamW, the loss and accuracy logged"
    rows = []
    for case, times in turns.times.items():
        low, middle, high = statistics.quantiles(times, n=4)
        rows.append(
            {
                "case": case,
                "contender": "trainfuse",
                "phase": "step",
                "ms": round(middle, 4),
                "ms_spread": round(high - low, 4),
                **dict.fromkeys(
                    ("host_ms", "peak_gib", "compile_s", "grad_error_ratio", "roof_fraction")
                ),
                "note": f"{note}; only the time of a step is measured here",
            }
        )
    return rows


def main(arguments: list[str] | None = None) -> Path:
    """Measure, print, and write the results file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--window", type=int, default=50)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    device = "cpu" if options.cpu else "cuda"
    environment = describe(device)
    rows = measure(device, options.window, options.windows)
    for row in rows:
        print(f"{row['case']:16s} {row['ms']:.3f} ms  (spread {row['ms_spread']:.3f})")
    return write_results(options.out, "lightning", {"environment": environment, "rows": rows})


if __name__ == "__main__":
    main()
