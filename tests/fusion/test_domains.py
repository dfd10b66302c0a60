"""Iteration domains: which axes a group has, who reduces what, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from autodiff.graph import Refusal
from trainfuse.fusion.domains import Domain, infer

aten = torch.ops.aten


def traced(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> list[fx.Node]:
    """ATen nodes of `fn` on float inputs; composite ops are written out by each test."""
    with FakeTensorMode():
        gm = make_fx(fn)(*(torch.empty(shape) for shape in shapes))
    return [node for node in gm.graph.nodes if node.op == "call_function"]


def domain_of(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> Domain:
    found = infer(traced(fn, *shapes))
    assert isinstance(found, Domain), found
    return found


def norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    var, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    return (x - mean) * torch.rsqrt(var + 1e-5) * w + b


def softmax(x: torch.Tensor) -> torch.Tensor:
    exps = (x - x.amax(-1, keepdim=True)).exp()
    return exps / exps.sum(-1, keepdim=True)


def channel_norm(x: torch.Tensor) -> torch.Tensor:
    var, mean = torch.var_mean(x, (0, 2, 3), correction=0, keepdim=True)
    return (x - mean) * torch.rsqrt(var + 1e-5)


def norm_backward(
    g: torch.Tensor, x: torch.Tensor, w: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    inner = g * w
    a, b = inner.mean(-1, keepdim=True), (inner * x).mean(-1, keepdim=True)
    return inner - a - x * b, (g * x).sum((0, 1)), g.sum((0, 1))


def parts(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of each part of a row, a sum of these, and the row again."""
    sums = (x * w).sum(-1, keepdim=True)
    return sums, x - (sums * w).sum(-2, keepdim=True) * sums


def row_loss(x: torch.Tensor) -> torch.Tensor:
    return (x - x.amax(-1, keepdim=True)).exp().sum(-1).log().mean()


