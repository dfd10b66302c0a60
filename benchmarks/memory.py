"""Peak memory and step time over the memory budget: `python -m benchmarks.memory`.

    python -m benchmarks.memory                     # gpt2, resnet50, vit on the GPU
    python -m benchmarks.memory --cases bert        # another case of benchmarks.steps
    python -m benchmarks.memory --cpu               # every code path, tiny; no memory figures

Eager, torch.compile, and trainfuse without a budget, with half and with a quarter of what its step
needs with everything saved. Measured as benchmarks.steps measures: `peak_gib` is what a contender
makes the allocator reserve, with its model, optimizer state and graph pools; times are of
interleaved rounds. All plans of a process share one pool, so a second one of ours would be charged
what it takes beyond the first: each has a process of its own, beside torch.compile.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import contenders as field
from benchmarks import steps
from benchmarks.cases import full_cases
from benchmarks.environment import describe, results_name
from benchmarks.report import memory_table

CASES = ("gpt2", "resnet50", "vit")
CONTENDERS = ("eager", "compile", *field.BUDGETS)


def races(contenders: Sequence[str]) -> list[list[str]]:
    """Contenders by process: one of ours in each, torch.compile beside it."""
    ours = [name for name in contenders if name in field.BUDGETS]
    others = [name for name in contenders if name not in field.BUDGETS]
    beside = [name for name in others if name == "compile"]
    return [others + ours[:1], *([*beside, name] for name in ours[1:])]


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
        for names in races(options.contenders):
            given = argparse.Namespace(**{**vars(options), "contenders": names})
            known = {row["contender"] for row in result["rows"] if row["case"] == case}
            rows = steps.in_own_process(case, given)
            result["rows"] += [row for row in rows if row["contender"] not in known]
        path.write_text(json.dumps(result, indent=1) + "\n")  # kept even if a later case fails
        print(memory_table(result["rows"]), flush=True)
    print(f"written: {path}")
    return path


if __name__ == "__main__":
    main()
