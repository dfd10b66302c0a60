"""Decomposition of composite operators by splicing, and clean-up of what tracing left behind."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from . import ops
from ._compat import plain_tracing
from .formulas import Formula, composites
from .graph import TrainingGraph
from .rewrite import (
    GraphEdit,
    fake_mode_of,
    is_row_major,
    known_equal,
    same_strides,
    value_of,
)

Table = Mapping[Any, Formula]


def decompose(
    tg: TrainingGraph, table: Table | None = None, only: Collection[fx.Node] | None = None
) -> TrainingGraph:
    """Replace each composite node by the nodes of its formula, in place and in its phase.

    table: from operator to formula over tensors; ours by default. only: the nodes to replace.
    A node stays as it is when its formula returns NotImplemented, or gives another shape or an
    unreachable layout.
    """
    chosen = composites() if table is None else table
    if not any(node.target in chosen for node in tg.nodes()):
        return tg
    edit = GraphEdit(tg)
    traced: dict[Any, fx.GraphModule | None] = {}
    for old in tg.nodes():
        if old.target not in chosen or (only is not None and old not in only):
            continue
        node = edit.mapping[old]
        key = _signature(node)
        if key is None or key not in traced:
            formula_graph = _trace(node, chosen)
            if key is not None:
                traced[key] = formula_graph
        else:
            formula_graph = traced[key]
        if formula_graph is not None:
            _splice(edit, node, formula_graph)
    edit.eliminate_dead()
    return edit.finish()


def _flat(node: fx.Node) -> list[Any]:
    return tree_leaves((node.args, node.kwargs))


def _signature(node: fx.Node) -> Any:
    """Key under which equal calls share one trace, or None when a size is symbolic."""
    # which arguments are one value: a formula has one input for all of them
    positions = {parent: index for index, parent in enumerate(node.all_input_nodes)}
    parts: list[Any] = [node.target]
    for argument in _flat(node):
        value = value_of(argument)
        if isinstance(value, torch.Tensor):
            sizes = (*value.shape, *value.stride())
            if not all(isinstance(size, int) for size in sizes):
                return None
            layout = (tuple(value.shape), tuple(value.stride()), value.dtype, value.device)
            parts.append((positions.get(argument), layout))
        elif isinstance(argument, fx.Node):
            return None
        else:
            parts.append((type(value), value))
    parts.extend(node.kwargs)
    return tuple(parts)


def _trace(node: fx.Node, table: Table) -> fx.GraphModule | None:
    """Graph of the node's formula, one placeholder a distinct input node, or None to keep it."""
    inputs = node.all_input_nodes
    positions = {parent: index for index, parent in enumerate(inputs)}
    covered = True

    def call(*values: Any) -> Any:
        nonlocal covered
        args, kwargs = fx.map_arg(
            (node.args, node.kwargs), lambda parent: values[positions[parent]]
        )
        result = table[node.target](*_thaw(args), **kwargs)
        covered = result is not NotImplemented
        return result if covered else values[0]

    nested = {target: formula for target, formula in table.items() if target is not node.target}
    with plain_tracing(), fake_mode_of(node.graph):
        gm = make_fx(call, decomposition_table=nested)(*map(_stand_in, inputs))
    return gm if covered else None


def _stand_in(node: fx.Node) -> Any:
    """A value like a node's, and of its own.

    Equal formulas share a trace, and so the values of their results: tracing a reader of two of
    them would take both for one.
    """
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _thaw(args: Any) -> list[Any]:
    """Arguments with fx's immutable lists made plain."""
    return [list(arg) if isinstance(arg, (list, tuple)) else arg for arg in args]


