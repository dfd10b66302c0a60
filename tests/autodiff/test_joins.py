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
