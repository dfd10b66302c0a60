"""Random operators' results, recorded in one run and given again in another of another type."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autodiff import ops


class Draws:
    """What the random operators of one run gave, in order.

    fp64 draws other numbers than fp32 from one generator: the reference must be given eager's.
    """

    def __init__(self) -> None:
        self.given: list[tuple[Any, list[Tensor]]] = []

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Remember what random operators give inside."""
        with _Mode(self, None):
            yield

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Random operators inside give what was recorded, in the type that they would give."""
        with _Mode(self, iter(list(self.given))):
            yield


class _Mode(TorchDispatchMode):
    def __init__(self, draws: Draws, replay: Iterator[tuple[Any, list[Tensor]]] | None) -> None:
        super().__init__()
        self.draws, self.replay = draws, replay

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not ops.is_random(func) or "_scaled_dot_product" in str(func):
            return result  # attention's dropout is the reference's own
        if kwargs and kwargs.get("generator") is not None:
            return result  # cotangents, which are the same in every type
        written = [
            arg
            for arg, spec in zip(args, func._schema.arguments, strict=False)
            if spec.alias_info is not None and spec.alias_info.is_write and isinstance(arg, Tensor)
        ]
        made = [t for t in (*written, *pytree.tree_leaves(result)) if isinstance(t, Tensor)]
        if self.replay is None:
            self.draws.given.append((func, [t.detach().clone() for t in made]))
        else:
            name, kept = next(self.replay)
            assert name is func, f"{func} is called where {name} was"
            for tensor, old in zip(made, kept, strict=True):
                tensor.copy_(old)
        return result
