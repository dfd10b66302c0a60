"""Products, and sums over rows, added to a carry wider than they: trainfuse.accumulate, _sum.

A weight's gradient summed over pieces in half precision rounds once a piece; a GEMM accumulates in
fp32 anyway, so its result and the sum of such results are kept in fp32 until the last. Neither is
fused with another: a piece is read when it is made, and is gone before the next one is.
"""

from __future__ import annotations

import torch
from torch import Tensor

_HALF = (torch.float16, torch.bfloat16)
_library = torch.library.Library("trainfuse", "FRAGMENT")
_library.define("accumulate(Tensor? carry, Tensor a, Tensor b) -> Tensor")
_library.define("accumulate_(Tensor(a!) carry, Tensor a, Tensor b) -> Tensor(a!)")
_library.define("accumulate_sum(Tensor? carry, Tensor a) -> Tensor")
_library.define("accumulate_sum_(Tensor(a!) carry, Tensor a) -> Tensor(a!)")


def carry_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that products of this type are summed in."""
    return torch.float32 if dtype in _HALF else dtype


def _accumulate(carry: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """carry + a @ b, or a @ b: [M, N], in the carry's type. a: [M, K]; b: [K, N]."""
    if a.dtype in _HALF and a.is_cuda:
        if carry is None:
            return torch.ops.aten.mm.dtype(a, b, torch.float32)
        return torch.ops.aten.addmm.dtype(carry, a, b, torch.float32)
    wide = carry_dtype(a.dtype)  # a CPU's products of fp32 are exact sums' terms, too
    if carry is None:
        return torch.mm(a.to(wide), b.to(wide))
    return torch.addmm(carry, a.to(carry.dtype), b.to(carry.dtype))


def _accumulate_in_place(carry: Tensor, a: Tensor, b: Tensor) -> Tensor:
    if a.dtype in _HALF and a.is_cuda:
        torch.ops.aten.addmm.dtype_out(carry, a, b, torch.float32, out=carry)
        return carry
    return carry.addmm_(a.to(carry.dtype), b.to(carry.dtype))


def _fake(carry: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    dtype = carry_dtype(a.dtype) if carry is None else carry.dtype
    return a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)


def _accumulate_sum(carry: Tensor | None, a: Tensor) -> Tensor:
    """carry + the sum of a's rows, or that sum: [1, N], in the carry's type. a: [M, N]."""
    total = torch.sum(a, 0, keepdim=True, dtype=carry_dtype(a.dtype))
    return total if carry is None else carry + total


def _accumulate_sum_in_place(carry: Tensor, a: Tensor) -> Tensor:
    return carry.add_(torch.sum(a, 0, keepdim=True, dtype=carry.dtype))


def _fake_sum(carry: Tensor | None, a: Tensor) -> Tensor:
    return a.new_empty((1, a.shape[1]), dtype=carry_dtype(a.dtype))


_library.impl("accumulate", _accumulate, "CompositeExplicitAutograd")
_library.impl("accumulate_", _accumulate_in_place, "CompositeExplicitAutograd")
torch.library.register_fake("trainfuse::accumulate", _fake, lib=_library)
_library.impl("accumulate_sum", _accumulate_sum, "CompositeExplicitAutograd")
_library.impl("accumulate_sum_", _accumulate_sum_in_place, "CompositeExplicitAutograd")
torch.library.register_fake("trainfuse::accumulate_sum", _fake_sum, lib=_library)

ACCUMULATING = frozenset(
    {torch.ops.trainfuse.accumulate.default, torch.ops.trainfuse.accumulate_sum.default}
)
"""Operators that continue the sum that is their first argument, or begin one where it is None."""
