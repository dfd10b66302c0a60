"""From what AOTAutograd traced to a TrainingGraph: phases, links, lines, mutations, the update."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from autodiff import ops
from autodiff.graph import InputFact, NodeFacts, Phase, TrainingGraph
from trainfuse.capture import compat
from trainfuse.capture.optimizers import find_handle
from trainfuse.capture.shadow import Shadow

PHASE_KEY = "trainfuse_phase"
"""Key in meta["custom"], which AOTAutograd hands on from Dynamo's nodes to ATen's."""

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')

CaptureKind = Literal["whole_step", "forward", "backward", "inference"]


@dataclass(frozen=True, slots=True)
class Captured:
    """A training graph as it was captured, with the real tensors of this call.

    examples: one a placeholder: real tensors where the capture had them, else fakes.
    updates: effect node's name -> (handle number, flat parameter indices).
    shadow: Dynamo's graph, of a whole step. sources, results: which of its inputs and outputs the
    graph's own are, None where they are none of them.
    """

    kind: CaptureKind
    graph: TrainingGraph
    examples: tuple[Any, ...]
    updates: Mapping[str, tuple[int, tuple[int, ...]]]
    shadow: Shadow | None = None
    sources: tuple[int | None, ...] = ()
    results: tuple[int | None, ...] = ()


class CaptureRefused(Exception):
    """Raised inside a backend to leave whole-step capture; carries the reason."""

    def __init__(self, reason: str, where: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.where = where


def user_line(node: fx.Node) -> str | None:
    """The innermost line outside torch in a node's stack trace, as "file.py:12"."""
    trace = node.meta.get("stack_trace")
    if not trace:
        return None
    frames = _FRAME.findall(trace)
    own = [f for f in frames if "/torch/" not in f[0] and "/trainfuse/capture/" not in f[0]]
    if not own:
        return None
    path, line = own[-1]
    return f"{path.rsplit('/', 1)[-1]}:{line}"


