"""Slicing, on graphs written by hand: the algorithm's cases, one by one.

`o` is a candidate (sigmoid and friends), `X` an opaque node.
"""

from __future__ import annotations

import operator
import random
import time
from typing import Any

import pytest
import torch
from slicing_graphs import check, cut, differentiated, o, opaque, owners
from torch import fx
from training_graphs import Builder, training_graph

from autodiff import ops
from autodiff.graph import TrainingGraph
from autodiff.slicing import slice_graph
from autodiff.subgraphs import Slices, producers

aten: Any = torch.ops.aten


@pytest.mark.covers("A1")
def test_01_chain() -> None:
    b = Builder()
    one = o(b, b.input())
    two = o(b, one)
    slices = cut(b, two)
    assert len(slices.subgraphs) == 1
    assert slices.subgraphs[0].nodes == (one, two)


@pytest.mark.covers("A2")
def test_02_beside_an_opaque_node() -> None:
    b = Builder()
    x = b.input()
    mine, other = o(b, x), opaque(b, x)
    slices = cut(b, mine, other)
    assert len(slices.subgraphs) == 1
    assert other not in slices.owner
    refusal = next(r for r in slices.refusals if other.name in r.node)
    assert "aten.cumsum.default" in refusal.reason


@pytest.mark.covers("A3")
def test_03_unrelated_pair_and_pair_sharing_an_input() -> None:
    b = Builder()
    assert len(cut(b, o(b, b.input()), o(b, b.input())).subgraphs) == 2
    b = Builder()
    x = b.input()
    slices = cut(b, o(b, x), o(b, x))
    assert len(slices.subgraphs) == 2


@pytest.mark.covers("A4")
def test_04_diamond() -> None:
    b = Builder()
    top = o(b, b.input())
    left, right = o(b, top), o(b, top)
    slices = cut(b, o(b, left, right))
    assert len(slices.subgraphs) == 1
    assert slices.subgraphs[0].executed == 4


@pytest.mark.covers("A5")
def test_05_two_splits_added_crosswise() -> None:
    b = Builder()
    parts = []
    for _ in range(2):
        split = b.call(aten.split.Tensor, o(b, b.input(4, 4)), 2)
        parts.append([b.call(operator.getitem, split, index) for index in range(2)])
    first = o(b, parts[0][0], parts[1][1])
    second = o(b, parts[0][1], parts[1][0])
    slices = cut(b, o(b, first, second))
    assert len(slices.subgraphs) == 1


@pytest.mark.covers("A6")
def test_06_opaque_between_and_a_chain() -> None:
    b = Builder()
    x, y = b.input(), b.input()
    before = o(b, x)
    middle = opaque(b, before)
    after = o(b, middle, before)
    chain = o(b, o(b, y))
    slices = cut(b, after, chain)
    # after reads before also through X: merging the two would be a cycle
    assert owners(slices, [before])[0] != owners(slices, [after])[0]
    assert len(slices.subgraphs) == 3
    b = Builder()
    before = o(b, b.input())
    after = o(b, opaque(b, before))
    assert len(cut(b, after, o(b, o(b, b.input()))).subgraphs) == 3


@pytest.mark.covers("A7", "A8")
@pytest.mark.parametrize("reads_producer", [True, False])
def test_07_08_independent_opaque_node_in_the_way(reads_producer: bool) -> None:
    b = Builder()
    x = b.input()
    producer = o(b, x)
    aside = opaque(b, producer if reads_producer else x)
    consumer = o(b, producer)
    slices = cut(b, consumer, aside)
    assert len(slices.subgraphs) == 1
    assert slices.subgraphs[0].nodes == (producer, consumer)


@pytest.mark.covers("A9")
def test_09_nothing_merges_across_a_barrier() -> None:
    b = Builder()
    one = o(b, b.input())
    wall = opaque(b, b.input())
    two = o(b, o(b, one))
    tg = differentiated(b, two, wall)
    assert len(slice_graph(tg, 1).subgraphs) == 1
    walled = slice_graph(tg, 1, barriers=[wall])
    check(tg, walled)
    assert len(walled.subgraphs) == 2
    assert owners(walled, [one])[0] != owners(walled, [two])[0]


@pytest.mark.covers("A12")
def test_12_only_views_returned() -> None:
    b = Builder()
    x = b.input(4, 6)
    y = b.call(aten.view.default, b.call(aten.permute.default, x, [1, 0]), [6, 4])
    assert cut(b, y).subgraphs == ()


@pytest.mark.covers("A13")
@pytest.mark.parametrize("length", range(1, 7))
@pytest.mark.parametrize("threshold", [1, 2, 5])
@pytest.mark.parametrize("horizontal", [True, False])
def test_13_chain_lengths_and_thresholds(length: int, threshold: int, horizontal: bool) -> None:
    b = Builder()
    y = b.input()
    for _ in range(length):
        y = o(b, b.call(aten.view.default, y, [4, 4]))  # views don't count
    slices = cut(b, y, threshold=threshold, horizontal=horizontal)
    assert len(slices.subgraphs) == (1 if length >= threshold else 0)
    if length < threshold:
        assert all("fewer than" in r.reason or "outside" in r.reason for r in slices.refusals)
        assert len(slices.refusals) >= length


