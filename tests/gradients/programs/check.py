"""A program's verdict: its rendered text runs, and is compared with eager and fp64."""

from __future__ import annotations

import itertools
import linecache
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
from torch import nn

import trainfuse
from tests.gradients.programs.generate import reference
from tests.gradients.programs.render import render
from tests.gradients.programs.tree import Program
from tests.gradients.programs.world import Invalid
from trainfuse import pipeline
from trainfuse.capture import compat
from trainfuse.codegen.builder import Group
from trainfuse.codegen.lower import candidates
from trainfuse.codegen.targets import H200, CodegenOptions, Target
from trainfuse.errors import TracingFailed

Kind = Literal["right", "wrong", "crash", "unfair"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a program.

    kind: "wrong" results, a "crash" where eager runs, or "unfair": as wrong as eager itself under
    other roundings, which a longer look showed, or with weights that stand still. error: what was
    raised. capture: "whole_step", "regions" or "none". reason: why it is not whole. fused: nodes in
    kernels of ours.
    """

    seed: int
    kind: Kind
    error: str = ""
    trace: str = ""
    capture: str = "none"
    reason: str = ""
    kernels: int = 0
    fused: int = 0
    plans: int = 0
    calls: int = 0
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether something is to be mended."""
        return self.kind in ("wrong", "crash")


_NUMBERS = itertools.count()
_DRAWS, _OTHER_SEED = 8, 1_000_003


def execute(text: str, name: str) -> dict[str, Any]:
    """The names that a rendered file defines; its lines show in tracebacks.

    Its module stays where imports find it: torch 2.11's Dynamo imports functions' modules by name.
    """
    own = f"random_program_{next(_NUMBERS)}"
    module = sys.modules[own] = ModuleType(own)
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec"), module.__dict__)
    return module.__dict__


def also_for_a_gpu(lower: Callable[..., Any]) -> Callable[..., Any]:
    """`lower`, once a group's text for a GPU could be written in every likely form."""

    def both(group: Group, target: Target, options: CodegenOptions) -> Any:
        candidates(group, H200, options, thorough=False)
        return lower(group, target, options)

    return both


def check(program: Program, device: str = "cpu") -> Verdict:
    """Run a program compiled, and judge it.

    Kernels are run by the interpreter on a CPU, and also written as for a GPU, where schedules
    decide otherwise. Where torch fails to trace it, with fallback off, it must be right with it on.
    """
    began = time.perf_counter()
    name = f"<program {program.seed}>"
    names = execute(render(program, device), name)
    kind: Kind = "right"
    error = trace = ""
    try:
        with (
            warnings.catch_warnings(),
            np.errstate(all="ignore"),
            mock.patch.object(pipeline, "lower", also_for_a_gpu(pipeline.lower)),
        ):
            warnings.simplefilter("ignore")
            names["test_program"]()
    except Exception as raised:
        if isinstance(raised, TracingFailed):  # torch's own fault: the rest must be right
            torch._dynamo.reset()
            return check(_falling_back(program), device)
        wrong = isinstance(raised, AssertionError) and "further from fp64" in str(raised)
        kind = "wrong" if wrong else "crash"
        error, trace = f"{type(raised).__name__}: {raised}", traceback.format_exc()
        # the reference ran on the CPU, which takes some types that a GPU refuses
        if kind == "crash" and device != "cpu" and not _runs_in_eager(names):
            kind = "unfair"
    facts = _facts(names["COMPILED"])
    names.clear()
    linecache.cache.pop(name, None)
    torch._dynamo.reset()
    if "the weights moved by" in error or (kind == "wrong" and _explained(program, error, device)):
        kind = "unfair"
    return Verdict(program.seed, kind, error, trace, **facts, seconds=time.perf_counter() - began)


def _falling_back(program: Program) -> Program:
    how = program.compile
    kept = tuple(option for option in how.options if option[0] != "fallback")
    return replace(program, compile=replace(how, options=kept))


def _runs_in_eager(names: Mapping[str, Any]) -> bool:
    try:
        if "function" in names:
            names["function"](*names["arguments"]())
        else:
            training = names["make"]()
            training.step(*training.batches[0])
    except Exception:
        return False
    return True


def _explained(program: Program, error: str, device: str) -> bool:
    """Whether eager's own rounding is as bad: the first line after the head has the worst ratio.

    Or whether eager was exact by luck: the ratio is not far beyond the rule, and the program keeps
    it on all other draws of its data.
    """
    ratio = re.search(r"ratio (\S+)", error)
    if ratio is None:
        return False
    try:
        runs = reference(program)
        if runs.explains(float(ratio[1])):
            return True
    except Invalid:
        return False
    return float(ratio[1]) <= 2 * runs.k and all(
        _passes(replace(program, seed=program.seed + _OTHER_SEED * i), device)
        for i in range(1, _DRAWS + 1)
    )


def _passes(program: Program, device: str) -> bool:
    names = execute(render(program, device), f"<program {program.seed}>")
    try:
        names["test_program"]()
    except Exception:
        return False
    finally:
        _facts(names["COMPILED"])
        torch._dynamo.reset()
    return True


def _facts(compiled: list[Any]) -> dict[str, Any]:
    """How the program was captured, and how much of it was fused; then it is closed."""
    if not compiled:
        return {}
    target = compiled[-1]
    step = compat.compiled_call(target) if isinstance(target, nn.Module) else target
    with trainfuse.settings.patch(keep_gradients=True):  # what the report ran under
        explanation = step.explain()
    facts = {
        "capture": explanation.capture,
        "reason": explanation.capture_reason or "",
        "fused": sum(len(group.nodes) for group in explanation.groups),
    }
    facts |= {name: step.stats()[name] for name in ("kernels", "plans", "calls")}
    step.close()
    return facts
