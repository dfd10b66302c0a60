"""Joins as selections: equal to ATen's copies, element by element, and one node chain."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from autodiff import joins
from autodiff.derive import decompose
from autodiff.graph import InputFact, NodeFacts, TrainingGraph


def captured(function, *inputs: torch.Tensor) -> TrainingGraph:
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    facts = {n: NodeFacts("forward") for n in gm.graph.nodes if n.op == "call_function"}
    names = [n.name for n in gm.graph.find_nodes(op="placeholder")]
    output = gm.graph.output_node()
    output.args = ((output.args[0],),)
    gm.recompile()
    return TrainingGraph(gm, facts, tuple(InputFact(n, "input") for n in names), 1)


def pieces(count: int, *shape: int, dtype=torch.float32) -> list[torch.Tensor]:
    return [torch.randn(shape).to(dtype) for _ in range(count)]


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_cat_of_equal_pieces(count: int, dim: int) -> None:
    inputs = pieces(count, 16, 32, 40)
    graph = decompose(captured(lambda *t: torch.ops.aten.cat.default(list(t), dim), *inputs))
    assert all(n.target is not torch.ops.aten.cat.default for n in graph.nodes())
    (result,) = graph.gm(*inputs)
    expected = torch.cat(inputs, dim)
    assert torch.equal(result, expected)
    assert result.stride() == expected.stride()


@pytest.mark.parametrize("index", [0, 1, -1])
def test_select_scatter(index: int) -> None:
    base, piece = torch.randn(64, 3, 100), torch.randn(64, 100)
    graph = decompose(captured(lambda b, p: torch.select_scatter(b, p, 1, index), base, piece))
    assert all(n.target is not torch.ops.aten.select_scatter.default for n in graph.nodes())
    (result,) = graph.gm(base, piece)
    assert torch.equal(result, torch.select_scatter(base, piece, 1, index))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scatter_add_of_one_element_a_row(dtype: torch.dtype) -> None:
    """ATen's sum; a row whose index is none of its places shows that, where ATen would stop."""
    base, source = torch.randn(6, 50).to(dtype), torch.randn(6, 1).to(dtype)
    index = torch.randint(50, (6, 1))
    scatter = torch.ops.aten.scatter_add.default
    graph = decompose(captured(lambda b, i, s: scatter(b, 1, i, s), base, index, source))
    assert all(node.target is not scatter for node in graph.nodes())
    (result,) = graph.gm(base, index, source)
    assert torch.equal(result, scatter(base, 1, index, source))
    index[1], index[3] = 50, -1
    (result,) = graph.gm(base, index, source)
    assert result.isnan().any(1).tolist() == [False, True, False, True, False, False]


def test_what_does_not_pay_stays_aten() -> None:
    """Unequal pieces, too many of them, and results so small that a launch is all they cost."""
    cat = torch.ops.aten.cat.default
    cases = [
        [torch.randn(128, 100), torch.randn(128, 60)],
        pieces(joins.MAX_PIECES + 1, 128, 100),
        pieces(2, 3, 4),
    ]
    for inputs in cases:
        graph = decompose(captured(lambda *t: cat(list(t), 1), *inputs))
        assert any(n.target is cat for n in graph.nodes())


UNEQUAL = {
    "three": (lambda *t: torch.cat(t, 1), [(128, 50), (128, 7), (128, 83)]),
    "two, last dim": (lambda *t: torch.cat(t, -1), [(16, 32, 40), (16, 32, 8)]),
    "first dim": (lambda *t: torch.cat(t, 0), [(3, 128, 40), (5, 128, 40)]),
    "slice": (lambda b, p: torch.slice_scatter(b, p, 1, 3, 140), [(130, 150), (130, 137)]),
    "slice from the end": (
        lambda b, p: torch.slice_scatter(b, p, 1, -9, None),
        [(130, 150), (130, 9)],
    ),
    "half": (lambda b, p: torch.slice_scatter(b, p, -1, 75, 1 << 60), [(130, 150), (130, 75)]),
    "in turns": (lambda b, p: torch.slice_scatter(b, p, 0, 1, 130, 2), [(130, 150), (65, 150)]),
    "all": (lambda b, p: torch.slice_scatter(b, p, 0), [(130, 150), (130, 150)]),
    "row": (lambda b, p: torch.select_scatter(b, p, 0, -2), [(130, 150), (150,)]),
}


@pytest.mark.parametrize("name", UNEQUAL)
def test_padded_joins(name: str) -> None:
    fn, shapes = UNEQUAL[name]
    inputs = [torch.randn(shape) for shape in shapes]
    before = captured(fn, *inputs)
    graph = decompose(before, joins.padded_joins())
    assert not {n.target for n in before.nodes()} & {n.target for n in graph.nodes()}
    (result,) = graph.gm(*inputs)
    expected = fn(*inputs)
    assert torch.equal(result, expected)
    assert result.stride() == expected.stride()


def test_padded_joins_leave_what_does_not_pay() -> None:
    """Too many pieces, a stride that covers nothing evenly, and results of a launch's size."""
    cases = [
        (lambda *t: torch.cat(t, 1), [torch.randn(128, 30 + i) for i in range(5)]),
        (
            lambda b, p: torch.slice_scatter(b, p, 1, 1, 100, 2),
            pieces(1, 130, 150) + pieces(1, 130, 50),
        ),
        (lambda *t: torch.cat(t, 1), [torch.randn(9, 3), torch.randn(9, 4)]),
    ]
    for fn, inputs in cases:
        before = captured(fn, *inputs)
        graph = decompose(before, joins.padded_joins())
        assert [n.target for n in before.nodes()] == [n.target for n in graph.nodes()]


def test_a_value_joined_with_itself_is_no_model_for_two_values() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, x), 1) - torch.cat((x, y), 1)

    inputs = pieces(2, 64, 256)
    (result,) = decompose(captured(fn, *inputs), joins.joins()).gm(*inputs)
    assert torch.equal(result, fn(*inputs))
