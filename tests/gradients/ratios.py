"""Luck, or a fault of ours? Errors over eager's, of many seeds: `python -m tests.gradients.ratios`.

`python -m tests.gradients.ratios recommender --device cuda --steps 6 --only bias` prints for each
tensor the geometric mean over all seeds and steps of ours over eager's error against fp64, with how
many standard errors it is from 1. Equally good roundings give 1; what one step gives of a tensor of
few elements is chance.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from autodiff.compare import TensorError, limit

K = 2.0
LEAST = 1e-3
"""Of the larger error, below which the other counts as so much: an exact result is luck, too."""


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor over all seeds and steps.

    mean: geometric mean of ours over eager's error. away: its distance from 1 in standard errors,
    of seeds, as the steps of one hang together. worst: the largest ratio as the rule takes it.
    over: how many are beyond the rule's limit.
    """

    name: str
    elements: int
    mean: float
    away: float
    worst: float
    over: int

    def __str__(self) -> str:
        return (
            f"{self.mean:8.2f} {self.away:+7.1f} {self.worst:7.2f} {self.over:4}"
            f"  {self.elements:7}  {self.name}"
        )


HEAD = "    mean    away   worst over  elements  tensor"


def row(seeds: Sequence[Sequence[TensorError]]) -> Row:
    """What all seeds say of a tensor: for each, its errors in each step."""
    logs = [statistics.fmean(_log(e.ours, e.eager) for e in steps) for steps in seeds]
    errors = [e for steps in seeds for e in steps]
    mean = statistics.fmean(logs)
    spread = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
    away = mean / spread if spread else 0.0
    over = sum(e.ratio > limit(K, e.elements) for e in errors)
    first = errors[0]
    worst = max(e.ratio for e in errors)
    return Row(first.name, first.elements, math.exp(mean), away, worst, over)


def _log(ours: float, eager: float) -> float:
    least = LEAST * max(ours, eager)
    return math.log(max(ours, least) / max(eager, least)) if least else 0.0


def rows(case: str, how: argparse.Namespace) -> list[Row]:
    """A model under several seeds; the worst tensors first."""
    from tests.gradients.cases import CASES, mixed_precision
    from tests.gradients.compilers import Compiler
    from tests.gradients.zoo import ZOO
    from trainfuse.testing import Training, gradient_report

    models = {**CASES, **ZOO}

    def make() -> Training:
        with mixed_precision() if how.bf16 else contextlib.nullcontext():
            return models[case](how.device)

    found: dict[str, list[list[TensorError]]] = defaultdict(list)
    for seed in range(how.seeds):
        compiler = Compiler(how.capture, "triton", verify="off")
        report = gradient_report(make, compiler, steps=how.steps, k=K, seed=seed)
        compiler.close()
        torch._dynamo.reset()
        of_seed: dict[str, list[TensorError]] = defaultdict(list)
        for error in report.errors:
            if error.note != "exact" and math.isfinite(error.ratio):
                of_seed[error.name].append(error)
        for name, steps in of_seed.items():
            found[name].append(steps)
    return sorted(map(row, found.values()), key=lambda r: -r.mean)


def main(arguments: Sequence[str]) -> int:
    """Print a table for each model."""
    parser = argparse.ArgumentParser(prog="python -m tests.gradients.ratios", description=__doc__)
    parser.add_argument("cases", nargs="+", help="models of cases.py and of the zoo")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--capture", choices=("whole", "regions"), default="whole")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--bf16", action="store_true", help="under autocast")
    parser.add_argument("--only", default="", help="tensors with this in their names")
    how = parser.parse_args(arguments)
    if how.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    from trainfuse.testing import rounded_bf16

    for case in how.cases:
        with rounded_bf16():
            found = rows(case, how)
        print(f"{case}, {how.seeds} seeds of {how.steps} steps, {how.device}\n{HEAD}")
        shown = [one for one in found if how.only in one.name]
        print("\n".join(map(str, shown)))
        print(f"{_all(found)}  geometric mean of all {len(found)}", flush=True)
    return 0


def _all(found: Iterable[Row]) -> str:
    return f"{math.exp(statistics.fmean(math.log(one.mean) for one in found)):8.2f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
