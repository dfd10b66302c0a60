"""Loss heads in chunks of rows: gradients, what is chunked and what is refused, and memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import trainfuse
from tests.gradients.compilers import Compiler
from tests.gradients.head_cases import BATCH, CASES, CLASSES, TIME, training
from trainfuse.fusion.flow import is_view
from trainfuse.testing import gradient_report

ROWS = BATCH * TIME
LOGITS = ROWS * CLASSES * 4
# 24 rows of 48 classes in chunks of 7 rows, so that the last chunk is shorter
CHUNK = 7
BUDGET = CHUNK * CLASSES * 4


def gemms(record: Any) -> int:
    """How many GEMMs make logits."""
    return sum(
        node.target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        and node.meta["val"].shape[-1] == CLASSES
        for node in record.graph.nodes("forward")
    )


def rows_in_memory(record: Any) -> int:
    """Rows of as many classes that the program computes and holds at once, at most."""
    rows = {
        node.name: node.meta["val"].shape[0]
        for node in record.graph.nodes()
        if "val" in node.meta and not is_view(node) and node.meta["val"].dim() == 2
        if node.meta["val"].shape[1] == CLASSES
    }
    memory: dict[str, str] = {}
    most = 0
    for line in record.plan.source.splitlines():
        found = re.fullmatch(r"    (\w+) = (.*)", line)
        if found and found[1] in rows:
            source = re.sub(r"memory_of\((\w+), .*\)", r"\1", found[2])  # written over, if it fits
            memory[found[1]] = memory.get(source, found[1])
        if line.startswith("    del "):
            for name in line.removeprefix("    del ").split(", "):
                memory.pop(name, None)
        most = max(most, sum(rows[name] for name in set(memory.values())))
    assert most, "no logits are in the program's text"
    return most


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of lanes that nothing stores
@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, compiler: Callable[..., Compiler]) -> None:
    """Every gradient and output, for three steps; chunked, or refused for the expected reason."""
    case = CASES[name]
    # joined, the small kernels of all chunks would be one
    options = {"chunk_memory": BUDGET // 2 if case.half else BUDGET, "horizontal": False}
    compile_fn = compiler("whole", "triton", options=options)
    gradient_report(lambda: training(name), compile_fn, k=3.0 if case.half else 2.0).check()
    compile_fn.check()
    (step,) = compile_fn.steps
    (record,) = step.plans
    reasons = [r.reason for r in record.state.refusals if r.reason.startswith("no chunks: ")]
    if case.refused is None:
        assert reasons == []
        assert gemms(record) >= 2 * case.heads
        # and two sums of a bias's gradients, a row each
        assert rows_in_memory(record) <= case.heads * (CHUNK + 2)
    else:
        assert len(reasons) == 1, reasons
        assert case.refused in reasons[0]
        assert gemms(record) == 1


def test_memory_is_taken_over() -> None:
    """Gradients are written over logits, sums over sums; the update reads a half weight's sum."""
    torch.manual_seed(0)
    trained = training("bf16 parameters")
    torch.manual_seed(0)
    plain = training("bf16 parameters")
    options = {"chunk_memory": BUDGET // 2, "horizontal": False, "verify": "kernels"}
    step = trainfuse.compile(trained.step, backend="triton", options=options)
    for batch in trained.batches:
        step(*batch)
        plain.step(*batch)
    (record,) = step.plans
    assert step.stats()["gate"] == "pass"
    made = gemms(record)
    source = record.plan.source
    for operator in ("accumulate_", "accumulate_sum_"):
        assert source.count(f"{operator}.default(") == made - 1
    assert len(re.findall(r" = memory_of\(addmm_default\w*, .*\)$", source, re.MULTILINE)) == made
    (update,) = record.graph.graph.find_nodes(
        op="call_function", target=torch.ops.trainfuse.update.default
    )
    gradients: Any = update.args[1]
    assert torch.float32 in [g.meta["val"].dtype for g in gradients]
    step.close()
    for ours, eager in zip(trained.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours, eager, rtol=2**-6, atol=2**-8)


def test_regions_say_why_not(compiler: Callable[..., Compiler]) -> None:
    compile_fn = compiler("regions", "triton", options={"chunk_memory": BUDGET})
    gradient_report(lambda: training("loss in the model"), compile_fn).check()
    (step,) = compile_fn.steps
    assert "P4: a region's forward doesn't know" in str(step.explain())


def test_never_when_switched_off() -> None:
    trained = training("plain")
    step = trainfuse.compile(trained.step, backend="triton", options={"chunk_memory": 0})
    step(*trained.batches[0])
    (record,) = step.plans
    assert gemms(record) == 1
    assert not any("no chunks" in r.reason for r in record.state.refusals)
    step.close()
