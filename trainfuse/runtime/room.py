"""How much of a device's memory a check may take, beside what the training holds."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch import Tensor

SHARE = 0.5
"""Of what is free: allocations of other sizes must find a place beside a check's."""
EVERYTHING = 1 << 62
"""More bytes than there are: for copies that are to wait on the host."""


def free_bytes(device: torch.device) -> int | None:
    """What may still be allocated there, the allocator's idle blocks included; None on a host."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_allocated(device)
    cached = torch.cuda.memory_reserved(device) - held
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(device)) - held
    return max(min(free + cached, allowed), 0)


class Room:
    """Bytes of a device that copies may take; what goes beyond them is kept on the host.

    needed: bytes that something else is about to allocate there, and that must stay free. wanted:
    bytes of copies that are kept together: where they do not all fit, none stays on the device,
    where each would break up the memory around it. `left` is None where there is no device.
    """

    def __init__(self, device: torch.device, needed: int = 0, wanted: int = 0) -> None:
        free = free_bytes(device)
        self.left = None if free is None else int(SHARE * max(free - needed, 0))
        if self.left is not None and wanted > self.left:
            self.left = 0

    def take(self, size: int) -> bool:
        """Whether so many bytes may be had; they are then no longer left."""
        if self.left is None:
            return True
        fits = size <= self.left
        self.left -= size if fits else 0
        return fits

    def copies(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Copies of tensors, each on its device while there is room."""
        made: list[Tensor] = []
        here: list[tuple[Tensor, Tensor]] = []
        for tensor in tensors:
            copy = self._empty_like(tensor)
            if copy is None:
                copy = to_host(tensor)
            else:
                here.append((copy, tensor))
            made.append(copy)
        copy_together(here)
        return made

    def _empty_like(self, tensor: Tensor) -> Tensor | None:
        """Memory for a copy on the device, or None where there is no room."""
        if self.take(tensor.numel() * tensor.element_size()):
            try:
                return torch.empty_like(tensor)
            except torch.OutOfMemoryError:
                self.left = 0
        return None


def empty() -> None:
    """Give back what nothing holds any more, after an attempt that ran out of memory."""
    gc.collect()  # an exception's frames may hold tensors in cycles
    torch.cuda.empty_cache()


def copy_together(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy into the first of each pair: tensors of a device and an element type in one launch."""
    alike: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
    for target, source in pairs:
        alike.setdefault((source.device, source.dtype), []).append((target, source))
    with torch.no_grad():
        for found in alike.values():
            targets, sources = zip(*found, strict=True)
            torch._foreach_copy_(targets, sources)


def bytes_of_tensors(tensors: Iterable[Tensor]) -> int:
    """What copies of some tensors take."""
    return sum(t.numel() * t.element_size() for t in tensors)


def to_host(tensor: Tensor) -> Tensor:
    """A copy in the host's memory."""
    return tensor.detach().to("cpu", copy=True)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A value that waits on the host, back on its device."""
    return tensor.to(device)


def device_of(values: Iterable[object]) -> torch.device:
    """The GPU that some tensors are on, or the host."""
    found = (v.device for v in values if isinstance(v, Tensor) and v.device.type == "cuda")
    return next(found, torch.device("cpu"))
