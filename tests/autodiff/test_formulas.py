"""Formulas of composite operators: as exact as ATen's kernels, in fp32 and bf16."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from training_graphs import training_graph

from autodiff import formulas
from autodiff.derive import cleanup, decompose
from autodiff.reference import run_graph
from autodiff.verify import verify

COMPOSITES = {str(op) for op in formulas.composites()}
Case = tuple[Callable[..., Any], Sequence[Tensor], Sequence[int]]


def leaves(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape).to(dtype) for shape in shapes]


def case(name: str, dtype: torch.dtype) -> Case:
    rows = torch.tensor([0, 4, 2, -100, 1, 4, 0])
    match name:
        case "softmax":
            return lambda x: F.softmax(x, -1), leaves(dtype, (6, 33)), [0]
        case "softmax of columns":
            return lambda x: F.softmax(x, 0), leaves(dtype, (6, 33)), [0]
        case "softmax to float":
            return lambda x: F.softmax(x, 1, dtype=torch.float32), leaves(dtype, (6, 33)), [0]
        case "softmax, transposed input":
            return lambda x: F.softmax(x.t(), -1), leaves(dtype, (6, 33)), [0]
        case "log_softmax":
            return lambda x: F.log_softmax(x, 1), leaves(dtype, (6, 33)), [0]
        case "layer_norm":
            return (
                lambda x, w, b: F.layer_norm(x, (33,), w, b),
                leaves(dtype, (2, 6, 33), (33,), (33,)),
                [0, 1, 2],
            )
        case "layer_norm, plain":
            return lambda x: F.layer_norm(x, (6, 33)), leaves(dtype, (4, 6, 33)), [0]
        case "layer_norm, weight only":
            return lambda x, w: F.layer_norm(x, (33,), w), leaves(dtype, (6, 33), (33,)), [0, 1]
        case "layer_norm of everything":
            # no outer dimension: summing over an empty list would mean over all
            return (
                lambda x, w, b: F.layer_norm(x, (6, 33), w, b),
                leaves(dtype, (6, 33), (6, 33), (6, 33)),
                [0, 1, 2],
            )
        case "layer_norm, frozen affine":
            return lambda x, w: F.layer_norm(x, (33,), w), leaves(dtype, (6, 33), (33,)), [0]
        case "layer_norm, large mean":
            # E[x²]-E[x]² would lose every digit here
            return lambda x: F.layer_norm(x + 100, (33,)), leaves(dtype, (6, 33)), [0]
        case "group_norm":
            return (
                lambda x, w, b: F.group_norm(x, 2, w, b),
                leaves(dtype, (3, 6, 5, 5), (6,), (6,)),
                [0, 1, 2],
            )
        case "cross_entropy":
            return lambda x, y: F.cross_entropy(x, y), [*leaves(dtype, (7, 5)), rows], [0]
        case "cross_entropy, sum":
            return (
                lambda x, y: F.cross_entropy(x, y, reduction="sum"),
                [*leaves(dtype, (7, 5)), rows],
                [0],
            )
        case "cross_entropy, none":
            return (
                lambda x, y: F.cross_entropy(x, y, reduction="none"),
                [*leaves(dtype, (7, 5)), rows],
                [0],
            )
        case "cross_entropy, weights":
            weight = torch.rand(5).to(dtype)
            return (
                lambda x, y, w: F.cross_entropy(x, y, w),
                [*leaves(dtype, (7, 5)), rows, weight],
                [0],
            )
        case "cross_entropy, own ignore_index":
            return (
                lambda x, y: F.cross_entropy(x, y, ignore_index=4),
                [*leaves(dtype, (7, 5)), rows.clamp(0)],
                [0],
            )
        case "nll of given log-probabilities":
            return lambda x, y: F.nll_loss(x, y), [*leaves(dtype, (7, 5)), rows.clamp(0)], [0]
    raise AssertionError(name)


NAMES = [
    "softmax",
    "softmax of columns",
    "softmax to float",
    "softmax, transposed input",
    "log_softmax",
    "layer_norm",
    "layer_norm, plain",
    "layer_norm, weight only",
    "layer_norm of everything",
    "layer_norm, frozen affine",
    "layer_norm, large mean",
    "group_norm",
    "cross_entropy",
    "cross_entropy, sum",
    "cross_entropy, none",
    "cross_entropy, weights",
    "cross_entropy, own ignore_index",
    "nll of given log-probabilities",
]


def distance(value: Tensor, exact: Tensor) -> float:
    return (value.double() - exact.double()).abs().max().item()


@pytest.mark.covers("A27")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_no_less_exact_than_aten(name: str, dtype: torch.dtype) -> None:
    fn, args, trainable = case(name, dtype)
    tg = training_graph(fn, args, trainable)
    whole = {str(node.target) for node in tg.nodes()} & COMPOSITES
    assert whole
    derived = verify(cleanup(verify(decompose(tg))))
    assert not {str(node.target) for node in derived.nodes()} & COMPOSITES
    cotangents = [
        torch.randn(value.shape).to(value.dtype)
        for node in tg.graph.nodes
        if node.op == "placeholder" and "tangent" in str(node.name)
        for value in [node.meta["val"]]
    ]
    inputs = [*args, *cotangents]
    exact = run_graph(tg, [value.clone() for value in inputs], torch.float64)
    eager = run_graph(tg, [value.clone() for value in inputs])
    ours = run_graph(derived, [value.clone() for value in inputs])
    precise = run_graph(derived, [value.clone() for value in inputs], torch.float64)
    epsilon = torch.finfo(dtype).eps
    for mine, theirs, truth, wide in zip(ours, eager, exact, precise, strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.shape == theirs.shape
        assert mine.stride() == theirs.stride()
        assert distance(wide, truth) <= 1e-10 * max(1.0, truth.abs().max().item())
        scale = truth.abs().max().item()
        assert distance(mine, truth) <= 2 * distance(theirs, truth) + epsilon * scale


def test_all_rows_ignored_gives_nan_loss_and_zero_gradient() -> None:
    rows = torch.full((3,), -100)
    tg = training_graph(F.cross_entropy, [torch.randn(3, 5), rows], [0])
    loss, gradient = run_graph(decompose(tg), [torch.randn(3, 5), rows, torch.tensor(1.0)])
    assert loss.isnan()
    assert torch.equal(gradient, torch.zeros(3, 5))


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_masked_entries(op: str) -> None:
    x = torch.tensor([[0.0, float("-inf"), 1.0], [float("-inf")] * 3])
    fn = getattr(F, op)
    tg = training_graph(lambda x: fn(x, 1), [x], [0])
    ours = run_graph(decompose(tg), [x, torch.ones(2, 3)])
    eager = run_graph(tg, [x, torch.ones(2, 3)])
    for mine, theirs in zip(ours, eager, strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True)


def test_uncovered_calls_stay_aten() -> None:
    tg = training_graph(F.nll_loss, [torch.randn(5), torch.tensor(2)], [0])
    derived = decompose(tg)
    assert [node.name for node in derived.nodes()] == [node.name for node in tg.nodes()]


@pytest.mark.parametrize("affine", [True, False])
def test_rms_norm(affine: bool) -> None:
    # On a CPU ATen has no such kernel to trace, so the formulas are called directly.
    x = torch.randn(4, 6, 33, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(33, dtype=torch.float64, requires_grad=True) if affine else None
    cotangent = torch.randn(4, 6, 33, dtype=torch.float64)
    wanted = F.rms_norm(x, (33,), weight, 1e-5)
    wrt = [x] if weight is None else [x, weight]
    gradients = torch.autograd.grad(wanted, wrt, cotangent)
    with torch.no_grad():
        output, rstd = formulas.rms_norm(x, [33], weight, 1e-5)
        ours = formulas.rms_norm_backward(cotangent, x, [33], rstd, weight, [True, affine])
        half = formulas.rms_norm(x.bfloat16(), [33], None, 1e-5)
    torch.testing.assert_close(output, wanted.detach())
    for mine, theirs in zip(ours, gradients, strict=False):
        torch.testing.assert_close(mine, theirs)
    assert (half[0].dtype, half[1].dtype) == (torch.bfloat16, torch.float32)


def test_equal_layers_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    table = {
        torch.ops.aten._softmax.default: lambda x, dim, half: (
            calls.append(1) or formulas.softmax(x, dim, half)
        )
    }

    def fn(x: Tensor) -> Tensor:
        for _ in range(5):
            x = F.softmax(x, 1)
        return x

    tg = training_graph(fn, [torch.randn(4, 8)], [0])
    decompose(tg, table)
    assert len(calls) == 1


def test_results_of_one_trace_are_told_apart() -> None:
    """Two equal formulas share a trace; a formula that reads both must not read one twice."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([F.softmax(x, 1), F.softmax(y, 1)], 1)

    args = leaves(torch.float32, (128, 128), (128, 128))
    tg = training_graph(fn, args, [0])
    derived = verify(cleanup(decompose(tg)))
    assert not any("cat" in str(node.target) for node in derived.nodes())
    inputs = [*args, torch.randn(128, 256)]
    for mine, theirs in zip(run_graph(derived, inputs), run_graph(tg, inputs), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_a_target_that_is_no_class_makes_the_loss_nan(reduction: str, weighted: bool) -> None:
    """ATen stops the program; a compiled loss must not go on as if the row were ignored."""
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]) if weighted else None
    number = ("none", "mean", "sum").index(reduction)
    x = torch.randn(4, 5).log_softmax(1)
    right = torch.tensor([1, -100, 4, 0])
    loss, _ = formulas.nll_loss_forward(x, right, weight, number, -100)
    torch.testing.assert_close(loss, F.nll_loss(x, right, weight, reduction=reduction))
    for wrong in (5, -1):
        target = torch.tensor([1, -100, wrong, 0])
        loss, _ = formulas.nll_loss_forward(x, target, weight, number, -100)
        assert loss.isnan().tolist() == ([False, False, True, False] if number == 0 else True)
