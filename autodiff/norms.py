"""Root mean squares of many tensors and of their errors: few launches, one wait for the device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

Figures = tuple[float, ...]
_PIECE = 1 << 22
"""Elements that are held in fp64 at a time."""
_FRACTION_SMALL, _FRACTION_TOGETHER = 16, 4
"""Parts of a piece: tensors up to one are laid end to end, until they are the other together."""
_PIECES_PENDING = 8
"""Pieces whose differences wait for their norms."""


def rms(x: torch.Tensor) -> float:
    """Root mean square in fp64, over the finite elements."""
    return measure([(x,)])[0][0]


def rmse(x: torch.Tensor, reference: torch.Tensor, eager: torch.Tensor | None = None) -> float:
    """Root mean square error against fp64.

    Where the reference isn't finite, x must be NaN or infinite exactly as eager is: else inf. The
    tensors may be on several devices: pieces are copied to that of x, a few at a time.
    """
    if eager is None:
        return measure([(x, reference)])[0][1]
    return measure([(x, eager, reference)])[0][2]


def measure(
    items: Sequence[tuple[torch.Tensor, ...]], known: Sequence[Figures | None] | None = None
) -> list[Figures]:
    """RMS figures of many tensors, waiting for each device once.

    items: (exact,), (eager, exact) or (ours, eager, exact). Returns the size of exact, then the
    errors of eager and ours, as `rms` and `rmse` define them. known: what the last two of three
    gave, so that the error of ours alone is measured; or what all of them gave.
    """
    return Measurement(items, known).read()


class Numbers:
    """A tensor's values, on their way to the host; only they are waited for, and not what follows.

    values: of one dimension.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._values, self._ready = values, None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._ready = torch.cuda.current_stream(values.device).record_event()

    def read(self) -> torch.Tensor:
        """The values, on the host."""
        if self._ready is not None:
            self._ready.synchronize()
        return self._values


class Measurement:
    """`measure` under way: launched when it is made, and waited for when it is read.

    errors_only: of each item the error of the first tensor alone.
    """

    @torch.no_grad()
    def __init__(
        self,
        items: Sequence[tuple[torch.Tensor, ...]],
        known: Sequence[Figures | None] | None = None,
        *,
        errors_only: bool = False,
    ) -> None:
        self._items, self._given = items, known or [None] * len(items)
        self._errors_only = errors_only
        self._norms = _Norms()
        self._places = [
            []
            if given is not None and len(given) == len(item)
            else self._norms.add(item, given is None and not errors_only)
            for item, given in zip(items, self._given, strict=True)
        ]
        self._norms.launch()

    @torch.no_grad()
    def read(self) -> list[Figures]:
        """The figures."""
        values = self._norms.read()
        results: list[Figures] = []
        for item, before, place in zip(self._items, self._given, self._places, strict=True):
            if before is not None and len(before) == len(item):
                results.append(before)
                continue
            count = max(item[0].numel(), 1)
            width = len(item) if before is None and not self._errors_only else 1
            found = [[values[item[0].device][i] for i in piece] for piece in place]
            parts = zip(*(found or [[0.0] * width]), strict=True)
            figures = tuple(math.hypot(*part) / math.sqrt(count) for part in parts)
            figures = (before or ()) + figures
            # a norm is finite where every element is
            if not all(map(math.isfinite, figures)):
                figures = _measure_special(*item)[-1 if self._errors_only else 0 :]
            results.append(figures)
        return results


@torch.no_grad()
def measure_parts(
    items: Sequence[tuple[torch.Tensor, ...]], lengths: Sequence[int]
) -> list[list[Figures]]:
    """`measure` of consecutive parts of flat tensors of one device, by item and part.

    lengths: of the parts, none of them zero, together a tensor's length.
    """
    results = figures_of_parts(norms_of_parts(items, lengths).tolist(), lengths)
    for item, found in zip(items, results, strict=True):
        for i, figures in enumerate(found):
            if not all(map(math.isfinite, figures)):
                found[i] = _measure_special(*(t.split(list(lengths))[i] for t in item))
    return results


