"""Values that a program compares with what was made of them, such as a row with its maximum.

The gradient of a maximum goes to the elements that equal it, divided by their number. A value that
is computed twice, in two kernels or in two loops of one, may come out with another last bit: the
compiler contracts a product and a sum here and not there. Then no element equals the maximum, and
the gradient is 0/0. So such values are computed once, by arithmetic that has only one result.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator

import torch
from torch import fx

from . import ops
from .graph import TrainingGraph
from .reads import is_fusible, is_view

_NEAR = 8
"""Nodes between a value and what it is compared with: farther ones are no maximum of it."""


def _names(text: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" for name in text.split())


_COMPARISONS = _names("eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor")
_EXTREMA = _names("amax.default amin.default max.default min.default max.dim min.dim")
# backwards of distances look for the coordinate that makes the greatest: arguments of each side
_COMPARED_INSIDE = {
    "aten._cdist_backward.default": ((1, 4), (2, 4)),
    "aten._pdist_backward.default": ((1, 3),),
}
# a difference from an extremum has one sign; one bit beyond 0 these would be NaN, or huge
_SINGULAR = _names(
    "sqrt.default rsqrt.default log.default log2.default log10.default reciprocal.default "
    "pow.Tensor_Scalar pow.Tensor_Tensor"
)
_SHIFTS = _names("add.Tensor mul.Tensor neg.default div.Tensor abs.default clone.default")
# of the same operand they give the same result, wherever they are computed
_ONE_RESULT = _names("abs.default neg.default clone.default") | {
    "prims.convert_element_type.default",
    "aten._to_copy.default",
}


def exact_pairs(tg: TrainingGraph, *, of_kernels: bool = True) -> list[tuple[fx.Node, fx.Node]]:
    """(value, made): what is compared with something made of it, and what it is compared with.

    Where both sides are made of a third value, that is the value, and each side is made of it.
    of_kernels: only values that kernels of ours compute. Others come out the same of the same
    operands; not so where the operands are computed again, too.
    """
    found: dict[tuple[fx.Node, fx.Node], None] = {}
    for first, second in _compared(tg):
        for value in _common(first, second):
            if _may_differ(value, of_kernels):
                found.update({(value, side): None for side in (first, second) if side is not value})
    return list(found)


def made_once(tg: TrainingGraph) -> set[fx.Node]:
    """The values of `exact_pairs`: no pass may compute them again."""
    return {value for value, _ in exact_pairs(tg)}


def between(value: fx.Node, made: fx.Node) -> set[fx.Node]:
    """What is made of a value on the way to another that is, the latter included."""
    near, reached = _sources(made, ()), {value: True}

    def leads(node: fx.Node) -> bool:
        if node not in reached:
            found = [leads(source) for source in node.all_input_nodes if source in near]
            reached[node] = any(found)
        return reached[node]

    leads(made)
    return {node for node, does in reached.items() if does and node is not value}


def _compared(tg: TrainingGraph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Pairs of values whose relation decides something, in the graph or beyond its outputs."""
    for node in tg.nodes():
        name = ops.op_name(node.target)
        if name in _COMPARISONS or (name == "aten.sub.Tensor" and _decides(node)):
            yield from _sides(node, 0, 1)
        for first, second in _COMPARED_INSIDE.get(name, ()):
            yield from _sides(node, first, second)
    outputs = dict.fromkeys(_shown(n) for n in tg.output_nodes if isinstance(n, fx.Node))
    for made in outputs:
        source = _extremum_of(made)
        if source in outputs:
            yield source, made


def _sides(node: fx.Node, *places: int) -> Iterator[tuple[fx.Node, fx.Node]]:
    sides = [node.args[place] for place in places]
    first, second = (_shown(side) if isinstance(side, fx.Node) else None for side in sides)
    if first is not None and second is not None and first is not second:
        yield first, second


def _shown(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and is_view(node):
        node = node.args[0]  # type: ignore[assignment]  # the viewed tensor
    return node


def _extremum_of(node: fx.Node) -> fx.Node | None:
    """What a value is the greatest or the least of."""
    if node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]  # the tuple
    if node.op == "call_function" and ops.op_name(node.target) in _EXTREMA:
        return _shown(node.args[0])  # type: ignore[arg-type]  # the reduced tensor
    return None


def _decides(difference: fx.Node) -> bool:
    """Whether a difference is one from an extremum, and read where its sign is all the matter."""
    sides = [_shown(side) for side in difference.args[:2] if isinstance(side, fx.Node)]
    if not any(_extremum_of(side) in sides for side in sides):
        return False
    pending, seen = [difference], {difference}
    while pending and len(seen) <= _NEAR:
        node = pending.pop()
        for user in node.users:
            name = ops.op_name(user.target) if user.op == "call_function" else ""
            if name in _SINGULAR or (name == "aten.div.Tensor" and user.args[1] is node):
                return True
            if user not in seen and (name in _SHIFTS or (name and is_view(user))):
                seen.add(user)
                pending.append(user)
    return False


def _common(first: fx.Node, second: fx.Node) -> list[fx.Node]:
    """The nearest values that both are made of; one of them itself, if the other is made of it."""
    shared = _sources(first, ()) & _sources(second, ())
    nearest = _sources(first, shared) | _sources(second, shared)
    return [_shown(node) for node in nearest & shared]


def _sources(node: fx.Node, ends: Collection[fx.Node]) -> set[fx.Node]:
    """A node and what it is made of, as far as it is near and the ends let one see."""
    found, level = {node}, [node]
    for _ in range(_NEAR):
        level = [
            source for reader in level if reader not in ends for source in reader.all_input_nodes
        ]
        level = [source for source in dict.fromkeys(level) if source not in found]
        found.update(level)
    return found


def _may_differ(node: fx.Node, of_kernels: bool) -> bool:
    """Whether a value, computed again, could have another bit: not what one exact step makes."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    while ops.op_name(node.target) in _ONE_RESULT:
        node = _shown(node.args[0])  # type: ignore[arg-type]  # the operand
    return node.op == "call_function" and (is_fusible(node) or not of_kernels)
