"""A memory budget keeps its word: least effort, masks and choices made once, gradients the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from training_graphs import training_graph

from autodiff import ops
from autodiff.budget import RUNGS, take
from autodiff.cut import CutProblem, Plan
from autodiff.graph import TrainingGraph
from autodiff.liveness import peak_bytes
from autodiff.recompute import RecomputeReport, plan_recompute
from autodiff.reference import run_graph
from autodiff.rng import functionalize_dropout
from autodiff.verify import verify
from autodiff.waists import Waists

ROWS, WIDTH, LAYERS = 64, 16, 12


def residual(x: Tensor, *weights: Tensor) -> Tensor:
    """Pre-norm layers with a residual stream, a network four times as wide."""
    for up, down in zip(weights[::2], weights[1::2], strict=True):
        x = x + F.gelu(F.layer_norm(x, (WIDTH,)) @ up) @ down
    return x


def chain(x: Tensor, *weights: Tensor) -> Tensor:
    """No stream: each layer's result is all that the next one reads."""
    for up, down in zip(weights[::2], weights[1::2], strict=True):
        x = torch.tanh(F.silu(x @ up) @ down)
    return x


def dropped(x: Tensor, *weights: Tensor) -> Tensor:
    """The residual layers with dropout of both kinds of values."""
    for up, down in zip(weights[::2], weights[1::2], strict=True):
        h = torch.native_dropout(F.gelu(F.layer_norm(x, (WIDTH,)) @ up), 0.3, True)[0]
        x = x + torch.native_dropout(h @ down, 0.3, True)[0]
    return x


def routed(x: Tensor, *weights: Tensor) -> Tensor:
    """Layers whose columns are chosen by their values."""
    for up, down in zip(weights[::2], weights[1::2], strict=True):
        h = x @ up
        best, chosen = h.topk(4, dim=-1)
        x = x + torch.zeros_like(h).scatter(1, chosen, best.softmax(-1)) @ down
    return x


def extreme(x: Tensor, *weights: Tensor) -> Tensor:
    """Layers that read the maxima of a contraction, whose gradient asks who equals them."""
    for up, down in zip(weights[::2], weights[1::2], strict=True):
        h = F.layer_norm(x, (WIDTH,)) @ up
        x = x + F.gelu(h) @ down * h.amax(-1, keepdim=True)
    return x


def graph_of(
    net: Callable[..., Tensor], layers: int = LAYERS
) -> tuple[TrainingGraph, list[Tensor]]:
    """The net's training graph, and inputs with a cotangent."""
    shapes = [(WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)] * layers
    args = [torch.randn(ROWS, WIDTH), *(torch.randn(shape) / 8 for shape in shapes)]
    return training_graph(net, args, range(len(args))), [*args, torch.randn(ROWS, WIDTH)]


def contractions(tg: TrainingGraph, report: RecomputeReport) -> int:
    by_name = {node.name: node for node in tg.nodes()}
    costs = (ops.lookup(by_name[name].target).cost for name in report.recomputed)
    return sum(cost == "expensive" for cost in costs)


def same_gradients(one: TrainingGraph, other: TrainingGraph, inputs: list[Tensor]) -> None:
    results = []
    for tg in (one, other):
        torch.manual_seed(7)
        results.append(run_graph(tg, inputs, torch.float64))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("net", [residual, chain, dropped, routed])
def test_budgets_are_kept_by_growing_effort(net: Callable[..., Tensor]) -> None:
    tg, inputs = graph_of(net)
    tg = functionalize_dropout(tg)
    baseline = peak_bytes(tg).num_bytes
    efforts = []
    for budget in (None, 0.8, 0.6, 0.4):
        planned, report = plan_recompute(tg, budget)
        verify(planned)
        same_gradients(planned, tg, inputs)
        efforts.append(contractions(tg, report))
        if budget is not None:
            assert report.baseline_peak == baseline
            assert report.limit == int(budget * baseline)
            assert report.within_budget
            assert report.peak == peak_bytes(planned).num_bytes <= report.limit
    assert efforts[0] == 0, "without a budget no contraction is done twice"
    assert efforts == sorted(efforts)
    assert efforts[-1] > 0


def test_a_quarter_of_a_deep_net_by_checkpoints() -> None:
    tg, inputs = graph_of(residual)
    planned, report = plan_recompute(tg, 0.25)
    assert report.within_budget
    same_gradients(planned, tg, inputs)
    assert {note.why for note in report.kept} >= {"a checkpoint, for memory_budget"}
    assert report.saved_bytes < 0.2 * report.baseline_bytes


def test_bytes_are_a_budget_too() -> None:
    tg, _ = graph_of(residual)
    limit = peak_bytes(tg).num_bytes // 2
    planned, report = plan_recompute(tg, limit)
    assert report.limit == limit
    assert peak_bytes(planned).num_bytes <= limit
    assert plan_recompute(tg, 1 << 40)[1].recomputed == plan_recompute(tg)[1].recomputed