def _splice(edit: GraphEdit, node: fx.Node, formula: fx.GraphModule) -> None:
    """Put a formula's nodes before a node, and let what reads it read them.

    Only results that something reads must have the node's type and layout.
    """
    if not node.users:
        return
    inputs = iter(node.all_input_nodes)
    fact = edit.facts[node]
    copies: dict[fx.Node, fx.Node] = {}
    results: Any = None
    with edit.graph.inserting_before(node):
        for inner in formula.graph.nodes:
            if inner.op == "placeholder":
                copies[inner] = next(inputs)
            elif inner.op == "output":
                results = inner.args[0]
            else:
                assert inner.op == "call_function", inner.format_node()
                args, kwargs = fx.map_arg((inner.args, inner.kwargs), copies.__getitem__)
                copies[inner] = edit.emit(
                    inner.target, args, kwargs, fact=fact, value=inner.meta["val"], origin=node
                )
        many = isinstance(node.meta["val"], (tuple, list))
        wanted = list(node.meta["val"]) if many else [node.meta["val"]]
        given = list(results) if many else [results]
        parts: Any = (user.args[1] for user in node.users)
        read = set(parts) if many else {0}
        ready = [
            _conform(edit, copies[result], value, fact, node)
            if result is not None and index in read
            else None
            for index, (result, value) in enumerate(zip(given, wanted, strict=True))
        ]
    if any(ready[index] is None and wanted[index] is not None for index in read):
        return  # the layout can't be had: the node stays, its formula is dead
    if not many:
        edit.replace(node, ready[0])  # type: ignore[arg-type]  # not None: checked above
        return
    for getitem in list(node.users):
        made = ready[getitem.args[1]]  # type: ignore[index]  # getitem's index is an int
        if made is not None:
            edit.replace(getitem, made)
    first = next(made for made in ready if made is not None)
    edit.rename(node, first)
    if not node.users:
        edit.erase(node)


def _conform(
    edit: GraphEdit, made: fx.Node, wanted: torch.Tensor, fact: Any, origin: fx.Node
) -> fx.Node | None:
    """The result with the dtype and strides that readers were traced with, or None."""
    value = made.meta["val"]
    if not known_equal(tuple(value.shape), tuple(wanted.shape)):
        return None
    if value.dtype != wanted.dtype:
        made = edit.emit(
            torch.ops.aten._to_copy.default,
            (made,),
            {"dtype": wanted.dtype},
            fact=fact,
            origin=origin,
        )
        value = made.meta["val"]
    if same_strides(value, wanted):
        return made
    if not is_row_major(wanted):
        return None
    kwargs = {"memory_format": torch.contiguous_format}
    return edit.emit(torch.ops.aten.clone.default, (made,), kwargs, fact=fact)


_ALIASES = frozenset({"aten.alias.default", "aten.detach.default"})
_COPIES = frozenset({"aten.clone.default", "aten._to_copy.default", "aten.copy.default"})
_CASTS = frozenset({"prims.convert_element_type.default"})


def cleanup(tg: TrainingGraph) -> TrainingGraph:
    """Remove copies that keep dtype, strides and sign bits, no-op views, repeated and dead nodes.

    Two entries of the output tuple that were distinct tensors stay distinct, and an output that
    was a fresh tensor never becomes an input: a copy that ensures this is kept. Repeats are
    joined within a phase only, never random draws, effects, or what is made again on purpose.
    """
    edit = GraphEdit(tg)
    edit.eliminate_dead()
    _remove_identities(edit)
    _join_repeats(edit)
    edit.eliminate_dead()
    return edit.finish()


def _remove_identities(edit: GraphEdit) -> None:
    for node in list(edit.graph.nodes):
        if node.op != "call_function":
            continue
        source = _identity_source(node) or _unrounded(edit, node)
        if source is not None and _may_stand_in(edit, source, node):
            edit.replace(node, source)


def _identity_source(node: fx.Node) -> fx.Node | None:
    """The node whose value, dtype and layout this node merely repeats."""
    name = ops.op_name(node.target)
    source: Any = None
    if name == "aten.copy.default":
        source = node.args[1]
    elif name in _ALIASES or name in _COPIES or name in _CASTS:
        source = node.args[0]
    elif name == "aten.permute.default":
        source = _undone_permute(node)
    elif ops.lookup(node.target).kind == "view" and node.target is not operator.getitem:
        source = node.args[0]
        if name == "aten.view.default" == ops.op_name(source.target):  # there and back
            source = source.args[0]
    if not isinstance(source, fx.Node) or not _alike(node, source):
        return None
    if ops.lookup(node.target).aliases and not _same_place(node, source):
        return None
    return source


def _alike(node: fx.Node, source: fx.Node) -> bool:
    """Whether two values have one type and layout.

    Nothing is read by the strides of dims of size 1, but ATen lays results out by them: a view that
    changes them stays, as it costs nothing. A copy doesn't.
    """
    made, given = node.meta["val"], source.meta["val"]
    if not isinstance(made, torch.Tensor) or not isinstance(given, torch.Tensor):
        return False
    is_view = ops.lookup(node.target).aliases
    return (
        known_equal(tuple(made.shape), tuple(given.shape))
        and made.dtype == given.dtype
        and made.device == given.device
        and (made.is_conj(), made.is_neg()) == (given.is_conj(), given.is_neg())
        and same_strides(made, given)
        and (not is_view or known_equal(made.stride(), given.stride()))
    )


