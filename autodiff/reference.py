"""The reference evaluator: any training graph, node by node with ATen, in fp64 if asked."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from . import ops
from .graph import TrainingGraph

Update = Callable[[list[torch.Tensor], list[torch.Tensor], int], None]
Environment = dict[fx.Node, Any]
Operation = Callable[[Environment], Any]
"""A node made ready to run: from the values of what it reads to its own."""
Read = Callable[[fx.Node, Any], Any]

_CAST = torch.ops.prims.convert_element_type.default
# Position of the dtype argument in operators that name an element type positionally.
_DTYPE_POSITION = {
    "prims.convert_element_type.default": 1,
    "aten._softmax_backward_data.default": 3,
    "aten._log_softmax_backward_data.default": 3,
}
# Operators that read operands of several element types, and compute in the widest of them.
_PROMOTE = {"aten.add.Tensor", "aten.sub.Tensor", "aten.mul.Tensor", "aten.div.Tensor"}
# Reductions that take the element type which they compute in beside their operand.
_SUMS = {"aten.sum.default", "aten.sum.dim_IntList"}
_HALF_TO_FLOAT = {"aten._softmax.default", "aten._log_softmax.default"}


def widen(value: Any, dtype: torch.dtype | None) -> Any:
    """Give a floating tensor the working dtype; anything else passes through."""
    if dtype is None or not isinstance(value, torch.Tensor) or value.dtype is dtype:
        return value
    return value.to(dtype) if value.is_floating_point() else value


def _widen_all(value: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(value, list | tuple):
        return [_widen_all(part, dtype) for part in value]
    return widen(value, dtype)


def _widen_literal(value: Any, dtype: torch.dtype) -> Any:
    return dtype if isinstance(value, torch.dtype) and value.is_floating_point else value


def widened_call(node: fx.Node, dtype: torch.dtype) -> tuple[list[Any], dict[str, Any]]:
    """A node's arguments with `dtype` where they name an element type: casts become no-ops."""
    name = ops.op_name(node.target)
    args: list[Any] = list(node.args)
    position = _DTYPE_POSITION.get(name)
    if position is not None:
        args[position] = _widen_literal(args[position], dtype)
    if name in _HALF_TO_FLOAT:
        args[2] = False
    kwargs = {
        key: _widen_literal(value, dtype) if key in ("dtype", "out_dtype") else value
        for key, value in node.kwargs.items()
    }
    return args, kwargs


def converts_as_it_reads(node: fx.Node) -> bool:
    """Whether a node reads operands of other element types than it computes in, at no cost."""
    return ops.op_name(node.target) in _PROMOTE | _SUMS


def _run_update(node: fx.Node, args: Any, update: Update | None) -> None:
    assert update is not None, f"{node.name} updates parameters: pass update="
    update(*args)


def run_nodes(
    nodes: Iterable[fx.Node],
    env: Environment,
    *,
    dtype: torch.dtype | None = None,
    update: Update | None = None,
) -> Environment:
    """Execute call_function nodes in order and return env extended with their values.

    env: the value of everything that the nodes read from outside. dtype: the type given to all
    floating tensors, None to compute as the graph says. update: called as
    update(params, grads, handle) at the update node. env itself is left alone.
    """
    values = {n: v if dtype is None else _widen_all(v, dtype) for n, v in env.items()}
    for node in nodes:
        if ops.lookup(node.target).kind == "effect":
            args = fx.map_arg(node.args, values.__getitem__)
            values[node] = _run_update(node, args, update)
        else:
            values[node] = run_node(node, values, dtype)
    return values


def run_node(node: fx.Node, env: Environment, dtype: torch.dtype | None = None) -> Any:
    """The value of one call_function node, from those of what it reads; no update."""
    assert node.op == "call_function", node.format_node()
    read = None if dtype is None else _widening(dtype)
    return _caller(node.target, dtype)(*_arguments(*_call_of(node, dtype), env, read))


