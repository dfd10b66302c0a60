"""One CUDA graph of a whole step: what allows it, capture, and replay."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autodiff import ops
from autodiff.graph import TrainingGraph
from trainfuse.capture import compat
from trainfuse.runtime.layout import Copies, copy_to, dense

_SYNCHRONISING = frozenset(
    {
        "nonzero", "_local_scalar_dense", "masked_select", "_unique2", "unique_dim",
        "unique_consecutive", "repeat_interleave", "bincount", "_assert_scalar",
        "_linalg_check_errors", "_linalg_eigh", "_linalg_eigvals", "_linalg_svd", "linalg_eig",
        "linalg_lu", "linalg_lu_factor_ex", "linalg_matrix_exp", "linalg_pinv",
    }
)  # fmt: skip
_INDEXING = frozenset({"index", "index_put", "_index_put_impl", "_unsafe_index"})
_MOVES = frozenset({"_to_copy", "device_put"})
_STATIC_KINDS = frozenset({"parameter", "buffer"})


@dataclass(frozen=True, slots=True)
class GraphState:
    """Whether a plan replays a CUDA graph, and if not, why not."""

    used: bool
    reason: str


def why_not(tg: TrainingGraph) -> str | None:
    """Why a graph can't be one CUDA graph, as far as the graph itself tells; or None."""
    uploads = uploaded(tg)
    allowed = set(uploads) | _host_constants(tg)
    placeholders = tg.graph.find_nodes(op="placeholder")
    for fact, node in zip(tg.inputs, placeholders, strict=True):
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return f"input {fact.name} is a number that may change between calls"
        if value.device.type != "cuda" and node not in allowed:
            return f"input {fact.target or fact.name} is on the {value.device.type}"
    for node in tg.nodes():
        if (reason := _why_not_node(node, allowed, uploads)) is not None:
            where = tg.where(node)
            return f"{node.name} {reason}" + (f" ({where})" if where else "")
    return None


def uploaded(tg: TrainingGraph) -> dict[fx.Node, bool]:
    """Host inputs that the step only moves to the GPU, and whether it does so asynchronously.

    A replay moves them itself, into a buffer on the GPU, and the captured move is a copy there.
    """
    found: dict[fx.Node, bool] = {}
    for fact, node in zip(tg.inputs, tg.graph.find_nodes(op="placeholder"), strict=True):
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or value.device.type != "cpu" or fact.name in tg.mutations:
            continue
        if node.users and all(_is_upload(user) for user in node.users):
            found[node] = all(bool(user.kwargs.get("non_blocking")) for user in node.users)
    return found


def _is_upload(node: fx.Node) -> bool:
    value = node.meta.get("val")
    moved = isinstance(value, Tensor) and value.device.type == "cuda"
    return moved and getattr(node.target, "_opname", "") in _MOVES


def _host_constants(tg: TrainingGraph) -> set[fx.Node]:
    """0-d values on the host that are the same at every step: kernels take them as numbers."""
    found: set[fx.Node] = set()
    for node in tg.graph.nodes:
        value = node.meta.get("val")
        scalar = isinstance(value, Tensor) and value.dim() == 0 and value.device.type == "cpu"
        row = ops.lookup(node.target) if node.op == "call_function" else None
        fixed = row is not None and row.kind not in ("rng", "effect", "opaque")
        if scalar and fixed and all(n in found or n.op == "get_attr" for n in node.all_input_nodes):
            found.add(node)
    return found


