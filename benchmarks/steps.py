"""Whole training steps with their optimizer, contenders interleaved: the published figures.

    python -m benchmarks.steps                    # mlp, block, gpt-small on the GPU
    python -m benchmarks.steps --cases gpt2 llama
    python -m benchmarks.steps --cpu              # every code path, tiny, in seconds

How it measures. Each case runs in a process of its own. There each contender is built and warmed up
on its own model with its own empty compile caches (`compile_s`: the time to its first steady step,
less the steps themselves; torch's pool of compile workers is started before), then its gradients
are compared with fp64. Timing comes last: rounds in which every contender in turn runs a burst of
steps between two synchronisations; `ms` is the median over rounds, `ms_spread` the interquartile
range. `host_ms` is the time that one call takes to return, the device idle. `peak_gib` is what the
contender makes the allocator reserve, its model, optimizer state and graph pools included.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import contenders as field
from benchmarks.cases import Case, full_cases, tiny_cases
from benchmarks.environment import describe, results_name
from trainfuse.settings import settings

HEADLINE = ("mlp", "block", "gpt-small")
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRAINFUSE_CACHE_DIR")
WARM_UP = 5
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure: rounds, and seconds of a burst; whether gradients are checked."""

    rounds: int
    burst_s: float
    check: bool = True


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def fresh_caches(root: str, name: str) -> None:
    """Point every compiler's disk cache at an empty folder."""
    for variable in CACHES:
        folder = Path(root, name, variable.lower())
        folder.mkdir(parents=True, mode=0o700)
        os.environ[variable] = str(folder)
    settings.reload_env()


def start_workers(root: str, device: str) -> None:
    """Start torch's compile workers, so that no contender pays for it; a CPU has none."""
    if device != "cuda":
        return
    fresh_caches(root, "workers")
    fn = torch.compile(lambda x: torch.softmax(x * 2, -1).sum())
    fn(torch.randn(64, 64, device=device, requires_grad=True)).backward()


