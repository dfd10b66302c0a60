"""Inputs that share memory, one of them written: eager's results, whatever came before."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from tests.capture.scenarios import assert_like_eager, reasons, seen
from trainfuse.capture.overlap import OverlapGuard, share_memory

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


def _inputs(how: str, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A buffer, and two inputs of equal shapes and strides, whatever they share."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(24, generator=generator)
    offset = {"apart": 12, "by five": 5, "by three": 3}
    if how == "strangers":
        return base, base[:10].view(2, 5).clone(), torch.randn(2, 5, generator=generator)
    return base, base[:10].view(2, 5), base[offset[how] :][:10].view(2, 5)


ORDERS = [
    ("by five", "apart", "by five"),
    ("by five", "strangers"),
    ("by five", "by three"),
    ("apart", "by three", "apart"),
    ("strangers", "by five", "strangers"),
]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("written", "order"), [*((0, order) for order in ORDERS), (1, ORDERS[0]), (1, ORDERS[3])]
)
def test_each_call_sees_its_own_overlap(order, whole, written):
    def scenario(compile_):
        weight = nn.Parameter(torch.linspace(-1, 1, 5))
        optimizer = torch.optim.SGD([weight], lr=0.1)

        def loss_of(a, b):
            (a, b)[written].mul_(2)
            return (a * weight + b.sin()).square().sum()

        def step(a, b):
            optimizer.zero_grad()
            loss = loss_of(a, b)
            loss.backward()
            optimizer.step()
            return loss.detach()

        compiled = compile_(step if whole else loss_of)
        observed = []
        for i, how in enumerate(order):
            base, a, b = _inputs(how, i)
            loss = compiled(a, b)
            if not whole:
                weight.grad = None
                loss.backward()
            observed.append(seen(loss, base, a, b, weight, None if whole else weight.grad))
        return observed

    (step,) = assert_like_eager(scenario, "eager")
    assert "share memory" in reasons(step)


@pytest.mark.parametrize("halves", [False, True])
def test_views_that_lie_between_each_other_are_apart(halves):
    """Columns of one buffer span the same addresses, and share none.

    AOTAutograd can tell that of left and right, not of even and odd: those run eagerly.
    """

    def scenario(compile_):
        weight = nn.Parameter(torch.linspace(-1, 1, 5))

        def loss_of(a, b):
            a.mul_(2)
            return (a * weight + b).square().sum()

        compiled = compile_(loss_of)
        observed = []
        for i in range(3):
            base = torch.randn(3, 10, generator=torch.Generator().manual_seed(i))
            a, b = (base[:, :5], base[:, 5:]) if halves else (base[:, ::2], base[:, 1::2])
            loss = compiled(a, b)
            weight.grad = None
            loss.backward()
            observed.append(seen(loss, base, weight.grad))
        return observed

    (step,) = assert_like_eager(scenario, "eager")
    assert ("share memory" in reasons(step)) is not halves


def test_shared_memory_that_is_only_read_is_no_matter():
    def scenario(compile_):
        weight = nn.Parameter(torch.linspace(-1, 1, 5))
        compiled = compile_(lambda a, b: (a * weight + b).square().sum())
        return [seen(compiled(*_inputs(how, 0)[1:])) for how in ("by five", "apart", "by three")]

    (step,) = assert_like_eager(scenario, "eager")
    assert "share memory" not in reasons(step)
    assert len(step.plans) == 1


def test_an_input_that_overlaps_a_buffer_which_is_written():
    """Buffers stand still: only what moves is looked at, and a buffer's new address is found."""
    base = torch.zeros(30)
    guard = OverlapGuard([base[:10], torch.zeros(10)], written={0}, static={0})
    assert guard.needed
    assert not guard.overlaps
    assert not guard.violated([base[:10], torch.zeros(10)])
    assert guard.violated([base[:10], base[5:15]])
    moved = base[15:25]
    assert not guard.violated([moved, base[5:15]])
    assert guard.violated([moved, base[10:20]])


def test_nothing_written_or_nothing_that_moves_needs_no_check():
    a, b = torch.zeros(4), torch.zeros(4)
    assert not OverlapGuard([a, b], written=(), static=()).needed
    assert not OverlapGuard([a, b], written={0}, static={0, 1}).needed
    assert OverlapGuard([a, a.view(2, 2)], written={0}, static={0, 1}).overlaps
    assert not OverlapGuard([a, 3, torch.zeros(0)], written={0}, static=()).overlaps


def test_exactly_whether_two_layouts_share_an_element():
    """Against all pairs of elements of small strided tensors."""
    base = torch.zeros(64)
    layouts = [((3, 4), (8, 2)), ((3, 4), (4, 1)), ((2, 2), (1, 9)), ((5,), (3,)), ((), ())]
    for (one, two), offset in itertools.product(itertools.product(layouts, layouts), range(12)):
        low = base.as_strided(*one, 3)
        high = base.as_strided(*two, 3 + offset)
        cells = [
            {
                view.storage_offset()
                + sum(i * s for i, s in zip(place, view.stride(), strict=True))
                for place in itertools.product(*map(range, view.shape))
            }
            for view in (low, high)
        ]
        assert share_memory(low, high) == bool(cells[0] & cells[1]), (one, two, offset)
