"""What a reference evaluates when, and what waits on the host meanwhile: decided from sizes alone.

So the bytes that a check takes are known before it runs.
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from autodiff import ops
from autodiff.reference import Operation, converts_as_it_reads, prepare
from trainfuse.runtime.memory import is_view

Verb = Literal["run", "drop", "spill", "fetch"]
_NEVER = 1 << 62
_CAST = torch.ops.prims.convert_element_type.default
_COPY = torch.ops.aten.copy.default
WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
"""The element type that holds another one's values one precision higher."""
_BITS = frozenset({"aten.view.dtype", "aten.view_as_complex.default", "aten.view_as_real.default"})
"""Operators whose result is its operand's bits: another element type is another value."""
_PADS = frozenset({"aten.constant_pad_nd.default"})
"""Of the operators that gather, those that make elements of their own."""
_MAY_COPY = frozenset({"aten::reshape", "aten::contiguous", "aten::to"})
"""Operators that give a view where they can, and else a copy."""


@dataclass(frozen=True, slots=True)
class View:
    """A node that shows others' values. make: by ATen; sources: the nodes that own what it shows.

    computes: it has another element type than what it shows, so that it is no view of that. copies:
    it may have memory of its own, which lives for one reader.
    """

    make: Operation
    sources: frozenset[fx.Node]
    computes: bool
    copies: bool


@dataclass(frozen=True, slots=True)
class Work:
    """What is to know of a node's evaluation.

    shown: views that it reads, each after those that it is made of. results: the nodes that hold
    what it makes, the part of it that is theirs (None: all of it), and the element type that it is
    held in (None: as it comes). plain: as the graph says, where no precision would change what is
    held (None: as the evaluation does it).
    """

    shown: tuple[fx.Node, ...]
    results: tuple[tuple[fx.Node, int | None, torch.dtype | None], ...]
    plain: Operation | None


@dataclass(frozen=True, slots=True)
class Schedule:
    """An evaluation within a budget: what is done in order, and the bytes held at the peak.

    actions: "run" a node, "drop" a value, "spill" it to the host, "fetch" it back. works: of the
    nodes that run, and of those wanted. wide: every value is held one precision higher than the
    graph says (fp32 for halves, fp64 for fp32). peak_bytes: values held on the device, with the
    operands and the result of the node that runs. kept_bytes: results that stay on the device.
    """

    actions: tuple[tuple[Verb, fx.Node], ...]
    works: Mapping[fx.Node, Work]
    views: Mapping[fx.Node, View]
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


# -- precision ----------------------------------------------------------------------------------


def computing_dtype(node: fx.Node) -> torch.dtype:
    """fp32 for a node of halves alone, else fp64."""
    dtypes = {v.dtype for n in (node, *node.all_input_nodes) for v in tensors_of(n.meta.get("val"))}
    floating = [dtype for dtype in dtypes if dtype.is_floating_point]
    halves = floating and all(WIDER.get(dtype) is torch.float32 for dtype in floating)
    return torch.float32 if halves else torch.float64


def _is_narrow(node: Any) -> bool:
    """Whether a node reads and makes the element types of the graph; masks are drawn by others."""
    return keeps_precision(node) and ops.lookup(node.target).kind == "contraction"


def keeps_precision(node: fx.Node) -> bool:
    row = ops.lookup(node.target)
    if ops.draws_randomness(node) or row.name in _BITS:
        return True
    values = tensors_of(node.meta.get("val"))
    if row.kind != "contraction" or not values:
        return False
    if "attention" in row.name and values[0].device.type == "cuda":
        return True  # in fp64 it raised nothing, and gave noise
    if all(WIDER.get(value.dtype) is torch.float32 for value in values):
        return True
    fast = torch.get_float32_matmul_precision() != "highest" or "convolution" in row.name
    return fast and values[0].device.type == "cuda"


