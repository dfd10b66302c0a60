"""Indexing moved up: equal values, one kernel, and left alone where it doesn't pay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from autodiff import ops
from autodiff.rewrite import GraphEdit
from tests.fusion.helpers import forward_graph, planned, run_plan
from trainfuse.fusion.plan import FusionPlan
from trainfuse.fusion.rewrites.index_maps import move_indexing_up

aten, randn = torch.ops.aten, torch.randn
Case = tuple[Callable[..., Any], Callable[[], list[Tensor]]]


def left(plan: FusionPlan) -> list[str]:
    """Operators outside every kernel, views left out."""
    names = [n for n in plan.aten if ops.lookup(n.target).kind != "view"]
    return [ops.op_name(n.target) for n in names]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def rotated_back(g: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of `rotated`, as autograd writes it."""
    half = g.shape[-1] // 2
    turned = g * sin
    zeros = torch.zeros_like(g)
    one = torch.slice_scatter(zeros, turned[..., :half].neg(), -1, half)
    two = torch.slice_scatter(zeros, turned[..., half:], -1, 0, half)
    return two + one + g * cos


def partly_rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat((rotated(x[..., :16], cos, sin), x[..., 16:]), -1)


def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = (x * 2)[..., ::2], (x * 2)[..., 1::2]
    turned = even * cos - odd * sin, even * sin + odd * cos
    return torch.cat([part.unsqueeze(-1) for part in turned], -1).flatten(-2)


ONE_KERNEL: dict[str, Case] = {
    "rotary": (rotated, lambda: [randn(2, 4, 80, 32), randn(80, 32), randn(80, 32)]),
    "rotary backward": (
        rotated_back,
        lambda: [randn(2, 4, 80, 32), randn(80, 32), randn(80, 32)],
    ),
    # heads are transposed, tables get their head dim
    "rotary backward of heads": (
        lambda g, c, s: rotated_back(g.transpose(1, 2), c.cos()[:, None], s.sin()[:, None]),
        lambda: [randn(2, 80, 4, 32).transpose(1, 2), randn(80, 32), randn(80, 32)],
    ),
    "partly rotary": (
        partly_rotated,
        lambda: [randn(2, 8, 80, 40), randn(80, 16), randn(80, 16)],
    ),
    "interleaved rotary": (
        interleaved,
        lambda: [randn(4, 8, 80, 32), randn(80, 16), randn(80, 16)],
    ),
    "padded product": (
        lambda x, y: F.pad(x * y, (1, 2, 0, 3), value=0.5).exp(),
        lambda: [randn(130, 140), randn(140)],
    ),
    "padded mask": (
        lambda m, x: torch.where(F.pad(~m, (1, 0), value=True), 1.0, F.pad(x, (1, 0))),
        lambda: [randn(130, 140) > 0, randn(130, 140)],
    ),
    "cropped": (lambda x: F.pad(x.exp(), (-1, -2)) * 2, lambda: [randn(130, 140)]),
    "unequal pieces": (
        lambda x, y, z: torch.cat((x * 2, y, z.exp()), 1).relu(),
        lambda: [randn(130, 50), randn(130, 7), randn(130, 83)],
    ),
    # hardly more than a launch: three of them in ATen
    "small pieces": (
        lambda x, y: F.pad(torch.cat((x[:, 9:] * 2, -y[:, :9]), 1), (0, 4)),
        lambda: [randn(64, 18), randn(64, 18)],
    ),
    "pieces of a sum": (lambda x, y: (x + y)[:, 3:] * 2, lambda: [randn(9, 8), randn(8)]),
    "one slice put back": (
        lambda x, y: torch.slice_scatter(x, y.sin() * 2, 1, 3, 140) + 1,
        lambda: [randn(130, 150), randn(130, 137)],
    ),
    "every third": (
        lambda x, y: torch.slice_scatter(x, y.sin(), 1, 1, 150, 3) + 1,
        lambda: [randn(130, 150), randn(130, 50)],
    ),
    "one row put back": (
        lambda x, y: torch.select_scatter(x, y.sin(), 0, 5) * 2,
        lambda: [randn(130, 140), randn(140)],
    ),
    "first token": (lambda x, y: (x + y)[:, 0].tanh(), lambda: [randn(3, 9, 8), randn(9, 1)]),
    "reversed": (lambda x, y: (x * y).flip(0, 2) + 1, lambda: [randn(4, 5, 6), randn(5, 1)]),
    "rolled": (
        lambda x, i: torch.index_select(x * 2 + 1, 1, i) * 3,
        lambda: [randn(4, 5, 6), torch.tensor([4, 0, 1, 2, 3])],
    ),
    "cast table": (
        lambda w, i: F.embedding(i, (w * w.abs().sqrt()).half()) * 2,
        lambda: [randn(50, 24), torch.randint(0, 50, (4, 7))],
    ),
    "scaled table": (
        lambda w, s, i: F.embedding(i, w * s) * 2,
        lambda: [randn(50, 24), randn(50, 1), torch.randint(0, 50, (4, 7))],
    ),
    "constants too": (lambda x: (x + torch.full((9, 8), 0.5))[2:7] * 2, lambda: [randn(9, 8)]),
}


