"""All or nothing: a first call that fails leaves the training state as it found it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from trainfuse.capture.optimizers import UpdateHandle


@contextmanager
def restored_on_failure(tensors: Iterable[Tensor], params: Iterable[Tensor] = ()) -> Iterator[None]:
    """Put values, gradients and random states back if the body does not finish.

    tensors: everything that the body writes (parameters, buffers, optimizer state); copied before
    it runs, to the host where the device has no room. params: tensors whose .grad is put back.
    Covers KeyboardInterrupt.
    """
    written = list({id(t): t for t in tensors}.values())
    saved = [_copy(t) for t in written]
    grads = [(p, p.grad) for p in params]
    devices = sorted({t.device.index for t in written if t.device.type == "cuda"})
    cpu_state = torch.get_rng_state()
    cuda_states = [torch.cuda.get_rng_state(device) for device in devices]
    finished = False
    try:
        yield
        finished = True
    finally:
        if not finished:
            with torch.no_grad():
                for tensor, old in zip(written, saved, strict=True):
                    tensor.copy_(old)
            for param, grad in grads:
                param.grad = grad
            torch.set_rng_state(cpu_state)
            for device, state in zip(devices, cuda_states, strict=True):
                torch.cuda.set_rng_state(state, device)


@contextmanager
def entries_restored_on_failure(handles: Iterable[UpdateHandle]) -> Iterator[None]:
    """Take back the optimizer state that the body created, if it does not finish.

    Which entries there are, not their values: those `restored_on_failure` puts back.
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


def _copy(tensor: Tensor) -> Tensor:
    try:
        return tensor.detach().clone()
    except torch.OutOfMemoryError:
        return tensor.detach().cpu()
