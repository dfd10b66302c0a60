"""Memory-bound kernels against the memory's roof, contenders interleaved: the published figures.

    python -m benchmarks.kernels                              # all cases, about nine minutes
    python -m benchmarks.kernels --only 'softmax*' rope --sizes 16384x4096
    python -m benchmarks.kernels --resume                     # what an earlier run did not reach
    python -m benchmarks.kernels --only 'rope*' --again       # these anew, the other rows stay
    python -m benchmarks.kernels --cpu                        # every code path, tiny

First `--jobs` processes compile everything into one set of disk caches, each its share of the
cases; which of several configurations is fastest is forgotten again, as it was measured on a
shared GPU. Then one process times, caches warm, case after case (benchmarks/kernel_timing.py says
how), and the results file is written after each. That process is replaced if it dies or hangs: a
kernel that breaks the GPU's context costs its own case only. `compile_s` is what the first calls
took in the compiling process, one thread, caches empty.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks import kernel_contenders as field
from benchmarks import kernel_timing as timing
from benchmarks.environment import describe, results_name
from benchmarks.kernel_cases import NAMED, Case, full_cases, tiny_cases
from benchmarks.kernel_report import dumps, print_table
from benchmarks.steps import CACHES, RESULTS
from trainfuse.capture.compat import reusable_backwards

WARM_SHARE = 0.4
"""Of the budget, for compiling."""
HANG_S = 120.0
"""Seconds without a finished case after which a timing process is taken to hang."""
Row = dict[str, Any]


def table_of(options: argparse.Namespace) -> dict[str, Case]:
    """Every case there is, by name."""
    return tiny_cases() if options.cpu else full_cases()


def selected(options: argparse.Namespace) -> list[Case]:
    """The cases that are asked for, in the order in which they run."""

    def wanted(case: Case) -> bool:
        op, _, size = case.name.partition("-")
        names = not options.only or any(
            fnmatch.fnmatch(op, p) or fnmatch.fnmatch(case.name, p) for p in options.only
        )
        sizes = not options.sizes or any(fnmatch.fnmatch(size, p) for p in options.sizes)
        return names and sizes

    return [case for case in table_of(options).values() if wanted(case)]


def contenders_of(case: Case, options: argparse.Namespace) -> list[str]:
    """The contenders that run a case."""
    names = [n for n in options.contenders if n != "liger" or field.liger_function(case)]
    tuned = options.max_autotune == "all" or (
        options.max_autotune == "named" and case.name in NAMED
    )
    if tuned and "compile" in names and "compile-max-autotune" not in names:
        names.insert(names.index("compile") + 1, "compile-max-autotune")
    return names


# -- in the timing and compiling processes --------------------------------------------------------


@contextlib.contextmanager
def settled(device: str) -> Iterator[None]:
    """One stream for everything, as capture wants it, and backwards that can run again."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(reusable_backwards())
        if device == "cuda":
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream()))
        yield


def compile_only(options: argparse.Namespace) -> None:
    """Compile a share of the cases; one JSON line each with the seconds of its contenders."""
    device, (part, parts) = _device(options), options.warm
    # one process of many: of trainfuse's own pool of compilers, two processes will do
    with settled(device), mock.patch.object(os, "cpu_count", return_value=2):
        for name in options.contenders:  # what a process pays once is no case's
            field.attempt(lambda n=name: _compiled(n, next(iter(tiny_cases().values())), device))
        for case in selected(options)[part::parts]:
            line: dict[str, Any] = {"case": case.name, "seconds": {}}
            for name in contenders_of(case, options):
                if name not in ("eager", "liger"):
                    made = field.attempt(lambda n=name, c=case: _compiled(n, c, device))
                    if not isinstance(made, str):
                        line["seconds"][name] = made.compile_s
                        if name == "trainfuse":
                            line["kernels"] = made.kernels
                        made.close()
            torch.compiler.reset()
            if device == "cuda":
                torch.cuda.empty_cache()  # the others need the memory
            print(json.dumps(line), flush=True)


def _compiled(name: str, case: Case, device: str) -> field.Entrant:
    entrant = field.build(name, case, case.make(device), verify="off")
    entrant.first_calls()
    return entrant


def time_cases(options: argparse.Namespace, names: Sequence[str]) -> Iterator[list[Row]]:
    """Rows of each case, as they are measured."""
    device, roof = _device(options), options.roof
    cases = table_of(options)
    with settled(device):
        for case in map(cases.__getitem__, names):
            contenders = contenders_of(case, options)
            yield timing.run_case(case, contenders, device, roof=roof, rounds=options.rounds)