def _strip_mutations(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Remove copy_ epilogues; returns placeholder -> its new value."""
    written: dict[fx.Node, fx.Node] = {}
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and node.target is torch.ops.aten.copy_.default:
            target, value = node.args[0], node.args[1]
            if not isinstance(target, fx.Node) or target.op != "placeholder":
                raise CaptureRefused("writes into a tensor that is not an input of the step")
            if not isinstance(value, fx.Node):
                raise CaptureRefused("an input is overwritten by a constant")
            node.replace_all_uses_with(value)
            graph.erase_node(node)
            written.setdefault(target, value)
    return dict(reversed(written.items()))


def _restore_effect(
    graph: fx.Graph, written: dict[fx.Node, fx.Node]
) -> dict[fx.Node, tuple[int, list[fx.Node]]]:
    """Put the mutating update back in place of its functional wrapper.

    Returns effect node -> (handle number, parameter placeholders); drops the update's copies.
    """
    op = torch.ops.trainfuse.update.default
    effects: dict[fx.Node, tuple[int, list[fx.Node]]] = {}
    for node in list(graph.nodes):
        kwargs = compat.functionalized_effect(node, op) if node.op == "call_function" else None
        if kwargs is None:
            continue
        bases: Any = kwargs["_all_bases"]
        count = kwargs["_params_length"]
        params = [bases[kwargs[f"_params_{i}_base_index"]] for i in range(count)]
        if any(p.op != "placeholder" for p in params):
            raise CaptureRefused("the optimizer updates a tensor made inside the step")
        new_values = set(node.users)
        for target, value in list(written.items()):
            if value in new_values:
                del written[target]
        for value in new_values:
            if value.users:
                raise CaptureRefused(
                    "a parameter is read after the optimizer's step", user_line(node)
                )
            graph.erase_node(value)
        with graph.inserting_before(node):
            effect = graph.call_function(op, (params, list(kwargs["grads"]), kwargs["handle"]))
        effect.meta = {k: v for k, v in node.meta.items() if k != "val"}
        graph.erase_node(node)
        effects[effect] = (kwargs["handle"], params)
    return effects


def _refuse_late_assertions(graph: fx.Graph) -> None:
    """An assertion that fails hands the step to another form of it: nothing may be written yet."""
    updated = False
    for node in graph.nodes:
        updated = updated or ops.is_effect(node)
        if updated and ops.is_assertion(node):
            raise CaptureRefused("after the update, data decides a size", user_line(node))


def _facts(graph: fx.Graph, default: Phase | None) -> dict[fx.Node, NodeFacts]:
    """Phase, link and line of every executed node.

    default: the phase of all nodes when the graph is one phase; None reads the capture's labels,
    and an unlabelled node goes with the node before it.
    """
    forward_by_number: dict[int, str] = {}
    origins: dict[int, object] = {}
    facts: dict[fx.Node, NodeFacts] = {}
    phase: Phase = default or "forward"
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        # A view that functionalization makes again in the update, for its first reader there, is
        # labelled as the view that it is made of.
        if default is None and phase != "update":
            phase = (node.meta.get("custom") or {}).get(PHASE_KEY, phase)
        number = node.meta.get("seq_nr")
        link = None
        if phase == "forward" and number is not None:
            # Calls that autograd does not record (a counter's increment) carry the number of the
            # recorded call before them: the first call with a number is the one it belongs to.
            if origins.setdefault(number, _origin(node)) == _origin(node):
                forward_by_number[number] = node.name
        elif phase == "backward" and number is not None:
            link = forward_by_number.get(number)
        facts[node] = NodeFacts(phase, link, user_line(node))
    return facts


def _origin(node: fx.Node) -> object:
    """What tells apart the calls, in the user's program, that ATen nodes were decomposed from."""
    source = node.meta.get("source_fn_stack") or (("", None),)
    return (source[-1][0], str(node.meta.get("original_aten")))


def lift(
    gm: fx.GraphModule,
    inputs: Sequence[InputFact],
    examples: Sequence[Any],
    kind: CaptureKind,
    shadow: Shadow | None = None,
    sources: Sequence[int | None] = (),
) -> Captured:
    """Make a TrainingGraph of an ATen graph from AOTAutograd; the graph module is taken over.

    inputs, examples, sources: one a placeholder, in order. Raises CaptureRefused for what has no
    place in a functional graph.
    """
    graph = gm.graph
    placeholders = graph.find_nodes(op="placeholder")
    for fact, node in zip(inputs, placeholders, strict=True):
        assert fact.name == node.name
    written = _strip_mutations(graph)
    effects = _restore_effect(graph, written)
    output = graph.output_node()
    user_outputs = tuple(output.args[0])  # type: ignore[arg-type]  # fx's Argument
    output.args = ((*user_outputs, *written.values()),)
    results = compat.plain_positions(output)
    output.meta.pop("desc", None)
    default: Phase | None = {"forward": "forward", "backward": "backward"}.get(kind)  # type: ignore[assignment]  # narrowed by kind
    if kind == "inference":
        default = "forward"
    facts = _facts(graph, default)
    _refuse_late_assertions(graph)
    graph.lint()
    gm.recompile()
    position = {node: i for i, node in enumerate(placeholders)}
    updates = {
        effect.name: (number, _indices(number, [examples[position[p]] for p in params]))
        for effect, (number, params) in effects.items()
    }
    training = TrainingGraph(
        gm, facts, tuple(inputs), len(user_outputs), tuple(p.name for p in written)
    )
    return Captured(kind, training, tuple(examples), updates, shadow, tuple(sources), results)


def _indices(number: int, params: Sequence[Any]) -> tuple[int, ...]:
    """Flat indices of parameters in their optimizer."""
    handle = find_handle(number)
    try:
        return tuple(handle.index_of(p) for p in params)
    except KeyError:
        # AOTAutograd puts one tensor in the place of those that overlap
        raise CaptureRefused("parameters share memory") from None


def input_fact(name: str, example: Any, static: bool, qualified: str | None) -> InputFact:
    """Classify one placeholder by the real tensor that came with it."""
    if not isinstance(example, Tensor):
        return InputFact(name, "scalar")
    if isinstance(example, torch.nn.Parameter):
        return InputFact(name, "parameter", qualified, example.requires_grad)
    if static:
        return InputFact(name, "buffer", qualified, example.requires_grad)
    return InputFact(name, "input", qualified, example.requires_grad)
