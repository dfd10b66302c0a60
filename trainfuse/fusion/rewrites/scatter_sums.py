"""Scatter-adds of rows as sums of sorted segments: deterministic, and no row is sorted.

An embedding's gradient, `index_add`, `index_put(accumulate=True)` and a `scatter_add` whose index
is the same along each row add rows of a source to rows of a result. The keys alone are sorted, by
ATen; then one pass over the source adds each run of equal keys, and each row of the result is
written with its sum or with zero. Equal indices share one sort. Gradients of a range of positions
need none: they are a padding.

Obligations: sums are of the same elements, in fp32 for half types and rounded once; an index out of
range is an error as before; a padding index' row stays zero. Shapes are static, nothing waits for
the device: the sort can be captured.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autodiff import ops
from autodiff.graph import Refusal, TrainingGraph
from autodiff.rewrite import GraphEdit, fake_mode_of, is_row_major
from trainfuse.fusion.arguments import argument
from trainfuse.fusion.indirect import INDEX_TYPES
from trainfuse.fusion.ranges import range_of
from trainfuse.fusion.segment_ops import RANKED, unsorted

aten, own = torch.ops.aten, torch.ops.trainfuse

MIN_INDICES = 256
MIN_ELEMENTS = 1 << 14
"""Fewer are launches, whoever makes them, and ATen makes fewer of them."""
GPU_ATOMIC_ELEMENTS = 1 << 22
"""Where launches cost time and ATen adds with atomics, slow only in large numbers: 4096 rows of
1024, 40 us each way. Rows of an odd width are 69 to 48."""
MIN_WIDTH = 16
"""Narrower rows are mostly keys: sorting those costs more than atomics on the elements."""


@dataclass(frozen=True, slots=True)
class Scatter:
    """result[lead, index, trail] += alpha * source[lead, place, trail].

    dim: of the result, where the index goes. lead: its dims before. index_leads: whether the index
    has those dims itself. base: what is added to; None for zeros. wrap: negative indices count from
    the end. padding: a row that gets nothing, or -1.
    """

    source: fx.Node
    index: fx.Node
    dim: int
    index_leads: bool = False
    base: fx.Node | None = None
    alpha: float = 1
    wrap: bool = False
    padding: int = -1


def sum_sorted_segments(
    tg: TrainingGraph, skip_ops: Collection[str] = frozenset(), *, launches_cost: bool = False
) -> tuple[TrainingGraph, tuple[Refusal, ...]]:
    """Replace the scatter-adds of rows, and say why of those that stay ATen.

    launches_cost: whether those too small to pay for the launches of a sort are left to ATen.
    """
    chosen: list[tuple[fx.Node, Scatter]] = []
    refusals: list[Refusal] = []
    for node in tg.nodes():
        rule = RULES.get(node.target)
        name = ops.op_name(node.target)
        if rule is None or not {name, name.rpartition(".")[0]}.isdisjoint(skip_ops):
            continue
        found = rule(node)
        if not isinstance(found, str):
            found = _worthwhile(node, found, launches_cost) or found
        if isinstance(found, str):
            refusals.append(tg.refuse("fusion", node, found))
        else:
            chosen.append((node, found))
    if not chosen:
        return tg, tuple(refusals)
    edit = GraphEdit(tg)
    writer = _Writer(edit)
    for node, scatter in chosen:
        writer.rewrite(node, scatter)
    edit.eliminate_dead()
    return edit.finish(), tuple(refusals)


# What each operator means.


def _embedding(node: fx.Node) -> Scatter | str:
    if argument(node, "scale_grad_by_freq"):
        return "its rows are scaled by how often they occur"
    gradient, index = argument(node, "grad_output"), argument(node, "indices")
    return Scatter(gradient, index, 0, padding=argument(node, "padding_idx"))


def _index_add(node: fx.Node) -> Scatter | str:
    base, index, source = (argument(node, name) for name in ("self", "index", "source"))
    rank = _value(base).dim()
    if rank == 0 or _value(index).dim() != 1:
        return "it adds to, or at, a single place"
    dim = argument(node, "dim") % rank
    alpha = argument(node, "alpha")
    if not isinstance(alpha, int | float):
        return "its factor is no number"
    return Scatter(source, index, dim, base=_not_zeros(base), alpha=alpha)


def _index_put(node: fx.Node) -> Scatter | str:
    base, indices, values = (argument(node, name) for name in ("self", "indices", "values"))
    if not argument(node, "accumulate"):
        return "it writes one of several values, whichever comes last"
    given = [dim for dim, index in enumerate(indices) if index is not None]
    if len(given) != 1:
        return "it adds at places given by several indices"
    (dim,) = given
    index = indices[dim]
    sizes = [size for node in (base, index, values) for size in _value(node).shape]
    if not all(isinstance(size, int) for size in sizes):
        return "the data decides its sizes"
    shape = list(_value(base).shape)
    if list(_value(values).shape) != shape[:dim] + list(_value(index).shape) + shape[dim + 1 :]:
        return "its values are repeated"
    return Scatter(values, index, dim, base=_not_zeros(base), wrap=True)


def _scatter_add(node: fx.Node) -> Scatter | str:
    base, index, source = (argument(node, name) for name in ("self", "index", "src"))
    rank = _value(base).dim()
    if rank == 0:
        return "it adds to a single place"
    dim = argument(node, "dim") % rank
    if _value(index).shape != _value(source).shape:
        return "it leaves out a part of its source"
    wanted, given = list(_value(base).shape), list(_value(index).shape)
    wanted[dim] = given[dim]
    if wanted != given:
        return "it leaves out a part of its result"
    strides = _value(index).stride()
    if any(strides[d] != 0 and given[d] != 1 for d in range(dim + 1, rank)):
        return "its index differs along a row"
    return Scatter(source, index, dim, index_leads=True, base=_not_zeros(base))


RULES: dict[Any, Callable[[fx.Node], Scatter | str]] = {
    aten.embedding_dense_backward.default: _embedding,
    aten.index_add.default: _index_add,
    aten.index_put.default: _index_put,
    aten.scatter_add.default: _scatter_add,
}


def _value(node: fx.Node) -> torch.Tensor:
    return node.meta["val"]


def _not_zeros(base: fx.Node) -> fx.Node | None:
    """None for zeros, to which adding changes nothing."""
    fills = {
        aten.full.default: lambda: base.args[1],
        aten.zeros.default: lambda: 0,
        aten.zeros_like.default: lambda: 0,
        aten.new_zeros.default: lambda: 0,
    }
    fill = fills.get(base.target) if base.op == "call_function" else None
    return None if fill is not None and fill() == 0 else base


def _worthwhile(node: fx.Node, scatter: Scatter, launches_cost: bool) -> str | None:
    """Why a scatter is better left to ATen, or can't be had, or None."""
    source, index, result = _value(scatter.source), _value(scatter.index), _value(node)
    sizes = (*source.shape, *source.stride(), *index.shape, *result.shape)
    if not all(type(size) is int for size in sizes):
        return "its shape is dynamic; plans are static"
    if not is_row_major(result):
        return "its result doesn't lie row by row"
    if not source.dtype.is_floating_point or source.dtype != result.dtype:
        return "it adds other than floating numbers of one type"
    if index.dtype not in INDEX_TYPES:
        return "its index is no tensor of int32 or int64"
    if source.device != index.device:
        return "its operands are on several devices"
    if _as_range(node, scatter) is not None:
        return None
    width = math.prod(result.shape[scatter.dim + 1 :])
    if width < MIN_WIDTH:
        return f"its rows have fewer than {MIN_WIDTH} elements"
    if source.numel() < max(MIN_ELEMENTS, MIN_INDICES * width):
        return "it adds too few rows for a sort to pay"
    # one launch of ours is as few as theirs
    atomic = node.target in (aten.index_add.default, aten.scatter_add.default)
    atomic = atomic and not unsorted(source.numel() // width, result.numel() // width, width)
    if launches_cost and atomic and source.numel() < GPU_ATOMIC_ELEMENTS:
        return "it adds too few elements for a sort's launches to pay"
    if launches_cost and atomic and width * source.dtype.itemsize % 16:
        return "its rows' width allows no vectors, and ATen's atomics need none"
    if max(source.numel() // width, result.numel() // width) >= (1 << 31) - 1:
        return "it has more rows than an int32 counts"
    return None


def _as_range(node: fx.Node, scatter: Scatter) -> tuple[int, int] | None:
    """(start, stop) of the rows when the index is these in order; None for any other scatter."""
    found = range_of(scatter.index)
    if found is None or scatter.dim or scatter.base is not None or scatter.alpha != 1:
        return None
    start, step, count = found
    stop, rows = start + count, _value(node).shape[0]
    if step != 1 or start < 0 or stop > rows or start <= scatter.padding < stop:
        return None
    return start, stop


class _Writer:
    """Writes the nodes of each scatter before it; equal indices share their sort."""

    def __init__(self, edit: GraphEdit) -> None:
        self.edit = edit
        self.sorted: dict[Any, tuple[fx.Node, fx.Node | None]] = {}

    def rewrite(self, old: fx.Node, scatter: Scatter) -> None:
        node = self.edit.mapping[old]
        with self.edit.graph.inserting_before(node):
            result = self.as_padding(node, scatter) or self.as_segments(node, scatter)
        self.edit.replace(node, result)

    def emit(self, near: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        fact = self.edit.facts[near]
        return self.edit.emit(target, args, kwargs, fact=fact, origin=near)

    def flat(self, near: fx.Node, value: fx.Node, shape: Sequence[int]) -> fx.Node:
        """A reshape; a copy first where no view has that shape."""
        if not is_row_major(_value(value)):
            # embedding_dense_backward copies, too
            value = self.emit(
                near, aten.clone.default, value, memory_format=torch.contiguous_format
            )
        if tuple(_value(value).shape) == tuple(shape):
            return value
        return self.emit(near, aten.view.default, value, list(shape))

    def as_padding(self, node: fx.Node, scatter: Scatter) -> fx.Node | None:
        """The gradient of rows start, start + 1, ...: each is read once, all others are zero."""
        found = _as_range(node, scatter)
        if found is None:
            return None
        start, stop = found
        rows = _value(node).shape[0]
        shape = (stop - start, _value(node).numel() // rows)
        source = self.flat(node, self.edit.mapping[scatter.source], shape)
        pads = [0, 0, start, rows - stop]
        padded = self.emit(node, aten.constant_pad_nd.default, source, pads, 0.0)
        return self.flat(node, padded, _value(node).shape)

    def as_segments(self, node: fx.Node, scatter: Scatter) -> fx.Node:
        shape = list(_value(node).shape)
        lead, rows = math.prod(shape[: scatter.dim]), shape[scatter.dim]
        width = math.prod(shape[scatter.dim + 1 :])
        source = self.edit.mapping[scatter.source]
        source = self.flat(node, source, (_value(source).numel() // width, width))
        keys, order = self.keys(node, scatter, lead, rows, width)
        padding = scatter.padding if 0 <= scatter.padding < rows else -1
        total = self.emit(node, own.segment_sum.default, source, keys, order, lead * rows, padding)
        total = self.flat(node, total, shape)
        if scatter.alpha != 1:
            total = self.emit(node, aten.mul.Tensor, total, scatter.alpha)
        if scatter.base is not None:
            total = self.emit(node, aten.add.Tensor, self.edit.mapping[scatter.base], total)
        return total

    def keys(
        self, node: fx.Node, scatter: Scatter, lead: int, rows: int, width: int
    ) -> tuple[fx.Node, fx.Node | None]:
        """Keys of the rows; sorted, and where each came from, unless they are few."""
        index = self.edit.mapping[scatter.index]
        as_is = lead == 1 and not scatter.wrap and _value(index).dtype == torch.int64
        as_is = as_is and unsorted(_value(index).numel(), rows, width)
        known = (self.edit.facts[node].phase, index, scatter.dim, scatter.wrap, lead, rows, as_is)
        if known in self.sorted:
            return self.sorted[known]
        if scatter.index_leads:
            for _ in range(scatter.dim + 1, _value(index).dim()):
                index = self.emit(node, aten.select.int, index, -1, 0)
            base_shape = [*_value(index).shape[:-1], 1]
        else:
            index = self.flat(node, index, (_value(index).numel(),))
            base_shape = [lead, 1]
        base = None
        if as_is:
            self.sorted[known] = index, None
            return self.sorted[known]
        if lead > 1:
            options = {"dtype": torch.int64, "device": _value(index).device}
            bounds = (0, lead * rows, rows)
            with fake_mode_of(self.edit.graph):
                value = torch.arange(*bounds, **options)
            base = self.edit.emit(
                aten.arange.start_step, bounds, options, fact=self.edit.facts[node], value=value
            )
            base = self.flat(node, base, base_shape)
        keys = self.emit(node, own.row_keys.default, index, base, rows, lead * rows, scatter.wrap)
        keys = self.flat(node, keys, (_value(keys).numel(),))
        if _value(keys).numel() <= RANKED:
            self.sorted[known] = keys, None
            return self.sorted[known]
        both = self.emit(node, aten.sort.stable, keys, stable=True, dim=0, descending=False)
        parts = tuple(
            self.edit.emit(
                operator.getitem, (both, i), fact=self.edit.facts[node], value=both.meta["val"][i]
            )
            for i in range(2)
        )
        self.sorted[known] = parts[0], parts[1]
        return self.sorted[known]
