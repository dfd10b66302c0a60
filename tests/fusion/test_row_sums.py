"""Sums along rows in closed form: the same numbers, and no pass over the row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autodiff.derive import cleanup, decompose
from autodiff.graph import TrainingGraph
from autodiff.reference import run_graph
from autodiff.verify import verify
from tests.autodiff.training_graphs import training_graph
from tests.fusion.helpers import forward_graph
from trainfuse.fusion.rewrites.row_sums import simplify_sums

aten = torch.ops.aten
ROWS, CLASSES = 9, 30
TARGET = torch.tensor([0, 29, -100, 4, 4, -100, 17, 1, 28])
WEIGHTS = torch.rand(CLASSES)


def backward_sums(tg: TrainingGraph) -> int:
    """Sums over the classes that the backward makes."""
    return sum(
        node.target is aten.sum.dim_IntList and node.all_input_nodes[0].meta["val"].dim() == 2
        for node in tg.nodes("backward")
    )


Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
LOSSES: dict[str, Loss] = {
    "mean": lambda x, y, w: F.cross_entropy(x, y),
    "none": lambda x, y, w: F.cross_entropy(x, y, reduction="none"),
    "weights": lambda x, y, w: F.cross_entropy(x, y, weight=w),
    "smoothing": lambda x, y, w: F.cross_entropy(x, y, label_smoothing=0.1),
    "gather": lambda x, y, w: F.log_softmax(x, -1).gather(1, y.clamp(0)[:, None]).mean(),
    "scaled": lambda x, y, w: F.cross_entropy(x, y) * 3 - F.log_softmax(x, 1).mean(1).sum() / 7,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LOSSES)
def test_a_cross_entropy_s_cotangent_is_summed_without_its_rows(
    name: str, dtype: torch.dtype
) -> None:
    args = [torch.randn(ROWS, CLASSES).to(dtype), TARGET, WEIGHTS.to(dtype)]
    # a half cotangent is rounded in each element before it is summed: that stays a sum
    closed = not (dtype is torch.bfloat16 and name in ("smoothing", "scaled"))
    tg = cleanup(decompose(training_graph(LOSSES[name], args, [0])))
    assert backward_sums(tg) > 0
    new = verify(simplify_sums(tg), "row sums")
    assert (backward_sums(new) == 0) == closed
    given = [*args, torch.randn(args[0].shape[:1] if name == "none" else (), dtype=dtype)]
    rtol, atol = (1e-2, 1e-3) if dtype is torch.bfloat16 else (1e-6, 1e-6)
    for want, got in zip(run_graph(tg, given), run_graph(new, given), strict=True):
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


def kept(fn: Callable[..., Tensor], *args: Tensor) -> bool:
    """Whether a graph is left as it is."""
    tg = forward_graph(fn, args)
    return simplify_sums(tg) is tg


def columns(start: int = 0) -> Tensor:
    return torch.arange(start, CLASSES + start)


def selected(place: Tensor, value: Tensor) -> Tensor:
    return torch.where(place[:, None] == columns(), value, 0.0).sum(1)


def test_what_is_no_selection_is_summed() -> None:
    x, place = torch.randn(ROWS, CLASSES), TARGET
    assert not kept(selected, place, x)
    assert kept(lambda x: x.sum(1), x)
    assert kept(lambda x: (x * x).sum(1), x)

    def summed(mask: Callable[[Tensor], Tensor], rest: float = 0.0, at: Tensor = place) -> bool:
        return kept(lambda p, x: torch.where(mask(p), x, rest).sum(1), at, x)

    assert not summed(lambda p: p[:, None] == columns())
    # a range that starts elsewhere, another comparison, or a value in what isn't selected
    assert summed(lambda p: p[:, None] == columns(1))
    assert summed(lambda p: p[:, None] == columns() + 1)
    assert summed(lambda p: p[:, None] >= columns())
    assert summed(lambda p: p[:, None] == columns(), 1.0)
    # an index for each element, and two selections of one row
    assert summed(lambda p: p == columns(), at=torch.randint(CLASSES, (ROWS, CLASSES)))
    assert summed(lambda p: (p[:, None] == columns()) & (p[:, None] + 1 == columns()))


def test_values_of_closed_forms() -> None:
    x, row, place = torch.randn(ROWS, CLASSES), torch.randn(ROWS, 1), TARGET.clone()
    place[0] = CLASSES  # no column: nothing is selected

    def fn(x: Tensor, row: Tensor, place: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        mask = (place[:, None] == columns()) & (row > 0)
        chosen = torch.where(mask, x, 0.0)
        return (
            selected(place, x),
            chosen.sum(-1, keepdim=True),
            (chosen * row - row.expand(ROWS, CLASSES)).sum(1),
            (-(chosen / row)).sum([1]),
            torch.where(mask, row, 0.0).sum(1),
            selected(place, weights),
            # a number times what is constant along the row
            aten.mul.Scalar(row.expand(ROWS, CLASSES), 0.8).sum(1),
            aten.mul.Scalar(row.expand(ROWS, CLASSES), 2).sum(1),
            aten.mul.Tensor(row.expand(ROWS, CLASSES), 0.8).sum(1),
        )

    args = [x, row, place, WEIGHTS]
    tg = forward_graph(fn, args)
    new = verify(simplify_sums(tg))
    assert not [n for n in new.nodes() if n.target is aten.sum.dim_IntList]
    for want, got in zip(run_graph(tg, args), run_graph(new, args), strict=True):
        assert want.shape == got.shape
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["sum", "mean"])
def test_a_sum_of_row_losses_begins_with_rows(name, dtype) -> None:
    def fn(x: Tensor, t: Tensor) -> Tensor:
        losses = -F.log_softmax(x, -1) * t
        return losses.sum() if name == "sum" else losses.mean()

    args = [torch.randn(ROWS, CLASSES).to(dtype), torch.rand(ROWS, CLASSES).to(dtype)]
    tg = cleanup(decompose(forward_graph(fn, args)))
    new = verify(simplify_sums(tg))
    sums = [n.all_input_nodes[0].meta["val"] for n in new.nodes() if n.target is aten.sum.default]
    assert [tuple(value.shape) for value in sums] == [(ROWS,)]
    assert sums[0].dtype is torch.float32
    (want,), (got,) = run_graph(tg, args, dtype=torch.float64), run_graph(new, args)
    assert got.dtype is dtype
    torch.testing.assert_close(got.double(), want, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5,
                               atol=1e-5)  # fmt: skip


def test_other_sums_of_everything_stay() -> None:
    x = torch.randn(ROWS, CLASSES)
    assert kept(lambda x: x.square().sum(), x)
    assert kept(lambda x: (x - x.amax(0, keepdim=True)).sum(), x)
    assert kept(lambda x: x.sum(0).sum(), x)


def test_what_aten_reads_is_laid_out_as_the_sum_was() -> None:
    """A repeated element's norm, for one, is less exact than that of equal elements."""
    x = torch.full((1, 1), 1.6)

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        total = x.expand(8, 96).sum(0, keepdim=True)
        return (*torch._foreach_norm([total]), x.expand(8, 96).sum(0) * 2)

    tg = forward_graph(fn, [x])
    new = verify(simplify_sums(tg))
    assert not [n for n in new.nodes() if n.target is aten.sum.dim_IntList]
    (norm,) = [n for n in new.nodes() if n.target is aten._foreach_norm.Scalar]
    assert all(n.meta["val"].is_contiguous() for n in norm.all_input_nodes)
    assert sum(n.target is aten.clone.default for n in new.nodes()) == 1
    for want, got in zip(run_graph(tg, [x]), run_graph(new, [x]), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
