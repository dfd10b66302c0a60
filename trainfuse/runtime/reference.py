"""The reference that checks compare with: ATen, node by node, within a bounded memory.

What is evaluated when, and what waits on the host meanwhile, is decided from sizes alone, so that
the bytes that a check takes are known before it runs.
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from autodiff import ops
from autodiff.reference import Environment, run_node
from trainfuse.log import get_logger, say_once
from trainfuse.runtime.fallback import Boundary, first_line
from trainfuse.runtime.memory import is_view
from trainfuse.runtime.room import to_device, to_host

Verb = Literal["run", "drop", "spill", "fetch"]
Run = Callable[[fx.Node, Environment], Any]
_NEVER = 1 << 62
_WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
_BITS = frozenset({"aten.view.dtype", "aten.view_as_complex.default", "aten.view_as_real.default"})
"""Operators whose result is its operand's bits: another element type is another value."""
_log = get_logger("gate")


@dataclass(frozen=True, slots=True)
class Schedule:
    """An evaluation within a budget: what is done in order, and the bytes held at the peak.

    actions: "run" a node, "drop" a value, "spill" it to the host, "fetch" it back. wide: every
    value is held one precision higher than the graph says (fp32 for halves, fp64 for fp32).
    peak_bytes: values held on the device, with the operands and the result of the node that runs.
    kept_bytes: results that stay on the device. views: nodes that only show values, and whose.
    """

    actions: tuple[tuple[Verb, fx.Node], ...]
    views: Mapping[fx.Node, Collection[fx.Node]]
    wanted: tuple[fx.Node, ...]
    wide: bool
    peak_bytes: int
    kept_bytes: int


def schedule(
    nodes: Sequence[fx.Node],
    wanted: Collection[fx.Node],
    *,
    wide: bool,
    budget: int | None = None,
    keep: int | None = None,
) -> Schedule:
    """Plan the evaluation of `wanted` by these nodes.

    nodes: executed nodes in order; effects are left out, and what nothing needs, but for random
    draws. budget: bytes to hold at most, None for any; a node's own operands and result are held
    whatever they take. keep: bytes of results that may stay on the device at the end.
    """
    return _Planner(nodes, tuple(dict.fromkeys(wanted)), wide).plan(budget, keep)


def evaluate(plan: Schedule, given: Environment, run: Run) -> Environment:
    """Carry out a schedule.

    given: values of what the nodes read from outside. run: evaluates one node. Returns the wanted
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


def natively(node: fx.Node, env: Environment) -> Any:
    """One node, as the graph says."""
    return run_node(node, env)


class Widened:
    """Evaluates nodes one precision higher, but for those that can't be, or that cost too much.

    Random draws depend on the element type. A product of halves, or in TF32, runs as it is: what
    it rounds, eager rounds too, and in fp64 it would take ten times as long as the rest.
    """

    def __init__(self, boundary: Boundary) -> None:
        self._boundary = boundary
        self._kept: set[str] = set()
        self._dtypes: dict[fx.Node, torch.dtype | None] = {}

    def __call__(self, node: fx.Node, env: Environment) -> Any:
        """The node's value; an operator that fails in the wider type is named once."""
        if node not in self._dtypes:
            self._dtypes[node] = self._computing(node)
        dtype = self._dtypes[node]
        if dtype is not None:
            made = self._boundary.attempt(lambda: run_node(node, env, dtype), "step")
            if not isinstance(made, str):
                return made
            name = ops.op_name(node.target)
            self._kept.add(name)
            self._dtypes.clear()
            say_once(
                "gate",
                f"own precision {name}",
                f"{name} stays in its own precision in the fp64 reference: {first_line(made, 80)}",
            )
        if node.target is operator.getitem:
            return natively(node, env)
        return natively(node, {n: _narrow(v, n.meta.get("val", v)) for n, v in env.items()})

    def _computing(self, node: fx.Node) -> torch.dtype | None:
        """The type to compute a node in; None for its own."""
        if node.target is operator.getitem or ops.op_name(node.target) in self._kept:
            return None
        return None if _keeps_precision(node) else computing_dtype(node)


def computing_dtype(node: fx.Node) -> torch.dtype:
    """fp32 for a node of halves alone, else fp64."""
    dtypes = {v.dtype for n in (node, *node.all_input_nodes) for v in _tensors(n.meta.get("val"))}
    floating = [dtype for dtype in dtypes if dtype.is_floating_point]
    halves = floating and all(_WIDER.get(dtype) is torch.float32 for dtype in floating)
    return torch.float32 if halves else torch.float64


