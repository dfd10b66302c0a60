"""Running a training step for the sake of looking at it: what it changed is put back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from trainfuse.capture.objects import find_objects


@contextmanager
def preserved(target: Any, args: Sequence[Any]) -> Iterator[None]:
    """Put back parameters, buffers, gradients, optimizer state, tensor inputs and random states.

    Covers what the target's closure, globals and arguments reach. Other Python state (a
    scheduler's count, a list of losses) stays as the step left it. Takes a copy of the state.
    """
    found = find_objects(target, args)
    params = leaves_of(target, args)
    buffers = [b for m in found.modules for b in m.buffers()]
    written = _unique(params, buffers, [a for a in args if isinstance(a, Tensor)])
    saved = [t.detach().clone() for t in written]
    grads = [(p, p.grad, None if p.grad is None else p.grad.detach().clone()) for p in params]
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in found.optimizers]
    devices = sorted({t.device.index for t in written if t.is_cuda})
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, old in zip(written, saved, strict=True):
                    tensor.copy_(old)
                for param, grad, old in grads:
                    param.grad = grad if grad is None or old is None else grad.copy_(old)
            for optimizer, state in zip(found.optimizers, states, strict=True):
                optimizer.load_state_dict(state)


def leaves_of(target: Any, args: Sequence[Any]) -> list[Tensor]:
    """What a call may give gradients to: parameters within reach, and tensor arguments."""
    found = find_objects(target, args)
    params = [p for m in found.modules for p in m.parameters()]
    groups = [group["params"] for optimizer in found.optimizers for group in optimizer.param_groups]
    return _unique(params, *groups, [a for a in args if isinstance(a, Tensor) and a.requires_grad])


def run_through(
    function: Callable[..., Any], args: Sequence[Any], leaves: Sequence[Tensor]
) -> list[Tensor]:
    """Call it, and differentiate its outputs where it left all gradients of `leaves` alone.

    A step calls backward itself; of a module the caller does. Returns the output tensors.
    Cotangents are random, the same at each call.
    """
    before = [_gradient(leaf) for leaf in leaves]
    outputs = [t for t in tree_leaves(function(*args)) if isinstance(t, Tensor)]
    roots = [t for t in outputs if t.requires_grad]
    changed = any(
        old is not new or version != now
        for (old, version), (new, now) in zip(before, map(_gradient, leaves), strict=True)
    )
    if roots and not changed:
        source = {t.device: torch.Generator(t.device).manual_seed(0) for t in roots}
        torch.autograd.backward(
            roots,
            [
                torch.randn(t.shape, generator=source[t.device], dtype=t.dtype, device=t.device)
                for t in roots
            ],
        )
    return outputs


def _gradient(leaf: Tensor) -> tuple[Tensor | None, int]:
    return leaf.grad, 0 if leaf.grad is None else leaf.grad._version


def _unique(*lists: Sequence[Tensor]) -> list[Tensor]:
    return list({id(t): t for tensors in lists for t in tensors}.values())
