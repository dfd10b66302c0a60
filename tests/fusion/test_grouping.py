"""Which nodes end up in one kernel, and that the plan computes what the graph says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import autodiff.rng  # noqa: F401 -- registers keep_mask
from autodiff.derive import cleanup, decompose
from autodiff.graph import NodeFacts, TrainingGraph
from autodiff.reference import run_graph
from tests.autodiff.training_graphs import Builder, training_graph
from tests.fusion.helpers import check, forward_graph, run_plan, supports
from trainfuse.fusion.cost import group_cost
from trainfuse.fusion.grouping import plan_fusion
from trainfuse.fusion.plan import FusionGroup, FusionOptions, FusionPlan

aten = torch.ops.aten


def randn(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape) for shape in shapes]


def planned(
    fn: Callable[..., Any], args: list[Tensor], trainable: list[int], **options: Any
) -> tuple[TrainingGraph, FusionPlan]:
    """The plan of one step of fn, checked, and run against the graph itself."""
    traced = training_graph(fn, args, trainable) if trainable else forward_graph(fn, args)
    tg = cleanup(decompose(traced))
    plan = plan_fusion(tg, supports=supports, options=FusionOptions(**options))
    check(tg, plan)
    assert_same_values(tg, plan, args)
    return tg, plan


def assert_same_values(tg: TrainingGraph, plan: FusionPlan, args: list[Tensor]) -> None:
    placeholders = [node for node in tg.graph.nodes if node.op == "placeholder"]
    rest = [torch.randn(node.meta["val"].shape) for node in placeholders[len(args) :]]
    given = [arg.clone() for arg in (*args, *rest)]
    for want, got in zip(run_graph(tg, given), run_plan(tg, plan, given), strict=True):
        assert (want is None) == (got is None)
        if want is not None:
            assert torch.equal(want, got)


def kinds(plan: FusionPlan, phase: str) -> list[str]:
    return [group.domain.kind for group in plan.groups if group.phase == phase]


def targets(plan: FusionPlan) -> set[str]:
    return {str(node.target) for node in plan.aten}


# What the groups are.


def test_layer_norm_is_one_kernel_each_way() -> None:
    def fn(x: Tensor, residual: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.layer_norm(F.gelu(x) + residual, (64,), w, b)

    _, plan = planned(fn, randn((8, 64), (8, 64), (64,), (64,)), [0, 1, 2, 3])
    assert kinds(plan, "forward") == ["row"]
    assert kinds(plan, "backward") == ["row_column"]
    assert plan.aten == ()


def test_bias_gradient_joins_the_pointwise_that_feeds_it() -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.gelu(x @ w + b)

    _, plan = planned(fn, randn((8, 16), (16, 32), (32,)), [1, 2])
    assert kinds(plan, "backward") == ["column"]
    [group] = [group for group in plan.groups if group.phase == "backward"]
    written = {str(node.target) for node in group.outputs}
    assert written == {"aten.gelu_backward.default", "aten.sum.dim_IntList"}, "GEMM reads the first"


def test_cross_entropy_is_a_row_kernel_and_a_sum() -> None:
    def fn(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits, target)

    args = [torch.randn(8, 10), torch.randint(0, 10, (8,))]
    _, plan = planned(fn, args, [0])
    assert kinds(plan, "forward") == ["row", "full"]
    assert kinds(plan, "backward") == ["row"]
    reasons = {refusal.reason for refusal in plan.refusals}
    assert any("a sum over the results of rows" in reason for reason in reasons)


def test_attention_scores_are_one_row_kernel() -> None:
    def fn(scores: Tensor, mask: Tensor) -> Tensor:
        return (scores * 0.5).masked_fill(mask, float("-inf")).softmax(-1)

    mask = torch.ones(8, 8, dtype=torch.bool).triu(1)
    _, plan = planned(fn, [torch.randn(2, 3, 8, 8), mask], [0])
    assert kinds(plan, "forward") == ["row"]
    assert kinds(plan, "backward") == ["row"]
    assert plan.aten == ()


def test_views_inside_are_free_and_outside_are_aten() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = torch.exp(x) * 2
        return (y.view(4, 6).t() @ w).relu()

    _, plan = planned(fn, randn((2, 2, 6), (4, 5)), [])
    [group] = plan.groups
    assert [str(node.target) for node in group.outputs] == ["aten.mul.Tensor"]
    assert targets(plan) == {
        "aten.view.default",
        "aten.t.default",
        "aten.mm.default",
        "aten.relu.default",
    }


def test_a_view_with_readers_on_both_sides_is_in_both_places() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        flat = torch.exp(x).view(4, 6)
        return flat * 2, flat @ w

    _, plan = planned(fn, randn((2, 2, 6), (6, 5)), [])
    [group] = plan.groups
    assert any(node.target is aten.view.default for node in group.nodes)
    assert "aten.view.default" in targets(plan)


def test_no_merge_closes_a_cycle() -> None:
    def fn(x: Tensor, z: Tensor, w: Tensor) -> Tensor:
        y = torch.maximum(x, z)
        return y + (y * 2) @ w

    _, plan = planned(fn, randn((8, 8), (8, 8), (8, 8)), [])
    [group] = plan.groups
    names = ["aten.maximum.default", "aten.mul.Tensor"]
    assert [str(node.target) for node in group.nodes] == names
    assert [str(node.target) for node in group.outputs] == names


def test_a_small_value_is_not_written_by_a_large_group() -> None:
    def fn(x: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        scaled = b * 2
        return x + scaled, scaled

    _, plan = planned(fn, randn((8, 16), (16,)), [])
    assert plan.groups == ()
    assert any("smaller than the group" in refusal.reason for refusal in plan.refusals)


def test_a_widening_cast_is_copied_into_each_reader() -> None:
    b = Builder()
    x, w = b.input(8, 8, dtype=torch.bfloat16), b.input(8, 8)
    wide = b.call(aten._to_copy.default, x, dtype=torch.float32)
    left = b.call(aten.exp.default, b.call(aten.mul.Tensor, wide, 2))
    product = b.call(aten.mm.default, left, w)
    right = b.call(aten.exp.default, b.call(aten.add.Tensor, product, wide))
    tg = b.finish(left, right)
    plan = plan_fusion(tg, supports=supports)
    check(tg, plan)
    assert [wide in group.nodes for group in plan.groups] == [True, True]
    assert not any(wide in group.outputs for group in plan.groups)
    assert_same_values(tg, plan, [torch.randn(8, 8).bfloat16(), torch.randn(8, 8)])


def test_dropout_masks_are_kernels_even_alone() -> None:
    b = Builder()
    x = b.input(8, 8)
    seed = b.input(1, dtype=torch.int64, trainable=False)
    mask = b.call(torch.ops.trainfuse.keep_mask.default, seed, 0, 0.5, [8, 8])
    product = b.call(aten.mm.default, x, x)
    tg = b.finish(mask, product)
    plan = plan_fusion(tg, supports=supports)
    check(tg, plan)
    [group] = plan.groups
    assert group.nodes == (mask,)


# What holds them apart.


def phases_graph() -> TrainingGraph:
    b = Builder()
    x = b.input(8, 8)
    first = b.call(aten.relu.default, x)
    second = b.call(aten.exp.default, first)
    third = b.call(aten.neg.default, second, phase="backward", of=second)
    fourth = b.call(aten.abs.default, third, phase="backward", of=first)
    return b.finish(fourth)


def test_groups_never_span_phases() -> None:
    tg = phases_graph()
    plan = plan_fusion(tg, supports=supports)
    check(tg, plan)
    assert [(group.name, len(group.nodes)) for group in plan.groups] == [
        ("forward_0", 2),
        ("backward_0", 2),
    ]


def test_what_slicing_left_out_stays_aten() -> None:
    tg = phases_graph()
    owner = dict.fromkeys(tg.nodes("forward"), 0)
    plan = plan_fusion(tg, owner, supports=supports)
    check(tg, plan)
    assert [group.phase for group in plan.groups] == ["forward"]
    assert list(plan.aten) == tg.nodes("backward")
    assert [r.reason for r in plan.refusals] == [
        "slicing left it outside every differentiable subgraph"
    ] * 2


def test_the_update_is_fused_without_slices() -> None:
    b = Builder()
    x = b.input(8, 8)
    scaled = b.call(aten.mul.Tensor, x, 2, phase="update")
    tg = b.finish(b.call(aten.add.Tensor, scaled, 1, phase="update"))
    plan = plan_fusion(tg, {}, supports=supports)
    assert [group.phase for group in plan.groups] == ["update"]


def test_random_draws_keep_their_order() -> None:
    b = Builder()
    x = b.input(8, 8)
    late = b.call(aten.rand_like.default, x)
    early = b.call(aten.randn_like.default, x)
    tg = b.finish(b.call(aten.add.Tensor, early, 1), late)
    plan = plan_fusion(tg, supports=supports)
    check(tg, plan)
    assert plan.aten.index(late) < plan.aten.index(early)


# Switches.


def siblings(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 0.5, x + 1


def test_horizontal_joins_siblings_that_share_a_read() -> None:
    _, plan = planned(siblings, randn((8, 8)), [])
    [group] = plan.groups
    assert group_cost(group).saved_bytes == 8 * 8 * 4
    _, apart = planned(siblings, randn((8, 8)), [], horizontal=False)
    assert apart.groups == ()


def test_unrelated_nodes_and_scalars_are_no_siblings() -> None:
    def unrelated(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * 0.5, y + 1

    assert planned(unrelated, randn((8, 8), (8, 8)), [])[1].groups == ()
    assert planned(siblings, [torch.tensor(1.0)], [])[1].groups == ()


@pytest.mark.parametrize(("rows", "groups"), [(64, [4]), (1 << 16, [2, 2])])
def test_siblings_that_share_only_a_vector_save_a_launch(rows: int, groups: list[int]) -> None:
    """Which is worth it while they move little."""

    def fn(x: Tensor, y: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return torch.exp(x + b), torch.exp(y * b)

    _, plan = planned(fn, randn((rows, 64), (rows, 64), (64,)), [])
    assert [len(group.nodes) for group in plan.groups] == groups


def test_sibling_reductions_are_one_kernel() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sum(-1), x.amax(-1)

    _, plan = planned(fn, randn((8, 16)), [])
    [group] = plan.groups
    assert group.domain.kind == "row"


def test_single_node_lets_one_operation_be_a_group() -> None:
    _, plan = planned(torch.relu, randn((8, 8)), [])
    assert plan.groups == ()
    assert "alone" in plan.refusals[0].reason
    _, plan = planned(torch.relu, randn((8, 8)), [], single_node=True)
    assert len(plan.groups) == 1


@pytest.mark.parametrize("name", ["aten.add", "aten.add.Tensor"])
def test_skipped_operators_stay_aten_in_both_phases(name: str) -> None:
    def fn(x: Tensor) -> Tensor:
        return (torch.exp(x) * x + x).tanh()

    _, plan = planned(fn, randn((8, 8)), [0], skip_ops=frozenset({name}))
    assert "aten.add.Tensor" in targets(plan)
    fused = {str(node.target) for group in plan.groups for node in group.nodes}
    assert "aten.add.Tensor" not in fused
    assert "aten.exp.default" in fused
    assert any("skipped" in refusal.reason for refusal in plan.refusals)


def test_fuse_first_keeps_the_first_groups_only() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(3):
            x = (torch.tanh(x) + 1).exp() @ w * 0.01
        return x

    args = randn((8, 8), (8, 8))
    full = planned(fn, args, [0])[1]
    assert len(full.groups) >= 3
    for count in range(len(full.groups) + 1):
        _, plan = planned(fn, args, [0], fuse_first=count)
        assert [g.nodes for g in plan.groups] == [] or len(plan.groups) == count
        assert [len(g.nodes) for g in plan.groups] == [len(g.nodes) for g in full.groups[:count]]


def test_limits_bound_a_group() -> None:
    def fn(x: Tensor) -> Tensor:
        for _ in range(20):
            x = torch.exp(x) * 0.5
        return x

    _, plan = planned(fn, randn((8, 8)), [], max_nodes=8)
    assert len(plan.groups) > 4
    assert all(len(group.nodes) <= 8 for group in plan.groups)

    def wide(*xs: Tensor) -> Tensor:
        return sum(x * 2 for x in xs)  # type: ignore[return-value]  # not an int: never empty

    _, plan = planned(wide, randn(*[(8, 8)] * 12), [], max_pointers=6)
    assert len(plan.groups) > 1
    assert all(len(group.inputs) + len(group.outputs) <= 6 for group in plan.groups)


# Reports.


def test_refusals_carry_the_users_line() -> None:
    tg = phases_graph()
    facts = {
        node: NodeFacts(fact.phase, fact.forward_of, "model.py:7")
        for node, fact in tg.facts.items()
    }
    plan = plan_fusion(replace(tg, facts=facts), {}, supports=supports)
    assert {refusal.where for refusal in plan.refusals} == {"model.py:7"}
    assert {refusal.stage for refusal in plan.refusals} == {"fusion"}


def test_cost_counts_each_value_once_and_broadcast_by_its_elements() -> None:
    def fn(x: Tensor, b: Tensor) -> Tensor:
        return torch.relu(x + b) * x

    _, plan = planned(fn, randn((64, 32), (32,)), [])
    [group] = plan.groups
    cost = group_cost(group)
    assert cost.read_bytes == (64 * 32 + 32) * 4
    assert cost.written_bytes == 64 * 32 * 4
    assert cost.aten_bytes == (7 * 64 * 32 + 32) * 4
    assert cost.saved_bytes == cost.aten_bytes - cost.effective_bytes


def test_equal_graphs_give_equal_plans() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return torch.softmax(torch.exp(x @ w) + x, -1)

    def names() -> list[str]:
        _, plan = planned(fn, randn((8, 16), (16, 16)), [0, 1])
        return [item.name for item in plan.order]

    assert names() == names()


def test_groups_are_what_executes() -> None:
    tg = phases_graph()
    plan = plan_fusion(tg, supports=supports)
    assert plan.groups == tuple(item for item in plan.order if isinstance(item, FusionGroup))