def test_effort_is_no_greater_than_the_budget_asks() -> None:
    """Between what costs no contraction and the least: some of the layers, not the last ones."""
    tg, _ = graph_of(residual)
    least = plan_recompute(tg, 0.0)[1]
    assert least.peak is not None
    problem = CutProblem(tg, None, ())
    cheap = min(take(problem, Plan(late=effort)).peak for effort in RUNGS)
    assert least.peak < cheap
    _, report = plan_recompute(tg, (least.peak + cheap) // 2)
    assert report.within_budget
    assert 0 < contractions(tg, report) < contractions(tg, least)
    order = {node.name: i for i, node in enumerate(tg.nodes("forward"))}
    again = [order[n] for n in report.recomputed if "mm" in n]
    assert max(again) < 0.8 * len(order)


def test_what_cannot_be_met_is_said_with_the_least_possible() -> None:
    tg, inputs = graph_of(residual)
    planned, report = plan_recompute(tg, 0.01)
    assert not report.within_budget
    assert report.peak == peak_bytes(planned).num_bytes
    same_gradients(planned, tg, inputs)
    assert report.peak < 0.25 * peak_bytes(tg).num_bytes
    assert report.limit is not None
    assert report.peak > report.limit


@pytest.mark.parametrize("budget", [0.6, 0.3])
def test_masks_come_from_one_seed_that_is_drawn_once(budget: float) -> None:
    tg, _ = graph_of(dropped)
    tg = functionalize_dropout(tg)
    planned, report = plan_recompute(tg, budget)
    assert report.within_budget
    targets = [node.target for node in planned.nodes()]
    assert targets.count(torch.ops.trainfuse.seed.default) == 1
    masks = {
        phase: {
            (node.args[0].name, node.args[1])
            for node in planned.nodes(phase)
            if node.target is torch.ops.trainfuse.keep_mask.default
        }
        for phase in ("forward", "backward")
    }
    assert masks["backward"] <= masks["forward"]
    assert len(masks["forward"]) == 2 * LAYERS


def test_eager_masks_and_choices_are_never_made_twice() -> None:
    for net, once in ((dropped, "native_dropout"), (routed, "topk")):
        tg, inputs = graph_of(net)
        planned, report = plan_recompute(tg, 0.3)
        assert not any(once in name for name in report.recomputed)
        assert contractions(tg, report) > 0
        same_gradients(planned, tg, inputs)


def test_maxima_are_made_again_where_their_contraction_is() -> None:
    """Of operands that another kernel makes, the contraction has other last bits."""
    tg, inputs = graph_of(extreme)
    planned, report = plan_recompute(tg, 0.3)
    assert contractions(tg, report) > 0
    same_gradients(planned, tg, inputs)
    again = set(report.recomputed)
    pairs = {
        n.name: n.args[0] for n in tg.nodes("forward") if n.target is torch.ops.aten.amax.default
    }
    assert len(pairs) == LAYERS
    assert any(value.name in again for value in pairs.values())
    assert all(made in again for made, value in pairs.items() if value.name in again)


def test_a_measurement_is_believed_more_than_the_estimate() -> None:
    """A plan that needs half as much again as estimated is asked for less until it fits."""
    tg, _ = graph_of(residual)
    measured: list[int] = []

    def measure(graph: TrainingGraph) -> int:
        size = peak_bytes(graph).num_bytes
        again = len(graph.nodes()) > len(tg.nodes())
        measured.append(size * 3 // 2 if again else size)
        return measured[-1]

    planned, report = plan_recompute(tg, 0.5, measure)
    assert report.within_budget
    assert report.peak == peak_bytes(planned).num_bytes * 3 // 2 == measured[-1]
    assert len(measured) > 2


def test_checkpoints_stand_where_the_forward_is_narrow() -> None:
    tg, _ = graph_of(residual)
    problem = CutProblem(tg, None, ())
    saved, _ = problem.cut(Plan())
    kept = Waists(problem, saved).checkpoints(LAYERS // 2)
    assert 0.25 * LAYERS <= len(kept) <= LAYERS
    assert {tuple(node.meta["val"].shape) for node in kept} == {(ROWS, WIDTH)}
    assert all(_is_stream(node) for node in kept)


def _is_stream(node: fx.Node) -> bool:
    return any("layer_norm" in user.name for user in node.users)


def test_the_estimate_sees_what_fusion_leaves_out() -> None:
    """Of a pointwise chain only the last has memory, which a contraction and its gradient read."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return x.sin().exp().cos() @ w

    tg = training_graph(fn, [torch.randn(ROWS, WIDTH), torch.randn(WIDTH, WIDTH)], [1])
    assert peak_bytes(tg).num_bytes == ROWS * WIDTH * 4
