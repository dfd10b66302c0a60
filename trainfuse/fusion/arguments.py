"""A node's arguments by the names of its operator's schema."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import fx


@cache
def _positions(target: Any) -> dict[str, tuple[int, Any]]:
    """Position and default of every schema argument of an op, by name."""
    return {
        arg.name: (index, arg.default_value if arg.has_default_value() else None)
        for index, arg in enumerate(target._schema.arguments)
    }


def argument(node: fx.Node, name: str) -> Any:
    """A node's argument by schema name, or its default; None when the op has no such argument."""
    index, default = _positions(node.target).get(name, (None, None))
    if name in node.kwargs:
        return node.kwargs[name]
    if index is not None and index < len(node.args):
        return node.args[index]
    return default
