"""One CUDA graph of a whole step: what allows it, capture, and replay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autodiff import ops
from autodiff.graph import TrainingGraph

_SYNCHRONISING = frozenset({"nonzero", "_local_scalar_dense", "masked_select", "_unique2"})
_INDEXING = frozenset({"index", "index_put", "_index_put_impl", "_unsafe_index"})
_STATIC_KINDS = frozenset({"parameter", "buffer"})


@dataclass(frozen=True, slots=True)
class GraphState:
    """Whether a plan replays a CUDA graph, and if not, why not."""

    used: bool
    reason: str


def why_not(tg: TrainingGraph) -> str | None:
    """Why a graph can't be one CUDA graph, as far as the graph itself tells; or None."""
    placeholders = tg.graph.find_nodes(op="placeholder")
    for fact, node in zip(tg.inputs, placeholders, strict=True):
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return f"input {fact.name} is a number that may change between calls"
        if value.device.type != "cuda":
            return f"input {fact.target or fact.name} is on the {value.device.type}"
    for node in tg.nodes():
        if (reason := _why_not_node(node)) is not None:
            where = tg.where(node)
            return f"{node.name} {reason}" + (f" ({where})" if where else "")
    return None


def _why_not_node(node: fx.Node) -> str | None:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        if target._opname in _SYNCHRONISING:
            return f"({target}) waits for the GPU"
        if target._opname in _INDEXING:  # index carries the tag below for masks only
            if _masked(node.args[1]):
                return f"({target}) indexes with a mask, which waits for the GPU"
        elif {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(target.tags):
            return f"({target}) has an output whose size depends on data"
    for value in _tensors(node.meta.get("val")):
        if value.device.type != "cuda":
            return f"({target}) computes on the {value.device.type}"
    return None


def _masked(indices: Any) -> bool:
    values = (i.meta["val"] for i in indices if isinstance(i, fx.Node))
    return any(v.dtype in (torch.bool, torch.uint8) for v in values)


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        return (value,)
    return (v for v in value if isinstance(v, Tensor)) if isinstance(value, list | tuple) else ()


_pools: dict[int, Any] = {}


def _pool(device: int) -> Any:
    """The device's memory pool, shared by all plans: they replay one after the other."""
    if device not in _pools:
        _pools[device] = torch.cuda.graph_pool_handle()
    return _pools[device]


_epoch = [0]
"""Counts failed captures: each replaces the generator's state, so older graphs must be redone."""


@contextmanager
def _undone_on_failure(device: int) -> Iterator[None]:
    """Put back what torch leaves behind when a capture is invalidated.

    Its context then stays on the capturing stream, the default generator believes that a capture
    is under way, and the allocator takes the pool to be in use.
    """
    generator = torch.cuda.default_generators[device]
    clean, stream = generator.clone_state(), torch.cuda.current_stream(device)
    finished = False
    try:
        yield
        finished = True
    finally:
        if not finished:
            torch.cuda.set_stream(stream)
            generator.graphsafe_set_state(clean)
            _pools.pop(device, None)
            _epoch[0] += 1


def is_static(tg: TrainingGraph) -> tuple[bool, ...]:
    """Which inputs keep their address from step to step: parameters and buffers."""
    updated = {
        param
        for node in tg.nodes()
        if ops.lookup(node.target).kind == "effect"
        for param in node.args[0]  # type: ignore[union-attr]  # a list, by the operator's schema
    }
    placeholders = tg.graph.find_nodes(op="placeholder")
    return tuple(
        fact.kind in _STATIC_KINDS or node in updated
        for fact, node in zip(tg.inputs, placeholders, strict=True)
    )


class Replay:
    """A captured program. Building it captures, which executes nothing.

    static: which inputs are read where they are; the others are copied into buffers before each
    replay, and back where the program mutates them. Outputs are clones: nothing a caller holds
    changes at the next replay. A failed capture raises whatever CUDA or the program raised, with
    the random state put back.
    """

    def __init__(
        self,
        program: Callable[[list[Any]], list[Any]],
        args: Sequence[Tensor],
        static: Sequence[bool],
        mutated: frozenset[int],
        stream: torch.cuda.Stream,
    ) -> None:
        self._moving = [i for i, fixed in enumerate(static) if not fixed]
        self._fixed = [i for i, fixed in enumerate(static) if fixed]
        self._returned = [i for i in self._moving if i in mutated]
        inputs = list(args)
        for i in self._moving:
            inputs[i] = _buffer(args[i])
        self._buffers = {i: inputs[i] for i in self._moving}
        self._dense = [_dense(self._buffers[i]) for i in self._moving]
        self._inputs = inputs
        self.addresses = self._addresses(args)
        self._graph = torch.cuda.CUDAGraph()
        with _undone_on_failure(stream.device.index):
            # thread_local: a data loader's thread may allocate meanwhile
            with torch.cuda.graph(
                self._graph,
                pool=_pool(stream.device.index),
                stream=stream,
                capture_error_mode="thread_local",
            ):
                self._outputs = program(list(inputs))
        self._epoch = _epoch[0]

    def moved(self, args: Sequence[Tensor]) -> bool:
        """Whether what was captured is out of date: an input or the generator is another one."""
        return self._epoch != _epoch[0] or self._addresses(args) != self.addresses

    def __call__(self, args: Sequence[Tensor]) -> list[Any]:
        """One step on the current stream."""
        if self._dense:
            sources = [_dense(args[i]) for i in self._moving]
            torch._foreach_copy_(self._dense, sources)
        self._graph.replay()
        for i in self._returned:
            args[i].copy_(self._buffers[i])
        return [o.clone() if isinstance(o, Tensor) else o for o in self._outputs]

    def close(self) -> None:
        """Give the graph's memory back to the pool."""
        self._outputs = []
        self._graph.reset()

    def _addresses(self, args: Sequence[Tensor]) -> tuple[int, ...]:
        return tuple(args[i].data_ptr() for i in self._fixed)


def _buffer(value: Tensor) -> Tensor:
    buffer = torch.empty_strided(
        value.shape, value.stride(), dtype=value.dtype, device=value.device
    )
    _dense(buffer).copy_(_dense(value))
    return buffer


def _dense(value: Tensor) -> Tensor:
    """One copy of what an expanded tensor repeats: a write must not overlap itself."""
    for dim, (size, step) in enumerate(zip(value.shape, value.stride(), strict=True)):
        if step == 0 and size > 1:
            value = value.narrow(dim, 0, 1)
    return value.detach()