def prepare(node: fx.Node, dtype: torch.dtype | None = None, read: Read | None = None) -> Operation:
    """A call_function node, but an update, as something that runs many times, each in less.

    dtype: the type given to what it reads and makes; casts between floating types become no-ops.
    read: what to make of each value that it reads instead.
    """
    assert node.op == "call_function", node.format_node()
    call = _caller(node.target, dtype)
    given, kwargs = _call_of(node, dtype)
    places = [(i, part) for i, part in enumerate(given) if isinstance(part, fx.Node)]
    if read is None and dtype is not None and converts_as_it_reads(node):
        return _converting(node, dtype, call, places)
    if read is None and dtype is not None:
        read = _widening(dtype)
    inner: list[fx.Node] = []
    fx.map_arg(([a for a in given if not isinstance(a, fx.Node)], kwargs), inner.append)

    def flat(env: Environment) -> Any:
        args = [*given]
        for i, part in places:
            args[i] = env[part] if read is None else read(part, env[part])
        return call(args, kwargs)

    def nested(env: Environment) -> Any:
        return call(*_arguments(given, kwargs, env, read))

    return nested if inner else flat


def _converting(
    node: fx.Node,
    dtype: torch.dtype,
    call: Callable[[Sequence[Any], Any], Any],
    places: Sequence[tuple[int, fx.Node]],
) -> Operation:
    """A node that converts its operands itself: it is told, or shown, what to compute in."""
    given, kwargs = _call_of(node, dtype)
    if ops.op_name(node.target) in _SUMS:
        operand, *rest = given

        def summed(env: Environment) -> Any:
            value = env[operand]
            told = value.is_floating_point() and "dtype" not in kwargs
            return call([value, *rest], {**kwargs, "dtype": dtype} if told else kwargs)

        return summed

    def promoted(env: Environment) -> Any:
        args = [*given]
        for i, part in places:
            args[i] = env[part]
        # operands without dimensions leave the type to those that have some
        wide = [i for i, _ in places if args[i].dim() and args[i].is_floating_point()]
        if not wide:
            args = _widen_all(args, dtype)
        elif all(args[i].dtype is not dtype for i in wide):
            least = min(wide, key=lambda i: args[i].numel())
            args[least] = args[least].to(dtype)
        return call(args, kwargs)

    return promoted


def _call_of(node: fx.Node, dtype: torch.dtype | None) -> tuple[Sequence[Any], Any]:
    """A node's arguments, with the working dtype where they name an element type."""
    return (node.args, node.kwargs) if dtype is None else widened_call(node, dtype)


def _arguments(
    given: Sequence[Any], kwargs: Any, env: Environment, read: Read | None
) -> tuple[Any, Any]:
    def value(part: fx.Node) -> Any:
        return env[part] if read is None else read(part, env[part])

    args, named = fx.map_arg((tuple(given), kwargs), value)
    return args, named


def _widening(dtype: torch.dtype) -> Read:
    return lambda _, value: _widen_all(value, dtype)


def _caller(target: Any, dtype: torch.dtype | None) -> Callable[[Sequence[Any], Any], Any]:
    if target is operator.getitem:
        return lambda args, _: args[0][args[1]]
    if target is _CAST:  # torch's own implementation is Python, and ten times slower
        return lambda args, _: args[0].to(args[1])
    if dtype is None:
        return lambda args, kwargs: target(*args, **kwargs)
    return lambda args, kwargs: _widen_all(target(*args, **kwargs), dtype)


def run_graph(
    tg: TrainingGraph,
    args: Sequence[Any],
    dtype: torch.dtype | None = None,
    *,
    update: Update | None = None,
) -> list[Any]:
    """Execute a training graph: user outputs, then the new values of the mutated inputs.

    args: one value a placeholder, in order; none is written (the caller's update may write what
    it is given). dtype: torch.float64 for the oracle, None for what the graph says.
    """
    env: Environment = {}
    placeholders = [node for node in tg.graph.nodes if node.op == "placeholder"]
    assert len(placeholders) == len(args), f"{len(placeholders)} inputs, {len(args)} given"
    env.update(zip(placeholders, args, strict=True))
    for node in tg.graph.nodes:
        if node.op == "get_attr":
            env[node] = operator.attrgetter(str(node.target))(tg.gm)
    values = run_nodes(tg.nodes(), env, dtype=dtype, update=update)
    return [values[out] if isinstance(out, fx.Node) else out for out in tg.output_nodes]
