"""What an indexing node does, said so that it fits each operand of what it reads.

Operands of an elementwise node align at their last dims, so dims are counted from the end: -1 is
the last one of every operand, and of the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from trainfuse.fusion.arguments import argument
from trainfuse.fusion.domains import RESHAPES
from trainfuse.fusion.indirect import INDEX_TYPES
from trainfuse.fusion.ranges import range_of

aten, prims = torch.ops.aten, torch.ops.prims


@dataclass(frozen=True, slots=True)
class Spec:
    """An indexing of some dims. dims: by dim, counted from the end, what is done along it.

    A slice's (start, end, step), a selection's number, (before, after) of a padding, the index
    tensor of a lookup, None of a flip.
    """

    target: Any
    dims: Mapping[int, Any]

    @property
    def pads(self) -> bool:
        """Whether it may add elements."""
        return self.target is aten.constant_pad_nd.default

    @property
    def picks(self) -> bool:
        """Whether data say what is read."""
        return any(isinstance(what, fx.Node) for what in self.dims.values())

    def _own(self, value: fx.Node) -> dict[int, Any]:
        """The dims along which a value has more than one element."""
        shape = value.meta["val"].shape
        return {d: v for d, v in self.dims.items() if -d <= len(shape) and shape[d] != 1}

    def misses(self, value: fx.Node) -> bool:
        """Whether a value is the same at all places: it has nothing along these dims."""
        return not self._own(value) and not self.squeezes(value)

    def squeezes(self, value: fx.Node) -> bool:
        """Whether a selection's dim is there, with one element: only the dim goes."""
        if self.target is not aten.select.int:
            return False
        (dim,) = self.dims
        shape = value.meta["val"].shape
        return -dim <= len(shape) and shape[dim] == 1

    def squeeze(self, value: fx.Node) -> tuple[Any, tuple[Any, ...]]:
        """The call that takes the selected dim away."""
        (dim,) = self.dims
        return aten.squeeze.dim, (value, value.meta["val"].dim() + dim)

    def call(self, value: fx.Node) -> tuple[Any, tuple[Any, ...]]:
        """The call that indexes a value."""
        own, rank = self._own(value), value.meta["val"].dim()
        if self.pads:
            pads = [n for i in range(1, rank + 1) for n in own.get(-i, (0, 0))]
            return self.target, (value, pads, 0)
        if self.target in (aten.flip.default, prims.rev.default):
            return self.target, (value, [rank + dim for dim in own])
        ((dim, what),) = own.items()
        if self.target is aten.slice.Tensor:
            return self.target, (value, rank + dim, *what)
        if self.target is aten.index.Tensor:
            return self.target, (value, [None] * (rank + dim) + [what])
        if self.target is aten.embedding.default:
            return self.target, (value, what)
        return self.target, (value, rank + dim, what)

    def shape_of(self, value: fx.Node) -> tuple[int, ...]:
        """Shape of a value that was indexed."""
        shape = list(value.meta["val"].shape)
        for dim, what in self._own(value).items():
            size = shape[dim]
            if self.pads:
                shape[dim] = size + sum(what)
            elif self.target is aten.slice.Tensor:
                start, end, step = what
                shape[dim] = len(range(*slice(start, end, step).indices(size)))
            elif self.target in (aten.index.Tensor, aten.index_select.default):
                shape[dim] = what.meta["val"].shape[0]
        if self.target is aten.select.int:
            (dim,) = self.dims
            if -dim <= len(shape):
                del shape[dim]
        if self.target is aten.embedding.default:
            shape = [*self.dims[-2].meta["val"].shape, shape[-1]]
        return tuple(shape)

    def bounds(self, user: fx.Node) -> Iterator[tuple[int, int, int]]:
        """Of a padding: each padded dim, and from where to where it holds the source."""
        shape = user.meta["val"].shape
        for dim, (before, after) in self.dims.items():
            yield len(shape) + dim, before, shape[dim] - after


def parse(node: fx.Node) -> Spec | None:
    """The indexing that a node is, of a tensor of fixed shape; None for any other node."""
    if node.op != "call_function" or node.target not in _PARSERS:
        return None
    source = node.args[0]
    if not isinstance(source, fx.Node) or not _static(node) or not _static(source):
        return None
    return _PARSERS[node.target](node, source.meta["val"].dim())


