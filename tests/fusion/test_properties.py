"""Random graphs: whatever is merged, the plan is acyclic, complete, and computes the same."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from autodiff import ops
from autodiff.graph import Phase, TrainingGraph
from tests.autodiff.training_graphs import Builder
from tests.fusion.helpers import check, run_plan, supports
from tests.fusion.test_grouping import assert_same_values
from trainfuse.fusion.grouping import plan_fusion
from trainfuse.fusion.plan import FusionGroup, FusionOptions
from trainfuse.fusion.reach import Reach
from trainfuse.fusion.schedule import topological

aten = torch.ops.aten
SHAPES = ((4, 6), (6,), (4, 1), (2, 2, 6), (6, 4), ())


def random_graph(seed: int, size: int) -> TrainingGraph:
    """Pointwise, broadcast, reduction, view, constant and opaque nodes over a few shapes."""
    rng = random.Random(seed)
    b = Builder()
    values: list[fx.Node] = [b.input(*shape) for shape in SHAPES if shape]
    turn = size * rng.random()

    def of(*shapes: tuple[int, ...]) -> fx.Node | None:
        found = [v for v in values if tuple(v.meta["val"].shape) in shapes]
        return rng.choice(found[-6:]) if found else None

    def step(phase: Phase) -> fx.Node | None:
        call: Callable[..., fx.Node] = lambda *a, **k: b.call(*a, phase=phase, **k)  # noqa: E731
        value = rng.choice(values[-8:])
        shape = tuple(value.meta["val"].shape)
        match rng.randrange(9):
            case 0 | 1:
                return call(rng.choice([aten.tanh, aten.neg, aten.relu]).default, value)
            case 2 | 3:
                other = of(shape, (), *([(6,), (4, 1)] if shape == (4, 6) else []))
                ready = other is not None and other.meta["val"].dim() <= len(shape)
                return call(aten.mul.Tensor, value, other) if ready else None
            case 4 if shape == (4, 6):
                dim = rng.choice([[0], [1], [0, 1]])
                return call(aten.sum.dim_IntList, value, dim, rng.random() < 0.5)
            case 5 if shape in ((4, 6), (2, 2, 6)):
                return call(aten.view.default, value, [2, 2, 6] if shape == (4, 6) else [4, 6])
            case 6 if len(shape) == 2 and 1 not in shape:
                return call(aten.permute.default, value, [1, 0])
            case 7:
                left, right = of((4, 6)), of((6, 4))
                if left is None or right is None:
                    return None
                return call(aten.mm.default, call(aten.mm.default, left, right), left)
            case 8:
                fill = call(aten.full.default, list(shape), 0.5)
                return call(aten.add.Tensor, value, fill)
        return None

    while len(b.facts) < size:
        node = step("forward" if len(b.facts) < turn else "backward")
        if node is not None:
            values.append(node)
    made = [value for value in values if value.op == "call_function"]
    unread = [node for node in made if not node.users]
    return b.finish(*unread, *rng.sample(made, min(2, len(made))))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    size=st.integers(1, 40),
    horizontal=st.booleans(),
    single_node=st.booleans(),
    fuse_first=st.none() | st.integers(0, 3),
)
def test_plans_compute_what_the_graph_says(
    seed: int, size: int, horizontal: bool, single_node: bool, fuse_first: int | None
) -> None:
    tg = random_graph(seed, size)
    options = FusionOptions(horizontal=horizontal, single_node=single_node, fuse_first=fuse_first)
    plan = plan_fusion(tg, supports=supports, options=options)
    check(tg, plan)
    inputs = [node for node in tg.graph.nodes if node.op == "placeholder"]
    assert_same_values(tg, plan, [torch.randn(node.meta["val"].shape) for node in inputs])
    runs = [node for item in plan.order for node in executed(item)]
    twice = {node for node in runs if runs.count(node) > 1}
    kinds = {ops.lookup(node.target).kind for node in twice}
    assert kinds <= {"pointwise"}, "what sums or contracts runs once"
    if fuse_first is not None:
        assert len(plan.groups) <= fuse_first


def executed(item: FusionGroup | fx.Node) -> list[fx.Node]:
    nodes = item.nodes if isinstance(item, FusionGroup) else (item,)
    free = ("view", "permute", "full")
    return [node for node in nodes if str(node.target).split(".")[1] not in free]


@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), size=st.integers(5, 40))
def test_horizontal_never_moves_more_bytes(seed: int, size: int) -> None:
    from trainfuse.fusion.cost import group_cost

    tg = random_graph(seed, size)
    for plan in (
        plan_fusion(tg, supports=supports, options=FusionOptions(horizontal=h))
        for h in (False, True)
    ):
        assert all(group_cost(group).saved_bytes >= 0 for group in plan.groups)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), size=st.integers(2, 24))
def test_reachability_follows_merges(seed: int, size: int) -> None:
    """Against a search in the contracted graph."""
    rng = random.Random(seed)
    edges = [[s for s in range(i) if rng.random() < 0.2] for i in range(size)]
    reach = Reach(edges)

    def below(unit: int, after: dict[int, set[int]]) -> set[int]:
        found: set[int] = set()
        pending = [unit]
        while pending:
            fresh = after.get(pending.pop(), set()) - found
            found |= fresh
            pending.extend(fresh)
        return found

    for _ in range(size):
        first, second = reach.find(rng.randrange(size)), reach.find(rng.randrange(size))
        if first == second:
            continue
        after: dict[int, set[int]] = {}
        for target, sources in enumerate(edges):
            for a in map(reach.find, sources):
                if a != reach.find(target):
                    after.setdefault(a, set()).add(reach.find(target))
        units = set(map(reach.find, range(size))) - {first, second}
        between = reach.between(first, second)
        assert set(between) == {
            unit
            for unit in units
            for top, bottom in ((first, second), (second, first))
            if unit in below(top, after) and bottom in below(unit, after)
        }
        for place, unit in enumerate(between):
            assert not below(unit, after) & set(between[:place])
        if not between:
            reach.merge(first, second)


def test_the_order_prefers_the_original_place() -> None:
    assert topological([0, 1, 2, 3], [set(), set(), set(), {0}]) == [0, 1, 2, 3]
    assert topological([5, 1, 2], [set(), set(), {1}]) == [1, 2, 0]
    with pytest.raises(AssertionError, match="cycle"):
        topological([0, 1], [{1}, {0}])


def test_a_whole_step_updates_after_every_reader_of_the_old_values() -> None:
    import trainfuse.capture.optimizers  # noqa: F401 -- registers the effect

    b = Builder()
    w, x = b.input(6, 4), b.input(4, 6, trainable=False)
    y = b.call(aten.tanh.default, b.call(aten.mm.default, x, w))
    g = b.call(aten.mm.default, b.call(aten.t.default, x, phase="backward"), y, phase="backward")
    late = b.call(aten.mul.Tensor, w, 2, phase="backward")
    late = b.call(aten.tanh.default, late, phase="backward")
    update = b.graph.call_function(torch.ops.trainfuse.update.default, ([w], [g], 0))
    b.facts[update] = type(b.facts[g])("update")
    tg = b.finish(y, late)
    plan = plan_fusion(tg, supports=supports)
    check(tg, plan)
    assert plan.order[-1] is update
    seen: list[torch.Tensor] = []
    run_plan(tg, plan, [torch.randn(6, 4), torch.randn(4, 6)], lambda p, g, h: seen.extend(p))
    assert len(seen) == 1
