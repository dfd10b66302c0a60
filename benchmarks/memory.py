"""Peak memory and step time over the memory budget: `python -m benchmarks.memory`.

    python -m benchmarks.memory                     # gpt2, resnet50, vit on the GPU
    python -m benchmarks.memory --cases bert        # another case of benchmarks.steps
    python -m benchmarks.memory --cpu               # every code path, tiny; no memory figures

Eager, torch.compile, and trainfuse without a budget, with half and with a quarter of what its step
needs with everything saved. Measured as benchmarks.steps measures, each case in a process of its
own: `peak_gib` is what a contender makes the allocator reserve, with its model, optimizer state and
graph pools; times are of interleaved rounds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks import contenders as field
from benchmarks import steps
from benchmarks.cases import full_cases
from benchmarks.environment import describe, results_name

CASES = ("gpt2", "resnet50", "vit")
CONTENDERS = ("eager", "compile", *field.BUDGETS)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown table: a line a case and contender, and both figures over torch.compile's."""
    lines = [
        "case | contender | peak GiB | of compile's | ms a step | of compile's",
        "---|---|---:|---:|---:|---:",
    ]
    base = {row["case"]: row for row in rows if row["contender"] == "compile"}
    for row in rows:
        cells = [row["case"], row["contender"]]
        for key in ("peak_gib", "ms"):
            value, other = row[key], base.get(row["case"], {}).get(key)
            cells.append("n/a" if value is None else f"{value:.4g}")
            cells.append(f"{value / other:.2f}" if value and other else "n/a")
        lines.append(" | ".join(cells))
    return "\n".join(lines)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=list(full_cases()), default=list(CASES))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--cpu", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--burst", type=float, default=0.25, help="seconds of one burst")
    parser.add_argument("--no-check", action="store_true", help="no gradients against fp64")
    parser.add_argument("--out", type=Path, default=steps.RESULTS, help="folder of the results")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> Path:
    """Measure, print the table, and write the results file."""
    options = parse(arguments)
    result: dict[str, Any] = {"environment": describe("cpu" if options.cpu else "cuda"), "rows": []}
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / results_name("memory", result["environment"])
    for case in options.cases:
        result["rows"] += steps.in_own_process(case, options)
        path.write_text(json.dumps(result, indent=1) + "\n")  # kept even if a later case fails
        print(table(result["rows"]), flush=True)
    print(f"written: {path}")
    return path


if __name__ == "__main__":
    main()
