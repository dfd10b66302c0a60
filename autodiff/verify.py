"""The verifier: what every pass may assume of a training graph, checked."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from . import ops
from .graph import TrainingGraph


class GraphDefect(AssertionError):
    """A pass made a graph that breaks the contract; a bug of ours, never the user's."""


def defects(tg: TrainingGraph) -> list[str]:
    """Every broken obligation, in words; an empty list means that the graph is sound."""
    found = list(_structure(tg))
    found += _facts(tg)
    found += _order(tg)
    found += _boundary(tg)
    return found


def verify(tg: TrainingGraph, after: str = "") -> TrainingGraph:
    """Return the graph, or raise GraphDefect naming the pass it came from and each defect."""
    tg.graph.lint()
    found = defects(tg)
    if found:
        title = f"training graph after {after}" if after else "training graph"
        raise GraphDefect(f"{title} is unsound:\n  " + "\n  ".join(found))
    return tg


def _structure(tg: TrainingGraph) -> Iterator[str]:
    for node in tg.graph.nodes:
        if node.op not in ("call_function", "placeholder", "get_attr", "output"):
            yield f"{node.name}: {node.op} is not functional ATen"
        if node.op != "call_function":
            continue
        if ops.is_effect(node) and ops.lookup(node.target).kind != "effect":
            yield f"{node.name}: {node.target} writes its arguments"
        silent = ops.lookup(node.target).kind == "effect" or ops.is_assertion(node)
        if "val" not in node.meta and not silent:
            yield f"{node.name}: no meta['val']"


def _facts(tg: TrainingGraph) -> Iterator[str]:
    nodes = set(tg.nodes())
    for node in tg.nodes():
        if node not in tg.facts:
            yield f"{node.name}: no facts"
    for node in tg.facts:
        if node not in nodes:
            yield f"{node.name}: has facts but is not an executed node of the graph"
    forward = {node.name for node in tg.nodes("forward")}
    if not forward:  # a backward region: its links name nodes of the forward region
        return
    for node in tg.nodes():
        link = tg.facts[node].forward_of if node in tg.facts else None
        if link is None:
            continue
        if tg.phase(node) == "forward":
            yield f"{node.name}: a forward node links to {link}"
        elif link not in forward:
            yield f"{node.name}: links to {link}, which is no forward node"


def _order(tg: TrainingGraph) -> Iterator[str]:
    updating = False
    positions = {node: index for index, node in enumerate(tg.graph.nodes)}
    for node in tg.nodes():
        phase = tg.phase(node)
        # A step that calls backward() several times has several forwards and backwards in turn.
        if updating and phase != "update":
            yield f"{node.name}: a {phase} node after the update began"
        updating = updating or phase == "update"
        if ops.lookup(node.target).kind == "effect":
            yield from _effect(node, positions)


def _effect(effect: fx.Node, positions: dict[fx.Node, int]) -> Iterator[str]:
    """The update must come after all readers of the values it overwrites."""
    written = effect.args[0] if effect.args else ()
    for parameter in written if isinstance(written, (tuple, list)) else ():
        pending = list(parameter.users) if isinstance(parameter, fx.Node) else []
        while pending:
            user = pending.pop()
            if user.op != "call_function":
                continue
            if positions[user] > positions[effect]:
                yield f"{user.name}: reads {parameter.name} after {effect.name} overwrote it"
            if ops.lookup(user.target).aliases:
                pending.extend(user.users)


def _boundary(tg: TrainingGraph) -> Iterator[str]:
    placeholders = [node for node in tg.graph.nodes if node.op == "placeholder"]
    names = [node.name for node in placeholders]
    if [fact.name for fact in tg.inputs] != names:
        yield f"inputs {[fact.name for fact in tg.inputs]} are not the placeholders {names}"
    for node in placeholders:
        if "val" not in node.meta:
            yield f"{node.name}: no meta['val']"
    outputs = tg.output_nodes
    if len(outputs) != tg.num_outputs + len(tg.mutations):
        yield f"{len(outputs)} outputs, not {tg.num_outputs} and {len(tg.mutations)} mutations"
    if len(set(tg.mutations)) != len(tg.mutations):
        yield f"an input is mutated twice: {tg.mutations}"
    for name in tg.mutations:
        if name not in names:
            yield f"mutation of {name}, which is no placeholder"
