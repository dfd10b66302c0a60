"""All or nothing: a checked call that fails leaves the training state as it found it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainfuse.runtime.room import Room, bytes_of_tensors, copy_together, device_of

if TYPE_CHECKING:
    from trainfuse.capture.optimizers import UpdateHandle


class Snapshot:
    """Copies of what a step writes, its gradients and the random states; may be taken again.

    tensors: everything that the step writes (parameters, buffers, optimizer state). params:
    tensors whose .grad is put back. needed: bytes that the step will allocate beside the copies,
    which go to the host where that leaves no room for all of them on the device.
    """

    def __init__(
        self, tensors: Iterable[Tensor], params: Iterable[Tensor] = (), needed: int = 0
    ) -> None:
        self._written = list({id(t): t for t in tensors}.values())
        self._params = list(params)
        room = Room(device_of(self._written), needed, bytes_of_tensors(self._written))
        self._saved = room.copies(self._written)
        self._place = {id(t): i for i, t in enumerate(self._written)}
        self._devices = sorted({t.device.index for t in self._written if t.device.type == "cuda"})
        self._remember()

    def _remember(self) -> None:
        self._grads = [(p, p.grad) for p in self._params]
        self._cpu_state = torch.get_rng_state()
        self._cuda_states = [torch.cuda.get_rng_state(device) for device in self._devices]

    def of(self, tensors: Iterable[Tensor]) -> bool:
        """Whether it holds copies of just these tensors."""
        wanted = {id(t) for t in tensors}
        return wanted == self._place.keys()

    def take(self) -> None:
        """Copy everything again, as it is now."""
        copy_together(zip(self._saved, self._written, strict=True))
        self._remember()

    def old(self, tensor: Tensor) -> Tensor:
        """What a tensor held; on its device or the host."""
        return self._saved[self._place[id(tensor)]]

    @contextmanager
    def restored_on_failure(self) -> Iterator[Snapshot]:
        """Put everything back if the body does not finish; covers KeyboardInterrupt."""
        finished = False
        try:
            yield self
            finished = True
        finally:
            if not finished:
                self._restore()

    def _restore(self) -> None:
        copy_together(zip(self._written, self._saved, strict=True))
        for param, grad in self._grads:
            param.grad = grad
        torch.set_rng_state(self._cpu_state)
        for device, state in zip(self._devices, self._cuda_states, strict=True):
            torch.cuda.set_rng_state(state, device)


@contextmanager
def entries_restored_on_failure(handles: Iterable[UpdateHandle]) -> Iterator[None]:
    """Take back the optimizer state that the body created, if it does not finish.

    Which entries there are, not their values: those a Snapshot puts back.
    """
    kept = [(h, {p: dict(old) for p, old in h.optimizer.state.items()}) for h in handles]
    finished = False
    try:
        yield
        finished = True
    finally:
        if not finished:
            for handle, before in kept:
                state = handle.optimizer.state
                for param in list(state):
                    if param in before:
                        state[param].clear()
                        state[param].update(before[param])
                    else:
                        del state[param]
                handle.mark_stale()