def _unrounded(edit: GraphEdit, node: fx.Node) -> fx.Node | None:
    """What an operator's piece gave before it was rounded, where the phase reads both anyway.

    A norm's statistics, saved as they are for one use and in a half type for another, are one then.
    """
    half = node.args[0] if ops.op_name(node.target) in _COPIES | _CASTS else None
    if not isinstance(half, fx.Node) or not ops.ends_formula(half):
        return None
    wide = half.args[0]
    if not isinstance(wide, fx.Node) or not _alike(node, wide):
        return None
    phase, base = edit.facts[node].phase, owner(wide)
    if base in edit.facts and edit.facts[base].phase == phase:
        return None  # it would be passed on in a wider type
    read = any(
        edit.facts[user].phase == phase and not ops.lookup(user.target).aliases
        for user in _reach_through_views(base) - {half}
        if user.op == "call_function"
    )
    return wide if read else None


def _same_place(node: fx.Node, source: fx.Node) -> bool:
    """Whether a view of unchanged shape and strides also reads the same elements in order."""
    if ops.op_name(node.target) == "aten.permute.default":
        return True  # proved by _undone_permute, or an exchange of size-1 dimensions
    made, given = node.meta["val"], source.meta["val"]
    return known_equal(made.storage_offset(), given.storage_offset())


def _undone_permute(node: fx.Node) -> Any:
    """Follow permutes up to the value that their composition leaves as it was."""
    order = list(range(node.meta["val"].dim()))
    current: Any = node
    while isinstance(current, fx.Node):
        name = ops.op_name(current.target)
        rank = len(order)
        if name == "aten.permute.default":
            step = [dim % rank for dim in current.args[1]]  # type: ignore[union-attr, operator]
        elif name == "aten.t.default":
            step = [1, 0] if rank == 2 else [0]
        else:
            return None
        order = [step[dim] for dim in order]
        current = current.args[0]
        if order == sorted(order):
            return current
    return None


def _may_stand_in(edit: GraphEdit, source: fx.Node, node: fx.Node) -> bool:
    """Whether outputs stay distinct, fresh tensors when source takes node's place."""
    output = edit.graph.output_node()
    if output not in _reach_through_views(node):
        return True
    base = owner(source)
    if base.op != "call_function" or owner(node) is base:
        return base.op == "call_function"
    return output not in _reach_through_views(base)


def owner(node: fx.Node) -> fx.Node:
    """The node that owns the storage which a chain of views, or of parts of one, shows."""
    while node.op == "call_function":
        parent = node.args[0] if node.args else None
        if not isinstance(parent, fx.Node) or not ops.lookup(node.target).aliases:
            break
        if node.target is operator.getitem and not ops.lookup(parent.target).aliases:
            break  # one of several results, in a storage of its own
        node = parent
    return node


def _reach_through_views(node: fx.Node) -> set[fx.Node]:
    """Readers of a value and of its views."""
    found: set[fx.Node] = set()
    pending = [node]
    while pending:
        for user in pending.pop().users:
            if user not in found:
                found.add(user)
                if ops.lookup(user.target).aliases and user.op == "call_function":
                    pending.append(user)
    return found


def _join_repeats(edit: GraphEdit) -> None:
    seen: dict[Any, fx.Node] = {}
    output = edit.graph.output_node()
    for node in list(edit.graph.nodes):
        if node.op != "call_function" or ops.is_random(node.target) or ops.is_effect(node):
            continue
        key = _repeat_key(edit, node)
        first = seen.setdefault(key, node) if key is not None else node
        if first is node:
            continue
        both_leave = output in _reach_through_views(node) and output in _reach_through_views(first)
        if not both_leave:
            edit.replace(node, first)


def _repeat_key(edit: GraphEdit, node: fx.Node) -> Any:
    def freeze(argument: Any) -> Any:
        if isinstance(argument, (list, tuple)):
            return (list, *map(freeze, argument))
        if isinstance(argument, dict):
            return (dict, *((key, freeze(value)) for key, value in argument.items()))
        if isinstance(argument, fx.Node):
            return argument
        if isinstance(argument, slice):
            return (slice, argument.start, argument.stop, argument.step)
        # 0.0 == -0.0 == False, and 1 == 1.0 == True: the text tells them apart.
        return (type(argument), repr(argument))

    if not isinstance(node.meta.get("val"), torch.Tensor) and node.target is not operator.getitem:
        kind = ops.lookup(node.target).kind
        if kind not in ("reduction", "norm", "softmax"):
            return None
    fact = edit.facts[node]
    return (fact.phase, fact.again, node.target, freeze(node.args), freeze(node.kwargs))
