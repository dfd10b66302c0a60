"""Nodes that have a shorter text together than one by one."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeGuard

import torch
from torch import fx

from autodiff.ops import op_name
from trainfuse.codegen.coarse import probability
from trainfuse.codegen.scalars import compute_dtype, literal

Idiom = tuple[tuple[fx.Node, ...], str]
"""Operands, and a template over their names."""


def idiom(node: fx.Node, members: Collection[fx.Node], *, coarse: bool) -> Idiom | None:
    """How a node is computed from what its operands are made of; they must be fp32, or booleans.

    coarse: whether its exponentials may take the hardware's short way.
    """
    if compute_dtype(node.meta["val"].dtype) != torch.float32:
        return None
    if coarse and (parts := probability(node, members)) is not None:
        text = "libdevice.fast_expf({}) * libdevice.exp(-{})"  # see `coarse`
        return (parts.shifted, parts.log_sum), text
    return _dropped(node, members)


def _dropped(node: fx.Node, members: Collection[fx.Node]) -> Idiom | None:
    """x * mask * number as x * (mask * number), which is the same to the bit, zeros' signs too."""
    if op_name(node.target) != "aten.mul.Tensor":
        return None
    product, number = node.args[:2]
    if not isinstance(number, float) or product not in members:
        return None
    assert isinstance(product, fx.Node)
    if op_name(product.target) != "aten.mul.Tensor":
        return None
    for value, mask in (product.args[:2], product.args[1::-1]):
        if _is(mask, torch.bool) and _is(value, torch.float32):
            return (value, mask), f"{{}} * tl.where({{}}, {literal(number, torch.float32)}, 0.0)"
    return None


def _is(value: Any, held: torch.dtype) -> TypeGuard[fx.Node]:
    return isinstance(value, fx.Node) and compute_dtype(value.meta["val"].dtype) == held
