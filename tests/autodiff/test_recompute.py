"""What is saved: minimum cut, prices, budgets, checkpoint tags; gradients never change."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy
from training_graphs import Builder, training_graph

from autodiff import ops
from autodiff.budget import RUNGS
from autodiff.cut import CutProblem, Plan
from autodiff.graph import NodeFacts, TrainingGraph
from autodiff.liveness import peak_bytes
from autodiff.mincut import INFINITE, FlowNetwork
from autodiff.recompute import choose, plan_recompute
from autodiff.reference import run_graph
from autodiff.rng import functionalize_dropout
from autodiff.verify import verify

aten: Any = torch.ops.aten


def cut_value(edges: list[tuple[int, int, int]], side: set[int]) -> int:
    return sum(c for tail, head, c in edges if tail in side and head not in side)


@pytest.mark.parametrize("seed", range(40))
def test_minimum_cut_against_enumeration(seed: int) -> None:
    draw = random.Random(seed)
    size = 7
    edges = [
        (tail, head, draw.choice([0, 1, 2, 5, 9]))
        for tail, head in itertools.permutations(range(size), 2)
        if draw.random() < 0.4
    ]
    network = FlowNetwork(size)
    for edge in edges:
        network.add_edge(*edge)
    side = network.source_side(0, size - 1)
    assert side is not None
    assert 0 in side
    assert size - 1 not in side
    sides = [
        {0, *middle}
        for count in range(size - 1)
        for middle in itertools.combinations(range(1, size - 1), count)
    ]
    least = min(cut_value(edges, each) for each in sides)
    assert cut_value(edges, side) == least
    # nearest to the source: contained in every other minimum cut
    assert all(side <= each for each in sides if cut_value(edges, each) == least)


def test_infinite_cut_is_none() -> None:
    network = FlowNetwork(3)
    network.add_edge(0, 1, INFINITE)
    network.add_edge(1, 2, INFINITE)
    assert network.source_side(0, 2) is None


def mlp_step(x: Tensor, w: Tensor, v: Tensor, y: Tensor) -> Tensor:
    hidden = F.layer_norm(torch.tanh(F.gelu(x @ w)), (48,))
    hidden = torch.native_dropout(torch.sin(hidden), 0.2, True)[0]
    return F.cross_entropy(hidden @ v, y)


def mlp_graph() -> tuple[TrainingGraph, list[Tensor]]:
    args = [torch.randn(16, 24), torch.randn(24, 48), torch.randn(48, 10)]
    target = torch.randint(0, 10, (16,))
    tg = training_graph(mlp_step, [*args, target], [0, 1, 2])
    return functionalize_dropout(tg), [*args, target, torch.randn(())]


@pytest.mark.parametrize("budget", [None, 1.0, 0.6, 0.3, 0.0, 2000])
def test_gradients_never_change(budget: float | None) -> None:
    tg, inputs = mlp_graph()
    planned, report = plan_recompute(tg, budget)
    verify(planned)
    torch.manual_seed(3)
    wanted = run_graph(tg, inputs, torch.float64)
    torch.manual_seed(3)
    for ours, theirs in zip(run_graph(planned, inputs, torch.float64), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    limit = None if budget is None else budget if budget > 1 else budget * peak_bytes(tg).num_bytes
    assert report.within_budget == (limit is None or peak_bytes(planned).num_bytes <= limit)


def test_default_saves_no_more_than_the_derivative_formulas_read() -> None:
    tg, _ = mlp_graph()
    _, report = plan_recompute(tg)
    assert report.saved_bytes <= report.baseline_bytes


def recomputed_targets(tg: TrainingGraph, names: tuple[str, ...]) -> set[str]:
    by_name = {node.name: node for node in tg.nodes()}
    return {str(by_name[name].target) for name in names}


def test_default_recomputes_cheap_nodes_only() -> None:
    tg, _ = mlp_graph()
    _, report = plan_recompute(tg)
    targets = recomputed_targets(tg, report.recomputed)
    assert "trainfuse.keep_mask.default" in targets
    assert not targets & {
        "aten.mm.default",
        "aten.native_layer_norm.default",
        "aten._log_softmax.default",
        "trainfuse.seed.default",
    }
    saved = recomputed_targets(tg, report.saved)
    assert "aten.mm.default" in saved
    assert "trainfuse.keep_mask.default" not in saved


def test_norm_saves_mean_and_rstd() -> None:
    tg = training_graph(lambda x: F.layer_norm(x.sin(), (64,)).cos(), [torch.randn(8, 64)], [0])
    _, report = plan_recompute(tg)
    shapes = {tuple(node.meta["val"].shape) for node in tg.nodes() if node.name in report.saved}
    assert (8, 1) in shapes
    assert "native_layer_norm" not in report.recomputed


def test_chain_of_pointwise_nodes_saves_nothing_but_inputs() -> None:
    tg = training_graph(
        lambda x: x.sin().exp().tanh().cos().mul(2).exp(), [torch.randn(64, 64)], [0]
    )
    planned, report = plan_recompute(tg)
    assert report.saved == ()
    assert report.saved_bytes == 0
    assert {planned.phase(n) for n in planned.nodes() if "exp" in n.name} == {
        "forward",
        "backward",
    }


def residual_net(x: Tensor, *weights: Tensor) -> Tensor:
    for w in weights:
        x = x + F.gelu(F.layer_norm(x, (32,)) @ w)
    return x


@pytest.mark.parametrize("budget", [None, 0.9])
def test_residual_stream_is_saved_not_rebuilt(budget: float | None) -> None:
    # Rebuilding it from every branch would keep all branches and all rebuilt values alive at once.
    weights = [torch.randn(32, 32) for _ in range(6)]
    tg = training_graph(residual_net, [torch.randn(4, 32), *weights], [0])
    _, report = plan_recompute(tg, budget)
    stream = {
        node.name
        for node in tg.nodes("forward")
        if str(node.target) == "aten.add.Tensor"
        and any("layer_norm" in user.name for user in node.users)
    }
    assert len(stream) == 5
    assert stream <= set(report.saved)


def test_value_written_for_a_backward_gemm_is_saved() -> None:
    # gelu(x) feeds a GEMM in both phases: computing it again would write it a second time
    tg = training_graph(
        lambda x, w, v: F.gelu(x @ w) @ v,
        [torch.randn(16, 24), torch.randn(24, 48), torch.randn(48, 10)],
        [0, 1, 2],
    )
    _, report = plan_recompute(tg)
    assert {"mm", "gelu"} <= set(report.saved)
    _, recomputed = CutProblem(tg, None, ()).cut(Plan(late=RUNGS[1]))
    assert "gelu" in {node.name for node in recomputed}


def test_copies_stand_late_and_belong_to_their_reader() -> None:
    tg, _ = mlp_graph()
    planned, report = plan_recompute(tg)
    originals = {node.name for node in tg.nodes()}
    order = {node: i for i, node in enumerate(planned.graph.nodes)}
    copies = [node for node in planned.nodes() if node.name not in originals]
    assert copies
    assert len(copies) <= len(report.recomputed)
    for copy in copies:
        assert planned.phase(copy) == "backward"
        first = min(copy.users, key=order.__getitem__)
        links = {planned.facts[user].forward_of for user in copy.users}
        assert planned.facts[copy].forward_of in links
        between = list(planned.graph.nodes)[order[copy] + 1 : order[first]]
        assert all(node in copies for node in between)


def test_copy_for_an_unlinked_reader_links_to_its_original() -> None:
    b = Builder()
    y = b.call(aten.sin.default, b.input(8, 8))
    z = b.call(aten.exp.default, y)
    g = b.call(aten.neg.default, z, phase="backward")
    planned, report = plan_recompute(b.finish(z, g))
    assert set(report.recomputed) == {y.name, z.name}
    links = {n.name: planned.facts[n].forward_of for n in planned.nodes("backward")}
    assert sorted(link for link in links.values() if link) == [z.name, z.name]


def test_output_handed_on_in_a_later_phase_is_not_recomputed() -> None:
    b = Builder()
    x = b.input(8, 8)
    y = b.call(aten.sin.default, x)
    g = b.call(aten.cos.default, x, phase="backward", of=y)
    late = b.call(aten.alias.default, y, phase="update")
    tg = b.finish(late, g)
    planned, report = plan_recompute(tg)
    assert report.recomputed == ()
    assert planned is tg


def test_output_handed_on_stays_the_forwards_own() -> None:
    b = Builder()
    x = b.input(8, 8)
    y = b.call(aten.sin.default, x)
    g = b.call(aten.exp.default, y, phase="backward", of=y)
    late = b.call(aten.alias.default, y, phase="update")
    planned, report = plan_recompute(b.finish(late, g))
    assert report.recomputed == (y.name,)
    handed = planned.output_nodes[0].args[0]
    assert handed.name == y.name
    assert planned.phase(handed) == "forward"


def test_nothing_is_recomputed_from_overwritten_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    write: Any = aten.copy_.default  # stands for the update: it writes a parameter
    monkeypatch.setitem(ops.TABLE, ops.op_name(write), ops.TABLE["trainfuse.update.default"])
    b = Builder()
    x, bias = b.input(8, 8), b.input(8)
    y = b.call(aten.add.Tensor, x, bias)
    g = b.call(aten.exp.default, y, phase="backward", of=y)
    effect = b.graph.call_function(write, ([bias], [g]))
    b.facts[effect] = NodeFacts("update")
    late = b.call(aten.sin.default, y, phase="update")
    planned, report = plan_recompute(b.finish(late, g))
    verify(planned)
    assert report.recomputed == (y.name,)
    (read,) = planned.output_nodes[0].all_input_nodes
    assert planned.phase(read) == "forward"


def tag(tg: TrainingGraph, names: set[str], region: int = 0) -> None:
    for node in tg.nodes("forward"):
        if node.name in names:
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
            node.meta["ac_graph_id"] = region


def test_checkpoint_tags_are_honoured() -> None:
    weights = [torch.randn(32, 32) for _ in range(3)]

    def fn(x: Tensor, *weights: Tensor) -> Tensor:
        for w in weights:
            x = torch.tanh(x @ w)
        return x

    tg = training_graph(fn, [torch.randn(4, 32), *weights], [0, 1, 2, 3])
    tag(tg, {"mm_1", "tanh_1"})
    planned, report = plan_recompute(tg)
    verify(planned)
    assert "mm_1" in report.recomputed
    assert "mm_1" not in report.saved
    assert "tanh" in report.saved  # the region's input
    assert "mm" not in report.recomputed
    inputs = [torch.randn(4, 32), *weights, torch.randn(4, 32)]
    for ours, theirs in zip(run_graph(planned, inputs), run_graph(tg, inputs), strict=True):
        assert torch.equal(ours, theirs)


def test_must_save_is_honoured() -> None:
    tg = training_graph(lambda x: x.sin().exp().tanh(), [torch.randn(64, 64)], [0])
    node = next(n for n in tg.nodes("forward") if n.name == "exp")
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    _, report = plan_recompute(tg)
    assert "exp" in report.saved


def test_eager_masks_are_saved_even_when_tagged() -> None:
    tg = training_graph(
        lambda x: torch.native_dropout(x.sin(), 0.5, True)[0].exp(), [torch.randn(64, 64)], [0]
    )
    tag(tg, {node.name for node in tg.nodes("forward")})
    planned, report = plan_recompute(tg)
    assert not any("dropout" in name for name in report.recomputed)
    torch.manual_seed(1)
    _, gradient = run_graph(planned, [torch.ones(64, 64), torch.ones(64, 64)])
    torch.manual_seed(1)
    _, wanted = run_graph(tg, [torch.ones(64, 64), torch.ones(64, 64)])
    assert torch.equal(gradient, wanted)


def test_choice_covers_every_read_of_the_backward() -> None:
    tg, _ = mlp_graph()
    choice = choose(tg)
    saved, recomputed = set(choice.saved), set(choice.recomputed)
    for node in tg.nodes("backward"):
        for parent in node.all_input_nodes:
            if parent.op == "call_function" and tg.phase(parent) == "forward":
                assert parent in saved | recomputed
    for node in choice.recomputed:
        for parent in node.all_input_nodes:
            assert parent.op == "placeholder" or parent in saved | recomputed


def test_three_thousand_nodes_in_seconds() -> None:
    b = Builder()
    x = b.input(32, 32)
    w = b.input(32, 32)
    forward: list[fx.Node] = [x]
    for _ in range(250):
        y = b.call(aten.mm.default, forward[-1], w)
        for op in (aten.sin.default, aten.exp.default, aten.tanh.default, aten.neg.default):
            y = b.call(op, y)
        forward.append(b.call(aten.add.Tensor, y, forward[-1]))
    g = b.call(aten.ones_like.default, x, phase="backward")
    for node in reversed(b.graph.find_nodes(op="call_function", target=aten.tanh.default)):
        for _ in range(5):
            g = b.call(aten.mul.Tensor, g, node, phase="backward", of=node)
        g = b.call(aten.mm.default, g, w, phase="backward", of=node)
    tg = b.finish(forward[-1], g)
    assert len(tg.nodes()) > 2900
    start = time.process_time()
    planned, report = plan_recompute(tg, 0.2)
    assert time.process_time() - start < 20
    assert report.recomputed
    verify(planned)
