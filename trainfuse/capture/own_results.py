"""Results that are views in their graph and, as in eager, tensors of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from autodiff import ops
from autodiff.derive import owner
from trainfuse.capture import compat

Run = Callable[[Sequence[Any]], Sequence[Any]]


def with_own_results(forward: fx.GraphModule, run: Run) -> Run:
    """`run`, a forward or a whole step, with results that may be written where eager's may.

    A product of three dimensions is a view of one of two, and autograd lets no view be written that
    a Function made, or that was made without grad mode. Where another result shows the same memory,
    kept for the backward or not, a result stays such a view: a write to it must not go unseen.
    """
    results: Any = forward.graph.output_node().args[0]
    places: dict[fx.Node, list[int]] = {}
    for place in compat.results_of_their_own():
        node = results[place]
        if isinstance(node, fx.Node) and ops.lookup(node.target).aliases:
            places[node] = [i for i, other in enumerate(results) if other is node]
    bases = [owner(node) for node in dict.fromkeys(results) if isinstance(node, fx.Node)]
    alone = [many for node, many in places.items() if bases.count(owner(node)) == 1]
    if not alone:
        return run

    def call(args: Sequence[Any]) -> Sequence[Any]:
        values = list(run(args))
        for first, *others in alone:
            values[first] = compat.no_view(values[first])
            for place in others:
                values[place] = values[first]
        return values

    return call
