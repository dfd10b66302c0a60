"""Cold and warm compile times, a fresh process for each: `python -m benchmarks.compile_time`.

A process pays for everything: starting compile workers, importing compilers, empty caches (cold) or
the caches that the cold process left behind (warm). `compile_s` is the time from the first call
to the first steady step, less the steps themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.cases import full_cases, tiny_cases
from benchmarks.environment import describe, write_results
from benchmarks.report import RESULTS
from benchmarks.steps import HEADLINE, fresh_caches, prepare

CONTENDERS = ("compile", "compile-reduce-overhead", "trainfuse")


def measure(case: str, name: str, cpu: bool) -> dict[str, Any]:
    """In this process: one contender's compile time and peak memory."""
    from benchmarks.contenders import precision

    cases = tiny_cases() if cpu else full_cases()
    with precision(cases[case]):
        return prepare(name, cases[case], "cpu" if cpu else "cuda")[1]


def child(case: str, name: str, cpu: bool) -> dict[str, Any]:
    """In a fresh process, with the cache folders of this one's environment."""
    command = [sys.executable, "-m", "benchmarks.compile_time", "--child", case, name]
    done = subprocess.run(
        command + (["--cpu"] if cpu else []), check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def rows_of(case: str, name: str, cpu: bool) -> list[dict[str, Any]]:
    """A cold and a warm row."""
    rows = []
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root:
        fresh_caches(root, name)
        for phase in ("cold", "warm"):
            row = child(case, name, cpu)
            empty = dict.fromkeys(("ms", "ms_spread", "host_ms", "grad_error_ratio"))
            rows.append(
                {
                    "case": case,
                    "contender": name,
                    "phase": phase,
                    **empty,
                    **row,
                    "roof_fraction": None,
                    "note": "compile time in a process of its own; steps are timed by steps.py",
                }
            )
    os.environ.clear()
    os.environ.update(before)
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Measure and write the results file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=list(full_cases()), default=list(HEADLINE))
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS))
    parser.add_argument("--cpu", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--child", nargs=2, metavar=("CASE", "CONTENDER"))
    options = parser.parse_args(arguments)
    if options.child:
        print(json.dumps(measure(*options.child, options.cpu)))
        return
    environment = describe("cpu" if options.cpu else "cuda")
    rows = []
    for case in options.cases:
        for name in options.contenders:
            rows += rows_of(case, name, options.cpu)
            for row in rows[-2:]:
                print(f"{case:10s} {name:24s} {row['phase']:5s} {row['compile_s']} s", flush=True)
    write_results(options.out, "compile_time", {"environment": environment, "rows": rows})


if __name__ == "__main__":
    main()
