"""Launching a foreach kernel: device tables of addresses and chunks, rebuilt when one moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from trainfuse.codegen.schedules.foreach import ForeachKernel
from trainfuse.codegen.schedules.foreach_tables import chunk_table, pointer_table
from trainfuse.runtime.cache import KernelCache, Variant
from trainfuse.runtime.launch import BoundFunction, pointer_type

Entry = Mapping[str, Tensor]


class ForeachLauncher:
    """One kernel over one list of parameters, whose sizes and 0-d types are fixed here.

    Under CUDA graph capture the gradients' table is filled at every replay from a pinned buffer,
    so that buffer and every captured table live as long as this object.
    """

    def __init__(
        self,
        kernel: ForeachKernel,
        entries: Sequence[Entry],
        cache: KernelCache,
        arch: str,
        *,
        fma: bool = True,
    ) -> None:
        self.kernel = kernel
        self._device = entries[0]["param"].device
        chunks = chunk_table([e["param"].numel() for e in entries], kernel.chunk)
        self._chunks = chunks.to(self._device)
        self._static: tuple[tuple[int, ...], Tensor] | None = None
        self._volatile: tuple[tuple[int, ...], Tensor] | None = None
        self._captured: list[Tensor] = []
        self._pinned: Tensor | None = None
        if self._device.type == "cuda":
            shape = (len(entries), len(kernel.volatile_roles))
            self._pinned = torch.empty(shape, dtype=torch.int64, pin_memory=True)
        folder = cache.entry(kernel.key, kernel.source, arch)
        shared = [pointer_type(entries[0][role].dtype) for role in kernel.shared_roles]
        launches = [("update", ["*i64", "*i64", "*i32", *shared], len(chunks))]
        if kernel.advances:
            launches.append(("advance", ["*i64", *shared], len(entries)))
        self._functions = [
            BoundFunction(
                cache, folder, arch, name, types, (grid, 1, 1), kernel.num_warps, None, fma
            )
            for name, types, grid in launches
        ]

    @property
    def wanted(self) -> list[tuple[Path, Variant]]:
        """Compilations that a call needs."""
        return [function.wanted for function in self._functions]

    def load(self) -> None:
        """Load the compiled functions; raises what compiling them raised."""
        for function in self._functions:
            function.load()

    def refresh(self, entries: Sequence[Entry]) -> Tensor:
        """The table of parameter and state addresses, uploaded if one moved; before a capture."""
        roles = self.kernel.static_roles
        addresses = _addresses(entries, roles)
        if self._static is None or self._static[0] != addresses:
            table = pointer_table(entries, roles, counted=True).to(self._device)
            self._static = (addresses, table)
        return self._static[1]

    def __call__(self, entries: Sequence[Entry]) -> None:
        """Update the parameters in place on the current stream."""
        static, volatile = self.refresh(entries), self._gradients(entries)
        shared = [entries[0][role] for role in self.kernel.shared_roles]
        self._functions[0]([static, volatile, self._chunks, *shared])
        for advance in self._functions[1:]:
            advance([static, *shared])

    def _gradients(self, entries: Sequence[Entry]) -> Tensor:
        roles = self.kernel.volatile_roles
        if self._pinned is not None and torch.cuda.is_current_stream_capturing():
            self._pinned.copy_(pointer_table(entries, roles, counted=False))
            table = self._pinned.to(self._device, non_blocking=True)
            assert self._static is not None
            self._captured += [table, self._static[1]]
            return table
        addresses = _addresses(entries, roles)
        if self._volatile is None or self._volatile[0] != addresses:
            table = pointer_table(entries, roles, counted=False)
            if self._pinned is not None:
                # a pinned buffer of its own: an earlier upload may still be under way
                table = table.pin_memory().to(self._device, non_blocking=True)
            self._volatile = (addresses, table)
        return self._volatile[1]


def _addresses(entries: Sequence[Entry], roles: Sequence[str]) -> tuple[int, ...]:
    return tuple(entry[role].data_ptr() for entry in entries for role in roles)
