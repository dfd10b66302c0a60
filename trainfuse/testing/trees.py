"""Tensors in nested tuples, lists and mappings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def tensors(tree: Any) -> list[torch.Tensor]:
    """All tensors of a nest, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    children = tree.values() if isinstance(tree, Mapping) else tree
    if not isinstance(tree, Mapping | tuple | list):
        return []
    return [t for child in children for t in tensors(child)]


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """The same nest of plain tuples, lists and dicts with fn applied to its tensors."""
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    if isinstance(tree, tuple | list):
        return type(tree)(map_tensors(fn, child) for child in tree)
    if isinstance(tree, dict):
        return {name: map_tensors(fn, child) for name, child in tree.items()}
    return tree
