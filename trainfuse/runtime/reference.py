"""The reference that checks compare with: ATen, node by node, within a bounded memory."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from autodiff import ops
from autodiff.reference import Environment, Operation, prepare
from trainfuse.log import get_logger, say_once
from trainfuse.runtime.fallback import Boundary, first_line
from trainfuse.runtime.reference_schedule import (
    Schedule,
    computing_dtype,
    keeps_precision,
    operands,
    passed_on,
)
from trainfuse.runtime.room import to_device, to_host

Run = Callable[[fx.Node], Operation]
"""Says how a node is run."""
_log = get_logger("gate")


def evaluate(plan: Schedule, given: Environment, run: Run) -> Environment:
    """Carry out a schedule.

    given: values of what the nodes read from outside. run: how each node is. Returns the wanted
    values, in memory of their own, on the device or the host.
    """
    values = _Values(given, run, plan)
    with torch.no_grad():
        for verb, node in plan.actions:
            match verb:
                case "run":
                    values.make(node)
                case "drop":
                    values.drop(node)
                case "spill":
                    values.spill(node)
                case "fetch":
                    values.fetch(node)
        return {node: values.own(node) for node in plan.wanted}


class Native:
    """Runs nodes as the graph says; each is made ready once."""

    def __init__(self) -> None:
        self._ready: dict[fx.Node, Operation] = {}

    def __call__(self, node: fx.Node) -> Operation:
        """How a node is run."""
        if node not in self._ready:
            copied = operands(node) != node.all_input_nodes
            self._ready[node] = _cast(node) if copied else prepare(node)
        return self._ready[node]


class Widened:
    """Runs nodes one precision higher, but for those that can't be, or that cost too much.

    Random draws depend on the element type. A product of halves, or in TF32, runs as it is: what
    it rounds, eager rounds too, and in fp64 it would take ten times as long as the rest. What runs
    so depends on the float32 matmul precision at the time a node is made ready, once.
    """

    def __init__(self, boundary: Boundary) -> None:
        self._boundary = boundary
        self._kept: set[str] = set()
        self._ready: dict[fx.Node, Operation] = {}

    def __call__(self, node: fx.Node) -> Operation:
        """How a node is run; an operator that fails in the wider type is named once."""
        if node not in self._ready:
            self._ready[node] = self._make_ready(node)
        return self._ready[node]

    def _make_ready(self, node: fx.Node) -> Operation:
        if node.target is operator.getitem:
            return prepare(node)
        source = passed_on(node)
        if source is not None:  # what it is held in is its cast
            return operator.itemgetter(source)
        own = prepare(node, read=_narrow)
        if keeps_precision(node):
            return own
        wide, name = prepare(node, computing_dtype(node)), ops.op_name(node.target)

        def attempted(env: Environment) -> Any:
            if name not in self._kept:
                made = self._boundary.attempt(lambda: wide(env), "step")
                if not isinstance(made, str):
                    return made
                self._keep(name, made)
            return own(env)

        return attempted

    def _keep(self, name: str, error: str) -> None:
        self._kept.add(name)
        say_once(
            "gate",
            f"own precision {name}",
            f"{name} stays in its own precision in the fp64 reference: {first_line(error, 80)}",
        )


def _cast(node: fx.Node) -> Operation:
    """What a copy passes on, in the element type that it gives it."""
    (source,), dtype = operands(node), node.meta["val"].dtype
    return lambda env: env[source].to(dtype)


def _narrow(node: fx.Node, value: Any) -> Any:
    """What a node reads in the element type that the graph gives it."""
    return _narrowed(value, node.meta.get("val", value))


def _narrowed(value: Any, like: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_narrowed(v, m) for v, m in zip(value, like, strict=True)]
    if not isinstance(value, Tensor) or value.dtype is like.dtype:
        return value
    return value.to(like.dtype)


class _Values:
    """What an evaluation holds; views of it are kept as long as what they show."""

    def __init__(self, given: Environment, run: Run, plan: Schedule) -> None:
        self._values: Environment = dict(given)
        self._run, self._plan = run, plan
        self._given = {_memory(t) for t in given.values() if isinstance(t, Tensor)}
        self._views: dict[fx.Node, list[fx.Node]] = {}
        self._homes: dict[fx.Node, torch.device] = {}

    def make(self, node: fx.Node) -> None:
        """Evaluate a node and hold its result; several results part by part."""
        work = self._plan.works[node]
        passing = self._show(work.shown)
        operation = self._run(node) if work.plain is None else work.plain
        made = operation(self._values)
        for view in passing:
            del self._values[view]
        for part, index, dtype in work.results:
            value = made if index is None else made[index]
            if dtype is not None and isinstance(value, Tensor) and value.dtype is not dtype:
                value = value.to(dtype)
            self._values[part] = value

    def drop(self, node: fx.Node) -> None:
        """Forget a value."""
        self._forget_views(node)
        del self._values[node]

    def spill(self, node: fx.Node) -> None:
        """Move a value to the host."""
        self._forget_views(node)
        self._homes[node] = self._values[node].device
        self._values[node] = to_host(self._values[node])

    def fetch(self, node: fx.Node) -> None:
        """Bring it back."""
        self._forget_views(node)
        self._values[node] = to_device(self._values[node], self._homes[node])

    def own(self, node: fx.Node) -> Any:
        """A result, in memory that nothing given shares."""
        if node in self._plan.views:
            self._show(self._plan.works[node].shown)
        value = self._values[node]
        shares = isinstance(value, Tensor) and _memory(value) in self._given
        return value.clone() if shares else value

    def _forget_views(self, node: fx.Node) -> None:
        for view in self._views.pop(node, ()):
            self._values.pop(view, None)

    def _show(self, views: Iterable[fx.Node]) -> list[fx.Node]:
        """Make views that aren't there; returns those to be forgotten, as they are no views."""
        passing = []
        for node in views:
            if node in self._values:
                continue
            view = self._plan.views[node]
            # what a view shows need not be converted, which would copy all of it
            make = self._run(node) if view.computes else view.make
            self._values[node] = make(self._values)
            if view.copies:
                passing.append(node)
                continue
            for source in view.sources:
                self._views.setdefault(source, []).append(node)
        return passing


def _memory(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


def constants(module: fx.GraphModule) -> Mapping[fx.Node, Any]:
    """The values of a graph's get_attr nodes."""
    nodes = module.graph.find_nodes(op="get_attr")
    return {node: operator.attrgetter(str(node.target))(module) for node in nodes}
