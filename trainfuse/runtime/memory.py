"""When values die, and where a mutated input's new value may be written straight into it."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import fx

import autodiff.accumulation  # noqa: F401  # registers torch.ops.trainfuse.accumulate
from autodiff import ops
from autodiff.graph import TrainingGraph
from trainfuse.fusion.indirect import source_of

if TYPE_CHECKING:
    from trainfuse.fusion.domains import Domain
    from trainfuse.fusion.plan import FusionGroup

StepKind = Literal["aten", "group", "graph", "update", "copy", "clone"]

_MANY = (tuple, list)
_UNDECLARED_VIEWS = frozenset({"aten::_unsafe_view", "aten::reshape", "aten::contiguous"})
"""Operators that may return their input's memory although their schema has no alias mark."""
_sums = torch.ops.trainfuse
IN_PLACE = {
    _sums.accumulate.default: _sums.accumulate_.default,
    _sums.accumulate_sum.default: _sums.accumulate_sum_.default,
}
"""Operators that may write their result over their first argument, and the variant that does."""


@dataclass(frozen=True, slots=True)
class Step:
    """One statement of a program, before it has text.

    reads, writes: graph nodes whose values it needs and makes. name: the callable of a group or of
    a compiled phase. group: set for kind "group". For "copy", reads is (value,) and target the
    placeholder that receives it; for "clone", the one value kept apart from a later mutation.
    """

    kind: StepKind
    reads: tuple[fx.Node, ...]
    writes: tuple[fx.Node, ...]
    node: fx.Node | None = None
    name: str = ""
    group: FusionGroup | None = None
    target: fx.Node | None = None


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Steps with the mutations placed.

    in_place: new value -> the placeholder whose memory it is written into. reused: new value -> the
    computed value that dies there, whose memory it takes.
    kept: values that the outputs must take from a clone, as their memory is overwritten later.
    """

    steps: tuple[Step, ...]
    in_place: Mapping[fx.Node, fx.Node] = field(default_factory=dict)
    kept: frozenset[fx.Node] = frozenset()
    reused: Mapping[fx.Node, fx.Node] = field(default_factory=dict)


def is_view(node: fx.Node) -> bool:
    """Whether the node's result may share memory with an argument."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return getattr(target, "__name__", "") == "getitem"
    schema = target._schema
    return schema.name in _UNDECLARED_VIEWS or any(
        result.alias_info is not None and not result.alias_info.is_write
        for result in schema.returns
    )


def alias_roots(tg: TrainingGraph) -> dict[fx.Node, fx.Node]:
    """Map each node to the node that owns its memory (itself unless it is a view)."""
    roots: dict[fx.Node, fx.Node] = {}
    for node in tg.graph.nodes:
        base = node.all_input_nodes[0] if node.all_input_nodes else None
        if node.op == "call_function" and base is not None and is_view(node):
            roots[node] = roots[base]
        else:
            roots[node] = node
    return roots


def memory_owners(tg: TrainingGraph) -> dict[fx.Node, fx.Node]:
    """As `alias_roots`, with the parts of a tuple as values of their own, unless they are views."""
    owners: dict[fx.Node, fx.Node] = {}
    for node in tg.graph.nodes:
        base = node.all_input_nodes[0] if node.all_input_nodes else None
        owners[node] = node
        if node.op == "call_function" and base is not None and is_view(node):
            many = isinstance(base.meta.get("val"), _MANY)
            if node.target is not operator.getitem or not many or is_view(base):
                owners[node] = owners[base]
    return owners


def fold_results(steps: Sequence[Step]) -> list[Step]:
    """Let an operator with several results write them at once: `out, mean, rstd = ...`."""
    made = {step.node for step in steps if step.kind == "aten"}
    folded: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for step in steps:
        node = step.node
        if step.kind == "aten" and node is not None and isinstance(node.meta.get("val"), _MANY):
            taken = {user.args[1]: user for user in node.users if user.target is operator.getitem}
            if 0 < len(taken) == len(node.users) and made.issuperset(node.users):
                folded[node] = tuple(sorted(taken.values(), key=lambda user: user.args[1]))
    gone = {user for users in folded.values() for user in users}
    kept = [step for step in steps if step.kind != "aten" or step.node not in gone]
    return [
        replace(step, writes=folded[step.node])
        if step.kind == "aten" and step.node in folded
        else step
        for step in kept
    ]


def place_mutations(tg: TrainingGraph, steps: Sequence[Step]) -> MemoryPlan:
    """Turn the graph's trailing outputs into writes to the inputs that they replace.

    A kernel writes into the input when no later step reads the old value and, should the kernel
    itself read it, each element is read only by the program that writes it (a batch norm's running
    statistics are made by the kernel that sums). Otherwise `copy_`, as
    early as the last reader allows. An output or new value that shares memory with a mutated input
    is cloned first. Nothing is written before the last assertion: where one fails, another form of
    the step is run instead.
    """
    pairs = _mutation_pairs(tg)
    if not pairs:
        return MemoryPlan(tuple(steps))
    roots = alias_roots(tg)
    mutated = {target for target, _ in pairs}
    user_outputs = [n for n in tg.output_nodes[: tg.num_outputs] if isinstance(n, fx.Node)]
    kept = {n for n in user_outputs if roots[n] in mutated}
    kept |= {value for _, value in pairs if roots[value] in mutated}
    made: dict[fx.Node, int] = {}
    for i, step in enumerate(steps):
        for node in step.writes:  # a cheap node may be made by several groups: the first counts
            made.setdefault(node, i)
    last_read = _last_reads(steps, roots, made, kept)
    escaping = {roots[n] for n in user_outputs}
    asserted = _last_assertion(steps)
    in_place: dict[fx.Node, fx.Node] = {}
    copies: dict[int, list[Step]] = {}
    for target, value in pairs:
        at = made.get(value, -1)
        last = last_read.get(target, -1)
        step = steps[at] if at >= 0 else None
        if (
            step is not None
            and at > asserted
            and step.group is not None
            and value not in in_place
            and roots[value] is value
            and value not in escaping
            and same_layout(value, target)
            and (last < at or (last == at and _elementwise(step.group, target, value, roots)))
        ):
            in_place[value] = target
        else:
            copy = Step("copy", (value,), (), target=target)
            copies.setdefault(max(at, last, asserted), []).append(copy)
    placed = _insert(steps, copies, {n: made.get(n, -1) for n in kept})
    return MemoryPlan(tuple(placed), in_place, frozenset(kept))


