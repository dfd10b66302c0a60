"""The fusion checklist: layouts, odd layouts, views."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import trainfuse
from tests.gradients.five_calls import assert_no_fallback, five_calls, kernels, t
from trainfuse.testing import assert_gradients_match

# numpy's, of lanes beyond the mask: they compute on what they hold, as on a GPU
pytestmark = pytest.mark.filterwarnings(
    "ignore:(invalid value|divide by zero|overflow) encountered:RuntimeWarning"
)

ORDERS = list(itertools.permutations(range(3)))


def compiled(fn: Callable[..., Any], **options: Any) -> Any:
    return trainfuse.compile(fn, backend="triton", whole_step=False, **options)


def same_as_eager(fn: Any, step: Any, args: Sequence[Tensor]) -> None:
    """Outputs, their strides, and gradients of inputs whose layout a copy would lose."""
    ours, theirs = step(*args), fn(*args)
    assert ours.stride() == theirs.stride()
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs)
    inputs = [a for a in args if a.requires_grad]
    cotangent = torch.randn_like(theirs)
    own = torch.autograd.grad(ours, inputs, cotangent)
    expected = torch.autograd.grad(theirs, inputs, cotangent)
    assert [g.stride() for g in own] == [g.stride() for g in expected]
    torch.testing.assert_close(own, expected)


@pytest.mark.covers("B layout")
@pytest.mark.parametrize("one", ORDERS, ids=str)
def test_pairs_of_permutations(one: tuple[int, ...]) -> None:
    """Each of six layouts with each other: strides as eager's, one kernel a phase."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(x * y) + x

    step = compiled(fn)
    for seed, two in enumerate(ORDERS):
        torch.manual_seed(seed)
        # parameters with memory in another order than their dims
        args = [
            torch.randn([(3, 4, 5)[i] for i in order])
            .permute([order.index(i) for i in range(3)])
            .requires_grad_()
            for order in (one, two)
        ]
        same_as_eager(fn, step, args)
    assert_no_fallback(step)
    assert kernels(step) == {"forward": 1, "backward": 1}


CHANNELS_LAST: dict[str, tuple[int, ...]] = {
    "batch": (1, 3, 4, 5),
    "channels": (2, 1, 4, 5),
    "rows": (2, 3, 1, 5),
    "columns": (2, 3, 4, 1),
    "bias": (3, 1, 1),
    "lower rank": (5,),
    "scalar": (),
}


@pytest.mark.covers("B layout")
@pytest.mark.parametrize("name", CHANNELS_LAST)
def test_channels_last_with_a_broadcast_operand(name: str) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return F.relu(x + y) * 2

    step = compiled(fn)
    for seed in range(2):
        torch.manual_seed(seed)
        x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_()
        same_as_eager(fn, step, (x, t(*CHANNELS_LAST[name])))
    assert_no_fallback(step)
    assert kernels(step)["forward"] == 1


def overlapping(seed: int) -> Tensor:
    """Rows that share elements: a sliding window."""
    torch.manual_seed(seed)
    return torch.randn(9).as_strided((4, 6), (1, 1))


ODD: dict[str, Callable[[int], Tensor]] = {
    "overlapping": overlapping,
    "transposed": lambda seed: torch.randn(6, 4).t(),
    "every other": lambda seed: torch.randn(8, 12)[::2, ::2],
    "offset": lambda seed: torch.randn(5, 7)[1:, 1:],
    "expanded": lambda seed: torch.randn(6).expand(4, 6),
    "reversed": lambda seed: torch.randn(4, 6).flip(0),
}


@pytest.mark.covers("B odd layouts")
@pytest.mark.parametrize("name", ODD)
def test_inputs_of_odd_strides(name: str) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x * w) + x * 2

    step = compiled(fn)
    for seed in range(3):
        same_as_eager(fn, step, (ODD[name](seed), t(4, 6)))
    assert_no_fallback(step)
    assert kernels(step) == {"forward": 1, "backward": 1}


@pytest.mark.covers("B odd layouts")
@pytest.mark.parametrize("rank", [5, 8, 9])
def test_high_ranks(rank: int) -> None:
    """Rank 9 is refused, and right."""

    def fn(x: Tensor) -> Tensor:
        return torch.tanh(x) * 2 + x

    step = compiled(fn)
    shape = (2,) * rank
    for seed in range(2):
        assert_gradients_match(fn, (t(*shape),), compile_fn=lambda _: step, seed=seed)
    assert kernels(step) == (
        {"forward": 1, "backward": 1} if rank < 9 else {"forward": 0, "backward": 0}
    )
    if rank == 9:
        reasons = [r.reason for r in step.explain().refusals]
        assert any("rank 9" in reason or "dimension" in reason for reason in reasons), reasons


