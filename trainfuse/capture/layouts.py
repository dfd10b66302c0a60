"""Strides of outputs that the step wrote in place.

Functionalization puts `x.index_add(...)` for `x.index_add_(...)`, and the result's strides need not
be x's: several of ATen's functional forms give rows whatever x is. Values agree, layouts don't.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from trainfuse.capture import compat

_Strides = tuple[int, ...]


def with_eager_strides(gm: fx.GraphModule, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` of a Dynamo graph, its outputs laid out as eager's; `run` itself where none can differ.

    Only outputs that share no memory with an input or another output: a copy has no aliases.
    """
    wanted = _written_outputs(gm)
    if not wanted:
        return run

    def call(*args: Any) -> Any:
        results = list(run(*args))
        for i, strides in wanted.items():
            results[i] = _laid_out(results[i], strides)
        return tuple(results)

    return call


def _laid_out(value: Tensor, strides: _Strides) -> Tensor:
    """The value with these strides; where they differ, a copy, through which gradients flow."""
    same = all(
        size == 1 or have == want
        for size, have, want in zip(value.shape, value.stride(), strides, strict=True)
    )
    if same:
        return value
    made = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
    return made.copy_(value)


def _written_outputs(gm: fx.GraphModule) -> dict[int, _Strides]:
    """Eager's strides of outputs with memory of their own that something wrote in place."""
    outputs = [_example(node) for node in compat.outputs_of(gm)]
    inputs = [_example(node) for node in gm.graph.find_nodes(op="placeholder")]
    sharers = Counter(compat.storage_key(v) for v in (*inputs, *outputs) if v is not None)
    return {
        i: tuple(value.stride())
        for i, value in enumerate(outputs)
        if value is not None
        and value.numel()
        and compat.was_written(value)
        and sharers[compat.storage_key(value)] == 1
    }


def _example(node: Any) -> Tensor | None:
    """What Dynamo found of a value: None if it is no plain tensor of known sizes."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return None
    known = all(isinstance(n, int) for n in (*value.shape, *value.stride()))
    return value if known else None
