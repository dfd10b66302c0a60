"""Wrong kernels, planted by name: the oracle catches each, and the gate puts each out of use.

A fault is a rewrite of the generated text of one phase's kernels, so everything else is real: the
capture, the plan, the launch.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.gradients.compilers import Compiler
from trainfuse import pipeline
from trainfuse.codegen import lower as lowering
from trainfuse.testing import Training, gradient_report

# numpy warns of what a fault computes in lanes that nothing stores
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

ROWS = 600  # more than one block of 512 rows in the interpreter, and not a multiple of it
MODEL_WIDTH, INNER_WIDTH = 12, 28


class Residual(nn.Module):
    """Norm, linear, GELU, dropout, linear around a residual: each kind of kernel once."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, MODEL_WIDTH)
        # an eps that matters beside a variance of about one
        self.norm = nn.LayerNorm(MODEL_WIDTH, eps=1e-2)
        self.up, self.down = (
            nn.Linear(MODEL_WIDTH, INNER_WIDTH),
            nn.Linear(INNER_WIDTH, MODEL_WIDTH),
        )
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [N, 5]."""
        h = torch.tanh(self.first(x))
        return h + self.down(self.dropout(functional.gelu(self.up(self.norm(h)))))


def make() -> Training:
    """Three plain steps of SGD."""
    model = Residual()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    def step(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        return loss

    batches = [(torch.randn(ROWS, 5), torch.randn(ROWS, MODEL_WIDTH)) for _ in range(3)]
    return Training(step, model, batches)


@dataclass(frozen=True, slots=True)
class Fault:
    """Rewrite the first match of a pattern in every kernel of a phase."""

    name: str
    pattern: str
    replacement: str | Callable[[re.Match[str]], str]
    phase: str = "backward"
    count: int = 1


STORE = r"tl\.store\((?P<where>out\d+[^,]*), (?P<value>\w+)"

FAULTS = (
    Fault("factor", STORE, r"tl.store(\g<where>, \g<value> * 1.001"),
    Fault("sign", STORE, r"tl.store(\g<where>, -\g<value>"),
    Fault("nan", STORE, r'tl.store(\g<where>, \g<value> * float("nan")'),
    Fault("wrong element", STORE, r"tl.store(\g<where> * 0, \g<value>"),
    Fault("forward factor", STORE, r"tl.store(\g<where>, \g<value> * 1.001", "forward"),
    Fault("dropped term", r"(t\d+ = t\d+) - t\d+\b", r"\1"),
    Fault("lost cotangent", r"(t\d+ =) x\d+ \+ (t\d+\b)", r"\1 \2"),
    Fault("dropped partial", r"(part \* COLS \+ col, mask=col_mask)", r"\1 & (part < 1)"),
    Fault(
        "low-precision sum",
        r"(?P<acc>t\d+_acc) = (?P=acc) \+ (?P<term>.*)",
        r"\g<acc> = (\g<acc> + \g<term>).to(tl.bfloat16).to(tl.float32)",
    ),
    Fault("maximum for sum", r"lib\.reduce_sum\(tl\.where", "lib.reduce_max(tl.where"),
    Fault("wrong mean divisor", rf"True\) / {MODEL_WIDTH}\b", f"True) / {MODEL_WIDTH - 1}"),
    Fault("bad tail mask", r"row_mask = row < ROWS", "row_mask = row < ROWS - 1"),
    Fault("neighbour's row", r"(tl\.load\(in\d+ \+) row \* COLS", r"\1 (row ^ 1) * COLS"),
    Fault("fresh mask", r"(lib\.keep\w*\(x\d+), (\d+),", r"\1, \2 + 7,"),
    Fault("wrong rate", r"(lib\.keep\w*\(.*), 0\.3\)", r"\1, 0.35)"),
    Fault("no eps", r"\+ 0\.01\b", "+ 0.0", "forward"),
    Fault("wrong gelu", r"0\.70710678\d*", "0.7"),
    Fault(
        "swapped outputs",
        r"out(?P<a>\d) \+ col, (?P<x>t\d+)(?P<mid>.*\n.*)out(?P<b>\d) \+ col, (?P<y>t\d+)",
        r"out\g<a> + col, \g<y>\g<mid>out\g<b> + col, \g<x>",
    ),
)


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fault], list[str]]:
    """Plant a fault; the list returned names the kernels that have it."""

    def planted(fault: Fault) -> list[str]:
        hit: list[str] = []
        phase: list[str] = []
        lower, print_module = pipeline.lower, lowering.print_module

        def lower_in_phase(group, *args, **kwargs):
            phase.append(group.phase)
            try:
                return lower(group, *args, **kwargs)
            finally:
                phase.pop()

        def print_wrong(module):
            text = print_module(module)
            if phase[-1:] != [fault.phase]:
                return text
            wrong, number = re.subn(fault.pattern, fault.replacement, text, count=fault.count)
            if number:
                hit.append(module.kernels[0].name)
            return wrong

        monkeypatch.setattr(pipeline, "lower", lower_in_phase)
        monkeypatch.setattr(lowering, "print_module", print_wrong)
        return hit

    return planted


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_oracle_catches_it(fault, plant):
    hit = plant(fault)
    compile_fn = Compiler("whole", "triton", verify="off")
    report = gradient_report(make, compile_fn)
    (step,) = compile_fn.steps
    assert step.stats()["gate"] == "pass", "the wrong kernel did not run"
    compile_fn.close()
    assert hit, "the fault was planted nowhere"
    assert report.failures, f"{fault.name} in {hit} passed: largest ratio {report.ratio}"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_gate_puts_it_out_of_use(fault, plant):
    hit = plant(fault)
    compile_fn = Compiler("whole", "triton", verify="kernels")
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        report = gradient_report(make, compile_fn)
    assert hit, "the fault was planted nowhere"
    (step,) = compile_fn.steps
    verdict = step.stats()["gate"]
    compile_fn.close()
    assert verdict != "pass", f"{fault.name} in {hit} passed the gate"
    report.check()


def test_without_a_fault_all_is_well():
    compile_fn = Compiler("whole", "triton")
    gradient_report(make, compile_fn).check()
    compile_fn.check()
    compile_fn.close()
