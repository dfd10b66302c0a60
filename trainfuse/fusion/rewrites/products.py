"""What a backward makes of the gradient over logits: products that rows add up to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx

from trainfuse.fusion.domains import argument
from trainfuse.fusion.rewrites import row_maps

aten = torch.ops.aten
Kind = Literal["input", "weight", "bias"]


class Unproved(Exception):
    """An obligation that isn't proved; becomes a Refusal."""

    def __init__(self, node: fx.Node, reason: str) -> None:
        super().__init__(reason)
        self.node, self.reason = node, reason


@dataclass(frozen=True, slots=True)
class Product:
    """One reader of a gradient [rows, classes], after a chain that may put rows back in place.

    kind: "input" is gradient @ other, "weight" gradient.T @ other (other.T @ gradient if
    `swapped`), "bias" the sum over rows. selected: what takes other's rows to the gradient's.
    """

    node: fx.Node
    kind: Kind
    gradient: fx.Node
    chain: tuple[fx.Node, ...]
    other: fx.Node | None = None
    swapped: bool = False
    selected: tuple[fx.Node, ...] = ()


def products_of(
    gradient: fx.Node, reader: fx.Node, selections: Iterable[Sequence[fx.Node]]
) -> list[Product]:
    """The products that one reader of a gradient leads to.

    selections: the chains that selected rows in the forward; one that the backward's chain undoes
    selects the rows of what is multiplied. Raises Unproved when a reader is no such product.
    """
    found: list[Product] = []
    pending = [(reader, gradient, ())]
    while pending:
        node, source, chain = pending.pop()
        if node.op != "call_function":
            raise Unproved(gradient, "P3: the gradient over the logits is returned")
        if row_maps.keeps_columns(node) and row_maps.moved(node) is source:
            pending += [(user, node, (*chain, node)) for user in node.users]
        elif _is_transpose(node):
            found += [_product(user, node, gradient, chain, True) for user in node.users]
        else:
            found.append(_product(node, source, gradient, chain, False))
    return [_placed(product, tuple(selections)) for product in found]


def _is_transpose(node: fx.Node) -> bool:
    if node.target is aten.t.default:
        return True
    return node.target is aten.permute.default and list(argument(node, "dims")) == [1, 0]


def _product(
    node: fx.Node, source: fx.Node, gradient: fx.Node, chain: tuple[fx.Node, ...], turned: bool
) -> Product:
    """The product that a node is; source: the gradient as the node reads it."""
    if source.meta["val"].dim() == 2 and node.target is aten.mm.default:
        first, second = node.args[:2]
        assert isinstance(first, fx.Node)
        assert isinstance(second, fx.Node)
        if first is source and second is not source:
            return Product(node, "weight" if turned else "input", gradient, chain, second)
        if second is source and not turned and _is_transpose(first):
            other = first.args[0]
            assert isinstance(other, fx.Node)
            return Product(node, "weight", gradient, chain, other, swapped=True)
    if node.target is aten.sum.dim_IntList and not turned and source.meta["val"].dim() > 1:
        rank = source.meta["val"].dim()
        dims = argument(node, "dim") or []
        if sorted(dim % rank for dim in dims) == list(range(rank - 1)):
            return Product(node, "bias", gradient, chain)
    raise Unproved(node, "P3: it reads the gradient over the logits")


def _placed(product: Product, selections: Sequence[Sequence[fx.Node]]) -> Product:
    """The product with the chain that selects its other operand's rows; Unproved without one."""
    shape = product.gradient.meta["val"].shape[:-1]
    places = row_maps.places_of(product.chain, shape)
    count = places.numel()
    if places.tolist() == list(range(1, count + 1)):
        return product
    for chain in selections:
        selected = row_maps.rows_of(chain, count) if _fits(chain, count) else None
        if selected is not None and row_maps.is_adjoint(selected, places, count):
            return Product(
                product.node, product.kind, product.gradient, product.chain, product.other,
                product.swapped, tuple(chain),
            )  # fmt: skip
    raise Unproved(product.node, "P2: the gradient's rows are not where the logits' were")


def _fits(chain: Sequence[fx.Node], count: int) -> bool:
    """Whether a chain begins with as many rows."""
    if not chain:
        return False
    value = chain[0].args[0].meta["val"]  # type: ignore[union-attr]  # what the chain begins with
    return value.numel() // value.shape[-1] == count
