"""Counts the bytes of tensors that are alive."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Bytes of the tensors that operators made and that are still alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._users: Counter[int] = Counter()
        self.counting = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.counting:
            inputs = {_place(tensor) for tensor in _real((args, kwargs))}
            for tensor in _real(result):
                self._add(tensor, inputs)
        return result

    def uncounted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose tensors are somewhere else."""

        def call(*args: Any, **kwargs: Any) -> Any:
            counting, self.counting = self.counting, False
            try:
                return function(*args, **kwargs)
            finally:
                self.counting = counting

        return call

    def _add(self, tensor: Tensor, inputs: set[int]) -> None:
        place, size = _place(tensor), tensor.untyped_storage().nbytes()
        if place not in self._users:
            if place in inputs:
                return  # a view of what came from outside
            self.now += size
            self.peak = max(self.peak, self.now)
        self._users[place] += 1
        weakref.finalize(tensor, self._drop, place, size)

    def _drop(self, place: int, size: int) -> None:
        self._users[place] -= 1
        if not self._users[place]:
            del self._users[place]
            self.now -= size


def _real(values: Any) -> list[Tensor]:
    """Tensors with memory: not those of a trace."""
    return [t for t in tree_leaves(values) if type(t) in (Tensor, Parameter)]


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
