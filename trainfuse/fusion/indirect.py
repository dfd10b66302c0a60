"""Reads at computed places: operators whose result is a tensor in memory, indexed.

An embedding, a selection by an index tensor, a padding or a roll moves elements and computes
nothing. In a kernel each is one load: its address comes from the result's coordinates, or from
an index that is loaded, or computed, first. What is read must be in memory: no program sees the
registers of another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx

from trainfuse.fusion.arguments import argument

aten, prims = torch.ops.aten, torch.ops.prims
PlaceKind = Literal["pick", "wrapping pick", "pad", "roll", "flip", "repeat"]
INDEX_TYPES = frozenset({torch.int32, torch.int64})  # ATen's; bytes and booleans are masks


@dataclass(frozen=True, slots=True)
class Place:
    """How a dim of the source is indexed, where it isn't by the result's own coordinate c.

    pick: by the values of `index`; wrapping: negative ones count from the end. pad: c - amount,
    and outside the source the fill. roll: c - amount, modulo the size. flip: size - 1 - c. repeat:
    c modulo the size.
    """

    kind: PlaceKind
    index: fx.Node | None = None
    amount: int = 0

    @property
    def picks(self) -> bool:
        """Whether the index is data, which can be out of range."""
        return self.index is not None


@dataclass(frozen=True, slots=True)
class Lookup:
    """A read of `source`. places: by dim of the source; a dim without one follows `walk`.

    walk: for each dim of the source the dim of the result whose coordinate indexes it; None for a
    picked dim. last: the dim of the result at which the last dim of the indices stands; they are
    broadcast against each other. fill: what a padding holds.
    """

    source: fx.Node
    walk: tuple[int | None, ...]
    places: Mapping[int, Place]
    last: int = 0
    fill: float | int | bool = 0

    @property
    def indices(self) -> list[fx.Node]:
        """Index tensors, in order of the source's dims."""
        return [place.index for place in self.places.values() if place.index is not None]


def parse(node: fx.Node) -> Lookup | str:
    """The read that a node is, or why it is none."""
    match node.target:
        case aten.embedding.default:
            return _embedding(node)
        case aten.index_select.default:
            return _index_select(node)
        case aten.index.Tensor:
            return _index(node)
        case aten.gather.default:
            return _gather(node)
        case aten.constant_pad_nd.default:
            return _pad(node)
        case aten.roll.default:
            return _roll(node)
        case aten.flip.default | prims.rev.default:
            return _flip(node)
        case aten.repeat.default:
            return _repeat(node)
        case _:
            return "it is no read at computed places"


TARGETS = frozenset(
    {
        aten.embedding.default,
        aten.index_select.default,
        aten.index.Tensor,
        aten.gather.default,
        aten.constant_pad_nd.default,
        aten.roll.default,
        aten.flip.default,
        prims.rev.default,
        aten.repeat.default,
    }
)


def source_of(node: fx.Node) -> fx.Node | None:
    """The tensor that a node reads at computed places; None for any other node."""
    if node.op != "call_function" or node.target not in TARGETS:
        return None
    found = parse(node)
    return found.source if isinstance(found, Lookup) else None


def _rank(node: fx.Node) -> int:
    return node.meta["val"].dim()


def _bad_index(index: object) -> str | None:
    if not isinstance(index, fx.Node):
        return "its index is no tensor"
    if index.meta["val"].dtype not in INDEX_TYPES:
        return "its index is no tensor of int32 or int64: a mask's result has a size of its own"
    return None


def _embedding(node: fx.Node) -> Lookup | str:
    weight, index = argument(node, "weight"), argument(node, "indices")
    if (bad := _bad_index(index)) is not None:
        return bad
    rank = _rank(index)
    return Lookup(weight, (None, rank), {0: Place("pick", index)}, last=rank - 1)


