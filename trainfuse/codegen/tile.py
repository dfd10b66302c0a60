"""Tiles: how a kernel's index tensors walk the axes of a domain, and where values lie in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autodiff.philox import word_shape
from trainfuse.fusion.domains import Domain

INT32_LIMIT = 1 << 31
VECTOR_BYTES = 16  # that a thread moves at once
_LONG, _EQUAL, _MOST_EQUAL, _FULL = 4096, 512, 8, 0.75
"""Rows longer than _LONG are covered by up to _MOST_EQUAL equal blocks: of at least _EQUAL where
these are exact, of any width where a row would be less than _FULL of a single block."""


@dataclass(frozen=True, slots=True)
class Vectors:
    """How a block of rows that begin at any address is moved in aligned vectors.

    element: text of the offset of values that are moved so. offset: the same, as a sum that Triton
    can tell is aligned. index: name of its index tensor, from an aligned element at most `before`
    elements before the row. stop: name of the row's end by that index. load, store: arguments of
    lib.load_row, but for the elements of an operand's vector, and of lib.store_row; "" where the
    block's mask takes vectors whole. first: text of the block's first column, which need be no
    multiple of 4.
    """

    element: str
    offset: str
    index: str
    before: int
    stop: str = ""
    load: str = ""
    store: str = ""
    first: str = ""


@dataclass(frozen=True, slots=True)
class Segment:
    """A block of a tile axis.

    index: name of its index tensor. mask: name of the mask that guards it, "" when the block
    never leaves the axis. width: elements. quad: text of its first element divided by 4, None
    when the block may start elsewhere than at a multiple of 4. vectors: of rows that begin at any
    address.
    """

    index: str
    mask: str
    width: int
    quad: str | None = None
    vectors: Vectors | None = None


@dataclass(frozen=True, slots=True)
class TileAxis:
    """One direction of a tile: several domain axes walked as one.

    axes: domain axes, outermost first. position: dimension in the tile, None for a scalar index.
    shared: different programs walk it, so a value that lacks it is stored by the first only.
    """

    name: str
    axes: tuple[int, ...]
    size: int
    segments: tuple[Segment, ...]
    position: int | None
    shared: bool


def floor_power(size: int) -> int:
    """Largest power of two that is at most `size`, which is at least 1."""
    return 1 << (size.bit_length() - 1)


def power_of_two(size: int) -> int:
    """Smallest power of two that is at least `size`."""
    return 1 << max(size - 1, 0).bit_length()


def divide_up(size: int, part: int) -> int:
    """Parts needed to cover `size`."""
    return -(-size // part)


def snug(size: int, widest: int, narrowest: int = 32) -> int:
    """The widest block, of powers of two, that wastes few lanes more than any: 32 for 160."""
    blocks = [widest]
    while blocks[-1] > narrowest:
        blocks.append(blocks[-1] // 2)
    lanes = [divide_up(size, block) * block for block in blocks]
    return next(b for b, count in zip(blocks, lanes, strict=True) if count <= 1.1 * min(lanes))


def cover(size: int, smallest: int = 128, pieces: int = 3) -> list[tuple[int, int]]:
    """(start, width) of power-of-two blocks that cover `size`, exactly when few of them do.

    768 is 512 + 256: no lane is wasted, no mask needed. 1000 is one masked block. Long rows take
    equal blocks, 5120 five of 1024: each thread then holds as much of one as of the next. So does
    4099, which would be half of one.
    """
    lowest = size & -size
    if size > _LONG and lowest >= _EQUAL and size // lowest <= _MOST_EQUAL:
        return [(start, lowest) for start in range(0, size, lowest)]
    if size > _LONG and size % smallest and size < _FULL * power_of_two(size):
        width = power_of_two(divide_up(size, _MOST_EQUAL))
        return [(start, width) for start in range(0, size, width)]
    blocks: list[tuple[int, int]] = []
    start = 0
    while start < size:
        left = size - start
        width = 1 << (left.bit_length() - 1)
        last = len(blocks) == pieces - 1
        if width < left and (last or (width < smallest and blocks) or left % smallest):
            width = power_of_two(left)
        blocks.append((start, width))
        start += width
    return blocks


def axis_strides(
    dims: Sequence[tuple[int, ...]], strides: Sequence[int], sizes: Sequence[int]
) -> dict[int, int]:
    """Elements between neighbours along each domain axis of a value."""
    found: dict[int, int] = {}
    for axes, stride in zip(dims, strides, strict=True):
        step = stride
        for axis in reversed(axes):
            found[axis] = step
            step *= sizes[axis]
    return found


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def value_strides(domain: Domain, node: fx.Node) -> dict[int, int]:
    """Strides along the domain's axes of a value as it lies in memory."""
    return axis_strides(domain.axes[node], node.meta["val"].stride(), domain.sizes)


