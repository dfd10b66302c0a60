"""Peak memory of a step over the memory budget: `python -m benchmarks.memory`.

For each case: eager, torch.compile, and trainfuse with several `memory_budget`s, each in turn on
its own model; what the allocator reserves at its peak, and the step's time beside it (one burst,
not interleaved: steps.py has the times to quote).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import trainfuse
from benchmarks import contenders as field
from benchmarks.cases import Case, full_cases
from benchmarks.environment import describe, results_name
from benchmarks.report import RESULTS
from benchmarks.steps import HEADLINE, reserved, timed

BUDGETS = (None, 0.5, 0.25)


def peak_row(case: Case, name: str, run: Any, before: int, note: str) -> dict[str, Any]:
    """Warm up, then the peak of three steps."""
    timed(run, "cuda", 5)
    reserved("cuda")
    torch.cuda.reset_peak_memory_stats()
    seconds = timed(run, "cuda", 10) / 10
    peak = (torch.cuda.max_memory_reserved() - before) / 2**30
    nothing = dict.fromkeys(("ms_spread", "host_ms"))
    later = dict.fromkeys(("compile_s", "grad_error_ratio", "roof_fraction"))
    return {
        "case": case.name,
        "contender": name,
        "phase": "step",
        "ms": round(seconds * 1e3, 4),
        **nothing,
        "peak_gib": round(peak, 3),
        **later,
        "note": f"{note}; one burst, not interleaved; the other figures are in steps",
    }


def rows_of(case: Case) -> list[dict[str, Any]]:
    """Rows of one case: two references, then trainfuse by budget."""
    rows = []
    for name in ("eager", "compile"):
        before = reserved("cuda")
        rows.append(peak_row(case, name, field.build(name, case, "cuda").run, before, case.note))
    for budget in BUDGETS:
        before = reserved("cuda")
        model, batch = case.build("cuda")
        optimizer = torch.optim.AdamW(model.parameters(), lr=case.learning_rate)
        plain = field.step_of(field.forward_of(case, model, "cuda"), optimizer)
        step = trainfuse.compile(plain, memory_budget=budget)
        note = f"{case.note}; memory_budget={budget}"
        rows.append(peak_row(case, "trainfuse", lambda s=step, b=batch: s(*b), before, note))
        step.close()
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write the results file; needs a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=list(full_cases()), default=list(HEADLINE))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    rows = []
    for name in options.cases:
        case = full_cases()[name]
        with field.precision(case):
            rows += rows_of(case)
    for row in rows:
        print(f"{row['case']:10s} {row['contender']:10s} {row['peak_gib']:8.3f} GiB  {row['note']}")
    environment = describe("cuda")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / results_name("memory", environment)
    path.write_text(json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
