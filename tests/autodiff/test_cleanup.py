"""Clean-up and splicing: what goes, what must stay, and links that stay true."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from training_graphs import Builder, training_graph

from autodiff import ops
from autodiff.creations import detach_creations
from autodiff.derive import cleanup, decompose
from autodiff.graph import TrainingGraph
from autodiff.reference import run_graph
from autodiff.rewrite import is_row_major, known_equal, same_strides
from autodiff.verify import verify

aten: Any = torch.ops.aten


def targets(tg: TrainingGraph) -> list[str]:
    return [ops.op_name(node.target) for node in tg.nodes()]


def test_copy_into_equal_strides_goes() -> None:
    b = Builder()
    x = b.input(4, 6)
    y = b.call(aten.sin.default, x)
    empty = b.call(aten.empty.memory_format, [4, 6])
    tg = cleanup(b.finish(b.call(aten.copy.default, empty, y)))
    assert targets(verify(tg)) == ["aten.sin.default"]


def test_copy_that_changes_strides_or_dtype_stays() -> None:
    b = Builder()
    x = b.input(4, 6)
    y = b.call(aten.permute.default, b.call(aten.sin.default, x), [1, 0])
    rows = b.call(aten.empty.memory_format, [6, 4])
    half = b.call(aten.empty.memory_format, [6, 4], dtype=torch.bfloat16)
    tg = cleanup(b.finish(b.call(aten.copy.default, rows, y), b.call(aten.copy.default, half, y)))
    assert targets(verify(tg)).count("aten.copy.default") == 2
    value = torch.randn(4, 6)
    first, second = run_graph(tg, [value])
    assert first.stride() == (4, 1)
    assert second.dtype == torch.bfloat16


def test_copy_of_a_part_of_an_input_stays() -> None:
    """The parts of a split are views: an output that was fresh must not become one."""
    b = Builder()
    x = b.input(4, 6)
    parts = b.call(aten.split_with_sizes.default, x, [2, 4], 1)
    part = b.call(operator.getitem, parts, 1)
    row = b.call(operator.getitem, b.call(aten.unbind.int, x), 2)
    tg = verify(cleanup(b.finish(b.call(aten.clone.default, row), b.call(aten.exp.default, part))))
    assert targets(tg).count("aten.clone.default") == 1
    value = torch.randn(4, 6)
    copied = run_graph(tg, [value])[0]
    assert copied.untyped_storage().data_ptr() != value.untyped_storage().data_ptr()


def test_copy_that_resolves_a_conjugate_stays() -> None:
    b = Builder()
    z = b.call(aten._conj.default, b.call(aten.mul.Tensor, b.input(3, dtype=torch.complex64), 2.0))
    copied = b.call(aten.clone.default, z)
    tg = b.finish(b.call(aten.view_as_real.default, copied))
    value = torch.randn(3, dtype=torch.complex64)
    ours, theirs = run_graph(verify(cleanup(tg)), [value]), run_graph(tg, [value])
    assert torch.equal(ours[0], theirs[0])


def test_no_op_views_and_casts_go() -> None:
    b = Builder()
    x = b.input(4, 6)
    y = b.call(aten.sin.default, x)
    y = b.call(aten.view.default, y, [4, 6])
    y = b.call(aten.expand.default, y, [4, 6])
    y = b.call(aten.permute.default, b.call(aten.permute.default, y, [1, 0]), [1, 0])
    y = b.call(aten.slice.Tensor, y, 0, 0, 4)
    y = b.call(aten.alias.default, y)
    y = b.call(aten._to_copy.default, y, dtype=torch.float32)
    tg = cleanup(b.finish(b.call(aten.cos.default, y)))
    assert targets(verify(tg)) == ["aten.sin.default", "aten.cos.default"]


def test_constants_stop_reading_what_they_are_shaped_like() -> None:
    """Permuted ones too: a kernel is not given what it reads for a shape alone."""
    b = Builder()
    x = b.input(4, 6, 5)
    rows = b.call(aten.sin.default, x)
    turned = b.call(aten.permute.default, rows, [2, 0, 1])
    zeros = [
        b.call(aten.full_like.default, rows, 0),
        b.call(aten.full_like.default, turned, 2.5),
        b.call(aten.zeros_like.default, turned),
    ]
    tg = verify(detach_creations(b.finish(*zeros)))
    assert set(targets(tg)) == {"aten.full.default", "aten.permute.default"}
    first, second, third = run_graph(tg, [torch.randn(4, 6, 5)])
    assert torch.equal(first, torch.zeros(4, 6, 5))
    assert torch.equal(second, torch.full((5, 4, 6), 2.5))
    assert second.stride() == third.stride() == (1, 30, 5)


def test_views_that_move_elements_stay() -> None:
    b = Builder()
    x = b.input(4, 4)
    y = b.call(aten.permute.default, b.call(aten.sin.default, x), [1, 0])
    # a square transpose keeps the shape, three cyclic steps of a permutation keep the order
    cube = b.call(aten.sin.default, b.input(3, 3, 3))
    once = b.call(aten.permute.default, cube, [1, 2, 0])
    twice = b.call(aten.permute.default, once, [1, 2, 0])
    thrice = b.call(aten.permute.default, twice, [1, 2, 0])
    tail = b.call(aten.slice.Tensor, b.call(aten.sin.default, b.input(8)), 0, 4, 8)
    outputs = [b.call(aten.exp.default, value) for value in (y, twice, thrice, tail)]
    tg = b.finish(*outputs)
    cleaned = verify(cleanup(tg))
    values = [torch.randn(4, 4), torch.randn(3, 3, 3), torch.randn(8)]
    for ours, theirs in zip(run_graph(cleaned, values), run_graph(tg, values), strict=True):
        assert torch.equal(ours, theirs)
    assert targets(cleaned).count("aten.permute.default") == 3


def test_outputs_stay_distinct_and_fresh() -> None:
    b = Builder()
    x = b.input(4, 6)
    y = b.call(aten.sin.default, x)
    copies = [b.call(aten.clone.default, source) for source in (x, y, y)]
    repeated = [b.call(aten.exp.default, y) for _ in range(2)]
    tg = verify(cleanup(b.finish(*copies, *repeated)))
    value = torch.randn(4, 6)
    outputs = run_graph(tg, [value])
    addresses = {output.data_ptr() for output in outputs}
    assert len(addresses) == 5
    assert value.data_ptr() not in addresses


def test_repeats_are_joined_within_a_phase_only() -> None:
    b = Builder()
    x = b.input(4, 6)
    one, two = b.call(aten.sin.default, x), b.call(aten.sin.default, x)
    forward = b.call(aten.add.Tensor, one, two)
    three = b.call(aten.sin.default, x, phase="backward", of=one)
    four = b.call(aten.sin.default, x, phase="backward", of=two)
    backward = b.call(aten.mul.Tensor, three, four, phase="backward", of=forward)
    tg = verify(cleanup(b.finish(forward, backward)))
    assert targets(tg).count("aten.sin.default") == 2
    assert {tg.phase(node) for node in tg.nodes() if "sin" in node.name} == {"forward", "backward"}


def test_equal_literals_of_different_type_are_not_joined() -> None:
    b = Builder()
    x = b.input(4, dtype=torch.int64)
    whole = b.call(aten.mul.Tensor, x, 2)
    real = b.call(aten.mul.Tensor, x, 2.0)
    zero = b.call(aten.full.default, [4], 0.0)
    negative = b.call(aten.full.default, [4], -0.0)
    outputs = [b.call(aten.neg.default, value) for value in (whole, real, zero, negative)]
    tg = cleanup(b.finish(*outputs))
    ours = run_graph(tg, [torch.arange(4)])
    assert [value.dtype for value in ours[:2]] == [torch.int64, torch.float32]
    assert torch.signbit(ours[2]).all()
    assert not torch.signbit(ours[3]).any()


@pytest.mark.covers("G18")
def test_random_draws_are_neither_joined_nor_reordered() -> None:
    b = Builder()
    x = b.input(64)
    draws = [b.call(aten.bernoulli.p, x, 0.5) for _ in range(2)]
    tg = cleanup(b.finish(*[b.call(aten.neg.default, draw) for draw in draws]))
    assert targets(tg).count("aten.bernoulli.p") == 2
    first, second = run_graph(tg, [torch.zeros(64)])
    assert not torch.equal(first, second)


def test_links_follow_a_node_that_is_replaced() -> None:
    b = Builder()
    x = b.input(4, 6)
    norm = b.call(aten._softmax.default, x, 1, False)
    again = b.call(aten.clone.default, norm)
    g = b.call(aten.ones_like.default, x, phase="backward")
    back = b.call(
        aten._softmax_backward_data.default, g, norm, 1, torch.float32, phase="backward", of=norm
    )
    after = b.call(aten.neg.default, back, phase="backward", of=again)
    tg = verify(cleanup(verify(decompose(b.finish(b.call(aten.exp.default, again), after)))))
    made = next(node for node in tg.nodes() if "div" in node.name)
    links = {tg.facts[node].forward_of for node in tg.nodes("backward")}
    assert links == {made.name, None}


def test_arguments_are_left_alone() -> None:
    tg = training_graph(lambda x: F.softmax(x, 1).detach().exp() * x, [torch.randn(3, 5)], [0])
    before = str(tg.graph)
    facts = dict(tg.facts)
    cleanup(decompose(tg))
    assert str(tg.graph) == before
    assert tg.facts == facts


def test_comparing_sizes_adds_no_guard() -> None:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    value = mode.from_tensor(torch.empty(5, 7), static_shapes=False)
    rows, columns = value.shape
    assert not known_equal(rows, 5)  # it is 5 today
    assert not known_equal((rows, columns), (5, 7))
    assert known_equal((rows, rows * columns), (rows, columns * rows))
    assert same_strides(value, value)
    assert is_row_major(value)
    assert not is_row_major(value.t())
    assert env.guards == []


def test_formulas_are_traced_without_the_callers_autocast() -> None:
    b = Builder()
    tg = b.finish(b.call(aten.tanh.default, b.input(4, 4)))
    table = {aten.tanh.default: lambda x: torch.mm(x, x)}
    plain = decompose(tg, table)
    with torch.autocast("cpu", torch.bfloat16):
        under = decompose(tg, table)
    assert str(under.graph) == str(plain.graph)
    assert targets(plain) == ["aten.mm.default"]


def test_spliced_result_keeps_the_strides_readers_were_traced_with() -> None:
    x = torch.randn(2, 3, 4)

    def fn(x: torch.Tensor) -> torch.Tensor:
        # pointwise formulas would keep the transposed layout; ATen's softmax is row-major
        return F.softmax(x.transpose(1, 2), -1).view(2, 12) * 2

    tg = training_graph(fn, [x], [0])
    derived = verify(decompose(tg))
    view = next(n for n in derived.nodes() if ops.op_name(n.target) == "aten.view.default")
    base = view.args[0]
    assert isinstance(base, fx.Node)
    assert is_row_major(base.meta["val"])
    inputs = [x, torch.randn(2, 12)]
    for ours, theirs in zip(run_graph(derived, inputs), run_graph(tg, inputs), strict=True):
        torch.testing.assert_close(ours, theirs)
