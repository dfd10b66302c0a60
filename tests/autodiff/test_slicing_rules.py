"""Who belongs to a subgraph: views, constants, random nodes, the backward, what stays ATen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from slicing_graphs import cut, differentiated, o, opaque
from training_graphs import Builder, training_graph

from autodiff.derive import cleanup, decompose
from autodiff.graph import NodeFacts
from autodiff.inlining import dissolve_unfused
from autodiff.slicing import slice_graph
from autodiff.subgraphs import UNSLICED

aten: Any = torch.ops.aten


def test_view_of_an_outside_value_belongs_to_none() -> None:
    b = Builder()
    x = b.input(4, 6)
    outside = b.call(aten.permute.default, x, [1, 0])
    inner = b.call(aten.permute.default, o(b, outside), [1, 0])
    slices = cut(b, o(b, inner))
    assert outside not in slices.owner
    assert slices.owner[inner] == 0
    assert slices.subgraphs[0].executed == 2


def test_view_is_never_an_output_but_its_base_is() -> None:
    b = Builder()
    base = o(b, o(b, b.input(4, 6)))
    view = b.call(aten.permute.default, base, [1, 0])
    slices = cut(b, view)
    assert slices.subgraphs[0].outputs == (base,)


def test_constants_go_with_their_only_reader() -> None:
    b = Builder()
    x = b.input(4, 4)
    constant = b.call(aten.full.default, [4, 4], 2.0)
    shared = b.call(aten.full.default, [4, 4], 3.0)
    one = o(b, x, constant)
    two = o(b, o(b, opaque(b, x)), shared)
    three = o(b, opaque(b, o(b, one, shared)))
    slices = cut(b, two, three)
    assert slices.owner[constant] == slices.owner[one]
    assert shared not in slices.owner


def test_random_nodes_are_members_and_keep_their_order() -> None:
    b = Builder()
    x, y = b.input(4, 4), b.input(4, 4)
    first = b.call(aten.bernoulli.p, x, 0.5)
    second = b.call(aten.bernoulli.p, y, 0.5)
    # without the order between draws, first and last would merge around the middle
    middle = opaque(b, second)
    third = b.call(aten.bernoulli.p, middle, 0.5)
    last = o(b, first, third)
    slices = cut(b, last)
    assert first in slices.owner
    assert slices.owner[third] == slices.owner[last]
    assert slices.owner[first] != slices.owner[last]


def test_backward_follows_its_link() -> None:
    b = Builder()
    x = b.input()
    inside = o(b, o(b, x))
    outside = opaque(b, inside)
    tg = differentiated(b, outside)
    slices = slice_graph(tg, 2)
    for node in tg.nodes("backward"):
        link = tg.facts[node].forward_of
        assert (node in slices.owner) == (link != outside.name)
    assert any(f"derives from {outside.name}" in r.reason for r in slices.refusals)


def test_sum_of_cotangents_goes_to_the_maker_of_the_value() -> None:
    b = Builder()
    x = b.input()
    made = o(b, opaque(b, o(b, o(b, x))))
    made = o(b, made)
    far = opaque(b, made)
    tangents = [b.input(), b.input()]
    total = b.call(aten.add.Tensor, *tangents, phase="backward")
    back = b.call(aten.mul.Tensor, total, made, phase="backward", of=made)
    for_input = b.call(aten.add.Tensor, back, back, phase="backward")
    tg = b.finish(far, for_input)
    slices = slice_graph(tg, 2)
    assert slices.owner[total] == slices.owner[made] == slices.owner[back]
    assert for_input not in slices.owner


def test_skip_ops_and_what_was_decomposed_from_them() -> None:
    x = torch.randn(4, 8)
    tg = cleanup(decompose(training_graph(lambda x: torch.softmax(x, 1).sin().exp(), [x], [0])))
    for node in tg.nodes():
        if node.name.startswith(("sin", "exp_1")):
            node.meta["original_aten"] = aten.gelu.default
    assert len(slice_graph(tg).subgraphs) == 1
    for name in ("aten.sin", "aten::sin", "aten.sin.default"):
        skipped = slice_graph(tg, 1, {name})
        assert not any("sin" == node.name for node in skipped.owner)
        assert any("skip_ops" in r.reason for r in skipped.refusals)
    origin = slice_graph(tg, 1, {"aten.gelu"})
    assert not any("sin" == node.name for node in origin.owner)


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((2,) * 9, torch.float32, "rank 9"),
        ((4, 4), torch.complex64, "complex"),
    ],
)
def test_values_that_stay_aten(shape: tuple[int, ...], dtype: torch.dtype, reason: str) -> None:
    b = Builder()
    y = b.call(aten.sin.default, b.call(aten.sin.default, b.input(*shape, dtype=dtype)))
    tg = b.finish(y, b.call(aten.cos.default, y, phase="backward", of=y))
    slices = slice_graph(tg)
    assert slices.subgraphs == ()
    assert any(reason in r.reason for r in slices.refusals)


def test_devices() -> None:
    b = Builder()
    y = o(b, o(b, b.input()))
    tg = differentiated(b, y)
    refused = slice_graph(tg, device_types=("cuda",))
    assert refused.subgraphs == ()
    assert "no generator for device cpu" in refused.refusals[0].reason


@pytest.mark.parametrize(("shape", "count"), [((), 1), ((4, 4), 0)])
def test_only_scalars_of_the_cpu_join_another_device(shape: tuple[int, ...], count: int) -> None:
    b = Builder()
    x, other = b.input(4, 4), b.input(4, 4)
    x.meta["val"] = torch.empty(4, 4, device="meta")
    other.meta["val"] = torch.empty(shape)
    node = b.graph.call_function(aten.mul.Tensor, (x, other))
    back = b.graph.call_function(aten.neg.default, (node,))
    node.meta["val"] = back.meta["val"] = torch.empty(4, 4, device="meta")
    b.facts = {node: NodeFacts("forward"), back: NodeFacts("backward", node.name)}
    slices = slice_graph(b.finish(node, back), 1, device_types=("meta", "cpu"))
    assert len(slices.subgraphs) == count


def test_graph_without_backward_is_not_sliced() -> None:
    b = Builder()
    x = b.input()
    y = o(b, o(b, x))
    other = opaque(b, y)
    slices = slice_graph(b.finish(other, b.call(aten.permute.default, y, [1, 0])))
    assert slices.subgraphs == ()
    assert slices.owner[y] == UNSLICED
    assert other not in slices.owner


def test_update_phase_is_free_to_fuse() -> None:
    b = Builder()
    y = o(b, o(b, b.input()))
    g = b.call(aten.cos.default, y, phase="backward", of=y)
    scaled = b.call(aten.mul.Tensor, g, 0.5, phase="update")
    slices = slice_graph(b.finish(y, scaled))
    assert slices.owner[scaled] == UNSLICED
    assert slices.owner[g] == 0


def test_second_inlining_drops_what_was_not_fused() -> None:
    b = Builder()
    first = o(b, o(b, b.input()))
    second = o(b, o(b, b.input()))
    tg = differentiated(b, first, second)
    slices = slice_graph(tg)
    assert len(slices.subgraphs) == 2
    kept_one = slices.subgraphs[1]
    after = dissolve_unfused(slices, kept_one.backward[:1])
    assert [s.nodes for s in after.subgraphs] == [kept_one.nodes]
    assert {after.owner[node] for node in kept_one.nodes} == {0}
    assert not set(after.owner) & set(slices.subgraphs[0].nodes)
    assert any("none of its subgraph was fused" in r.reason for r in after.refusals)
    assert dissolve_unfused(slices, tg.nodes()) is slices
