"""Log-probabilities are computed again in the backward, from logits and row statistics."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from autodiff.derive import cleanup, decompose
from autodiff.graph import TrainingGraph
from autodiff.recompute import plan_recompute
from autodiff.reference import run_graph
from autodiff.verify import verify
from tests.autodiff.training_graphs import Builder, training_graph
from tests.fusion.helpers import check, supports
from trainfuse.fusion.grouping import plan_fusion
from trainfuse.fusion.plan import FusionPlan
from trainfuse.fusion.rewrites.row_statistics import recompute_from_statistics

aten = torch.ops.aten
ROWS, CLASSES = 16, 96


def step_graph(dtype: torch.dtype = torch.float32) -> tuple[TrainingGraph, list[Tensor]]:
    def step(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy((x @ w).float(), target)

    args = [
        torch.randn(ROWS, 8, dtype=dtype),
        torch.randn(8, CLASSES, dtype=dtype),
        torch.randint(0, CLASSES, (ROWS,)),
    ]
    tg, _ = plan_recompute(cleanup(training_graph(step, args, [0, 1])))
    return cleanup(decompose(tg)), args


def large_values(plan: FusionPlan, phase: str) -> list[str]:
    """Outputs of one value a logit."""
    return [
        node.name
        for group in plan.groups
        if group.phase == phase
        for node in group.outputs
        if node.meta["val"].numel() == ROWS * CLASSES
    ]


def test_forward_writes_no_log_probabilities() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        tg, args = step_graph(dtype)
        before = plan_fusion(tg, supports=supports)
        assert len(large_values(before, "forward")) == 1
        new = verify(recompute_from_statistics(tg), "row statistics")
        plan = plan_fusion(new, supports=supports)
        check(new, plan)
        assert large_values(plan, "forward") == []
        assert [g.domain.kind for g in plan.groups if g.phase == "backward"] == ["row"]
        given = [*args, torch.randn(())]
        for want, got in zip(run_graph(tg, given), run_graph(new, given), strict=True):
            assert torch.equal(want, got)


def test_the_graph_given_is_left_as_it_was() -> None:
    tg, _ = step_graph()
    text = str(tg.graph)
    recompute_from_statistics(tg)
    assert str(tg.graph) == text


def test_nothing_to_gain_gives_the_same_graph() -> None:
    def step(x: Tensor, w: Tensor) -> Tensor:
        return torch.softmax(x @ w, -1) @ w.t()

    args = [torch.randn(4, 8), torch.randn(8, 8)]
    tg, _ = plan_recompute(cleanup(training_graph(step, args, [0, 1])))
    tg = cleanup(decompose(tg))
    assert recompute_from_statistics(tg) is tg, "a GEMM needs the probabilities in memory"


def two_phases(read: int) -> TrainingGraph:
    """tanh(a + b + ..) saved for the backward: cheap to save, dear to compute again."""
    b = Builder()
    terms = [b.call(aten.mm.default, b.input(8, 8), b.input(8, 8)) for _ in range(read)]
    total = terms[0]
    for term in terms[1:]:
        total = b.call(aten.add.Tensor, total, term)
    saved = b.call(aten.tanh.default, total)
    loss = b.call(aten.sum.default, saved)
    gradient = b.call(aten.tanh_backward.default, b.input(8, 8), saved, phase="backward", of=saved)
    return b.finish(loss, gradient)


def test_computing_again_must_not_read_or_hold_more() -> None:
    once = two_phases(1)
    assert recompute_from_statistics(once) is not once, "one operand instead of a write and a read"
    wide = two_phases(2)
    assert recompute_from_statistics(wide) is wide, (
        "two operands would be held instead of one value"
    )
