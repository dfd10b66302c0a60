"""Ranges of seeds: each program made, run and, if it fails, shrunk; what came of all of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tests.gradients.programs.check import Verdict, check
from tests.gradients.programs.generate import generate
from tests.gradients.programs.render import render
from tests.gradients.programs.shrink import shrink
from tests.gradients.programs.tree import Program

LEAST_WHOLE = 0.95
"""Of the steps that are to be captured whole, the share that must be."""
LEAST_FUSED = 0.7
"""Of the programs on Triton, the share that must run a kernel of ours: 14 of one chunk's 18 small
ones do."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One seed: its program's compile options, its verdict, and a failure's shrunk text."""

    seed: int
    capture: str
    backend: str
    statements: int
    dropped: int
    verdict: Verdict
    seconds: float
    text: str = ""

    @property
    def report(self) -> str:
        """What is printed of a failure: the seed, the error, and a file that reproduces it."""
        return (
            f"random program {self.seed} ({self.capture} on {self.backend}) is "
            f"{self.verdict.kind}: {self.verdict.error}\n\n"
            f"python -m tests.gradients.programs --start {self.seed} --count 1\n"
            f"shrunk, as a file that runs alone:\n\n{self.text}"
        )


def run_seed(seed: int, device: str = "cpu", shrink_s: float = 120.0) -> Outcome:
    """Make, run and judge one program. shrink_s: how long a failure may be shrunk, 0 for not."""
    began = time.perf_counter()
    made = generate(seed, device)
    program = made.program
    verdict = check(program, device)
    text = ""
    if verdict.failed:
        small = shrink(program, _fails_like(verdict, device), shrink_s) if shrink_s else program
        text = render(small, device)
    how = program.compile
    return Outcome(
        seed,
        how.capture,
        how.backend,
        program.statements,
        len(made.dropped),
        verdict,
        time.perf_counter() - began,
        text,
    )


def _fails_like(first: Verdict, device: str):
    """Whether another program fails in the same way: the same kind, and the same exception."""

    def fails(program: Program) -> bool:
        verdict = check(program, device)
        return verdict.kind == first.kind and _name(verdict) == _name(first)

    return fails


def _name(verdict: Verdict) -> str:
    return verdict.error.partition(":")[0]


@dataclass(slots=True)
class Tally:
    """Counts over many outcomes."""

    outcomes: list[Outcome] = field(default_factory=list)

    def add(self, outcomes: Iterable[Outcome]) -> None:
        """Count some more."""
        self.outcomes += outcomes

    @property
    def failures(self) -> list[Outcome]:
        """The programs that are wrong, or crash."""
        return [o for o in self.outcomes if o.verdict.failed]

    @property
    def whole(self) -> tuple[int, int]:
        """How many steps were captured whole, of those that were to be."""
        asked = [o for o in self.outcomes if o.capture == "whole"]
        return sum(o.verdict.capture == "whole_step" for o in asked), len(asked)

    @property
    def fused(self) -> tuple[int, int]:
        """How many programs ran a kernel of ours, of those on Triton."""
        asked = [o for o in self.outcomes if o.backend == "triton"]
        return sum(o.verdict.kernels > 0 for o in asked), len(asked)

    def summary(self) -> str:
        """The counts as text."""
        rows = Counter((o.capture, o.backend, o.verdict.kind) for o in self.outcomes)
        lines = [f"{count:6} {' '.join(key)}" for key, count in sorted(rows.items())]
        reasons = Counter(
            o.verdict.reason.partition(", <program")[0]
            for o in self.outcomes
            if o.capture == "whole" and o.verdict.capture != "whole_step"
        )
        lines += [f"{count:6} not whole: {reason}" for reason, count in reasons.most_common()]
        count = max(len(self.outcomes), 1)
        seconds = sum(o.seconds for o in self.outcomes)
        lines.append(
            f"{count} programs, {sum(o.statements for o in self.outcomes) / count:.1f} statements, "
            f"{seconds / count:.2f} s each; whole {_share(self.whole)}, "
            f"fused {_share(self.fused)}, "
            f"{sum(o.verdict.fused for o in self.outcomes)} nodes in kernels, "
            f"{sum(o.dropped for o in self.outcomes)} attempts dropped"
        )
        return "\n".join(lines)

    def lacking(self) -> list[str]:
        """Where too little was captured or fused for the programs to show anything."""
        return [
            f"{got} of {asked} were {name}"
            for name, (got, asked), least in (
                ("captured whole", self.whole, LEAST_WHOLE),
                ("fused", self.fused, LEAST_FUSED),
            )
            # of few programs, one may be the exception
            if got < least * asked - 1
        ]

    def check(self) -> None:
        """Raise AssertionError for a failure, or where too little was captured or fused."""
        assert not self.failures, "\n\n".join(o.report for o in self.failures)
        assert not self.lacking(), f"{self.lacking()}:\n{self.summary()}"


def _share(pair: Sequence[int]) -> str:
    return f"{pair[0]}/{pair[1]}"


def run_range(start: int, count: int, device: str = "cpu", shrink_s: float = 120.0) -> Tally:
    """Run consecutive seeds."""
    tally = Tally()
    tally.add(run_seed(seed, device, shrink_s) for seed in range(start, start + count))
    return tally