def _moves(node: fx.Node) -> bool:
    """Whether every element of a node's result is one of its operands'."""
    row = ops.lookup(node.target)
    return row.name == "aten.clone.default" or (row.kind == "gather" and row.name not in _PADS)


def _rounds_once(node: fx.Node) -> bool:
    """Whether a node of halves computes in fp32, and then rounds."""
    values = [v for n in (node, *node.all_input_nodes) for v in tensors_of(n.meta.get("val"))]
    halves = all(WIDER.get(value.dtype) is torch.float32 for value in values)
    return halves and ops.lookup(node.target).kind == "pointwise"


def tensors_of(value: Any) -> list[Tensor]:
    values = value if isinstance(value, list | tuple) else [value]
    return [v for v in values if isinstance(v, Tensor)]


# -- what is passed on ---------------------------------------------------------------------------


def passed_on(node: fx.Node) -> fx.Node | None:
    """The node whose values are this one's, in a higher precision: a cast's, or a last copy's."""
    source = _copied(node)
    if source is None and node.target is _CAST:
        operand = node.args[0]
        assert isinstance(operand, fx.Node)
        values = tensors_of([node.meta.get("val"), operand.meta.get("val")])
        source = operand if all(v.is_floating_point() for v in values) else None
    return source


def _copied(node: fx.Node) -> fx.Node | None:
    """What is copied over a whole tensor that nothing computes with: a gradient, to its layout."""
    if node.target is not _COPY or any(
        u.op != "output" and not ops.is_effect(u) for u in node.users
    ):
        return None
    target, source = node.args[:2]
    assert isinstance(target, fx.Node)
    if not isinstance(source, fx.Node) or source.meta["val"].shape != target.meta["val"].shape:
        return None
    return source


def operands(node: fx.Node) -> list[fx.Node]:
    """The nodes whose values are needed for that of this one."""
    source = _copied(node)
    return node.all_input_nodes if source is None else [source]


# -- views: made when they are read, so that memory belongs to one node ---------------------------


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
    return _reads_of(node)


def _view(node: fx.Node) -> View:
    computes = not _shows(node)
    schema = getattr(node.target, "_schema", None)  # getitem has none
    copies = computes or (schema is not None and schema.name in _MAY_COPY)
    return View(prepare(node), frozenset(sources(node)), computes, copies)


def _shows(node: fx.Node) -> bool:
    """Whether a view is of its operand's element type."""
    values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    return len({value.dtype for value in values if isinstance(value, Tensor)}) == 1


def _reads_of(node: fx.Node) -> set[fx.Node]:
    return {found for read in operands(node) for found in sources(read)}


# -- planning -----------------------------------------------------------------------------------


