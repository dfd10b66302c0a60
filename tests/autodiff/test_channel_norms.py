"""Batch and group norm in pieces: as exact as ATen's kernels, in every form that the ops take."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from training_graphs import Builder, training_graph

from autodiff import channel_norms
from autodiff.derive import cleanup, decompose
from autodiff.reference import run_graph
from autodiff.verify import verify

aten = torch.ops.aten
SHAPES = [(7, 5), (3, 5, 11), (4, 5, 3, 6), (2, 5, 2, 3, 2)]


def laid_out(x: Tensor, last: bool) -> Tensor:
    """x with its channels innermost in memory, if asked."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x


def widened(values: Sequence[Any]) -> list[Any]:
    return [v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for v in values]


def assert_no_worse(op: Any, formula: Any, args: Sequence[Any]) -> None:
    """Every result of the formula is as exact as the operator's, and of its type and layout."""
    eager, ours = op(*args), formula(*args)
    exact, precise = op(*widened(args)), formula(*widened(args))
    for mine, theirs, truth, wide in zip(ours, eager, exact, precise, strict=True):
        if mine is None or theirs is None:
            assert mine is None
            continue
        assert mine.shape == theirs.shape
        scale = truth.abs().max().item() if truth.numel() else 0.0
        if scale:
            assert (wide - truth).abs().max().item() <= 1e-10 * max(1.0, scale)
            allowed = 2 * (theirs.double() - truth).abs().max().item()
            allowed += 2 * torch.finfo(theirs.dtype).eps * scale
            assert (mine.double() - truth).abs().max().item() <= allowed


def parameters(dtype: torch.dtype, affine: bool) -> list[Tensor | None]:
    return [torch.rand(5, dtype=dtype) + 0.5, torch.randn(5, dtype=dtype)] if affine else [None] * 2


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_batch_norm(dtype: torch.dtype, shape: tuple[int, ...], last: bool, affine: bool) -> None:
    x = laid_out(torch.randn(shape) * 2 + 3, last).to(dtype)
    weight, bias = parameters(dtype, affine)
    running = [torch.randn(5).to(dtype), torch.rand(5).to(dtype) + 0.5]
    assert_no_worse(
        aten._native_batch_norm_legit_functional,
        channel_norms.batch_norm_functional,
        [x, weight, bias, *running, True, 0.1, 1e-5],
    )
    assert_no_worse(
        aten._native_batch_norm_legit_no_training,
        channel_norms.batch_norm_inference,
        [x, weight, bias, *running, 0.1, 1e-5],
    )
    assert_no_worse(
        aten._native_batch_norm_legit.no_stats,
        channel_norms.batch_norm_no_stats,
        [x, weight, bias, True, 0.1, 1e-5],
    )


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_batch_norm_backward(
    dtype: torch.dtype, shape: tuple[int, ...], last: bool, affine: bool, training: bool
) -> None:
    x = laid_out(torch.randn(shape) * 2 + 3, last).to(dtype)
    g = laid_out(torch.randn(shape), last).to(dtype)
    weight, _ = parameters(dtype, affine)
    others = [0, *range(2, len(shape))]
    var, mean = torch.var_mean(x.float(), others, correction=0)
    running = [torch.randn(5).to(dtype), torch.rand(5).to(dtype) + 0.5]
    saved = [mean.to(dtype), torch.rsqrt(var + 1e-5).to(dtype)] if training else [None, None]
    for mask in ([True, affine, affine], [True, False, False], [False, affine, affine]):
        assert_no_worse(
            aten.native_batch_norm_backward,
            channel_norms.batch_norm_backward,
            [g, x, weight, *running, *saved, training, 1e-5, mask],
        )


