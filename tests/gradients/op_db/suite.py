"""Calls compiled by trainfuse and checked, by themselves and as training steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import trainfuse
from tests.gradients.op_db.calls import Call, joined, scattered, unseeded
from tests.gradients.op_db.checks import problems
from tests.gradients.op_db.coverage import COMMAND
from tests.gradients.op_db.exclusions import stock_error
from tests.gradients.op_db.extremal import extremal
from tests.gradients.op_db.runs import (
    Outcome,
    cotangents,
    differentiate,
    differentiate_twice,
    of_two_minds,
    references,
    step_references,
    take_step,
    train,
    training_step,
    world,
)
from tests.gradients.op_db.samples import POINTWISE, Operator, choose
from trainfuse.debug.explain import Explanation

# No rescue: a kernel that fails must raise, and what it gives is compared here rather than gated.
OPTIONS: dict[str, Any] = {
    "backend": "triton",
    "verify": "off",
    "fallback": False,
    "check": True,
    "max_plans": 64,
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check found, and what trainfuse says of the plans."""

    problems: tuple[str, ...]
    explanation: Explanation


def eager_error(call: Call, run: Callable[..., Outcome] = differentiate) -> str | None:
    """Why torch itself can't differentiate the call as `run` does, or None."""
    try:
        with world():
            outcome = run(call.function(), call.fresh())
    except Exception as error:  # whatever it is, there is nothing to be equal to
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return None if any(outcome.flags) else "no output requires a gradient"


def able(calls: Iterable[Call], check: Callable[[Call], Verdict]) -> list[Call]:
    """Those of which torch itself can do what a check compares, by itself and under Dynamo."""
    run = take_step if check is check_step else differentiate
    return [c for c in calls if eager_error(c, run) is None and stock_error(c) is None]


def calls_of(
    operator: Operator, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> list[Call]:
    """What is run of an operator every time: two samples that differ in kind, the first again on
    tensors with gaps and on extremal values; of these, what torch can do."""
    chosen = choose(operator.samples(dtype, device), 2)
    more: list[Call | None] = []
    for call in chosen[:1]:
        more += [scattered(call), extremal(call, operator.name in POINTWISE)]
    return [call for call in (*chosen, *more) if call is not None and eager_error(call) is None]


def check_alone(call: Call, **options: Any) -> Verdict:
    """The call by itself, every operator that has a kernel in one; its outputs stay
    differentiable."""
    eager, exact = references(call)
    wanted = {"whole_step": False, "single_node": True, **options}
    known = eager, exact, of_two_minds(call, lambda f: differentiate(f, call.fresh()))
    return _judged(call, call.function(), wanted, differentiate, known)


def check_twice(call: Call) -> Verdict:
    """Gradients of the call's gradients, which are eager's own."""
    known = *references(call, differentiate_twice), None
    return _judged(call, call.function(), {"whole_step": False}, differentiate_twice, known)


def check_step(call: Call, *, runs: int = 1, **options: Any) -> Verdict:
    """The call amid a training step, fused as by default. runs: the last of so many is checked."""
    eager, _ = references(call)
    weights = cotangents(eager.differentiable)
    eager, exact = step_references(call, weights)

    def run(step: Callable[..., Any], leaves: Sequence[torch.Tensor]) -> Outcome:
        return train(step, leaves, weights)

    known = eager, exact, of_two_minds(call, lambda f: run(training_step(f), call.fresh()))
    return _judged(call, training_step(call.function()), options, run, known, runs)


def _judged(
    call: Call,
    function: Callable[..., Any],
    options: dict[str, Any],
    run: Callable[[Callable[..., Any], Sequence[torch.Tensor]], Outcome],
    known: tuple[Outcome, Outcome, Outcome | None],
    runs: int = 1,
) -> Verdict:
    compiled = trainfuse.compile(function, **{**OPTIONS, **options})
    try:
        with unseeded():
            for _ in range(runs - 1):
                run(compiled, call.fresh())
            ours = run(compiled, call.fresh())
        return Verdict(tuple(problems(ours, *known)), compiled.explain())
    finally:
        compiled.close()
        torch._dynamo.reset()


def check_all(calls: Sequence[Call], check: Callable[[Call], Verdict]) -> Explanation:
    """Check calls in one plan, for speed; returns what trainfuse says of it.

    Raises an AssertionError that names each call that is wrong, with what is wrong of it, and how
    to run its operator by itself.
    """
    try:
        verdict = check(calls[0] if len(calls) == 1 else joined(calls))
    except Exception as error:
        raise AssertionError(_report(blame(calls, check), error)) from error
    if verdict.problems:
        found = [(calls[0], verdict.problems)] if len(calls) == 1 else blame(calls, check)
        raise AssertionError(_report(found, "; ".join(verdict.problems)))
    return verdict.explanation


def blame(
    calls: Sequence[Call], check: Callable[[Call], Verdict]
) -> list[tuple[Call, tuple[str, ...]]]:
    """The calls that are wrong by themselves, found by halves."""
    try:
        found = check(calls[0] if len(calls) == 1 else joined(calls)).problems
    except Exception as error:
        found = (f"{type(error).__name__}: {error}",)
    if not found:
        return []
    if len(calls) == 1:
        return [(calls[0], found)]
    half = len(calls) // 2
    return [*blame(calls[:half], check), *blame(calls[half:], check)]


def _report(found: Sequence[tuple[Call, tuple[str, ...]]], together: object) -> str:
    if not found:
        return f"each call is right by itself, and all in one plan are wrong: {together}"
    lines = [f"{call}: {'; '.join(problems)}" for call, problems in found]
    again = {rerun(call) for call, _ in found}
    return "\n".join(["wrong:", *lines, "to run one operator by itself:", *sorted(again)])


def rerun(call: Call) -> str:
    """The command that checks a call's operator by itself."""
    leaf = next((t for t in call.leaves if t.requires_grad), call.leaves[0])
    dtype = str(leaf.dtype.to_real() if leaf.is_complex() else leaf.dtype)
    kind = leaf.device.type
    return f"{COMMAND} {call.name} --dtype {dtype.removeprefix('torch.')} --device {kind}"