def _index_select(node: fx.Node) -> Lookup | str:
    source, index = argument(node, "self"), argument(node, "index")
    rank = _rank(source)
    if rank == 0 or _rank(index) != 1:
        return "it selects by a number, or from one"
    if (bad := _bad_index(index)) is not None:
        return bad
    dim = argument(node, "dim") % rank
    walk = tuple(None if d == dim else d for d in range(rank))
    return Lookup(source, walk, {dim: Place("pick", index)}, last=dim)


def _index(node: fx.Node) -> Lookup | str:
    """x[i, :, j]: adjacent indices stand where they were, others in front. Source: numpy's rule."""
    source, indices = argument(node, "self"), list(argument(node, "indices"))
    indices += [None] * (_rank(source) - len(indices))
    picked = [dim for dim, index in enumerate(indices) if index is not None]
    if not picked:
        return "it has no index"
    for dim in picked:
        if (bad := _bad_index(indices[dim])) is not None:
            return bad
    width = max(_rank(indices[dim]) for dim in picked)
    adjacent = picked == list(range(picked[0], picked[-1] + 1))
    first = picked[0] if adjacent else 0
    walk: list[int | None] = []
    place = 0
    for dim in range(_rank(source)):
        if indices[dim] is not None:
            walk.append(None)
            continue
        walk.append(place if place < first else place + width)
        place += 1
    places = {dim: Place("wrapping pick", indices[dim]) for dim in picked}
    return Lookup(source, tuple(walk), places, last=first + width - 1)


def _gather(node: fx.Node) -> Lookup | str:
    source, index = argument(node, "self"), argument(node, "index")
    rank = _rank(source)
    if rank == 0 or _rank(index) != rank:
        return "gather from a scalar"
    if (bad := _bad_index(index)) is not None:
        return bad
    dim = argument(node, "dim") % rank
    walk = tuple(None if d == dim else d for d in range(rank))
    return Lookup(source, walk, {dim: Place("pick", index)}, last=rank - 1)


def _pad(node: fx.Node) -> Lookup | str:
    source, pads, fill = argument(node, "self"), argument(node, "pad"), argument(node, "value")
    rank = _rank(source)
    if not isinstance(fill, bool | int | float) or not all(type(p) is int for p in pads):
        return "its padding is no number"
    # The list goes from the last dim to the first: before, after, before, after.
    places = {
        rank - 1 - i: Place("pad", amount=pads[2 * i])
        for i in reversed(range(len(pads) // 2))
        if (pads[2 * i], pads[2 * i + 1]) != (0, 0)
    }
    return Lookup(source, tuple(range(rank)), places, fill=fill)


def _roll(node: fx.Node) -> Lookup | str:
    source, shifts, dims = (argument(node, name) for name in ("self", "shifts", "dims"))
    rank = _rank(source)
    if not dims or not all(type(shift) is int for shift in shifts):
        return "it rolls over all elements as one"
    total: dict[int, int] = {}
    for shift, dim in zip(shifts, dims, strict=True):
        total[dim % rank] = total.get(dim % rank, 0) + shift
    shape = source.meta["val"].shape
    places = {dim: Place("roll", amount=shift % shape[dim]) for dim, shift in total.items()}
    return Lookup(source, tuple(range(rank)), places)


def _flip(node: fx.Node) -> Lookup | str:
    source, dims = node.args[0], argument(node, "dims")
    assert isinstance(source, fx.Node)
    rank = _rank(source)
    places = {dim % rank: Place("flip") for dim in dims}
    return Lookup(source, tuple(range(rank)), places)


def _repeat(node: fx.Node) -> Lookup | str:
    source, times = argument(node, "self"), argument(node, "repeats")
    rank, added = _rank(source), _rank(node) - _rank(source)
    if not all(type(time) is int for time in times):
        return "it repeats a number of times that is no constant"
    places = {dim: Place("repeat") for dim in range(rank) if times[added + dim] != 1}
    return Lookup(source, tuple(range(added, added + rank)), places)