VIEWS: dict[str, tuple[Any, tuple[int, ...], int, int]] = {
    "view": (lambda x: torch.tanh((x * 2).view(4, 15)) + 1, (4, 3, 5), 1, 1),
    "reshape -1": (lambda x: torch.tanh((x * 2).reshape(-1, 5)) + 1, (4, 3, 5), 1, 1),
    "flatten": (lambda x: torch.tanh((x * 2).flatten(1)) + 1, (4, 3, 5), 1, 1),
    "squeeze": (lambda x: torch.tanh((x * 2).squeeze(1)) + 1, (4, 1, 5), 1, 1),
    "squeeze negative": (lambda x: torch.tanh((x * 2).squeeze(-1)) + 1, (4, 5, 1), 1, 1),
    "squeeze nothing": (lambda x: torch.tanh((x * 2).squeeze(0)) + 1, (4, 5), 1, 1),
    "squeeze 0-dim": (lambda x: (x * 2).squeeze() * 3 + 1, (1, 1), 1, 1),
    "unsqueeze": (lambda x: torch.tanh((x * 2).unsqueeze(1)) + 1, (4, 5), 1, 1),
    "nested": (
        lambda x: torch.tanh((x * 2).view(12, 5).unsqueeze(0).flatten(1).view(3, 20)) + 1,
        (4, 3, 5),
        1,
        1,
    ),
    "before permute": (
        lambda x: torch.tanh((x * 2).view(2, 2, 15).permute(2, 0, 1)) + 1,
        (4, 3, 5),
        1,
        1,
    ),
    "view of an input": (lambda x: torch.tanh(x.view(-1) * 2) + 1, (4, 5), 1, 1),
    "returned": (lambda x: (torch.tanh(x * 2) + 1).view(-1), (4, 5), 1, 1),
}


@pytest.mark.covers("B views", "S views")
@pytest.mark.parametrize("name", VIEWS)
def test_views(name: str) -> None:
    fn, shape, forward, backward = VIEWS[name]
    five_calls(fn, lambda: (t(*shape),), forward, backward, calls=3)


@pytest.mark.covers("B views")
@pytest.mark.parametrize("seed", range(4))
def test_random_splits_and_merges(seed: int) -> None:
    draw = random.Random(seed)
    shape = [draw.choice((2, 3, 4)) for _ in range(3)]

    def reshaped(sizes: list[int]) -> list[int]:
        place = draw.randrange(len(sizes))
        size = sizes[place]
        if draw.random() < 0.5 and size % 2 == 0 and size > 2:
            return [*sizes[:place], 2, size // 2, *sizes[place + 1 :]]
        if place + 1 < len(sizes):
            return [*sizes[:place], size * sizes[place + 1], *sizes[place + 2 :]]
        return [*sizes, 1]

    shapes = [shape]
    for _ in range(4):
        shapes.append(reshaped(shapes[-1]))

    def fn(x: Tensor) -> Tensor:
        for sizes in shapes[1:]:
            x = torch.tanh(x).view(sizes) + 0.1
        return x

    step = compiled(fn)
    for number in range(2):
        assert_gradients_match(fn, (t(*shape),), compile_fn=lambda _: step, seed=number)
    assert_no_fallback(step)
    # axes merged and then split elsewhere part two kernels: no one loop walks both
    assert 1 <= kernels(step)["forward"] <= 2


def around_matmul(x: Tensor, w: Tensor) -> Tensor:
    h = torch.tanh(x).view(-1, x.shape[-1])
    return (h @ w).view(*x.shape[:-1], -1).sigmoid() * 2


def sizes_as_numbers(x: Tensor, w: Tensor) -> tuple[Tensor, int, int]:
    h = torch.tanh(x) * w.mean()
    return h / h.numel(), h.shape[0], h.size(-1) * 2


def base_written_after_the_view(x: Tensor, w: Tensor) -> Tensor:
    """The view sees the write."""
    base = x * 2
    view = base[1:, :].t()
    base.mul_(w.mean())
    base[0] = 1.0
    return torch.tanh(view) + base[:1].sum()


def view_written_then_base(x: Tensor, w: Tensor) -> Tensor:
    base = x.sin()
    base.view(-1)[2:9].mul_(3)
    base.t()[0].add_(w.mean())
    return base.exp()


@pytest.mark.covers("B views, more", "S views", "B GEMM, conv")
def test_views_around_matmul() -> None:
    five_calls(around_matmul, lambda: (t(3, 4, 6), t(6, 5)), 1, 2)


@pytest.mark.covers("B views, more")
def test_sizes_returned_as_numbers() -> None:
    step = compiled(sizes_as_numbers)
    for _ in range(5):
        x, w = t(4, 6), t(6)
        ours, theirs = step(x, w), sizes_as_numbers(x, w)
        assert ours[1:] == theirs[1:] == (4, 12)
        assert isinstance(ours[1], int)
        torch.testing.assert_close(ours[0], theirs[0])
    assert_no_fallback(step)


@pytest.mark.covers("B views, more", "S views")
@pytest.mark.parametrize("fn", [base_written_after_the_view, view_written_then_base])
def test_writes_and_views(fn: Any) -> None:
    """Writes through views are nodes, and fuse where a group may hold them; eager's result."""
    step = compiled(fn)
    for seed in range(5):
        assert_gradients_match(fn, (t(4, 6), t(6)), compile_fn=lambda _: step, seed=seed)
    assert_no_fallback(step)