def _static(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and all(
        type(size) is int and size > 0 for size in value.shape
    )


def _slice(node: fx.Node, rank: int) -> Spec | None:
    what = tuple(argument(node, name) for name in ("start", "end", "step"))
    if not all(part is None or type(part) is int for part in what):
        return None
    return Spec(node.target, {argument(node, "dim") % rank - rank: what})


def _select(node: fx.Node, rank: int) -> Spec | None:
    index = argument(node, "index")
    if type(index) is not int:
        return None
    return Spec(node.target, {argument(node, "dim") % rank - rank: index})


def _pad(node: fx.Node, rank: int) -> Spec | None:
    pads, fill = argument(node, "pad"), argument(node, "value")
    if not all(type(pad) is int for pad in pads) or not isinstance(fill, bool | int | float):
        return None
    pairs = {-1 - i: (pads[2 * i], pads[2 * i + 1]) for i in range(len(pads) // 2)}
    return Spec(node.target, {dim: pair for dim, pair in pairs.items() if pair != (0, 0)})


def _flip(node: fx.Node, rank: int) -> Spec | None:
    return Spec(node.target, {dim % rank - rank: None for dim in argument(node, "dims")})


def _index(node: fx.Node, rank: int) -> Spec | None:
    given = {i - rank: index for i, index in enumerate(argument(node, "indices")) if index}
    if len(given) != 1 or not all(map(_is_list, given.values())):
        return None
    return Spec(node.target, given)


def _index_select(node: fx.Node, rank: int) -> Spec | None:
    index = argument(node, "index")
    if not rank or not _is_list(index):
        return None
    return Spec(node.target, {argument(node, "dim") % rank - rank: index})


def _embedding(node: fx.Node, rank: int) -> Spec | None:
    index = argument(node, "indices")
    return Spec(node.target, {-2: index}) if index.meta["val"].dtype in INDEX_TYPES else None


def _is_list(index: Any) -> bool:
    value = index.meta["val"] if isinstance(index, fx.Node) else None
    return value is not None and value.dim() == 1 and value.dtype in INDEX_TYPES


_PARSERS: dict[Any, Any] = {
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.constant_pad_nd.default: _pad,
    aten.flip.default: _flip,
    prims.rev.default: _flip,
    aten.index.Tensor: _index,
    aten.index_select.default: _index_select,
    aten.embedding.default: _embedding,
}

INDEXINGS = frozenset(_PARSERS)


def through(spec: Spec, view: fx.Node) -> Spec | None:
    """The same indexing of what a view shows, when the view only orders dims; else None.

    Not for a selection or an embedding, which change the number of dims.
    """
    if view.op != "call_function" or spec.target in (aten.select.int, aten.embedding.default):
        return None
    rank = view.meta["val"].dim()
    if view.target is aten.expand.default:
        return spec
    if view.target in RESHAPES:
        return _past_ones(spec, view)
    if view.target is aten.permute.default:
        order = [dim % rank for dim in argument(view, "dims")]
    elif view.target is aten.transpose.int and rank:
        order = list(range(rank))
        first, second = argument(view, "dim0") % rank, argument(view, "dim1") % rank
        order[first], order[second] = second, first
    elif view.target is aten.t.default:
        order = list(range(rank))[::-1]
    else:
        return None
    return Spec(spec.target, {order[d] - rank: v for d, v in spec.dims.items()})


def _past_ones(spec: Spec, view: fx.Node) -> Spec | None:
    """Through a reshape that only adds and takes away dims of one element."""
    source = view.args[0]
    assert isinstance(source, fx.Node)
    made, given = view.meta["val"].shape, source.meta["val"].shape
    ours = [d - len(made) for d, size in enumerate(made) if size != 1]
    theirs = [d - len(given) for d, size in enumerate(given) if size != 1]
    if [made[d] for d in ours] != [given[d] for d in theirs]:
        return None
    place = dict(zip(ours, theirs, strict=True))
    return Spec(spec.target, {place[d]: v for d, v in spec.dims.items() if d in place})


def composed(spec: Spec, padding: fx.Node) -> tuple[int, ...] | None:
    """Amounts that pad a padding's source to what an indexing reads of the padding, else None.

    A cut is a negative amount. Where the indexing pads again its own fill is still to be put.
    """
    inner = parse(padding)
    if inner is None or not inner.pads:
        return None
    shape, total = padding.meta["val"].shape, dict(inner.dims)
    for dim, what in spec.dims.items():
        if spec.pads:
            more = what
        elif spec.target is aten.slice.Tensor:
            cut = range(*slice(*what).indices(shape[dim]))
            if cut.step != 1:
                return None
            more = (-cut.start, cut.stop - shape[dim])
        else:
            return None
        before, after = total.get(dim, (0, 0))
        if before < 0 < more[0] or after < 0 < more[1]:
            return None  # what was cut would be seen again
        total[dim] = before + more[0], after + more[1]
    source = padding.args[0].meta["val"].shape  # type: ignore[union-attr]  # a padding's tensor
    if any(
        source[dim] + min(0, before) + min(0, after) <= 0 for dim, (before, after) in total.items()
    ):
        return None  # only padding is left in sight
    return tuple(n for i in range(1, len(shape) + 1) for n in total.get(-i, (0, 0)))


def counted(spec: Spec, node: fx.Node) -> tuple[int, int, int] | None:
    """(first, step, count) of what an indexing reads of a range; None where it is no range."""
    found = range_of(node) if node.meta["val"].dim() == 1 else None
    if found is None or spec.picks or spec.dims.keys() != {-1}:
        return None
    first, step, count = found
    what = spec.dims[-1]
    if spec.pads:
        return first - step * what[0], step, count + sum(what)
    if spec.target is aten.slice.Tensor:
        cut = range(*slice(*what).indices(count))
        return first + step * cut.start, step * cut.step, len(cut)
    if spec.target is aten.select.int:
        return None
    return first + step * (count - 1), -step, count