def _device(options: argparse.Namespace) -> str:
    return "cpu" if options.cpu else "cuda"


# -- in the process that leads -------------------------------------------------------------------


class Run:
    """One results file, and the processes that fill it."""

    def __init__(self, options: argparse.Namespace, caches: Path) -> None:
        self.options, self.caches = options, caches
        self.deadline = time.monotonic() + options.budget
        environment = describe(_device(options)) | {"liger": field.liger_version()}
        self.path = options.out / results_name("kernels", environment)
        self.result: dict[str, Any] = {"environment": environment, "copy": [], "rows": []}
        if (options.resume or options.again) and self.path.exists():
            self.result |= resumed(self.path, environment, any_commit=options.again)
        if options.again:
            anew = {case.name for case in selected(options)}
            rows = [row for row in self.result["rows"] if row["case"] not in anew]
            self.result |= {"environment": environment, "rows": rows}
        self.compile_s: dict[tuple[str, str], float | None] = {}

    @property
    def left_s(self) -> float:
        """Seconds until the budget is spent."""
        return self.deadline - time.monotonic()

    def remaining(self) -> list[str]:
        """Cases without rows."""
        done = {row["case"] for row in self.result["rows"]}
        return [c.name for c in selected(self.options) if c.name not in done]

    def add(self, rows: Sequence[Row]) -> None:
        """Take a case's rows in and write the file."""
        for row in rows:
            row["commit"] = self.result["environment"]["commit"]
            row["compile_s"] = self.compile_s.get((row["case"], row["contender"]), row["compile_s"])
        self.result["rows"] += rows
        self.result["floors"] = {c.name: dict(c.floors) for c in selected(self.options)} | (
            self.result.get("floors", {})
        )
        self.write()

    def write(self) -> None:
        """Write what there is so far."""
        self.options.out.mkdir(parents=True, exist_ok=True)
        self.path.write_text(dumps(self.result))

    def child(self, *arguments: str, threads: str = "", **more: Any) -> subprocess.Popen[str]:
        """This script again, in a process of its own, with the shared caches.

        threads: processes of Inductor's pool of compilers, if not its default.
        """
        environment = dict(os.environ)
        if threads:  # read when torch is imported
            environment["TORCHINDUCTOR_COMPILE_THREADS"] = threads
        for variable in CACHES:
            folder = self.caches / variable.lower()
            folder.mkdir(parents=True, mode=0o700, exist_ok=True)
            environment[variable] = str(folder)
        command = [sys.executable, "-m", "benchmarks.kernels", *self.options.arguments, *arguments]
        return subprocess.Popen(command, env=environment, text=True, **more)

    def warm(self) -> None:
        """Compile everything, side by side, within its share of the budget."""
        jobs = min(self.options.jobs, len(self.remaining()))
        until = time.monotonic() + WARM_SHARE * self.left_s
        with tempfile.TemporaryDirectory() as folder:
            outputs = [Path(folder, str(i)) for i in range(jobs)]
            children = []
            for i, output in enumerate(outputs):
                with output.open("w") as stdout:
                    children.append(
                        self.child("--warm", str(i), str(jobs), threads="1", stdout=stdout)
                    )
            while any(c.poll() is None for c in children) and time.monotonic() < until:
                time.sleep(0.2)
            for child in children:
                if child.poll() is None:
                    child.kill()
                child.wait()
            found = [line for output in outputs for line in whole_lines(output.read_text())[0]]
        for line in found:
            for name, seconds in line["seconds"].items():
                self.compile_s[line["case"], name] = seconds
            if "kernels" in line:
                self.result.setdefault("kernels", {})[line["case"]] = line["kernels"]
        print(f"compiled {len(self.compile_s)} functions", file=sys.stderr, flush=True)
        forget_choices(self.caches)

    def measure(self) -> None:
        """Time what remains, until it is done or the budget spent."""
        while (names := self.remaining()) and self.left_s > 0:
            with tempfile.TemporaryDirectory() as folder:
                output, todo = Path(folder, "rows"), Path(folder, "cases")
                output.touch()
                todo.write_text(json.dumps(names))
                roof = ["--roof", str(self.options.roof)] if self.options.roof else []
                child = self.child("--time", str(todo), "--rows", str(output), *roof)
                why = self._follow(child, output)
            if why is not None and (names := self.remaining()):
                case = table_of(self.options)[names[0]]
                self.add(failed_rows(case, contenders_of(case, self.options), why))

    def _follow(self, child: subprocess.Popen[str], output: Path) -> str | None:
        """Take rows in as they come; why the process ended before its last case, or None."""
        heard, text = time.monotonic(), ""
        with output.open() as lines:
            while True:
                ended = child.poll() is not None
                found, text = whole_lines(text + lines.read())
                for line in found:
                    self._take(line)
                    heard = time.monotonic()
                if ended:
                    return None if child.returncode == 0 else f"exit status {child.returncode}"
                late = self.left_s <= 0
                if late or time.monotonic() - heard > HANG_S:
                    child.kill()
                    child.wait()
                    return None if late else f"no result in {HANG_S:g} s"
                time.sleep(0.1)

    def _take(self, found: Any) -> None:
        if isinstance(found, dict):
            self.result["copy"] = found["copy"]
            self.options.roof = found["copy"][-1][1]
        else:
            self.add(found)
            done = found[0]["case"] if found else "?"
            print(f"{done}: {self.left_s:.0f} s left", file=sys.stderr, flush=True)


