"""Values under construction and the scopes that define them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from trainfuse.codegen.ir import Statement


@dataclass(frozen=True, slots=True)
class Value:
    """A node's value in the text: one name, or one for each segment of `segmented`.

    deps: tile axes that it varies over. depth: scope that defines it. dtype: compute type.
    """

    names: tuple[str, ...]
    deps: frozenset[str]
    depth: int
    dtype: torch.dtype


@dataclass(slots=True)
class Scope:
    """A block of statements, the tile axes whose indices it has, and the values it defines."""

    axes: frozenset[str]
    body: list[Statement] = field(default_factory=list)
    values: dict[fx.Node, Value | tuple[Value, ...]] = field(default_factory=dict)
