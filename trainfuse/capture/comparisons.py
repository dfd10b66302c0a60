"""Comparisons with a Parameter, as Python dispatches them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import fx, nn

_REFLECTED = {
    operator.gt: operator.lt,
    operator.lt: operator.gt,
    operator.ge: operator.le,
    operator.le: operator.ge,
    operator.eq: operator.eq,
    operator.ne: operator.ne,
}


def reflect(gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Swap the sides of `tensor > parameter` in a graph of Dynamo's, inputs in their order.

    Python asks the right operand first where its type derives from the left one's, so eager
    computes `parameter < tensor`, and lays the result out as the parameter. AOTAutograd traces
    tensors that are no Parameters.
    """
    places = gm.graph.find_nodes(op="placeholder")
    parameters = {
        place
        for place, value in zip(places, inputs, strict=False)
        if isinstance(value, nn.Parameter)
    }
    swapped = False
    for node in gm.graph.nodes:
        if node.target not in _REFLECTED or len(node.args) != 2:
            continue
        left, right = node.args
        if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
            continue
        if right in parameters and left not in parameters:
            node.target, node.args = _REFLECTED[node.target], (right, left)
            swapped = True
    if swapped:
        gm.recompile()