class _Planner:
    """Simulates an evaluation on sizes; a value that is read last waits on the host first."""

    def __init__(self, nodes: Sequence[fx.Node], wanted: tuple[fx.Node, ...], wide: bool) -> None:
        self.wanted, self.wide = wanted, wide
        needed = _needed(nodes, wanted)
        self.steps = [n for n in nodes if n in needed and _owns(n) and not _is_part(n)]
        self.views = {n for n in needed if not _owns(n)}
        self.results = {found for node in wanted for found in sources(node)}
        self.reads: dict[fx.Node, list[int]] = {}
        for i, node in enumerate(self.steps):
            for read in _reads_of(node):
                self.reads.setdefault(read, []).append(i)
        self.as_is: set[fx.Node] = set()
        self.passed: dict[fx.Node, fx.Node] = {}
        for node in self.steps:
            self.as_is |= {n for n in _parts(node) if not wide or self._is_held_as_is(n)}
            if (source := self._is_passed(node)) is not None:
                self.passed[node] = source
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
        works = {n: self._work(n) for n in dict.fromkeys([*self.steps, *self.wanted])}
        views = {n: _view(n) for n in self.views}
        actions = tuple(self.actions)
        return Schedule(actions, works, views, self.wanted, self.wide, self.peak, self.held)

    def _work(self, node: fx.Node) -> Work:
        several = isinstance(node.meta.get("val"), list | tuple)
        results = []
        for part in _parts(node) if node not in self.views else ():
            index: Any = part.args[1] if several else None
            like = part.meta.get("val")
            held = self._held(part, like) if self.wide and isinstance(like, Tensor) else None
            results.append((part, index, held))
        plain = prepare(node) if self.wide and self._is_plain(node) else None
        return Work(tuple(self._shown(node)), tuple(results), plain)

    def _shown(self, node: fx.Node) -> dict[fx.Node, None]:
        """The views behind a node, itself included, each after what it reads."""
        found: dict[fx.Node, None] = {}
        for read in operands(node):
            if read in self.views:
                found |= self._shown(read)
        return found | {node: None} if node in self.views else found

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
        values = tensors_of(node.meta.get("val"))
        return sum(count_of(value) * self._held(node, value).itemsize for value in values)

    def _held(self, node: fx.Node, value: Tensor) -> torch.dtype:
        """The element type in which a value of a node is held; inputs come in the graph's."""
        owners = sources(node)
        if len(owners) == 1 and (source := self.passed.get(*owners)) is not None:
            return self._held(source, source.meta["val"])
        narrow = all(n.op != "call_function" or n in self.as_is for n in owners)
        return value.dtype if narrow else WIDER.get(value.dtype, value.dtype)

    def _is_passed(self, node: fx.Node) -> fx.Node | None:
        """What a cast to a wider type, that need not be made, passes on as it is held."""
        source = passed_on(node)
        if source is None or not self.wide:
            return None
        readers = [self.steps[i] for i in self.reads.get(node, ())]
        if len(readers) > 1 and not all(map(converts_as_it_reads, readers)):
            return None  # each of them would convert it
        held = self._held(node, node.meta["val"])
        return source if self._held(source, source.meta["val"]).itemsize < held.itemsize else None

    def _is_held_as_is(self, node: fx.Node) -> bool:
        """Whether a higher precision would be of no use: nothing more is known, or is read."""
        maker = node.args[0] if _is_part(node) else node
        if _is_narrow(maker) or (_moves(maker) and self._reads_as_is(maker)):
            return True
        readers = [self.steps[i] for i in self.reads.get(node, ())]
        return bool(readers) and node not in self.results and all(map(_is_narrow, readers))

    def _reads_as_is(self, node: fx.Node) -> bool:
        """Whether what a node reads and makes is of one element type, and held so."""
        values = [(n, v) for n in node.all_input_nodes for v in tensors_of(n.meta.get("val"))]
        floating = [(n, v) for n, v in values if v.dtype.is_floating_point]
        made = tensors_of(node.meta.get("val"))
        return {v.dtype for _, v in floating} == {v.dtype for v in made} and all(
            self._held(n, v) is v.dtype for n, v in floating
        )

    def _is_plain(self, node: fx.Node) -> bool:
        """Whether a step gives what it is to hold when it runs as the graph says."""
        if node not in self.as_is or keeps_precision(node) or passed_on(node) is not None:
            return False
        return self._reads_as_is(node) and (_moves(node) or _rounds_once(node))

    def _working_bytes(self, node: fx.Node) -> int:
        """Operands and results in the type that a node computes in, where they are not held so."""
        if not self.wide or passed_on(node) is not None or self._is_plain(node):
            return 0
        computing = None if keeps_precision(node) else computing_dtype(node)
        total = 0
        for n in (node, *node.all_input_nodes):
            for value in tensors_of(n.meta.get("val")):
                used = value.dtype if computing is None else computing
                if value.dtype.is_floating_point and used is not self._held(n, value):
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
            pending.extend(n for n in operands(node) if n in inside)
    return found


def bytes_of(nodes: Sequence[fx.Node], wanted: Collection[fx.Node]) -> int:
    """Bytes that these nodes hold at the peak when they run as the graph says."""
    return schedule(nodes, wanted, wide=False).peak_bytes