@pytest.mark.parametrize("name", ONE_KERNEL)
def test_one_kernel(name: str) -> None:
    fn, make = ONE_KERNEL[name]
    args = make()
    graph, plan = planned(fn, args)
    (result,) = run_plan(graph, plan, args)
    expected = fn(*args)
    assert torch.equal(result, expected)
    assert result.stride() == expected.stride()
    assert len(plan.groups) == 1, [group.nodes for group in plan.groups]
    assert left(plan) == []


def reads(graph: Any, target: object) -> list[fx.Node]:
    """What the nodes of an operator read."""
    return [node.args[0] for node in graph.nodes() if node.target is target]


def test_a_value_that_is_written_anyway_is_not_computed_again() -> None:
    """A product reads it whole: its slice is read from memory."""

    def fn(x: Tensor, w: Tensor) -> Any:
        y = x.exp() * 2
        return y @ w, y[:, :4] + 1

    graph, _ = planned(fn, [randn(9, 8), randn(8, 8)])
    (source,) = reads(graph, aten.slice.Tensor)
    assert source.target is aten.mul.Tensor


def test_parts_that_products_read_stay_views() -> None:
    """Computed apart they would be written each by a kernel of its own."""

    def fn(x: Tensor, w: Tensor) -> Any:
        y = x.exp() * 2
        return y[:4] @ w, y[4:] @ w

    graph, _ = planned(fn, [randn(9, 8), randn(8, 8)])
    assert {source.target for source in reads(graph, aten.slice.Tensor)} == {aten.mul.Tensor}


def test_a_view_that_leaves_the_graph_stays_a_view() -> None:
    graph, _ = planned(lambda x: (x.exp() * 2)[:, :4], [randn(9, 8)])
    (source,) = reads(graph, aten.slice.Tensor)
    assert source.target is aten.mul.Tensor


def test_what_is_reduced_is_not_reduced_again() -> None:
    """The rolled rows of a norm need other rows' statistics: they are read, not computed."""

    def fn(x: Tensor) -> Tensor:
        y = x / x.square().sum(-1, keepdim=True)
        return y.flip(0) * 2

    graph, plan = planned(fn, [randn(90, 80)])
    assert len(plan.groups) == 2
    (source,) = [n.args[0] for n in graph.nodes() if "flip" in str(n.target)]
    assert source.target is aten.div.Tensor


def test_statistics_serve_every_part_of_their_row() -> None:
    """Along the row they have one element: the slice of a normalised row is a normalised slice."""

    def fn(x: Tensor) -> Tensor:
        y = x / x.square().sum(-1, keepdim=True)
        half = y.shape[-1] // 2
        return torch.cat((-y[..., half:], y[..., :half]), -1)

    args = [randn(300, 64)]
    graph, plan = planned(fn, args)
    assert torch.equal(run_plan(graph, plan, args)[0], fn(*args))
    assert {source.op for source in reads(graph, aten.slice.Tensor)} == {"placeholder"}
    assert left(plan) == []


def test_many_operands_are_not_read_for_a_small_part() -> None:
    """Where the whole is written by its kernel anyway, a part of four sums costs four reads."""

    def fn(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Any:
        y = a * b + c * d
        return y.sum(0), y.flip(0) * 2, y.flip(1) * 2

    graph, _ = planned(fn, [randn(90, 80) for _ in range(4)])
    assert all(
        n.target is not aten.flip.default or n.args[0].op == "call_function" for n in graph.nodes()
    )


def test_no_value_is_moved_over_an_update() -> None:
    """What is computed before a write isn't computed after it."""

    def fn(x: Tensor) -> Any:
        y = (x * 2).exp()
        return y[:, 1:] + 1, x + 1

    graph = forward_graph(fn, [randn(9, 8)])
    (source,) = reads(move_indexing_up(graph), aten.slice.Tensor)
    assert source.op == "placeholder"
    for before, made in (
        (aten.exp.default, aten.mul.Tensor),
        (aten.slice.Tensor, aten.exp.default),
    ):
        copied = GraphEdit(graph)
        place = next(n for n in copied.graph.nodes if n.target is before)
        x, new = next(iter(copied.graph.nodes)), copied.graph.output_node().args[0][1]
        with copied.graph.inserting_before(place):
            new = copied.emit(aten.add.Tensor, (x, 1), fact=copied.facts[place])
            copied.emit(aten.copy_.default, (x, new), fact=copied.facts[place])
        (source,) = reads(move_indexing_up(copied.finish()), aten.slice.Tensor)
        assert source.target is made
