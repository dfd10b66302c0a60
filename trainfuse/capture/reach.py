"""Which inputs of a region the gradients of each of its results reach.

AOTAutograd's backward gives zeros for a parameter that nothing in the loss depends on, where eager
gives none. Weight decay and momentum tell them apart, and so does `grad is None`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainfuse.capture import compat


@dataclass(frozen=True, slots=True)
class Outline:
    """A tensor without its values."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, value: Any) -> Any:
        """The outline of a tensor; what is none comes back as it is."""
        if not isinstance(value, Tensor):
            return value
        return cls(
            tuple(value.shape),
            tuple(value.stride()),
            value.dtype,
            value.device,
            value.requires_grad,
        )

    def leaf(self) -> Tensor:
        """A tensor of this outline."""
        empty = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)
        return empty.requires_grad_(self.requires_grad)


def reached(
    region: Callable[..., Sequence[Any]], outlines: Sequence[Any]
) -> tuple[frozenset[int], ...]:
    """The inputs behind each result, and then behind each input as the region leaves it.

    As eager has it: a gradient is there where autograd's graph leads, so the region is run once, on
    tensors without values, and that graph is followed. outlines: of the inputs.
    """
    with torch.enable_grad(), compat.without_values():
        leaves = [o.leaf() if isinstance(o, Outline) else o for o in outlines]
        # what a region writes with history is no leaf
        inputs = [v.clone() if _differentiable(v) else v for v in leaves]
        results = region(*inputs)
    ends = {
        torch.autograd.graph.get_gradient_edge(v).node: i
        for i, v in enumerate(leaves)
        if _differentiable(v)
    }
    return tuple(_behind(value, ends) for value in (*results, *inputs))


def _differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _behind(value: Any, ends: dict[Any, int]) -> frozenset[int]:
    seen: set[Any] = set()
    open_ = [value.grad_fn] if _differentiable(value) else []
    while open_:
        node = open_.pop()
        if node is not None and node not in seen:
            seen.add(node)
            open_ += (following for following, _ in node.next_functions)
    return frozenset(ends[node] for node in seen if node in ends)
