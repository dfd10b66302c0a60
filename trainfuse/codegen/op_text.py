"""Arguments of an elementwise op as text: what a row of the code table is written with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import fx

from trainfuse.codegen.scalars import TRITON_TYPE, cast, compute_dtype, literal, typed, unrounded
from trainfuse.fusion.arguments import argument

Read = Callable[[fx.Node], str]


class Unsupported(Exception):
    """A node that has no code; `lower` makes it a Refusal."""

    def __init__(self, node: fx.Node, reason: str) -> None:
        super().__init__(reason)
        self.node = node
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Args:
    """A node's arguments as text, by schema name; and `exp`, `coarse`, as accurate as they must be.

    coarse: whether its exponentials may take the hardware's short way.
    """

    node: fx.Node
    read: Read
    work: torch.dtype
    coarse: bool = False

    @property
    def result(self) -> torch.dtype:
        """Compute type of the result."""
        return compute_dtype(self.node.meta["val"].dtype)

    @property
    def floating(self) -> bool:
        return self.work.is_floating_point

    def number(self, name: str) -> Any:
        """A Python argument."""
        return argument(self.node, name)

    def __getitem__(self, name: str) -> str:
        if name == "T":
            return TRITON_TYPE[self.work]
        if name == "coarse":
            return str(self.coarse)
        if name == "exp":
            return "libdevice.fast_expf" if self.coarse else "libdevice.exp"
        if name.endswith("_tensor"):
            return self.tensor(name.removesuffix("_tensor"))
        if name.endswith("_bound"):
            return self.bound(name.removesuffix("_bound"))
        value = argument(self.node, name)
        wanted = torch.bool if name in ("condition", "mask") else self.work
        if isinstance(value, fx.Node):
            return cast(self.read(value), compute_dtype(value.meta["val"].dtype), wanted)
        if isinstance(value, bool | int | float):
            return literal(value, wanted)
        raise Unsupported(self.node, f"its argument {name} is no tensor or number")

    def tensor(self, name: str) -> str:
        """An argument as a tensor, for functions that would take a number in fp32."""
        value = argument(self.node, name)
        return typed(value, self.work) if isinstance(value, int | float) else self[name]

    def bound(self, name: str) -> str:
        """An argument of lib.maximum or lib.minimum, which would round a number to fp32."""
        value = argument(self.node, name)
        return self[name] if isinstance(value, fx.Node) else self.bound_of(value)

    def bound_of(self, value: float) -> str:
        """The same for a number that is no argument itself."""
        return unrounded(value, self.work)


Code = str | Callable[[Args], str]


@dataclass(frozen=True, slots=True)
class Row:
    code: Code
    work: Literal["result", "promote"] = "result"


def working_dtype(node: fx.Node, rule: Literal["result", "promote"]) -> torch.dtype:
    """The compute type that a row's operands are cast to."""
    if rule == "result":
        return compute_dtype(node.meta["val"].dtype)
    kinds: list[Any] = []
    for value in (*node.args, *node.kwargs.values()):
        if isinstance(value, fx.Node):
            tensor = value.meta["val"]
            kinds.append((tensor.dtype, tensor.dim() > 0))
        elif isinstance(value, bool | int | float):
            kinds.append(type(value))
    promoted = kinds[0]
    for kind in kinds[1:]:
        promoted = _promote(promoted, kind)
    return compute_dtype(_promote(promoted, promoted)[0])


@cache
def _promote(first: Any, second: Any) -> tuple[torch.dtype, bool]:
    """torch's promotion; a kind is (dtype, has dims) or a Python number's type."""
    made = [
        torch.empty((1,) if kind[1] else (), dtype=kind[0], device="meta")
        if isinstance(kind, tuple)
        else kind(1)
        for kind in (first, second)
    ]
    dims = any(isinstance(kind, tuple) and kind[1] for kind in (first, second))
    return torch.result_type(*made), dims
