"""The first loss or gradient that is not finite: seen without waiting, or at once where asked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

EVERY = 32
"""Calls from one look at the loss to the next, where nobody asked for one at every call."""


class NotFinite(Exception):
    """A checked call made a NaN or infinity; nothing has changed."""


def losses(outputs: Iterable[Any]) -> list[Tensor]:
    """The outputs that a loss could be: floating, of one element."""
    return [
        o for o in outputs if isinstance(o, Tensor) and o.is_floating_point() and o.numel() == 1
    ]


@torch.no_grad()
def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether every element of every floating tensor is finite; waits for the device once."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.numel():
            alike.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    by_device: dict[torch.device, list[Tensor]] = {}
    for (device, _), found in alike.items():
        by_device.setdefault(device, []).append(torch.stack(torch._foreach_norm(found, 1)).double())
    for device, sums in by_device.items():
        here = (t for (place, _), found in alike.items() if place == device for t in found)
        # a sum of huge numbers may overflow by itself: only then is each element looked at
        if not bool(torch.cat(sums).isfinite().all()):
            if not all(bool(t.isfinite().all()) for t in here):
                return False
    return True


class Watch:
    """Looks at the loss of every so many calls; the answer comes when the device has it."""

    def __init__(self) -> None:
        self._calls = 0
        self._asked = False
        self._answer: Tensor | None = None
        self._ready: torch.cuda.Event | None = None

    def see(self, outputs: Sequence[Any]) -> bool:
        """Take note of one call's outputs; True once a loss was found that is not finite.

        A call that the user captures is passed over: nothing may be waited for, or asked, there.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return False
        self._calls += 1
        if self._asked:
            return self._answered()
        if self._calls % EVERY or not (seen := losses(outputs)):
            return False
        finite = torch.stack([o.detach().isfinite().all() for o in seen]).all()
        if finite.device.type != "cuda":
            return not bool(finite)
        if self._answer is None:  # allocated once: that may wait for the device
            self._answer = torch.empty((), dtype=torch.bool, pin_memory=True)
            self._ready = torch.cuda.Event()
        assert self._ready is not None
        self._answer.copy_(finite, non_blocking=True)
        self._ready.record()
        self._asked = True
        return False

    def _answered(self) -> bool:
        assert self._ready is not None and self._answer is not None
        if not self._ready.query():
            return False
        self._asked = False
        return not bool(self._answer)
