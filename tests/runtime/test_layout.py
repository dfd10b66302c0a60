"""Copies of a replay's outputs: eager's strides, and eager's sharing of memory."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainfuse.runtime.layout import Copies

DTYPES = (torch.float32, torch.uint8, torch.float64, torch.complex64)


@st.composite
def views(draw: st.DrawFn) -> list[Tensor]:
    """Views of one or two storages: expanded, gapped, windows, empty, of other types."""
    bases = [torch.arange(draw(st.integers(64, 300))).repeat(8).byte() for _ in range(2)]
    made: list[Tensor] = []
    for _ in range(draw(st.integers(1, 5))):
        dtype = draw(st.sampled_from(DTYPES))
        base = draw(st.sampled_from(bases))
        typed = base.view(dtype)
        size = draw(st.lists(st.integers(0, 3), max_size=3))
        stride = draw(st.lists(st.integers(0, 7), min_size=len(size), max_size=len(size)))
        reach = 1 + sum(max(n - 1, 0) * s for n, s in zip(size, stride, strict=True))
        offset = draw(st.integers(0, typed.numel() - reach))
        made.append(typed.as_strided(size, stride, offset))
    return made


def span(value: Tensor) -> tuple[int, int]:
    """Addresses of the first byte that a tensor touches, and of the one after its last."""
    steps = zip(value.shape, value.stride(), strict=True)
    length = 1 + sum((n - 1) * s for n, s in steps) if value.numel() else 0
    return value.data_ptr(), value.data_ptr() + length * value.element_size()


def meet(a: Tensor, b: Tensor) -> bool:
    (start, end), (other, last) = span(a), span(b)
    return max(start, other) < min(end, last)


def bits(value: Tensor) -> bytes:
    return value.contiguous().numpy().tobytes()


@settings(max_examples=300)
@given(views())
def test_copies_have_their_values_strides_and_sharing(values: list[Tensor]) -> None:
    copies = Copies(values)
    made = copies()
    for value, copy in zip(values, made, strict=True):
        assert (copy.shape, copy.stride(), copy.dtype) == (value.shape, value.stride(), value.dtype)
        assert bits(value) == bits(copy)
        assert not any(meet(copy, original) for original in values)
    for i, j in itertools.combinations(range(len(values)), 2):
        if meet(values[i], values[j]):
            apart = values[i].data_ptr() - values[j].data_ptr()
            assert made[i].data_ptr() - made[j].data_ptr() == apart
    # all that is held is the stretch of memory that the values lie in
    held = {c.untyped_storage().data_ptr(): c.untyped_storage().nbytes() for c in made}
    touched = sum(v.untyped_storage().nbytes() for v in _first_of_each_storage(values))
    assert sum(held.values()) <= touched + 32 * len(values)


def _first_of_each_storage(values: list[Tensor]) -> list[Tensor]:
    return list({v.untyped_storage().data_ptr(): v for v in values}.values())


@settings(max_examples=300)
@given(views())
def test_copies_stay_and_the_next_ones_are_new(values: list[Tensor]) -> None:
    copies = Copies(values)
    first = copies()
    before = [bits(copy) for copy in first]
    for base in _first_of_each_storage(values):
        base.untyped_storage().fill_(1)
    second = copies()
    for value, old, kept, new in zip(values, first, before, second, strict=True):
        assert bits(old) == kept
        assert bits(new) == bits(value)
        assert not meet(old, new)


def test_a_write_to_one_view_shows_in_the_other() -> None:
    whole = torch.randn(4, 6)
    part, row = Copies([whole[:, :4], whole[1]])()
    part[1, 2] = 7.0
    assert row[2] == 7.0


def test_parts_of_memory_that_do_not_overlap_are_copied_apart() -> None:
    whole = torch.randn(8, 6)
    first, second = Copies([whole[:4], whole[4:]])()
    assert first.untyped_storage().nbytes() == second.untyped_storage().nbytes() == 4 * 6 * 4


def test_a_small_slice_of_a_large_storage_takes_its_own_memory() -> None:
    (row,) = Copies([torch.randn(1000, 100)[500]])()
    assert row.untyped_storage().nbytes() == 100 * 4


class Copied(TorchDispatchMode):
    """Counts the elements of each copy that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default):
            self.elements.append(args[-1].numel())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("values", "elements"),
    [
        (lambda x: [x.sin(), x.cos().t(), x.sum()], [48, 48, 1]),
        (lambda x: [x, x.t(), x[3]], [48]),  # views of one storage
        (lambda x: [x[:, :5]], [47]),  # few gaps
        (lambda x: [x[0].expand(9, 6)], [6]),
        (lambda x: [x.flatten().unfold(0, 8, 1)], [48]),  # windows, which overlap
        (lambda x: [x[:, 0], x[:, 1]], [8, 8]),  # few elements over a long stretch
        (lambda x: [x[:, :1].expand(8, 4)], [8]),
    ],
)
def test_what_is_copied(values, elements: list[int]) -> None:
    """One clone in the common case; never much more than what is asked for."""
    copies = Copies(values(torch.randn(8, 6)))
    with Copied() as copied:
        copies()
    assert copied.elements == elements


def test_what_has_no_strides_is_cloned_and_no_tensor_is_handed_on() -> None:
    sparse = torch.eye(3).to_sparse()
    lazy = torch.randn(3, dtype=torch.complex64).conj()
    made = Copies([sparse, 3, None, lazy])()
    assert made[0].is_sparse
    assert made[0] is not sparse
    assert made[1:3] == [3, None]
    assert made[3].equal(lazy)
