"""What comparing a whole step costs: `python -m benchmarks.gate`.

    python -m benchmarks.gate                   # eight transformer blocks, and gpt2, on the GPU
    python -m benchmarks.gate --parts           # and where a comparison's time goes on the host
    python -m benchmarks.gate --cpu             # every code path, tiny; its times mean nothing

Each case runs in a process of its own. `eager_ms`, `step_ms` and `compared_ms` are medians of one
call, synchronised at both ends: of eager, of the compiled step, and of the compiled step with every
call compared (`verify=1`); `comparison` is the last less the second, in eager steps. `first_s` and
`first_compared_s` are first calls, traced, planned and loaded with compiled kernels on disk;
`first_comparison` is their difference, kernels' own checks included, in eager steps. The peaks are
what torch has allocated at once, with model and optimizer: in eager, and in a compared call.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import gc
import json
import pstats
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

import trainfuse
from autodiff.masks import Masks
from benchmarks import contenders as field
from benchmarks.cases import Case, classes, full_cases, tiny_cases
from benchmarks.environment import describe, write_results
from benchmarks.report import RESULTS, gate_table
from benchmarks.steps import fresh_caches, timed
from trainfuse.capture.shadow import Shadow
from trainfuse.runtime.captured import CapturedStep
from trainfuse.runtime.checks import Checks
from trainfuse.runtime.plan import Plan
from trainfuse.runtime.snapshot import Snapshot
from trainfuse.runtime.step_gate import StepCheck, StepGate

Run = Callable[[], Any]
CASES = ("blocks", "gpt2")
PARTS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (Plan, ("first", "needed", "_prepare")),
    (Shadow, ("look",)),
    (Masks, ("keep",)),
    (CapturedStep, ("run", "schedule")),
    (StepGate, ("references", "settle")),
    (Snapshot, ("__init__",)),
    (StepCheck, ("before", "after", "finish")),
    (Checks, ("_demand_finite",)),
)
"""What a comparison consists of; later ones run within earlier ones."""


class Block(nn.Module):
    """Attention and a network around residuals, with dropout."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T, width]."""
        parts = self.project(self.norms[0](x)).unflatten(-1, (3, -1, self.head)).unbind(-3)
        q, k, v = (part.transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(-2)))
        return x + self.drop(self.down(functional.gelu(self.up(self.norms[1](x)))))


def blocks(layers: int, width: int, head: int, batch: int, time: int, number: int) -> Case:
    """A small model of many kernels, whose comparison is the host's work."""

    def build() -> nn.Module:
        stack = (Block(width, head) for _ in range(layers))
        return nn.Sequential(*stack, nn.Linear(width, number))

    return Case(
        "blocks",
        build,
        lambda: (torch.randn(batch, time, width), torch.randint(number, (batch, time))),
        lambda logits, target: classes(logits.float(), target),
        "bf16-autocast",
        f"{layers} transformer blocks d{width}, {batch}x{time}, dropout 0.1, bf16 autocast",
        learning_rate=1e-6,  # one batch is soon learnt, and gradients of nothing but roundings left
    )


def cases(device: str) -> dict[str, Case]:
    """What is measured, by name."""
    if device == "cpu":
        tiny = blocks(2, 16, 8, 2, 8, 5)
        return {"blocks": replace(tiny, note=f"tiny, CPU: {tiny.note}"), **tiny_cases()}
    return {"blocks": blocks(8, 1024, 64, 16, 256, 1000), **full_cases()}


def milliseconds(run: Run, device: str, rounds: int) -> float:
    """The median of single calls."""
    return 1e3 * statistics.median(timed(run, device) for _ in range(rounds))


def peak_gib(run: Run, device: str) -> float | None:
    """What is allocated at once in a call."""
    if device != "cuda":
        return None
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    timed(run, device)
    return round(torch.cuda.max_memory_allocated() / 2**30, 3)