def test_a_large_mean_costs_no_digits() -> None:
    # E[x^2] - E[x]^2 would lose every digit of a deviation of 1 about 1000
    x = torch.randn(8, 5, 16, 16) + 1e3
    running = [torch.zeros(5), torch.ones(5)]
    output, _, rstd, _, _ = channel_norms.batch_norm_functional(
        x, None, None, *running, True, 0.1, 1e-5
    )
    exact = torch.nn.functional.batch_norm(x.double(), None, None, training=True)
    assert (output - exact).abs().max() < 2e-3  # a unit of 1000 in fp32 is 6e-5
    assert (rstd * x.double().var([0, 2, 3], correction=0).sqrt() - 1).abs().max() < 1e-4


@pytest.mark.parametrize("affine", [True, False])
def test_group_norm_backward_masks(affine: bool) -> None:
    x, g = torch.randn(3, 6, 5, 5), torch.randn(3, 6, 5, 5)
    weight = torch.rand(6) + 0.5 if affine else None
    _, mean, rstd = aten.native_group_norm(x, weight, None, 3, 6, 25, 2, 1e-5)
    for mask in ([True, affine, affine], [True, False, False], [False, affine, affine]):
        assert_no_worse(
            aten.native_group_norm_backward,
            channel_norms.group_norm_backward,
            [g, x, mean, rstd, weight, 3, 6, 25, 2, mask],
        )


@pytest.mark.parametrize(
    ("shape", "counts"), [((5,), [4]), ((5,), [3, 2]), ((2, 3), [1, 2, 3]), ((), [2, 2])], ids=str
)
def test_repeat(shape: tuple[int, ...], counts: list[int]) -> None:
    x = torch.randn(shape)
    made = channel_norms.repeat(x, counts)
    assert torch.equal(made, x.repeat(counts))
    assert made.stride() == x.repeat(counts).stride()


def test_what_no_formula_covers() -> None:
    one = torch.randn(1, 5, 1, 1)  # one value a channel has no unbiased variance
    running = [torch.zeros(5), torch.ones(5)]
    functional = channel_norms.batch_norm_functional
    assert functional(one, None, None, *running, True, 0.1, 1e-5) is NotImplemented
    empty = torch.randn(0, 5, 2, 2)
    assert functional(empty, None, None, *running, False, 0.1, 1e-5) is NotImplemented
    assert channel_norms.repeat(torch.randn(3), [0]) is NotImplemented


def test_statistics_that_nothing_reads_need_no_layout() -> None:
    """On a CPU evaluation saves two empty tensors, in a type of their own."""
    b = Builder()
    x, mean, var = b.input(4, 5, 6, dtype=torch.bfloat16), b.input(5), b.input(5)
    norm = b.call(
        aten._native_batch_norm_legit_no_training.default, x, None, None, mean, var, 0.1, 1e-5
    )
    tg = b.finish(b.call(operator.getitem, norm, 0))
    derived = verify(cleanup(decompose(tg)))
    assert not any("batch_norm" in str(node.target) for node in derived.nodes())
    args = [torch.randn(4, 5, 6).bfloat16(), torch.randn(5), torch.rand(5) + 0.5]
    [mine], [theirs] = run_graph(derived, args), run_graph(tg, args)
    torch.testing.assert_close(mine, theirs)


def test_instance_norm_repeats_no_parameter() -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        made = aten._native_batch_norm_legit.no_stats(
            x.view(1, 15, 4, 4), w.repeat(3), b.repeat(3), True, 0.1, 1e-5
        )
        return made[0].view(3, 5, 4, 4)

    args = [torch.randn(3, 5, 4, 4), torch.rand(5) + 0.5, torch.randn(5)]
    tg = training_graph(fn, args, [0, 1, 2])
    composites = {str(op) for op in channel_norms.channel_norms()}
    assert len({str(node.target) for node in tg.nodes()} & composites) == 3
    derived = verify(cleanup(decompose(tg)))
    assert not {str(node.target) for node in derived.nodes()} & composites
    inputs = [*args, torch.randn(3, 5, 4, 4)]
    for mine, theirs in zip(run_graph(derived, inputs), run_graph(tg, inputs), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