def _keeps_precision(node: fx.Node) -> bool:
    row = ops.lookup(node.target)
    if ops.draws_randomness(node) or row.name in _BITS:
        return True
    values = _tensors(node.meta.get("val"))
    if row.kind != "contraction" or not values:
        return False
    if "attention" in row.name and values[0].device.type == "cuda":
        return True  # in fp64 it raised nothing, and gave noise
    if all(_WIDER.get(value.dtype) is torch.float32 for value in values):
        return True
    fast = torch.get_float32_matmul_precision() != "highest" or "convolution" in row.name
    return fast and values[0].device.type == "cuda"


def _narrow(value: Any, like: Any) -> Any:
    """Tensors in the element type that the graph gives them."""
    if isinstance(value, list | tuple):
        return [_narrow(v, m) for v, m in zip(value, like, strict=True)]
    return value.to(like.dtype) if isinstance(value, Tensor) else value


def _tensors(value: Any) -> list[Tensor]:
    values = value if isinstance(value, list | tuple) else [value]
    return [v for v in values if isinstance(v, Tensor)]


# -- values: views are made when they are read, so that memory belongs to one node --------------


def _is_part(node: fx.Node) -> bool:
    """Whether a node takes one of an operator's several results."""
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and not is_view(source)


def _owns(node: fx.Node) -> bool:
    if node.op != "call_function" or _is_part(node):
        return True
    return not is_view(node) or ops.op_name(node.target) in _BITS


def sources(node: fx.Node) -> set[fx.Node]:
    """The nodes whose values a read of this one needs: itself, or what its views are made of."""
    if _owns(node):
        return {node}
    return {found for read in node.all_input_nodes for found in sources(read)}


def _reads_of(node: fx.Node) -> set[fx.Node]:
    return {found for read in node.all_input_nodes for found in sources(read)}


class _Values:
    """What an evaluation holds; views of it are kept as long as what they show."""

    def __init__(self, given: Environment, run: Run, plan: Schedule) -> None:
        self._values: Environment = dict(given)
        self._run, self._wide, self._sources = run, plan.wide, plan.views
        self._given = {_memory(t) for t in given.values() if isinstance(t, Tensor)}
        self._views: dict[fx.Node, list[fx.Node]] = {}
        self._homes: dict[fx.Node, torch.device] = {}

    def make(self, node: fx.Node) -> None:
        """Evaluate a node and hold its result; several results part by part."""
        made = self._run(node, self._reads(node))
        if not isinstance(made, list | tuple):
            self._values[node] = self._held(made, node)
            return
        for user in node.users:
            index: Any = user.args[1]
            self._values[user] = self._held(made[index], user)

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
        value = self._value(node)
        shares = isinstance(value, Tensor) and _memory(value) in self._given
        return value.clone() if shares else value

    def _forget_views(self, node: fx.Node) -> None:
        for view in self._views.pop(node, ()):
            self._values.pop(view, None)

    def _reads(self, node: fx.Node) -> Environment:
        values = self._values
        return {n: values[n] if n in values else self._value(n) for n in node.all_input_nodes}

    def _value(self, node: fx.Node) -> Any:
        if node in self._values or node not in self._sources:
            return self._values[node]
        reads = self._reads(node)
        if not _shows(node):
            return self._run(node, reads)
        # a view computes nothing: what it shows need not be converted, which would copy all of it
        value = natively(node, reads)
        bases = {_memory(v) for v in reads.values() if isinstance(v, Tensor)}
        if isinstance(value, Tensor) and _memory(value) in bases:
            self._values[node] = value
            for source in self._sources[node]:
                self._views.setdefault(source, []).append(node)
        return value

    def _held(self, made: Any, node: fx.Node) -> Any:
        """A result in the element type that it is held in."""
        like = node.meta.get("val")
        if not self._wide or not isinstance(made, Tensor) or not isinstance(like, Tensor):
            return made
        return made.to(_WIDER.get(like.dtype, like.dtype))


def _shows(node: fx.Node) -> bool:
    """Whether a view is of its operand's element type."""
    values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    return len({value.dtype for value in values if isinstance(value, Tensor)}) == 1


