"""Host-side layout of the foreach kernels' device tables, and what may share a launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

ALIGNMENT_BYTES = 16
BLOCK = 1024
CHUNK_SIZES = (8192, 4096, 2048, 1024)
INTERPRETED_CHUNK = 16384
PROGRAMS_PER_SM = 4


def chunk_for(total_elements: int, num_sms: int) -> int:
    """Elements a program covers: large lists amortise the 0-d part, small ones fill the GPU.

    num_sms: multiprocessors; 1 stands for the interpreter, whose programs and operations cost
    the same however much they hold.
    """
    if num_sms == 1:
        return INTERPRETED_CHUNK
    for chunk in CHUNK_SIZES[:-1]:
        if total_elements >= chunk * num_sms * PROGRAMS_PER_SM:
            return chunk
    return CHUNK_SIZES[-1]


def walk_together(tensors: Mapping[str, Tensor]) -> str | None:
    """Why one parameter's tensors can't be walked by one flat index; None when they can.

    tensors: role -> tensor; 0-d entries (step, lr) are ignored unless the parameter is 0-d itself.
    They must be dense, without gaps or overlap, and have one order of strides.
    """
    param = tensors["param"]
    for role, tensor in tensors.items():
        if tensor.dim() == 0:
            continue
        if tensor.shape != param.shape or tensor.stride() != param.stride():
            return (
                f"{role} is laid out as {tuple(tensor.stride())}, param as {tuple(param.stride())}"
            )
    extent = 1 + sum(
        (size - 1) * step for size, step in zip(param.shape, param.stride(), strict=True)
    )
    if param.numel() not in (0, extent):
        return "param has gaps or overlaps"
    return None


def pointer_table(
    tensors: Sequence[Mapping[str, Tensor]], roles: Sequence[str], *, counted: bool
) -> Tensor:
    """The static (counted) or the volatile table, on the host: int64 [tensors, roles (+ 1)]."""
    rows = [
        [entry[role].data_ptr() for role in roles] + [entry["param"].numel()] * counted
        for entry in tensors
    ]
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), len(roles) + counted)


def chunk_table(element_counts: Sequence[int], chunk: int) -> Tensor:
    """The launch map, on the host: int32 [programs, 2], rows of (tensor index, chunk index)."""
    rows = [
        (index, part)
        for index, count in enumerate(element_counts)
        for part in range(-(-count // chunk))
    ]
    return torch.tensor(rows, dtype=torch.int32).reshape(len(rows), 2)


def all_aligned(tensors: Sequence[Mapping[str, Tensor]]) -> bool:
    """Whether every tensor with elements starts on 16 bytes, as an aligned kernel assumes."""
    return all(
        tensor.data_ptr() % ALIGNMENT_BYTES == 0
        for entry in tensors
        for tensor in entry.values()
        if tensor.dim() > 0
    )