def row_of(case: Case, device: str, rounds: int, parts: bool) -> dict[str, Any]:
    """Every figure of one case; said as they are had."""
    model, batch = case.build(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=case.learning_rate)
    step = field.step_of(field.forward_of(case, model, device), optimizer)
    row: dict[str, Any] = {"case": case.name}

    def note(**figures: float | None) -> None:
        row.update({name: f if f is None else round(f, 3) for name, f in figures.items()})
        print(f"{case.name}: {figures}", file=sys.stderr, flush=True)

    compiled: list[Any] = []

    def made(**options: Any) -> Run:
        torch.compiler.reset()
        # kernels in the forms that their models choose: which ones is not what is asked here
        compiled.append(trainfuse.compile(step, options={"autotune": "off"}, **options))
        return lambda made=compiled[-1]: made(*batch)

    def eager() -> Any:
        return step(*batch)

    timed(eager, device, 3)
    note(eager_ms=milliseconds(eager, device, rounds), eager_peak_gib=peak_gib(eager, device))
    plain = made(verify="off")
    timed(plain, device, 4)
    note(step_ms=milliseconds(plain, device, rounds))
    compared = made(verify=1)
    note(first_compared_s=timed(compared, device))
    timed(compared, device, 2)
    note(compared_ms=milliseconds(compared, device, rounds), peak_gib=peak_gib(compared, device))
    note(comparison=(row["compared_ms"] - row["step_ms"]) / row["eager_ms"])
    if parts:
        print_parts(compared, device)
    verdict = compiled[-1].stats()["gate"]
    assert verdict == "pass", f"no cost of a comparison, but of what came after one: {verdict}"
    note(first_s=timed(made(verify="off"), device))
    more_s = row["first_compared_s"] - row["first_s"]
    note(first_comparison=1e3 * more_s / row["eager_ms"])
    return row | {"note": case.note}


@contextlib.contextmanager
def parts_of_a_comparison() -> Iterator[dict[str, list[float]]]:
    """Milliseconds of the host in each part of what is compared within the block."""
    times: dict[str, list[float]] = {}

    def watched(owner: type, name: str) -> Any:
        function = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            began = perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent = 1e3 * (perf_counter() - began)
                times.setdefault(f"{owner.__name__}.{name}", []).append(spent)

        return mock.patch.object(owner, name, run)

    with contextlib.ExitStack() as stack:
        for owner, names in PARTS:
            for name in names:
                stack.enter_context(watched(owner, name))
        yield times


def print_parts(compared: Run, device: str) -> None:
    """Where the host's time goes: by part, and by function."""
    rounds = 3
    with parts_of_a_comparison() as times:
        timed(compared, device, rounds)
    for name, spent in times.items():
        each = sum(spent) / rounds
        print(f"  {name:28} {each:7.2f} ms in {len(spent) / rounds:.0f} calls", file=sys.stderr)
    profile = cProfile.Profile()
    profile.runcall(timed, compared, device)
    pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(25)


def in_own_process(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one case in a fresh interpreter."""
    command = [sys.executable, "-m", "benchmarks.gate", "--row", name]
    command += ["--rounds", str(options.rounds)]
    command += [f"--{flag}" for flag in ("cpu", "parts") if getattr(options, flag)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measured(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one case here, with compile caches of its own."""
    device = "cpu" if options.cpu else "cuda"
    case = cases(device)[name]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root, field.precision(case):
        fresh_caches(root, "gate")
        return row_of(case, device, options.rounds, options.parts)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the table, and write the results file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=list(cases("cuda")), default=list(CASES))
    parser.add_argument("--cpu", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--parts", action="store_true", help="say where the host's time goes")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results file")
    parser.add_argument("--row", choices=list(cases("cuda")), help="print one case's row alone")
    options = parser.parse_args(arguments)
    if options.row:
        print(json.dumps(measured(options.row, options)), flush=True)
        return
    rows = [in_own_process(name, options) for name in options.cases]
    print(gate_table(rows))
    if options.cpu:
        return
    environment = describe("cuda")
    write_results(options.out, "gate", {"environment": environment, "rows": rows})


if __name__ == "__main__":
    main()