def test_siblings_that_share_a_tensor_count_together() -> None:
    for shape, horizontal, wanted in (((4, 4), True, 2), ((4, 4), False, 0)):
        b = Builder()
        x = b.input(*shape)
        slices = cut(b, b.call(aten.relu.default, x), o(b, x), threshold=2, horizontal=horizontal)
        assert len(slices.subgraphs) == wanted
    b = Builder()
    scalar = b.input(4, 4)
    scalar.meta["val"] = b.mode.from_tensor(torch.zeros(()))
    assert cut(b, b.call(aten.relu.default, scalar), o(b, scalar), threshold=2).subgraphs == ()
    b = Builder()
    assert cut(b, o(b, b.input()), o(b, b.input()), threshold=2).subgraphs == ()


def test_29_output_also_used_inside() -> None:
    b = Builder()
    inner = o(b, b.input())
    outer = o(b, inner)
    slices = cut(b, inner, outer)
    assert len(slices.subgraphs) == 1
    assert set(slices.subgraphs[0].outputs) == {inner, outer}


def test_28_inputs_of_a_subgraph() -> None:
    args = [torch.randn(4, 4) for _ in range(2)]
    tg = training_graph(lambda a, b: a * b * a + b, args, [0, 1])
    (subgraph,) = slice_graph(tg, 1).subgraphs
    assert {node.name for node in subgraph.inputs} == {"primals_1", "primals_2"}
    assert subgraph.executed == 3
    # the product's cotangent is its own; a's and b's are sums that belong to graph inputs, to none
    sums = [n for n in tg.nodes("backward") if ops.op_name(n.target) == "aten.add.Tensor"]
    assert len(sums) == 2


def lstm_cell(*values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, h, c, wi, wh, bias = values
    gates = x @ wi + h @ wh + bias
    i, f, g, out = gates.chunk(4, 1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(out) * torch.tanh(c), c


@pytest.mark.covers("A26")
def test_26_lstm_cell_is_one_subgraph() -> None:
    shapes = [(3, 5), (3, 4), (3, 4), (5, 16), (4, 16), (16,)]
    tg = training_graph(lstm_cell, [torch.randn(shape) for shape in shapes], range(6))
    slices = slice_graph(tg, 2)
    check(tg, slices)
    assert len(slices.subgraphs) == 1
    left = {
        ops.op_name(node.target)
        for node in tg.nodes()
        if node not in slices.owner and tg.phase(node) == "forward"
    }
    assert not left & {
        "aten.mm.default",
        "aten.sigmoid.default",
        "aten.tanh.default",
        "aten.mul.Tensor",
    }


def random_graph(seed: int) -> tuple[Builder, list[fx.Node]]:
    draw = random.Random(seed)
    b = Builder()
    values = [b.input(3, 3) for _ in range(2)]
    for _ in range(draw.randint(4, 14)):
        make = opaque if draw.random() < 0.3 else o
        values.append(make(b, *draw.choices(values[-5:], k=draw.randint(1, 2))))
    return b, values


@pytest.mark.parametrize("seed", range(60))
def test_random_graphs_are_merged_to_a_fixpoint_without_cycles(seed: int) -> None:
    b, values = random_graph(seed)
    tg = differentiated(b, *[v for v in values if not v.users] or [values[-1]])
    slices = slice_graph(tg, 1)
    check(tg, slices)
    candidates = {n for n in tg.nodes("forward") if ops.lookup(n.target).kind == "pointwise"}
    owned = {n for n in tg.nodes("forward") if n in slices.owner}
    assert owned == candidates
    # maximal: where two still touch, a path through other nodes or subgraphs would be a cycle
    for consumer in candidates:
        for producer in producers(consumer) & candidates:
            pair = {slices.owner[producer], slices.owner[consumer]}
            if len(pair) == 2:
                assert leaves_and_returns(tg, slices, pair), (producer.name, consumer.name)


def leaves_and_returns(tg: TrainingGraph, slices: Slices, pair: set[int]) -> bool:
    """Whether some path leaves a pair of subgraphs and comes back, all others contracted."""

    def point(node: fx.Node) -> object:
        own = slices.owner.get(node, node)
        return "pair" if own in pair else own

    users: dict[object, set[object]] = {}
    for node in tg.nodes("forward"):
        for parent in producers(node):
            if point(parent) != point(node):
                users.setdefault(point(parent), set()).add(point(node))
    seen: set[object] = set()
    pending = list(users.get("pair", ()))
    while pending:
        current = pending.pop()
        if current == "pair":
            return True
        if current not in seen:
            seen.add(current)
            pending.extend(users.get(current, ()))
    return False


def test_large_graph_is_sliced_in_seconds() -> None:
    b = Builder()
    y = b.input(8, 8)
    for index in range(1500):
        y = opaque(b, y) if index % 50 == 49 else o(b, y)
    tg = differentiated(b, y)
    start = time.perf_counter()
    slices = slice_graph(tg)
    assert time.perf_counter() - start < 10
    assert len(slices.subgraphs) == 30
