"""Which exponentials may be coarse: those whose error no result can show.

The hardware's exp2 of x log2(e) is within |x| ulps of exp(x), with a quarter of the arithmetic that
an exponential to one ulp takes; over half-type rows that arithmetic is what kernels are bound by.
|x| ulps of fp32 are at most 1/80 of a step of fp16, and 1/600 of one of bf16 (below -104 the result
is zero). So a value is coarse when all that is made of it, element by element, is rounded to a half
type. Two things on the way could make the error more than it is:

- a difference, which cancels: allowed where the argument of exp is a difference itself, as in a
  softmax. It is off by as many ulps already, in eager, too. Sigmoids and their kin need no
  such condition: their error is at most a third of an ulp of one.
- a sum, whose own rounding is fp32's: allowed under the same condition. Errors average out, and
  what remains is the error of log2(e) in fp32, |x| 1.3e-8.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import fx

from autodiff.ops import lookup, op_name
from trainfuse.codegen.scalars import HALF, compute_dtype

BOUNDED = frozenset(
    f"aten.{name}" for name in ("sigmoid", "silu", "silu_backward", "gelu", "gelu_backward")
)
_PRODUCTS = frozenset({"aten.mul.Tensor", "aten.div.Tensor", "aten.neg", "aten.where.self"})
_CASTS = frozenset({"prims.convert_element_type", "aten._to_copy"})
_DIFFERENCES = frozenset({"aten.sub.Tensor", "aten.add.Tensor"})
_SUMS = frozenset({"aten.sum.dim_IntList", "aten.mean.dim"})


def coarse_nodes(nodes: Sequence[fx.Node], outputs: Collection[fx.Node]) -> frozenset[fx.Node]:
    """The nodes of a group whose exponentials may take the short way."""
    members, written = frozenset(nodes), frozenset(outputs)
    return frozenset(
        node
        for node in nodes
        if (name := _name(node)) == "aten.exp" or name in BOUNDED
        if compute_dtype(node.meta["val"].dtype) == torch.float32
        if _settles(node, members, written, name in BOUNDED or _of_difference(node, members))
    )


def _settles(
    node: fx.Node, members: frozenset[fx.Node], written: frozenset[fx.Node], sums: bool
) -> bool:
    """Whether every element made of a value's elements is rounded to a half type."""
    if node.meta["val"].dtype in HALF:
        return True
    if node in written:
        return False
    return all(
        _passes(user, sums) and (_name(user) in _SUMS or _settles(user, members, written, sums))
        for user in node.users
        if user in members
    )


def _passes(user: fx.Node, sums: bool) -> bool:
    name = _name(user)
    if name in _PRODUCTS or name in _CASTS or lookup(user.target).kind == "view":
        return True
    return sums and (name in _DIFFERENCES or name in _SUMS)


def _of_difference(node: fx.Node, members: frozenset[fx.Node]) -> bool:
    """Whether the argument is a difference, rounded to fp32 or less, that the group makes."""
    argument = node.args[0]
    while isinstance(argument, fx.Node) and argument in members:
        if _name(argument) == "aten.sub.Tensor":
            return True
        # what a cast rounds on the way is far more than the exponential's error
        if lookup(argument.target).kind != "view" and _name(argument) not in _CASTS:
            return False
        argument = argument.args[0]
    return False


def _name(node: fx.Node) -> str:
    return op_name(node.target).removesuffix(".default")