def word_strides(domain: Domain, mask: fx.Node) -> dict[int, int]:
    """Words between neighbours of a random mask along the domain's axes."""
    return axis_strides(
        domain.axes[mask], row_major(word_shape(mask.meta["val"].shape)), domain.sizes
    )


def runs(
    axes: Sequence[int], strides: Mapping[int, int], sizes: Sequence[int]
) -> list[tuple[int, int, int, bool]]:
    """A tile axis cut in runs of even stride: (inner, size, stride, outermost), innermost first.

    inner: elements of the tile axis between neighbours of the run.
    """
    found: list[tuple[int, int, int]] = []
    inner = 1
    for axis in reversed(axes):
        stride, size = strides.get(axis, 0), sizes[axis]
        if found and stride == found[-1][2] * found[-1][1]:
            first, extent, step = found[-1]
            found[-1] = (first, extent * size, step)
        else:
            found.append((inner, size, stride))
        inner *= size
    return [(*run, index == len(found) - 1) for index, run in enumerate(found)]


def span(shape: Iterable[int], strides: Iterable[int]) -> int:
    """Elements from a tensor's first to past its last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def needs_int64(values: Iterable[torch.Tensor], iterations: int) -> bool:
    """Whether any offset or index passes 2^31."""
    return iterations >= INT32_LIMIT or any(
        span(value.shape, value.stride()) >= INT32_LIMIT for value in values
    )


def run_terms(
    axes: Sequence[int],
    index: str,
    strides: Mapping[int, int],
    sizes: Sequence[int],
    names: Mapping[int, str],
) -> list[str]:
    """Summands of an offset along one tile axis; `names` has the named sizes."""
    terms: list[str] = []
    for inner, size, stride, outermost in reversed(runs(axes, strides, sizes)):
        if stride == 0:
            continue
        text = index if inner == 1 else f"({index} // {inner})"
        if not outermost:
            text = f"({text} % {size})"
        terms.append(text if stride == 1 else f"{text} * {names.get(stride, stride)}")
    return terms


def first_only(
    axes: Sequence[int], index: str, present: Iterable[int], sizes: Sequence[int]
) -> list[str]:
    """Conditions that the axes not in `present` are at 0: one writer for a repeated value."""
    own = set(present)
    absent = {axis: 0 if axis in own else 1 for axis in axes}
    conditions: list[str] = []
    found: list[tuple[int, int, int]] = []
    inner = 1
    for axis in reversed(axes):
        if found and found[-1][2] == absent[axis]:
            found[-1] = (found[-1][0], found[-1][1] * sizes[axis], absent[axis])
        else:
            found.append((inner, sizes[axis], absent[axis]))
        inner *= sizes[axis]
    for place, (step, size, missing) in enumerate(found):
        if missing:
            text = index if step == 1 else f"({index} // {step})"
            if place < len(found) - 1:
                text = f"({text} % {size})"
            conditions.append(f"({text} == 0)")
    return conditions
