"""Other roundings: operators' results moved by a unit in their last place.

What an equally good program might give. Where eager's own error is luck (a cancellation, a result
that halfway between two numbers went the right way), it says how large the error might have been.
Random rounding as an estimate of rounding's effect is Monte Carlo arithmetic: D. S. Parker, B.
Pierce, P. R. Eggert, "Monte Carlo arithmetic: how to gamble with floating point and win",
doi:10.1109/5992.852391.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Operators that give their operands' bits, or zeros and draws: nothing is rounded there.
_EXACT = frozenset(
    """
    abs alias arange as_strided bernoulli_ bernoulli cat clamp clamp_ clamp_max clamp_min clone
    constant_pad_nd copy_ detach diagonal empty empty_like empty_strided eq expand fill_ flip full
    full_like gather ge gt index index_copy index_copy_ index_fill index_fill_ index_put index_put_
    index_select keep_mask le lift_fresh lt masked_fill masked_fill_ max maximum min minimum amax
    amin ne neg neg_ new_empty new_empty_strided new_ones new_zeros ones ones_like permute rand
    randint randn randperm relu relu_ repeat roll scalar_tensor scatter scatter_ seed select
    select_backward sign slice slice_backward sort split split_with_sizes squeeze stack t
    threshold_backward topk transpose tril triu unbind unfold unsqueeze view where zero_ zeros
    zeros_like _unsafe_view _local_scalar_dense _reshape_alias value_selecting_reduction_backward
    """.split()
)

ROUNDINGS, AS_FAR = 64, 2
"""How many other roundings are asked where something seems wrong, and how many of them must be as
far off. So few, as the one scalar of a half type that decides is seldom moved.
"""
_PIECE = 1 << 22
"""Elements that are moved at a time: a move takes some fp64 numbers for each."""
_aten = torch.ops.aten
_SUMS = frozenset({_aten.sum.default, _aten.sum.dim_IntList, _aten.mean.default, _aten.mean.dim})


class Jitter(TorchDispatchMode):
    """Moves one floating result in twelve by a unit in its last place; of sums, more than half.

    operands: also what is read by operators that sum within (reductions, products, norms): one that
    adds in a wider type than its operands', as ATen's do on a CPU, or whose sum cancels, shows
    nothing of its rounding in its result. Sums add their terms in another order, too.

    The variance is that of rounding itself, so that errors come to sqrt(2) times eager's. A sum in
    another order is rounded otherwise at every addition, and a loss is often the only one.
    """

    def __init__(self, seed: int, *, operands: bool = False) -> None:
        super().__init__()
        self._operands = operands
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __enter__(self) -> Any:
        """Begin anew: the same roundings in every block."""
        self._generators.clear()
        return super().__enter__()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if self._operands and _sums(func):
            args = [self._moved(value, 0) for value in args]
            if func in _SUMS:
                args[0] = self._reordered(args[0], args[1] if len(args) > 1 else None)
        result = func(*args, **(kwargs or {}))
        if not _rounds(func):
            return result
        most = max((v.numel() for v in args if isinstance(v, Tensor)), default=0)
        if func._schema.is_mutable:
            for value in _floats(result):
                value.copy_(self._moved(value, most))
            return result
        if isinstance(result, tuple | list):
            return type(result)(self._moved(value, most) for value in result)
        return self._moved(result, most)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]

    def _reordered(self, value: Tensor, dims: Sequence[int] | None) -> Tensor:
        for dim in dims or range(value.ndim):
            generator, size = self._generator(value.device), value.shape[dim] if value.ndim else 0
            if size > 1:
                order = torch.randperm(size, generator=generator, device=value.device)
                value = value.index_select(dim, order)
        return value

    def _moved(self, value: Any, most: int) -> Any:
        """The value, rounded otherwise. most: elements of the largest operand."""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        moved = torch.empty_like(value)
        for piece, into in zip(_pieces(value), _pieces(moved), strict=True):
            into.copy_(piece.double() * self._factors(piece, is_sum=most > value.numel()))
        return moved

    def _factors(self, value: Tensor, *, is_sum: bool) -> Tensor:
        """By what each element is multiplied, in fp64."""
        generator = self._generator(value.device)
        drawn = {"generator": generator, "dtype": torch.float64, "device": value.device}
        if is_sum:
            step = (0.8 * torch.randn(value.shape, **drawn)).round()
        else:
            chance = torch.rand(value.shape, **drawn)
            step = (chance < 1 / 24).double() - (chance > 23 / 24).double()
        # 0.7 to 1.4 units in the last place, which rounds to one
        return 1.0 + 0.7 * torch.finfo(value.dtype).eps * step


def _pieces(value: Tensor) -> Sequence[Tensor]:
    """Views of a tensor that are few elements each, along its longest dimension."""
    if value.numel() <= _PIECE:
        return [value]
    longest = max(range(value.ndim), key=lambda dim: value.shape[dim])
    rows = max(1, _PIECE * value.shape[longest] // value.numel())
    return value.split(rows, longest)


@functools.cache
def _rounds(func: Any) -> bool:
    """Whether an operator computes what a type may not hold."""
    name = func._schema.name.partition("::")[2]
    aliases = [r.alias_info for r in func._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in aliases)
    return not (name in _EXACT or name.startswith("_foreach") or is_view)


@functools.cache
def _sums(func: Any) -> bool:
    """Whether an operator adds up elements of what it reads, and writes none of it."""
    return _rounds(func) and torch.Tag.pointwise not in func.tags and not func._schema.is_mutable


def _floats(result: Any) -> Iterator[Tensor]:
    for value in result if isinstance(result, tuple | list) else (result,):
        if isinstance(value, Tensor) and value.is_floating_point():
            yield value