def whole_lines(text: str) -> tuple[list[Any], str]:
    """What the complete JSON lines of a text hold, and what is left after the last of them."""
    *lines, rest = text.split("\n")
    return [json.loads(line) for line in lines if line.startswith(("{", "["))], rest


def resumed(path: Path, environment: dict[str, Any], *, any_commit: bool) -> dict[str, Any]:
    """Results to go on with; exits if they are of another machine, or commit where that counts."""
    result = json.loads(path.read_text())
    keys = ("gpu", "torch", "triton", "liger") + (() if any_commit else ("commit",))
    for key in keys:
        if (before := result["environment"].get(key)) != environment[key]:
            sys.exit(f"{path} has results of {key} {before}, this is {environment[key]}: "
                     "move it away, or run without --resume")  # fmt: skip
    return result


def forget_choices(caches: Path) -> None:
    """Delete which configurations were fastest, keep what was compiled.

    They were compared while other processes used the GPU.
    """
    for pattern in ("*.best_config", "tuned-*.json"):  # Inductor's, trainfuse's
        for choice in caches.rglob(pattern):
            choice.unlink()


def failed_rows(case: Case, names: Sequence[str], why: str) -> list[Row]:
    """Rows of a case whose process ended."""
    note = f"the process that timed it ended: {why}"
    return [timing.empty_row(case, n, phase, [note]) for phase in case.op.phases for n in names]


def time_into(options: argparse.Namespace) -> None:
    """The timing process: the roof, unless it is known, then every case; one JSON line each."""
    with options.rows.open("a", buffering=1) as rows:
        if options.roof is None and not options.cpu:
            with settled("cuda"):
                found = timing.measure_roof("cuda")
            options.roof = found[-1][1]
            rows.write(json.dumps({"copy": found}) + "\n")
        for measured in time_cases(options, json.loads(options.time.read_text())):
            rows.write(json.dumps(measured) + "\n")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="ops or cases, like 'soft*'")
    parser.add_argument("--sizes", nargs="+", metavar="PATTERN", help="sizes, like 16384x*")
    parser.add_argument("--contenders", nargs="+", choices=field.ALL, default=None)
    parser.add_argument("--max-autotune", choices=("named", "all", "none"), default="named")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds for everything")
    parser.add_argument("--jobs", type=int, help="compiling processes; default: one a core")
    parser.add_argument("--rounds", type=int, default=timing.ROUNDS)
    parser.add_argument("--resume", action="store_true", help="keep the rows that are there")
    parser.add_argument("--again", action="store_true", help="keep the rows of other cases")
    parser.add_argument("--caches", type=Path, help="folder of compilers' caches; default: empty")
    parser.add_argument("--cpu", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results file")
    parser.add_argument("--warm", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--time", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--roof", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.arguments = sys.argv[1:] if arguments is None else arguments
    if options.contenders is None:
        options.contenders = [*field.DEFAULT, "liger"]
    if options.jobs is None:
        options.jobs = 0 if options.cpu else os.cpu_count() or 1
    return options


def main(arguments: list[str] | None = None) -> Path | None:
    """Measure, print the table, and write the results file."""
    options = parse(arguments)
    if options.warm or options.time:
        compile_only(options) if options.warm else time_into(options)
        return None
    if not options.cpu and not torch.cuda.is_available():
        sys.exit(
            "the kernels are timed on an NVIDIA GPU, and torch sees none: --cpu runs them tiny"
        )
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        run = Run(options, options.caches or Path(folder))
        if options.cpu and not options.jobs:
            for rows in time_cases(options, run.remaining()):
                run.add(rows)
                if run.left_s <= 0:
                    break
        else:
            if run.options.jobs:
                run.warm()
            run.measure()
        run.write()
    print_table(run.result)
    print(f"written: {run.path}")
    return run.path


if __name__ == "__main__":
    main()