def _why_not_node(
    node: fx.Node, allowed: Collection[fx.Node], uploads: Collection[fx.Node]
) -> str | None:
    target = node.target
    if ops.is_collective(node):
        return f"({target}) waits for other processes, which need not replay when this one does"
    if isinstance(target, torch._ops.OpOverload):
        if target._opname in _SYNCHRONISING:
            return f"({target}) waits for the GPU"
        if target._opname in _INDEXING:  # index carries the tag below for masks only
            if _masked(node.args[1]):
                return f"({target}) indexes with a mask, which waits for the GPU"
        elif {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(target.tags):
            return f"({target}) has an output whose size depends on data"
        if target._opname in _MOVES and node not in allowed:
            source = node.all_input_nodes[0]
            value = source.meta.get("val")
            if isinstance(value, Tensor) and value.device.type == "cpu" and source not in uploads:
                return f"({target}) copies from the host"
    for value in _tensors(node.meta.get("val")):
        if value.device.type != "cuda" and node not in allowed:
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
_users: dict[int, weakref.WeakSet[Replay]] = {}


def _pool(device: int) -> Any:
    """The device's memory pool, shared by all plans: they replay one after the other.

    torch frees a pool with its last graph, after which its handle must not be used again.
    """
    if device not in _pools or not _users.get(device):
        _pools[device] = torch.cuda.graph_pool_handle()
        _users[device] = weakref.WeakSet()
    return _pools[device]


_streams: dict[int, torch.cuda.Stream] = {}


def capture_stream(device: int) -> torch.cuda.Stream:
    """The one stream that a device's plans are warmed up and captured on.

    The allocator reuses memory within a pool only among blocks of one stream.
    """
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


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
            _streams.pop(device, None)
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

    static: which inputs are read where they are; the others are copied into buffers on the GPU
    before each replay, and back where the program mutates them. uploads: inputs that come from the
    host, and whether their copy may be asynchronous. Outputs are copies, laid out as the program's
    are: nothing a caller holds changes at the next replay. A failed capture raises whatever CUDA or
    the program raised, with the random state put back.
    """

    def __init__(
        self,
        program: Callable[[list[Any]], list[Any]],
        args: Sequence[Tensor],
        static: Sequence[bool],
        mutated: frozenset[int],
        uploads: Mapping[int, bool],
        stream: torch.cuda.Stream,
    ) -> None:
        self._moving = [i for i, fixed in enumerate(static) if not fixed]
        self._fixed = [i for i, fixed in enumerate(static) if fixed]
        self._returned = [i for i in self._moving if i in mutated]
        inputs = list(args)
        for i in self._moving:
            inputs[i] = copy_to(args[i], stream.device)
        self._buffers = {i: inputs[i] for i in self._moving}
        self._uploads = [(i, dense(inputs[i]), uploads[i]) for i in uploads]
        self._moving = [i for i in self._moving if i not in uploads]
        self._dense = [dense(self._buffers[i]) for i in self._moving]
        self._expanded = {i for i in self._moving if 0 in args[i].stride()}
        self._inputs = inputs
        self.addresses = self._addresses(args)
        self._graph = torch.cuda.CUDAGraph()
        with _undone_on_failure(stream.device.index), compat.own_blas_workspaces():
            # thread_local: a data loader's thread may allocate meanwhile
            with torch.cuda.graph(
                self._graph,
                pool=_pool(stream.device.index),
                stream=stream,
                capture_error_mode="thread_local",
            ):
                outputs = program(list(inputs))
        self._results = Copies(outputs)
        self._epoch = _epoch[0]
        self._device = stream.device.index
        _users[self._device].add(self)

    def moved(self, args: Sequence[Tensor]) -> bool:
        """Whether what was captured is out of date: an input or the generator is another one."""
        return self._epoch != _epoch[0] or self._addresses(args) != self.addresses

    def __call__(self, args: Sequence[Tensor]) -> list[Any]:
        """One step on the current stream."""
        # one by one: a list of mixed types falls back to that, at some cost
        for i, buffer in zip(self._moving, self._dense, strict=True):
            buffer.copy_(dense(args[i]) if i in self._expanded else args[i])
        for i, buffer, asynchronous in self._uploads:
            buffer.copy_(dense(args[i]), non_blocking=asynchronous)
        self._graph.replay()
        for i in self._returned:
            args[i].copy_(self._buffers[i])
        return self._results()

    def close(self) -> None:
        """Give the graph's memory back to the pool."""
        self._results = Copies(())
        _users[self._device].discard(self)
        self._graph.reset()

    def _addresses(self, args: Sequence[Tensor]) -> tuple[int, ...]:
        return tuple(args[i].data_ptr() for i in self._fixed)
