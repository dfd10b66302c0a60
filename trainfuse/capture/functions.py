"""Custom autograd.Functions as Dynamo captured them: the user's backward is law, twice as well."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

_CANT = "a custom autograd.Function that changes the grad mode in its backward is differentiated"


def apply_function(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    args: tuple[Any, ...],
    facts: Mapping[str, Any],
    *,
    unchecked: Callable[[Any], None],
) -> Any:
    """Run a captured Function as eager's engine would, so that its gradient has a gradient.

    Dynamo's own way loses it: the backward is traced under no_grad, which becomes a part of it, and
    saved outputs have no history. facts: Dynamo's description of the call. unchecked: called with
    each value that the user kept on `ctx` instead of by `save_for_backward`.
    """
    law = _law(backward)
    by_context = set(facts["saved_for_backward_idx"])

    class Applied(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            results, saved = fx.Interpreter(forward).run(*args)
            places = [i for i, v in enumerate(saved) if i in by_context and isinstance(v, Tensor)]
            ctx.save_for_backward(*[saved[i] for i in places])
            ctx.places = places
            ctx.kept = [None if i in set(places) else v for i, v in enumerate(saved)]
            for value in ctx.kept:
                unchecked(value)
            many = results if isinstance(results, tuple | list) else [results]
            for mark, indices in (
                (ctx.mark_dirty, facts.get("dirty_idx", ())),
                (ctx.mark_non_differentiable, facts["non_differentiable_idx"]),
            ):
                if indices:
                    mark(*[r for i, r in enumerate(many) if i in indices])
            return _distinct(results) if isinstance(results, tuple | list) else results

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            saved = list(ctx.kept)
            for place, value in zip(ctx.places, ctx.saved_tensors, strict=True):
                saved[place] = value
            if law is not None:
                return fx.Interpreter(law).run(*grads, *saved)
            results = fx.Interpreter(backward).run(*grads, *saved)
            return _once(results) if torch.is_grad_enabled() else results

    return Applied.apply(*args)


def _distinct(results: Any) -> tuple[Any, ...]:
    """The results, a repeated one as a copy.

    Dynamo (torch 2.11) returns a value that was written in place twice, under the name that it had
    before as well. All its gradient would go to the last, which nobody reads.
    """
    seen: set[int] = set()
    made = []
    for value in results:
        again = isinstance(value, Tensor) and id(value) in seen
        made.append(value.clone() if again else value)
        seen.add(id(value))
    return tuple(made)


class _Once(torch.autograd.Function):
    """An identity without a derivative, for gradients whose own derivative is not known."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *values: Any) -> Any:
        made = tuple(v.detach() if isinstance(v, Tensor) else v for v in values)
        return made if len(made) != 1 else made[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(_CANT)


def _once(results: Any) -> Any:
    # a node is made only where an input requires a gradient
    anchor = torch.empty(0, requires_grad=True)
    return _Once.apply(anchor, *(results if isinstance(results, tuple) else (results,)))


_LAWS: weakref.WeakKeyDictionary[fx.GraphModule, fx.GraphModule | None] = (
    weakref.WeakKeyDictionary()
)


def _law(backward: fx.GraphModule) -> fx.GraphModule | None:
    """The backward without the no_grad that Dynamo put around it, or None if it has more of it."""
    if backward not in _LAWS:
        _LAWS[backward] = _unguarded(backward)
    return _LAWS[backward]


def _unguarded(backward: fx.GraphModule) -> fx.GraphModule | None:
    graph = fx.Graph()
    output = graph.graph_copy(backward.graph, {})
    graph.output(output)
    modes = [n for n in graph.nodes if n.target is torch._C._set_grad_enabled]
    if [node.args for node in modes] not in ([], [(False,), (True,)]):
        return None
    for node in modes:
        graph.erase_node(node)
    return fx.GraphModule(backward, graph)