CASES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], tuple[Any, ...]]] = {
    "flat": (lambda x: x.relu() * 2, ((4, 6),), ("pointwise", (4, 6), (), (0, 1))),
    "broadcast": (lambda x, b: x + b, ((4, 6), (6,)), ("pointwise", (4, 6), (), (0, 1))),
    # the view splits the rows of 32 into 4 x 8
    "view": (
        lambda x, b: (x.view(32, 6) + b).view(4, 8, 6) * x,
        ((4, 8, 6), (6,)),
        ("pointwise", (4, 8, 6), (), (0, 1, 2)),
    ),
    "heads": (
        lambda q, k: q.view(2, 8, 3, 4).transpose(1, 2) * k,
        ((2, 8, 12), (2, 3, 8, 4)),
        ("pointwise", (2, 8, 3, 4), (), (0, 1, 2, 3)),
    ),
    "rotary": (
        lambda q, k, c: (q * c, k * c),
        ((2, 3, 8, 4), (2, 3, 8, 4), (8, 4)),
        ("pointwise", (2, 3, 8, 4), (), (0, 1, 2, 3)),
    ),
    "siblings": (lambda q, k: (q * 2, k * 3), ((4, 6), (4, 6)), ("pointwise", (4, 6), (), (0, 1))),
    "norm": (norm, ((4, 8, 6), (6,), (6,)), ("row", (4, 8, 6), (0, 1), (2,))),
    "softmax": (softmax, ((2, 3, 8, 6),), ("row", (2, 3, 8, 6), (0, 1, 2), (3,))),
    "row sum": (lambda x: x.sum(-1), ((4, 6),), ("row", (4, 6), (0,), (1,))),
    "column sum": (
        lambda g, x: (g * x, (g * x).sum((0, 1))),
        ((4, 8, 6), (4, 8, 6)),
        ("column", (4, 8, 6), (0, 1), (2,)),
    ),
    "norm backward": (
        norm_backward,
        ((4, 8, 6), (4, 8, 6), (6,)),
        ("row_column", (4, 8, 6), (0, 1), (2,)),
    ),
    "loss": (lambda a, b: (a - b).square().mean(), ((4, 6), (4, 6)), ("full", (4, 6), (0, 1), ())),
    "row loss": (row_loss, ((4, 6),), ("row_column", (4, 6), (0,), (1,))),
    "scalar input": (lambda x, s: x * s, ((4, 6), ()), ("pointwise", (4, 6), (), (0, 1))),
    "vector softmax": (softmax, ((6,),), ("row", (6,), (), (0,))),
    "parts of rows": (parts, ((200, 6, 50), (6, 1)), ("nested", (200, 6, 50), (0,), (1, 2))),
    # whole rows are reduced, too
    "parts and rows": (
        lambda x, w: parts(x - x.mean((-2, -1), keepdim=True), w),
        ((200, 6, 50), (6, 1)),
        ("nested", (200, 6, 50), (0,), (1, 2)),
    ),
    # axes are ordered as the operands lie in memory, not as the dims are written
    "transposed": (
        lambda x: x.t().exp().sum(-1),
        ((4, 6),),
        ("column", (4, 6), (0,), (1,)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_kind_and_axes(name: str) -> None:
    fn, shapes, expected = CASES[name]
    found = domain_of(fn, *shapes)
    assert (found.kind, found.sizes, found.rows, found.cols) == expected


REFUSED: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], str]] = {
    "diagonal": (lambda x: x + x.t(), ((4, 4),), "two different maps"),
    "outer product with itself": (lambda x: x[:, None] * x, ((4,),), "two different maps"),
    "uneven reshape": (lambda x: (x * 2).view(3, 4) + 1, ((2, 6),), "split axes evenly"),
    "unrelated": (lambda x, y: (x + 1, y + 1), ((4, 6), (5,)), "share no single"),
    "slice": (lambda x: (x * 2)[1:] + 1, ((4, 6),), "no map of whole axes"),
    "rows read back": (
        lambda x: (x - x.amax(-1, keepdim=True)) / x.sum(0),
        ((4, 6),),
        "reduces other axes",
    ),
    "reduced again": (lambda x: x.sum((0, 1)).amax(), ((4, 5, 6),), "reduce"),
    # images of 57 x 57, a channel a row: of 56 x 56 they are one kernel, see below
    "long rows in odd pieces": (channel_norm, ((16, 160, 57, 57),), "pieces that no vectors"),
    "huge read back": (softmax, ((1 << 17,),), "read back"),
    "wide row and column": (norm_backward, ((4, 8, 20000), (4, 8, 20000), (20000,)), "too many"),
    "too many parts": (parts, ((200, 65, 50), (65, 1)), "too many parts"),
    "few rows of long parts": (parts, ((100, 8, 4096), (8, 1)), "too few and too long"),
    "parts side by side": (
        lambda x, w: parts(x.transpose(0, 1), w),
        ((6, 200, 50), (6, 1)),
        "one after the other",
    ),
    "parts that overlap": (
        lambda x: x - x.sum(-1, keepdim=True) * x.sum(-2, keepdim=True),
        ((200, 6, 50),),
        "reduces other axes",
    ),
    "product": (lambda a, b: a @ b, ((4, 6), (6, 4)), "not fused"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why(name: str) -> None:
    fn, shapes, reason = REFUSED[name]
    found = infer(traced(fn, *shapes))
    assert isinstance(found, Refusal)
    assert found.stage == "fusion"
    assert reason in found.reason
    assert ":" in found.node


@pytest.mark.parametrize(
    "shape",
    [
        (16, 160, 56, 56),  # vectors divide the pieces
        (8, 160, 57, 57),  # too short for slabs to pay
        (1, 160, 181, 182),  # in one piece
    ],
)
def test_rows_that_are_one_kernel(shape: tuple[int, ...]) -> None:
    assert domain_of(channel_norm, shape).kind == "row"


def test_every_value_has_a_map_of_its_size() -> None:
    nodes = traced(norm_backward, (4, 8, 6), (4, 8, 6), (6,))
    found = infer(nodes)
    assert isinstance(found, Domain)
    values = set(nodes) | {operand for node in nodes for operand in node.all_input_nodes}
    assert set(found.axes) == values
    for node, dims in found.axes.items():
        assert [found.extent(dim) for dim in dims] == list(node.meta["val"].shape)
    assert sorted(found.rows + found.cols) == list(range(len(found.sizes)))


def test_split_reaches_values_inferred_before_it() -> None:
    """The reshape comes last, yet the first value's dim is divided too."""
    nodes = traced(lambda x, y: (x * 2, (x * 3).view(2, 4, 6) + y), (8, 6), (4, 6))
    found = infer(nodes)
    assert isinstance(found, Domain)
    assert found.sizes == (2, 4, 6)
    assert found.axes[nodes[0]] == ((0, 1), (2,))


def test_gather_of_one_element_a_row_is_a_reduction() -> None:
    with FakeTensorMode():
        x, index = torch.empty(4, 6), torch.empty(4, 1, dtype=torch.int64)
        gm = make_fx(lambda x, i: x.log().gather(1, i))(x, index)
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    found = infer(nodes)
    assert isinstance(found, Domain)
    assert (found.kind, found.reduced[nodes[-1]]) == ("row", frozenset({1}))


def test_dynamic_shapes_are_refused() -> None:
    gm = make_fx(lambda x: x * 2, tracing_mode="symbolic")(torch.empty(4, 6))
    found = infer([node for node in gm.graph.nodes if "mul" in node.name])
    assert isinstance(found, Refusal)
    assert "dynamic" in found.reason


def test_layer_norm_of_torch_decomposes_to_a_row_group() -> None:
    table = torch._decomp.get_decompositions([aten.native_layer_norm])
    with FakeTensorMode():
        x, w = torch.empty(4, 8, 6), torch.empty(6)
        gm = make_fx(lambda x, w: F.layer_norm(x, (6,), w, w), decomposition_table=table)(x, w)
    gm.graph.eliminate_dead_code()
    found = infer([node for node in gm.graph.nodes if node.op == "call_function"])
    assert isinstance(found, Domain)
    assert found.kind == "row"
