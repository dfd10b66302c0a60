"""Private torch names that autodiff touches, for torch 2.11 to 2.14."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import fx
from torch._functorch import partitioners
from torch._prims_common import suggest_memory_format as suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils._pytree import tree_leaves

FakeMode = FakeTensorMode
_Function = Callable[..., Any]


def graph_module(root: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """A module whose code is generated once it is called or printed.

    Passes, and the search for a memory budget, make dozens of graphs whose code nobody reads.
    """
    return _LazyGraphModule(root, graph)


def fake_mode_among(values: Any) -> FakeMode | None:
    """The fake mode of the first fake tensor in a nest of values."""
    for value in tree_leaves(values):
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return None


@contextlib.contextmanager
def plain_tracing() -> Iterator[None]:
    """No gradient and no autocast: a caller's autocast would cast the operands of formulas."""
    with torch.no_grad(), torch._C._DisableAutocast():
        yield


@contextlib.contextmanager
def recomputing_through(wrap: Callable[[_Function], _Function]) -> Iterator[None]:
    """Checkpoints that begin in the block run what they run again as `wrap(function)`.

    `wrap` is called as the checkpoint begins. Works on torch 2.11 to 2.14.
    """
    module, reentrant = torch.utils.checkpoint, torch.utils.checkpoint.CheckpointFunction
    name = "_checkpoint_without_reentrant_generator"
    name = f"{name}_impl" if hasattr(module, f"{name}_impl") else name
    own = getattr(module, name)

    def begin(function: _Function, *args: Any, **kwargs: Any) -> Any:
        return own(wrap(function), *args, **kwargs)

    class Reentrant:
        @staticmethod
        def apply(function: _Function, *args: Any) -> Any:
            first, again = iter([function]), wrap(function)
            return reentrant.apply(lambda *given: next(first, again)(*given), *args)

    with (
        mock.patch.object(module, name, begin),
        mock.patch.object(module, "CheckpointFunction", Reentrant),
    ):
        yield


def backward_nodes(
    joint: fx.GraphModule, static_indices: Sequence[int], num_fwd_outputs: int
) -> set[fx.Node]:
    """Nodes of a joint graph that belong to the backward: they need a cotangent, or were traced
    while the derivative was taken.

    The latter's mark is missing inside a custom Function's backward, so that what the forward's
    outputs don't need, and has no mark of the forward's, is the backward's too.
    """
    info = partitioners.classify_nodes(joint, list(static_indices), num_fwd_outputs)
    required = set(info.required_fw_nodes)
    found = set(info.tangents_closure)
    for node in joint.graph.nodes:
        if node.op != "call_function" or node in found or node in required:
            continue
        forward = node.meta.get("partitioner_tag") == "is_forward"
        if not forward or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def extract_modules(
    joint: fx.GraphModule,
    saved: Sequence[fx.Node],
    saved_sizes: Sequence[fx.Node],
    *,
    num_fwd_outputs: int,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward modules of a joint, in AOTAutograd's calling convention."""
    extract: Any = partitioners._extract_fwd_bwd_modules
    return extract(joint, list(saved), list(saved_sizes), num_fwd_outputs=num_fwd_outputs)