@torch.no_grad()
def norms_of_parts(
    items: Sequence[tuple[torch.Tensor, ...]], lengths: Sequence[int]
) -> torch.Tensor:
    """What `figures_of_parts` reads: [item, figure, part], in fp64; nothing waits for the device.

    Every item has as many tensors.
    """
    parts = [p for i in items for d in _differences(i, True) for p in d.split(list(lengths))]
    return torch.stack(_norms_in_fp64(parts)).view(len(items), -1, len(lengths))


def figures_of_parts(norms: list[list[list[float]]], lengths: Sequence[int]) -> list[list[Figures]]:
    """Figures of parts by item and part; not finite where an element isn't, or a square is not."""
    return [
        [
            tuple(norm / math.sqrt(count) for norm in part)
            for count, *part in zip(lengths, *of_item, strict=True)
        ]
        for of_item in norms
    ]


def _norms_in_fp64(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Norms of tensors of one device: in fp32 a square may be below its smallest number."""
    alike: dict[torch.dtype, list[int]] = {}
    for i, tensor in enumerate(tensors):
        alike.setdefault(tensor.dtype, []).append(i)
    found: dict[int, torch.Tensor] = {}
    for places in alike.values():
        norms = torch._foreach_norm([tensors[i] for i in places], 2, dtype=torch.float64)
        found |= zip(places, norms, strict=True)
    return [found[i] for i in range(len(tensors))]


class _Norms:
    """Norms of exact tensors and of differences from them.

    Small tensors are laid end to end, and norms of several tensors are one launch: it is the
    launches and not the bytes that take time.
    """

    def __init__(self) -> None:
        self._made: dict[torch.device, list[torch.Tensor]] = {}
        self._found: dict[torch.device, Numbers] = {}
        self._pending: dict[torch.device, list[torch.Tensor]] = {}
        self._waiting: dict[object, _Together] = {}

    def add(self, item: tuple[torch.Tensor, ...], whole: bool) -> list[list[int]]:
        """Take note of one item; returns where the figures of its pieces will be, after `read`.

        whole: False for the error of the first tensor alone.
        """
        places: list[list[int]] = []
        for piece in _pieces(*item) if item[0].numel() else ():
            if not whole:
                piece = (piece[0], piece[-1])
            place: list[int] = []
            places.append(place)
            if piece[0].numel() * _FRACTION_SMALL > _PIECE:
                place += self._keep([*_differences(piece, whole)])
                continue
            key = (piece[0].device, whole, *(t.dtype for t in piece))
            together = self._waiting.setdefault(key, _Together(whole))
            together.add([t.reshape(-1) for t in piece], place)
            if together.count * _FRACTION_TOGETHER >= _PIECE:
                self._join(self._waiting.pop(key))
        return places

    def _join(self, together: _Together) -> None:
        columns = [torch.cat(column) for column in zip(*together.rows, strict=True)]
        lengths = [row[0].numel() for row in together.rows]
        differences = _differences(columns, together.whole)
        kept = self._keep([part for d in differences for part in d.split(lengths)])
        for i, place in enumerate(together.places):
            place += kept[i :: len(lengths)]

    def _keep(self, tensors: Sequence[torch.Tensor]) -> range:
        """Where the norms of these will be."""
        device = tensors[0].device
        made = self._made.setdefault(device, [])
        pending = self._pending.setdefault(device, [])
        first = len(made) + len(pending)
        pending += tensors
        if sum(t.numel() for t in pending) > _PIECES_PENDING * _PIECE:
            self._launch(device)
        return range(first, first + len(tensors))

    def _launch(self, device: torch.device) -> None:
        self._made[device] += _norms_in_fp64(self._pending[device])
        self._pending[device].clear()

    def launch(self) -> None:
        """Whatever waits for company."""
        for together in self._waiting.values():
            self._join(together)
        self._waiting.clear()
        for device, pending in self._pending.items():
            if pending:
                self._launch(device)
        self._found = {device: Numbers(torch.stack(made)) for device, made in self._made.items()}

    def read(self) -> dict[torch.device, list[float]]:
        """The norms, by device; waits for each."""
        return {device: found.read().tolist() for device, found in self._found.items()}


class _Together:
    """Flat pieces of the same element types, and where each one's figures go."""

    def __init__(self, whole: bool) -> None:
        self.whole, self.count = whole, 0
        self.rows: list[list[torch.Tensor]] = []
        self.places: list[list[int]] = []

    def add(self, row: list[torch.Tensor], place: list[int]) -> None:
        """One more."""
        self.rows.append(row)
        self.places.append(place)
        self.count += row[0].numel()


def _differences(piece: Sequence[torch.Tensor], whole: bool) -> Iterator[torch.Tensor]:
    """The last of some tensors, if asked for, and how far the others are from it.

    A difference is rounded once, and to fp32 where what differs is no better.
    """
    *others, exact = piece
    exact = exact.float() if _is_half(exact) else _floating(exact)
    if whole:
        yield exact
    for other in map(_floating, reversed(others)):
        dtype = torch.float64 if other.dtype is torch.float64 else torch.float32
        yield torch.sub(other, exact, out=torch.empty_like(other, dtype=dtype))


def _pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The tensors, or flat pieces of large ones, where the first one is."""
    device, shape = tensors[0].device, tensors[0].shape
    if tensors[0].numel() <= _PIECE and all(
        (t.device, t.shape) == (device, shape) for t in tensors
    ):
        yield tensors
        return
    flat = [t.reshape(-1).split(_PIECE) for t in tensors]
    for parts in zip(*flat, strict=True):
        yield tuple(part.to(device) for part in parts)


def _is_half(x: torch.Tensor) -> bool:
    return x.dtype in (torch.float16, torch.bfloat16)


def _floating(x: torch.Tensor) -> torch.Tensor:
    # a subtraction itself widens, but not every type has one
    return x if x.is_floating_point() and x.dtype.itemsize > 1 else x.double()


def _measure_special(*item: torch.Tensor) -> tuple[float, ...]:
    """The figures of one tensor that has NaN, infinity, or squares beyond fp64."""
    *others, exact = item
    figures = [_rms_where_finite(exact)]
    if others:
        figures.append(_rmse_where_finite(others[-1], exact))
    if len(others) == 2:
        figures.append(_rmse_where_finite(others[0], exact, others[1]))
    return tuple(figures)


def _rms_where_finite(x: torch.Tensor) -> float:
    total = count = torch.zeros((), dtype=torch.float64, device=x.device)
    for (part,) in _pieces(x):
        piece = part.double()
        finite = torch.isfinite(piece)
        total = total + torch.where(finite, piece, 0.0).square().sum()
        count = count + finite.sum()
    return float((total / count.clamp(min=1)).sqrt())


def _rmse_where_finite(
    x: torch.Tensor, reference: torch.Tensor, eager: torch.Tensor | None = None
) -> float:
    total = count = torch.zeros((), dtype=torch.float64, device=x.device)
    alike = torch.ones((), dtype=torch.bool, device=x.device)
    for piece in _pieces(x, *([] if eager is None else [eager]), reference):
        mine, exact = piece[0].double(), piece[-1].double()
        finite = torch.isfinite(exact)
        if eager is not None:
            theirs = piece[1].double()
            finite &= torch.isfinite(theirs)  # an overflow that eager has too is no error of ours
            same = (mine == theirs) | (mine.isnan() & theirs.isnan())
            alike = alike & (same | finite).all()
        total = total + torch.where(finite, mine - exact, 0.0).square().sum()
        count = count + finite.sum()
    return float((total / count.clamp(min=1)).sqrt()) if bool(alike) else math.inf