def reserved(device: str) -> int:
    """Bytes that the allocator holds, with nothing idle."""
    if device != "cuda":
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def timed(run: Any, device: str, steps: int = 1) -> float:
    """Seconds of a burst of steps, synchronised at both ends."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(steps):
        run()
    synchronize(device)
    return time.perf_counter() - start


def prepare(name: str, case: Case, device: str) -> tuple[field.Contender, dict[str, Any]]:
    """Build and warm a contender; its compile time and peak memory."""
    before = reserved(device)
    contender = field.build(name, case, device)
    cold = timed(contender.run, device, WARM_UP)
    steady = min(timed(contender.run, device) for _ in range(3))
    row: dict[str, Any] = {
        "compile_s": None if name == "eager" else round(max(0.0, cold - WARM_UP * steady), 2),
        "peak_gib": None,
    }
    if device == "cuda":
        reserved(device)
        torch.cuda.reset_peak_memory_stats()
        timed(contender.run, device, 3)
        row["peak_gib"] = round((torch.cuda.max_memory_reserved() - before) / 2**30, 3)
    return contender, row


def host_seconds(run: Any, device: str) -> float:
    """Seconds until one call returns, on an idle device."""
    synchronize(device)
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def race(
    entrants: dict[str, field.Contender], device: str, effort: Effort
) -> dict[str, dict[str, float]]:
    """Time the contenders in interleaved rounds."""
    bursts, times, host = {}, {n: [] for n in entrants}, {n: [] for n in entrants}
    for name, contender in entrants.items():
        one = timed(contender.run, device, 3) / 3
        bursts[name] = max(1, min(200, round(effort.burst_s / one)))
    names = list(entrants)
    for i in range(effort.rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            run = entrants[name].run
            timed(run, device)  # refill what the last contender pushed out
            times[name].append(timed(run, device, bursts[name]) / bursts[name] * 1e3)
            host[name].append(host_seconds(run, device) * 1e3)
    figures = {}
    for name in entrants:
        low, middle, high = statistics.quantiles(times[name], n=4)
        figures[name] = {
            "ms": round(middle, 4),
            "ms_spread": round(high - low, 4),
            "host_ms": round(statistics.median(host[name]), 4),
        }
    return figures


def check(name: str, case: Case, device: str) -> tuple[float | None, str]:
    """The largest gradient error ratio of a contender, or None and why."""
    if name == "eager":
        return 1.0, ""
    report, why = field.check_gradients(name, case, device)
    if report is None:
        return None, why
    worst = report.worst
    note = (
        "" if not report.failures else f"gradients beyond {report.k} x eager's error: {worst.name}"
    )
    return round(report.ratio, 3), note


def run_case(
    case: Case, names: tuple[str, ...], device: str, effort: Effort
) -> list[dict[str, Any]]:
    """All rows of one case."""
    rows: dict[str, dict[str, Any]] = {}
    entrants: dict[str, field.Contender] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root, field.precision(case):
        start_workers(root, device)
        for name in names:
            fresh_caches(root, name)
            print(f"{case.name}: {name}: compile", file=sys.stderr, flush=True)
            entrants[name], row = prepare(name, case, device)
            rows[name] = {"case": case.name, "contender": name, "phase": "step", **row}
        for name in names:
            print(f"{case.name}: {name}: gradients", file=sys.stderr, flush=True)
            ratio, note = (
                check(name, case, device)
                if effort.check
                else (None, "no gradient check: not asked")
            )
            rows[name] |= {"grad_error_ratio": ratio, "notes": [note]}
            synchronize(device)
            reserved(device)
        print(f"{case.name}: timing", file=sys.stderr, flush=True)
        for name, figures in race(entrants, device, effort).items():
            rows[name] |= figures
    return [_row(row, case, device) for row in rows.values()]


def _row(row: dict[str, Any], case: Case, device: str) -> dict[str, Any]:
    """The row as published: every field, and a note for each that is null."""
    notes = [case.note, *filter(None, row.pop("notes"))]
    if device != "cuda":
        notes.append("no peak memory on a CPU")
    if row["compile_s"] is None:
        notes.append("nothing to compile")
    notes.append("a whole step has no single roof")
    order = ("case", "contender", "phase", "ms", "ms_spread", "host_ms", "peak_gib", "compile_s")
    full = {key: row[key] for key in order}
    full |= {"grad_error_ratio": row["grad_error_ratio"], "roof_fraction": None}
    return {**full, "note": "; ".join(notes)}


def in_own_process(case: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run one case in a fresh interpreter and read its rows back."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "rows.json")
        command = [sys.executable, "-m", "benchmarks.steps", "--cases", case, "--rows", target]
        command += ["--contenders", *options.contenders, "--rounds", str(options.rounds)]
        command += ["--burst", str(options.burst)] + (["--cpu"] if options.cpu else [])
        command += ["--no-check"] if options.no_check else []
        subprocess.run([str(part) for part in command], check=True)
        return json.loads(target.read_text())


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=list(full_cases()), default=list(HEADLINE))
    choices = dict.fromkeys((*field.ALL, *field.BUDGETS))
    parser.add_argument("--contenders", nargs="+", choices=choices, default=list(field.DEFAULT))
    parser.add_argument("--cpu", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--burst", type=float, default=0.15, help="seconds of one burst")
    parser.add_argument("--no-check", action="store_true", help="no gradients against fp64")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results file")
    parser.add_argument("--rows", type=Path, help="run one case here and write its rows only")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> Path:
    """Measure, print the table, and write the results file."""
    from benchmarks.report import table

    options = parse(arguments)
    device = "cpu" if options.cpu else "cuda"
    if options.rows:
        cases = tiny_cases() if options.cpu else full_cases()
        effort = Effort(options.rounds, options.burst, not options.no_check)
        names = tuple(options.contenders)
        rows = [row for c in options.cases for row in run_case(cases[c], names, device, effort)]
        options.rows.write_text(json.dumps(rows))
        return options.rows
    result = {"environment": describe(device), "rows": []}
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / results_name("steps", result["environment"])
    for case in options.cases:
        result["rows"] += in_own_process(case, options)
        path.write_text(json.dumps(result, indent=1) + "\n")  # kept even if a later case fails
        print(table(result["rows"]), flush=True)
    print(f"written: {path}")
    return path


if __name__ == "__main__":
    main()
