"""Faults, planted by name: the oracle catches each, and the gate goes on with right values.

Everything but the fault is real: the capture, the plan, the launch.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from autodiff.verify import GraphDefect
from tests.gradients.compilers import Compiler
from tests.gradients.planted.planting import Fault, captured
from tests.gradients.planted.table import FAULTS
from tests.gradients.planted.trainings import TRAININGS
from trainfuse import plans
from trainfuse.runtime.gate import Gate
from trainfuse.testing import gradient_report, step_gradients, steps

# numpy warns of what a fault computes in lanes that nothing stores
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def fresh_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that passed beside one fault may be launched wrongly by the next."""
    monkeypatch.setattr(plans, "GATE", Gate())


@pytest.fixture(autouse=True)
def shared_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """The eager and the fp64 run of one training are the same for every fault in it."""
    run = steps.step_gradients

    def once(make: Any, compile_fn: Any = None, **options: Any) -> steps.StepTrace:
        if compile_fn is not None:
            return run(make, compile_fn, **options)
        key = (make, *sorted(options.items(), key=str))
        if key not in _REFERENCES:
            _REFERENCES[key] = run(make, None, **options)
        return _REFERENCES[key]

    monkeypatch.setattr(steps, "step_gradients", once)


_REFERENCES: dict[Any, steps.StepTrace] = {}


@pytest.fixture
def compiled() -> Any:
    """Makes Compilers, and closes what they compiled."""
    made: list[Compiler] = []

    def compiler(**options: Any) -> Compiler:
        made.append(Compiler("whole", "triton", **options))
        return made[-1]

    yield compiler
    for one in made:
        one.close()


Compiled = Callable[..., Compiler]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_oracle_catches_it(
    fault: Fault, compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    hits: list[str] = []
    fault.plant(monkeypatch, hits)
    compile_fn = compiled(verify="off", **fault.options)
    report = gradient_report(TRAININGS[fault.training], compile_fn)
    (step,) = compile_fn.steps
    assert hits, "the fault was planted nowhere"
    assert step.stats()["gate"] == "pass", "what was planted did not run"
    assert report.failures, f"{fault.name} in {hits} passed: largest ratio {report.ratio}"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_gate_puts_it_out_of_use(
    fault: Fault, compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    hits: list[str] = []
    fault.plant(monkeypatch, hits)
    compile_fn = compiled(verify=fault.verify, **fault.options)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        report = gradient_report(TRAININGS[fault.training], compile_fn)
    (step,) = compile_fn.steps
    assert hits, "the fault was planted nowhere"
    assert step.stats()["gate"] != "pass", f"{fault.name} in {hits} passed the gate"
    report.check()


@pytest.mark.parametrize("training", TRAININGS)
def test_without_a_fault_all_is_well(training: str, compiled: Compiled) -> None:
    compile_fn = compiled(verify=1)
    gradient_report(TRAININGS[training], compile_fn).check()
    compile_fn.check()


def test_a_wrong_phase_label_is_the_verifier_s(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It changes no number by itself: phases decide what is fused, saved and computed again."""

    def mislabel(graph: Any) -> Any:
        node = graph.nodes("backward")[0]
        facts = {**graph.facts, node: replace(graph.facts[node], phase="forward")}
        return graph.replace(facts=facts)

    captured(mislabel)(monkeypatch, [])
    with pytest.raises(GraphDefect, match="a forward node links to"):
        step_gradients(TRAININGS["square"], compiled(check=True), steps=1)


def test_the_table_is_long_and_names_are_its_keys() -> None:
    names = Counter(fault.name for fault in FAULTS)
    assert max(names.values()) == 1
    assert len(FAULTS) >= 60
    assert {f.verify for f in FAULTS} == {"kernels", "step", 1}
