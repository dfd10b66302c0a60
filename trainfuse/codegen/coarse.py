"""Which exponentials and quotients may be coarse: those whose error no result can show.

The hardware's exp2 of x log2(e) is within |x| ulps of exp(x), with a quarter of the arithmetic that
an exponential to one ulp takes; over half-type rows that arithmetic is what kernels are bound by.
|x| ulps of fp32 are at most 1/80 of a step of fp16, and 1/600 of one of bf16 (below -104 the result
is zero). So a value is coarse when all that is made of it, element by element, is rounded to a half
type. Two things on the way could make the error more than it is:

- a sum, in which one exponential may outweigh the others: allowed where the argument of exp is the
  distance from the row's maximum. What outweighs is then exp2(0), which is 1 to the bit, and errors
  of the others average out.
- a difference, which cancels, as in a cross-entropy's gradient, p - 1 of a target that is all but
  certain: allowed for probabilities, exp(x - max - log(sum)) as exp(x - max) exp(-log(sum)). Only
  the row's maximum can have one near 1, and its first factor is exactly 1, its second exact.
  Sigmoids and their kin need neither: their error is at most a third of an ulp of one.

A softmax's quotient is coarse whatever is made of it: a row has one divisor, whose reciprocal takes
part in a product for each element. As this sum is neither small nor huge, no more is lost than by
the quotient that Triton has for fp32, which is a product with a reciprocal, too, of scaled numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autodiff.ops import ends_formula, lookup, op_name
from trainfuse.codegen.scalars import HALF, compute_dtype

BOUNDED = frozenset(
    f"aten.{name}" for name in ("sigmoid", "silu", "silu_backward", "gelu", "gelu_backward")
)
_PRODUCTS = frozenset({"aten.mul.Tensor", "aten.div.Tensor", "aten.neg", "aten.where.self"})
_CASTS = frozenset({"prims.convert_element_type", "aten._to_copy"})
_DIFFERENCES = frozenset({"aten.sub.Tensor", "aten.add.Tensor"})
_SUMS = frozenset({"aten.sum.dim_IntList", "aten.mean.dim"})


@dataclass(frozen=True, slots=True)
class Probability:
    """exp(shifted - log_sum), where shifted is x - max(x) and log_sum is log(sum(exp(shifted)))."""

    shifted: fx.Node
    log_sum: fx.Node


def coarse_nodes(nodes: Sequence[fx.Node], outputs: Collection[fx.Node]) -> frozenset[fx.Node]:
    """The nodes of a group whose exponentials or quotients may take the short way."""
    members, written = frozenset(nodes), frozenset(outputs)
    found: set[fx.Node] = set()
    for node in nodes:
        name = _name(node)
        if name == "aten.div.Tensor" and _by_softmax_sum(node, members):
            found.add(node)
        if name not in (*BOUNDED, "aten.exp"):
            continue
        if compute_dtype(node.meta["val"].dtype) != torch.float32:
            continue
        if name in BOUNDED or probability(node, members) is not None:
            passing = _PRODUCTS | _CASTS | _SUMS | _DIFFERENCES
        elif _from_peak(_argument(node, members), members):
            passing = _PRODUCTS | _CASTS | _SUMS
        else:
            passing = _PRODUCTS | _CASTS
        if _settles(node, members, written, passing):
            found.add(node)
    return frozenset(found)


def probability(node: fx.Node, members: Collection[fx.Node]) -> Probability | None:
    """What an exponential in a group is made of where it is a softmax's, from its logarithm."""
    if _name(node) != "aten.exp":
        return None
    outer = _argument(node, members)
    if not _is(outer, "aten.sub.Tensor", members) or outer.kwargs:
        return None
    shifted, log_sum = (_through(each, members) for each in outer.args[:2])
    inner = log_sum
    for name in ("aten.log", "aten.sum.dim_IntList", "aten.exp"):
        if not _is(inner, name, members):
            return None
        inner = _argument(inner, members)
    found = inner is shifted and _from_peak(shifted, members)
    return Probability(shifted, log_sum) if found else None


def _from_peak(node: Any, members: Collection[fx.Node]) -> bool:
    """Whether a value is the distance of a row's elements from their maximum."""
    if not _is(node, "aten.sub.Tensor", members) or node.kwargs:
        return False
    value, peak = (_through(each, members) for each in node.args[:2])
    if _is(peak, "aten.masked_fill.Scalar", members):  # 0 in place of an infinite maximum
        peak = _argument(peak, members)
    return _is(peak, "aten.amax", members) and _argument(peak, members) is value


def _by_softmax_sum(node: fx.Node, members: Collection[fx.Node]) -> bool:
    """Whether an fp32 quotient's divisor is a row's sum of exp(x - max): 1 to the row's length."""
    if compute_dtype(node.meta["val"].dtype) != torch.float32:
        return False
    total = _through(node.args[1], members)
    if not _is(total, "aten.sum.dim_IntList", members):
        return False
    made = _argument(total, members)
    return _is(made, "aten.exp", members) and _from_peak(_argument(made, members), members)


def _is(node: Any, name: str, members: Collection[fx.Node]) -> bool:
    return node in members and _name(node) == name


def _argument(node: fx.Node, members: Collection[fx.Node]) -> Any:
    return _through(node.args[0], members)


def _through(node: Any, members: Collection[fx.Node]) -> Any:
    """The value behind views, and casts that don't round in registers."""
    while node in members and (lookup(node.target).kind == "view" or _keeps(node)):
        node = node.args[0]
    return node


def _keeps(node: fx.Node) -> bool:
    """Whether a node is a cast that changes no bit of what a register holds."""
    if _name(node) not in _CASTS or not isinstance(node.args[0], fx.Node):
        return False
    widens = node.args[0].meta["val"].dtype in HALF and node.meta["val"].dtype == torch.float32
    return widens or ends_formula(node)


def _settles(
    node: fx.Node,
    members: frozenset[fx.Node],
    written: frozenset[fx.Node],
    passing: frozenset[str],
) -> bool:
    """Whether every element made of a value's elements is rounded to a half type."""
    if node.meta["val"].dtype in HALF:
        return True
    if node in written:
        return False
    return all(
        (_name(user) in passing or lookup(user.target).kind == "view")
        and (_name(user) in _SUMS or _settles(user, members, written, passing))
        for user in node.users
        if user in members
    )


def _name(node: fx.Node) -> str:
    return op_name(node.target).removesuffix(".default")