def _last_assertion(steps: Sequence[Step]) -> int:
    """Index of the last step that may find an assumption of the capture broken, or -1."""
    found = (i for i, step in enumerate(steps) if step.node and ops.is_assertion(step.node))
    return max(found, default=-1)


def _mutation_pairs(tg: TrainingGraph) -> list[tuple[fx.Node, fx.Node]]:
    placeholders = tg.graph.find_nodes(op="placeholder")
    by_name = {fact.name: node for fact, node in zip(tg.inputs, placeholders, strict=True)}
    values = tg.output_nodes[tg.num_outputs :]
    pairs = [(by_name[n], v) for n, v in zip(tg.mutations, values, strict=True)]
    return [(target, value) for target, value in pairs if target is not value]


def _last_reads(
    steps: Sequence[Step],
    roots: Mapping[fx.Node, fx.Node],
    made: Mapping[fx.Node, int],
    kept: set[fx.Node],
) -> dict[fx.Node, int]:
    """Index of the last step that reads each memory owner, clones of kept values included."""
    last = {roots[node]: made.get(node, -1) for node in kept}
    for i, step in enumerate(steps):
        for node in step.reads:
            last[roots[node]] = max(i, last.get(roots[node], -1))
    return last


def _insert(
    steps: Sequence[Step], copies: Mapping[int, list[Step]], clones: Mapping[fx.Node, int]
) -> list[Step]:
    after: dict[int, list[Step]] = {}
    for node, at in clones.items():
        after.setdefault(at, []).append(Step("clone", (node,), (), node=node))
    for at, these in copies.items():
        after.setdefault(at, []).extend(these)
    placed = list(after.get(-1, ()))
    for i, step in enumerate(steps):
        placed += [step, *after.get(i, ())]
    return placed


def same_layout(a: fx.Node, b: fx.Node) -> bool:
    """Whether two values have one dtype, device, shape and strides."""
    x, y = a.meta["val"], b.meta["val"]
    return (x.dtype, x.device, x.shape, x.stride()) == (y.dtype, y.device, y.shape, y.stride())


def _elementwise(
    group: FusionGroup, target: fx.Node, value: fx.Node, roots: Mapping[fx.Node, fx.Node]
) -> bool:
    """Whether each element of `target` is read only by the program that overwrites it."""
    domain = group.domain
    if domain.axes.get(target) != domain.axes.get(value):
        return False
    if any(roots[node] is target and node is not target for node in group.inputs):
        return False  # also read through a view, in another order
    if any(source_of(node) is target for node in domain.indirect):
        return False  # also read at computed places, which other programs may have overwritten
    made = _made_of(group, target)
    if value not in made:
        return False  # the kernel may store the value before it loads the old one
    own = _own(domain, value)
    if domain.kind == "pointwise":
        return len(own) == len(domain.sizes)
    # A row's value, or a column's: its program's threads all load the old one, and those that are
    # late may find the new one. Only what the one that stores has made of it may count.
    kept = {"row": domain.rows, "column": domain.cols}.get(domain.kind)
    return (
        kept is not None
        and own == frozenset(kept)
        and made.intersection(group.outputs) == {value}
        and all(_own(domain, node) == own and not domain.reduced.get(node) for node in made)
    )


def _own(domain: Domain, node: fx.Node) -> frozenset[int]:
    """Domain axes that a value has."""
    return frozenset(axis for dim in domain.axes[node] for axis in dim)


def _made_of(group: FusionGroup, source: fx.Node) -> set[fx.Node]:
    """Nodes of a group that an input goes into."""
    made: set[fx.Node] = set()
    for node in group.nodes:
        if any(operand is source or operand in made for operand in node.all_input_nodes):
            made.add(node)
    return made


def deaths(plan: MemoryPlan, tg: TrainingGraph) -> list[tuple[fx.Node, ...]]:
    """For every step, and first for the start, the values that nothing reads afterwards.

    Entry 0 holds inputs that are never read; entry i+1 the values that die after step i. A value
    written in place counts as its placeholder.
    """
    owner = plan.in_place
    last: dict[fx.Node, int] = dict.fromkeys(tg.graph.find_nodes(op="placeholder"), 0)
    for i, step in enumerate(plan.steps, start=1):
        targets = () if step.target is None else (step.target,)
        for node in (*step.reads, *step.writes, *targets):
            last[owner.get(node, node)] = i
    for node in tg.output_nodes[: tg.num_outputs]:
        if isinstance(node, fx.Node) and node not in plan.kept:
            last.pop(owner.get(node, node), None)
    dead: list[list[fx.Node]] = [[] for _ in range(len(plan.steps) + 1)]
    for node, at in last.items():
        if node.op != "get_attr":
            dead[at].append(node)
    return [tuple(nodes) for nodes in dead]
