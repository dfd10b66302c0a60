"""`python -m trainfuse demo`: train a small GPT, then show what was fused and what it is worth."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

import trainfuse
from trainfuse import testing
from trainfuse.debug.timing import Timing, interleave
from trainfuse.integrations.gpt import GPT, GPTConfig, batches, text

Step = Callable[[Tensor, Tensor], Tensor]

ON_CPU = GPTConfig()
ON_GPU = GPTConfig(layers=6, heads=6, width=384, context=256, batch=64, dropout=0.1)
STEPS_ON_CPU, STEPS_ON_GPU = 150, 1000
LEARNING_RATE = 1e-3


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The demo's JSON line.

    grad_error_ratio: our gradients' error against fp64 over eager's own, the largest over
    parameters. gate: "pass" or the failing kernel. Times are of one whole step, interleaved.
    """

    device: str
    backend: str
    capture: str
    steps: int
    loss_first: float
    loss_last: float
    grad_error_ratio: float
    groups_forward: int
    groups_backward: int
    groups_update: int
    aten_nodes: int
    eager_ms: float
    torch_compile_ms: float
    trainfuse_ms: float
    compile_s: float
    gate: str

    def to_json(self) -> str:
        """One line, six digits; a figure that could not be had is null."""
        return json.dumps({name: _figure(value) for name, value in asdict(self).items()})


def _figure(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


def make_training(
    config: GPTConfig, device: torch.device, *, fused_optimizer: bool = False
) -> tuple[GPT, Step]:
    """A model and its ordinary train step: what a user writes, nothing of trainfuse in it.

    fused_optimizer: torch's fused AdamW, the fastest eager has; trainfuse brings its own.
    """
    torch.manual_seed(0)
    model = GPT(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=fused_optimizer)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, train_step


def run(steps: int | None, console: Console) -> DemoResult:
    """Train, explain, check the gradients and time; everything human goes to the console."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = ON_GPU if device.type == "cuda" else ON_CPU
    steps = steps or (STEPS_ON_GPU if device.type == "cuda" else STEPS_ON_CPU)
    model, train_step = make_training(config, device)
    size = sum(p.numel() for p in model.parameters())
    console.print(
        f"[bold]A character-level GPT of {size:,} parameters[/] on {_device_name(device)}, with"
        " text from Python's own manual; the step is `trainfuse.compile(train_step)`."
    )
    compiled = trainfuse.compile(train_step)
    stream = batches(text(), config, device)
    losses, first_call_s = _train(compiled, stream, steps, console)
    x, y = next(stream)
    explanation = compiled.explain(x, y)
    explanation.print(console, groups=12)
    console.print()
    ratio = _gradient_ratio(config, device, console)
    times, torch_compile_s = _race(compiled, config, device, stream, console)
    stats = compiled.stats()
    _print_times(times, first_call_s, torch_compile_s, console)
    return DemoResult(
        device=_device_name(device),
        backend=explanation.backend,
        capture=explanation.capture,
        steps=steps,
        loss_first=losses[0],
        loss_last=losses[-1],
        grad_error_ratio=ratio,
        groups_forward=explanation.count("forward"),
        groups_backward=explanation.count("backward"),
        groups_update=explanation.count("update"),
        aten_nodes=len(explanation.aten_nodes),
        eager_ms=times["eager"].ms,
        torch_compile_ms=times["torch.compile"].ms,
        trainfuse_ms=times["trainfuse"].ms,
        compile_s=first_call_s,
        gate=stats["gate"],
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} threads"


def _train(
    step: Step, stream: Iterator[tuple[Tensor, Tensor]], steps: int, console: Console
) -> tuple[list[float], float]:
    """Mean loss of up to 10 steps at either end, and the first call's seconds."""
    kept: list[Tensor] = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("compiling", total=steps, loss="-")
        start = time.perf_counter()
        first_call_s = math.nan
        for index in range(steps):
            kept.append(step(*next(stream)))
            if index == 0:
                kept[0].item()
                first_call_s = time.perf_counter() - start
            # .item() waits for the GPU: look only now and then
            show = index % 10 == 0 or index == steps - 1
            shown = {"loss": f"{kept[-1].item():.3f}"} if show else {}
            progress.update(task, advance=1, description="training", **shown)
    losses = torch.stack(kept).tolist()
    window = max(1, min(10, steps // 4))
    ends = [sum(part) / window for part in (losses[:window], losses[-window:])]
    console.print(f"loss [bold]{ends[0]:.3f} -> {ends[1]:.3f}[/], mean of {window} steps each")
    return ends, first_call_s


def _gradient_ratio(config: GPTConfig, device: torch.device, console: Console) -> float:
    """Error of our gradients against fp64 over eager's own, largest over parameters, 3 steps."""

    def make() -> testing.Training:
        model, step = make_training(config, device)
        stream = batches(text(), config, device, seed=1)
        return testing.Training(step, model, [next(stream) for _ in range(3)])

    with console.status("comparing every gradient with fp64 ..."):
        report = testing.gradient_report(make, lambda made: trainfuse.compile(made.step))
    verdict = "[green]as right as eager's[/]" if report.ok else "[red]further off than eager's[/]"
    console.print(
        f"gradients: {verdict}. Of {len(report.errors)} comparisons over 3 steps the worst is"
        f" {report.worst.name}: its error against fp64 is [bold]{report.ratio:.2f}[/] times eager's"
        " own (2 is allowed; the rounding of the result itself counts for both)."
    )
    return report.ratio


def _race(
    compiled: Step,
    config: GPTConfig,
    device: torch.device,
    stream: Iterator[tuple[Tensor, Tensor]],
    console: Console,
) -> tuple[dict[str, Timing], float]:
    """Interleaved step times, and the seconds of torch.compile's first call."""
    _, eager_step = make_training(config, device, fused_optimizer=True)
    model, torch_step = make_training(config, device, fused_optimizer=True)
    model.compile()
    x, y = next(stream)
    with console.status("compiling the same step with torch.compile ..."):
        start = time.perf_counter()
        torch_step(x, y).item()
        torch_compile_s = time.perf_counter() - start
    contenders: dict[str, Step] = {
        "eager": eager_step,
        "torch.compile": torch_step,
        "trainfuse": compiled,
    }
    with console.status("timing, interleaved ..."):
        runs = {name: _bind(step, x, y) for name, step in contenders.items()}
        return interleave(runs, device, steps=10 if device.type == "cuda" else 1), torch_compile_s


def _bind(step: Step, x: Tensor, y: Tensor) -> Callable[[], Any]:
    return lambda: step(x, y)


def _print_times(
    times: dict[str, Timing], first_call_s: float, torch_compile_s: float, console: Console
) -> None:
    console.print()
    table = Table(
        title="one whole step", title_justify="left", title_style="bold", box=None, pad_edge=False
    )
    table.add_column("")
    for column in ("median ms", "spread ms", "against eager", "first call s"):
        table.add_column(column, justify="right")
    first = {"torch.compile": torch_compile_s, "trainfuse": first_call_s}
    for name, timing in times.items():
        table.add_row(
            name,
            f"{timing.ms:.2f}",
            f"{timing.spread_ms:.2f}",
            f"{times['eager'].ms / timing.ms:.2f}x",
            f"{first[name]:.1f}" if name in first else "-",
        )
    console.print(table)
    console.print(
        "[dim]eager and torch.compile use torch's fused AdamW; torch.compile compiles the model,"
        " as is usual. Spread is between quartiles.[/]"
    )