def _memory(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


# -- planning -----------------------------------------------------------------------------------


class _Planner:
    """Simulates an evaluation on sizes; a value that is read last waits on the host first."""

    def __init__(self, nodes: Sequence[fx.Node], wanted: tuple[fx.Node, ...], wide: bool) -> None:
        self.wanted, self.wide = wanted, wide
        needed = _needed(nodes, wanted)
        self.steps = [n for n in nodes if n in needed and _owns(n) and not _is_part(n)]
        self.views = {n: sources(n) for n in needed if not _owns(n)}
        self.results = {found for node in wanted for found in sources(node)}
        self.reads: dict[fx.Node, list[int]] = {}
        for i, node in enumerate(self.steps):
            for read in _reads_of(node):
                self.reads.setdefault(read, []).append(i)
        self.actions: list[tuple[Verb, fx.Node]] = []
        self.here: dict[fx.Node, int] = {}
        self.away: dict[fx.Node, int] = {}
        self.held = self.peak = 0

    def plan(self, budget: int | None, keep: int | None) -> Schedule:
        limit = _NEVER if budget is None else budget
        for i, node in enumerate(self.steps):
            reads = _reads_of(node)
            coming = {n: self.away[n] for n in reads if n in self.away}
            made = {n: self._bytes(n) for n in _parts(node)}
            need = self._working_bytes(node) + sum(made.values())
            self._make_room(limit - need - sum(coming.values()), i, reads)
            for read, size in coming.items():
                self.actions.append(("fetch", read))
                self.here[read] = size
                self.held += size
                del self.away[read]
            self.peak = max(self.peak, self.held + need)
            self.actions.append(("run", node))
            self.here.update(made)
            self.held += sum(made.values())
            for value in (*reads, *made):
                if value in self.here and self._next_read(value, i) == _NEVER:
                    if value not in self.results:
                        self.actions.append(("drop", value))
                        self.held -= self.here.pop(value)
        self._make_room(_NEVER if keep is None else keep, len(self.steps), ())
        actions = tuple(self.actions)
        return Schedule(actions, self.views, self.wanted, self.wide, self.peak, self.held)

    def _make_room(self, limit: int, step: int, busy: Collection[fx.Node]) -> None:
        if self.held <= limit:
            return
        waiting = (n for n in self.here if n not in busy and self.here[n])
        for node in sorted(waiting, key=lambda n: -self._next_read(n, step - 1)):
            self.actions.append(("spill", node))
            self.away[node] = self.here.pop(node)
            self.held -= self.away[node]
            if self.held <= limit:
                return

    def _next_read(self, node: fx.Node, step: int) -> int:
        reads = self.reads.get(node, [])
        place = bisect.bisect_right(reads, step)
        return reads[place] if place < len(reads) else _NEVER

    def _bytes(self, node: fx.Node) -> int:
        return sum(self._size(value) for value in _tensors(node.meta.get("val")))

    def _size(self, value: Tensor) -> int:
        dtype = _WIDER.get(value.dtype, value.dtype) if self.wide else value.dtype
        return count_of(value) * dtype.itemsize

    def _working_bytes(self, node: fx.Node) -> int:
        """Operands and results in the type that a node computes in, where they are not held so."""
        if not self.wide:
            return 0
        computing = None if _keeps_precision(node) else computing_dtype(node)
        total = 0
        for n in (node, *node.all_input_nodes):
            for value in _tensors(n.meta.get("val")):
                used = value.dtype if computing is None else computing
                given = n.op != "call_function"  # inputs come in the graph's own type
                held = value.dtype if given else _WIDER.get(value.dtype, value.dtype)
                if value.dtype.is_floating_point and used is not held:
                    total += count_of(value) * used.itemsize
        return total


def _parts(node: fx.Node) -> list[fx.Node]:
    """The nodes that hold a node's results."""
    return list(node.users) if isinstance(node.meta.get("val"), list | tuple) else [node]


def count_of(value: Tensor) -> int:
    """Elements of a tensor; of what the data decides, as if it were one."""
    count = 1
    for size in value.shape:
        if isinstance(size, int):
            count *= size
        elif size.node.has_hint():  # else the data decides it
            count *= size.node.hint
    return count


def _needed(nodes: Sequence[fx.Node], wanted: Collection[fx.Node]) -> set[fx.Node]:
    """The nodes behind `wanted`, and those that draw random numbers: later draws depend on them."""
    inside = {n for n in nodes if ops.lookup(n.target).kind != "effect"}
    pending = [*wanted, *(n for n in inside if ops.draws_randomness(n))]
    found: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending.extend(n for n in node.all_input_nodes if n in inside)
    return found


def bytes_of(nodes: Sequence[fx.Node], wanted: Collection[fx.Node]) -> int:
    """Bytes that these nodes hold at the peak when they run as the graph says."""
    return schedule(nodes, wanted, wide=False).peak_bytes


def constants(module: fx.GraphModule) -> Mapping[fx.Node, Any]:
    """The values of a graph's get_attr nodes."""
    nodes = module.graph.find_nodes(op="get_attr")
    return {node: operator.attrgetter(str(node.target))(module) for node in nodes}
