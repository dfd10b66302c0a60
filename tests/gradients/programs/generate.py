"""From a seed to a random training program that eager runs, and that is a fair question."""

from __future__ import annotations

import dataclasses
import math
import warnings
from dataclasses import dataclass

from tests.gradients.programs.control import Reference
from tests.gradients.programs.render import draws_eagerly
from tests.gradients.programs.sketch import sketch
from tests.gradients.programs.tree import Block, Program
from tests.gradients.programs.world import Invalid

ATTEMPTS = 30
# The weights' relative change over the run: below the first, later steps show nothing; above the
# last, they are other weights.
MOVES = (5e-3, 0.5)


@dataclass(frozen=True, slots=True)
class Made:
    """A program, and why earlier attempts at this seed were dropped."""

    program: Program
    dropped: tuple[str, ...]


def generate(seed: int, device: str = "cpu") -> Made:
    """The program of a seed. device: where it is to run; it is tried on the CPU either way."""
    dropped: list[str] = []
    for attempt in range(ATTEMPTS):
        try:
            program = sketch(seed, attempt)
            if device == "cuda":
                _comparable_on_cuda(program)
            return Made(_admitted(program), tuple(dropped))
        except Invalid as reason:
            dropped.append(str(reason))
    raise AssertionError(f"no program of seed {seed} is of use: {dropped}")


def _comparable_on_cuda(program: Program) -> None:
    """Raise Invalid for what the fp64 run on a GPU does not do alike."""
    if program.draws and draws_eagerly(program):
        raise Invalid("torch's own masks differ by element type on a GPU")
    checkpointed = [
        statement.text
        for line in program.body
        if isinstance(line, Block) and line.kind.startswith("checkpoint")
        for statement in line.body
    ]
    if any(
        "torch.float" in t or "16" in t or ".float()" in t or "double" in t for t in checkpointed
    ):
        raise Invalid("autograd's thread casts as written, not to fp64, when it recomputes")


_NO_PROGRAM = (
    RuntimeError,
    AssertionError,
    ValueError,
    TypeError,
    IndexError,
    NameError,  # of a value that shrinking took away
    UserWarning,
)


def reference(program: Program) -> Reference:
    """Its eager and fp64 runs. Raises Invalid for what eager refuses."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Reference(program)
    except _NO_PROGRAM as error:
        raise Invalid(f"eager: {type(error).__name__}: {str(error)[:80]}") from None


def _admitted(program: Program) -> Program:
    """The program with a rate at which its weights move. Raises Invalid if it is not fair."""
    runs = reference(program)
    if program.compile.capture != "function":
        for _ in range(3):
            moved = runs.eager.moved
            if MOVES[0] <= moved <= MOVES[1]:
                break
            if not moved or not math.isfinite(moved):
                raise Invalid("no gradient")
            rate = float(f"{program.update.lr * min(max(0.05 / moved, 1e-3), 1e3):.2g}")
            update = dataclasses.replace(program.update, lr=rate)
            program = dataclasses.replace(program, update=update)
            runs = reference(program)
        else:
            raise Invalid("no rate suits")
    if not runs.finite:
        raise Invalid("not finite")
    if not runs.fair():
        raise Invalid("not fair")
    return program
