"""A vocabulary's head alone, linear layer and cross-entropy: `python -m benchmarks.head`.

8192 rows of 2048, 128256 classes, bf16, cross-entropy in fp32; forward, backward and SGD as one
step. Peak memory is what the step makes the allocator reserve beyond the parameters, in a process
where nothing else ran; times are medians over rounds in which every contender runs in turn; the
weight gradient's error is against fp64, relative, root mean square.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import trainfuse
from benchmarks.environment import describe, write_results
from benchmarks.report import RESULTS
from benchmarks.steps import reserved, synchronize, timed

CHUNK_MEMORY = {"trainfuse, no chunks": 0, "trainfuse, chunks of 256 MiB": 256 << 20}
CONTENDERS = ("eager", "compile", "trainfuse", *CHUNK_MEMORY)
IGNORED = -100


@dataclass(frozen=True, slots=True)
class Size:
    """Rows, width of the input, classes."""

    rows: int = 8192
    width: int = 2048
    classes: int = 128256


class Head(nn.Module):
    """The input as a parameter, so that its gradient is made, and the linear layer."""

    def __init__(self, size: Size, device: str) -> None:
        super().__init__()
        made = {"device": device, "dtype": torch.bfloat16}
        self.hidden = nn.Parameter(torch.randn(size.rows, size.width, **made))
        self.linear = nn.Linear(size.width, size.classes, bias=False, **made)

    def forward(self, y: Tensor) -> Tensor:
        """y: [R] classes; the mean loss of those that aren't ignored."""
        logits = self.linear(self.hidden).float()
        return functional.cross_entropy(logits, y, ignore_index=IGNORED)


def targets(size: Size, device: str) -> Tensor:
    """Classes; one row in eight is ignored."""
    y = torch.randint(size.classes, (size.rows,), device=device)
    y[::8] = IGNORED
    return y


def step_of(name: str, model: Head, rate: float) -> Callable[[Tensor], Tensor]:
    """A contender's whole step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    forward = torch.compile(model) if name == "compile" else model

    def step(y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = forward(y)
        loss.backward()
        optimizer.step()
        return loss

    if name.startswith("trainfuse"):
        chosen = {"chunk_memory": CHUNK_MEMORY[name]} if name in CHUNK_MEMORY else {}
        return trainfuse.compile(step, options=chosen)
    return step


def peak_bytes(name: str, size: Size) -> int:
    """What a warm step reserves beyond model and target."""
    model, y = Head(size, "cuda"), targets(size, "cuda")
    before = reserved("cuda")
    step = step_of(name, model, 1e-3)
    for _ in range(4):
        step(y)
    model.zero_grad(set_to_none=True)
    reserved("cuda")
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        step(y)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_reserved() - before
    close = getattr(step, "close", None)
    if close is not None:
        close()
    return peak


def peak_of(name: str) -> int:
    """`peak_bytes` in a process of its own: what others have left in the pools counts for none."""
    command = [sys.executable, "-m", "benchmarks.head", "--peak", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout.split()[-1])


def times(names: Iterable[str], size: Size, device: str, rounds: int) -> dict[str, list[float]]:
    """Seconds a step, round by round, every contender in each."""
    steps = {}
    for name in names:
        torch.manual_seed(0)
        model, y = Head(size, device), targets(size, device)
        steps[name] = functools.partial(step_of(name, model, 1e-3), y)
        timed(steps[name], device, 4)
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, run in steps.items():
            found[name].append(timed(run, device, 5) / 5)
    return found


def exact_gradient(model: Head, y: Tensor) -> Tensor:
    """The weight's gradient in fp64, by pieces of rows."""
    weight = model.linear.weight.detach().double()
    total = torch.zeros_like(weight)
    count = (y != IGNORED).sum()
    for x, part in zip(model.hidden.detach().split(1024), y.split(1024), strict=True):
        logits = x.double() @ weight.t()
        gradient = logits.softmax(-1)
        known = part != IGNORED
        gradient[known, part[known]] -= 1
        gradient[~known] = 0
        total += gradient.t() @ x.double() / count
    return total


def gradient_error(name: str, size: Size, device: str) -> float:
    """Relative error of the weight's gradient; nothing moves."""
    torch.manual_seed(0)
    model, y = Head(size, device), targets(size, device)
    exact = exact_gradient(model, y)
    with trainfuse.settings.patch(keep_gradients=True):
        step_of(name, model, 0.0)(y)
    synchronize(device)
    gradient = model.linear.weight.grad
    assert gradient is not None
    error = (gradient.double() - exact).square().mean().sqrt()
    return float(error / exact.square().mean().sqrt())


def rows_of(size: Size, device: str, rounds: int) -> list[dict[str, Any]]:
    """One row a contender."""
    peaks = {name: peak_of(name) for name in CONTENDERS} if device == "cuda" else {}
    measured = times(CONTENDERS, size, device, rounds)
    rows = []
    for name in CONTENDERS:
        torch.compiler.reset()
        gc.collect()
        quartiles = statistics.quantiles(measured[name], n=4)
        rows.append(
            {
                "contender": name,
                "ms": round(statistics.median(measured[name]) * 1e3, 3),
                "ms_spread": round((quartiles[2] - quartiles[0]) * 1e3, 3),
                "peak_gib": round(peaks[name] / 2**30, 3) if peaks else None,
                "weight_gradient_error": gradient_error(name, size, device),
            }
        )
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write the results file; `--cpu` runs every code path, tiny."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--peak", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.peak:
        print(peak_bytes(options.peak, Size()))
        return
    device = "cpu" if options.cpu else "cuda"
    size = Size(32, 8, 64) if options.cpu else Size()
    rows = rows_of(size, device, options.rounds)
    reference = next(row for row in rows if row["contender"] == "compile")
    for row in rows:
        share = row["peak_gib"] / reference["peak_gib"] if row["peak_gib"] else float("nan")
        print(
            f"{row['contender']:28s} {row['ms']:9.3f} ms ({row['ms'] / reference['ms']:.3f})  "
            f"{row['peak_gib']} GiB ({share:.2f})  error {row['weight_gradient_error']:.2e}"
        )
    if options.cpu:
        return
    environment = describe(device)
    body = {"environment": environment, "size": [size.rows, size.width, size.classes], "rows": rows}
    write_results(options.out, "head", body)


if __name__ == "__main__":
    main()
