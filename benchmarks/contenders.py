"""The contenders: one training step each, from the same model, data and optimizer settings.

eager: plain PyTorch, fused AdamW. compile, compile-reduce-overhead, compile-max-autotune: forward
and loss through torch.compile (more of the step than most users compile), fused AdamW.
trainfuse: `trainfuse.compile` of the plain step with plain AdamW; with a number behind it, under
that `memory_budget`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import trainfuse
from benchmarks.cases import Case
from trainfuse.testing import GradientReport, Training, gradient_report

DEFAULT = ("eager", "compile", "compile-reduce-overhead", "trainfuse")
ALL = (*DEFAULT, "compile-max-autotune")
BUDGETS = {"trainfuse": None, "trainfuse-0.5": 0.5, "trainfuse-0.25": 0.25}
MODES = {
    "compile": "default",
    "compile-reduce-overhead": "reduce-overhead",
    "compile-max-autotune": "max-autotune",
}

Step = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class Contender:
    """A step to time. run: one whole step on the case's batch, without a synchronisation."""

    name: str
    run: Callable[[], Any]
    model: nn.Module


def forward_of(case: Case, model: nn.Module, device: str) -> Step:
    """Forward and loss of a case, in its precision."""
    autocast = case.precision == "bf16-autocast"

    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if not autocast:
            return case.loss(model(x), y)
        with torch.autocast(device, dtype=torch.bfloat16):
            return case.loss(model(x), y)

    return forward


def step_of(forward: Step, optimizer: torch.optim.Optimizer) -> Step:
    """The whole step, as anyone would write it."""

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = forward(x, y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def _marked(step: Step) -> Step:
    """A step that tells torch.compile's CUDA graphs that the last one's outputs are done with."""

    def run(*batch: torch.Tensor) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return step(*batch)

    return run


def _assemble(name: str, case: Case, model: nn.Module, device: str) -> Step:
    """The contender's step over a model."""
    ours = name in BUDGETS
    fused = {} if ours or device == "cpu" else {"fused": True}
    optimizer = torch.optim.AdamW(model.parameters(), lr=case.learning_rate, **fused)
    forward = forward_of(case, model, device)
    if name in MODES:
        forward = torch.compile(forward, mode=MODES[name])
    step = step_of(forward, optimizer)
    if name == "compile-reduce-overhead":
        return _marked(step)
    if ours:
        return trainfuse.compile(step, memory_budget=BUDGETS[name])
    return step


def build(name: str, case: Case, device: str) -> Contender:
    """A contender on its own model and batch; nothing is compiled before its first run."""
    model, batch = case.build(device)
    step = _assemble(name, case, model, device)
    return Contender(name, lambda: step(*batch), model)


@contextlib.contextmanager
def precision(case: Case):
    """TF32 for the cases that ask for it; the setting is restored."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if case.precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def has_dropout(model: nn.Module) -> bool:
    """Whether a training step of the model draws masks."""
    rates = [getattr(m, "p", getattr(m, "dropout", 0.0)) for m in model.modules()]
    return any(isinstance(rate, float) and rate > 0.0 for rate in rates)


def check_gradients(name: str, case: Case, device: str) -> tuple[GradientReport | None, str]:
    """Three steps' gradients against fp64, or None and the reason why there is no figure.

    The optimizer's learning rate is raised so that the weights move; attention dropout, drawn
    inside ATen's kernel on a GPU, is set to 0 for the check alone.
    """
    if not case.check:
        return None, "no gradient check: the fp64 run does not fit"
    model, _ = case.build(device)
    if has_dropout(model) and name not in BUDGETS:
        return None, "no gradient check: its dropout masks are not the reference's"

    def make() -> Training:
        model, batch = case.build(device)
        for module in model.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        forward = forward_of(case, model, device)
        return Training(step_of(forward, optimizer), model, [batch])

    def compiled(training: Training) -> Step:
        if name in BUDGETS:
            return trainfuse.compile(training.step, memory_budget=BUDGETS[name])
        optimizer = torch.optim.SGD(training.model.parameters(), lr=0.05)
        forward = torch.compile(forward_of(case, training.model, device), mode=MODES[name])
        step = step_of(forward, optimizer)
        return _marked(step) if name == "compile-reduce-overhead" else step

    return gradient_report(make, compiled), ""
