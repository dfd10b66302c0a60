"""From AOTAutograd's joint graph to a forward and a backward graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from . import _compat, ops
from .channel_norms import channel_norms
from .derive import cleanup, decompose
from .formulas import losses
from .graph import InputFact, NodeFacts, TrainingGraph
from .pools import save_less_of_pools
from .recompute import Choice, RecomputeReport, choose, save_all, saved_values
from .rereads import reread_less
from .rng import functionalize_dropout
from .signs import save_less_of_signs
from .softmaxes import save_less_of_softmaxes


def partition(
    joint: fx.GraphModule,
    joint_inputs: Any,
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
    memory_budget: float | None = None,
    fast_rng: bool = True,
    recompute: bool = True,
    note: Callable[[RecomputeReport], None] | None = None,
    **_: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """AOTAutograd's partition_fn: (forward, backward), saving what our minimum cut chooses.

    memory_budget: as in `plan_recompute`. fast_rng: draw dropout masks from one saved seed, so
    that no mask is saved; otherwise masks are eager's and are saved. recompute: False saves all
    that the derivative formulas read. note: told what was chosen.
    """
    static = tuple(static_lifetime_input_indices or ())
    tg = joint_graph(joint, num_fwd_outputs, static)
    if fast_rng:
        tg = functionalize_dropout(tg)
    if recompute:
        tg = save_less_of_softmaxes(tg)
    tg = save_less_of_pools(cleanup(decompose(tg, {**losses(), **channel_norms()})))
    if recompute:
        tg = reread_less(tg)
        tg = save_less_of_signs(tg, *_lasting(tg, num_fwd_outputs, static))
    choice = choose_for_joint(tg, num_fwd_outputs, static, memory_budget, recompute=recompute)
    if note is not None:
        note(choice.report)
    tensors, sizes = saved_values(choice)
    modules = _compat.extract_modules(tg.gm, tensors, sizes, num_fwd_outputs=num_fwd_outputs)
    draws = {node.name: tg.phase(node) for node in tg.nodes() if ops.draws_randomness(node)}
    for module, phase in zip(modules, ("forward", "backward"), strict=True):
        _draw_once(module, {name for name, of in draws.items() if of != phase})
    return modules


def _draw_once(module: fx.GraphModule, elsewhere: set[str]) -> None:
    """Leave out what the other module draws: copied with what it has inputs for, read by none."""
    graph = module.graph
    for node in reversed(graph.nodes):
        unread = node.op == "call_function" and not node.users
        if unread and (node.name in elsewhere or not ops.is_kept(node)):
            graph.erase_node(node)
    module.recompile()


def joint_graph(
    joint: fx.GraphModule, num_fwd_outputs: int, static_indices: Sequence[int] = ()
) -> TrainingGraph:
    """A joint as a training graph: phases by need of a cotangent, links by sequence number.

    Its outputs are the forward's, then the gradients (None where none is wanted).
    """
    backward = _compat.backward_nodes(joint, static_indices, num_fwd_outputs)
    facts: dict[fx.Node, NodeFacts] = {}
    forward_by_number: dict[int, str] = {}
    inputs: list[InputFact] = []
    for node in joint.graph.nodes:
        if node.op == "placeholder":
            inputs.append(_input_fact(node, len(inputs) in static_indices))
        if node.op != "call_function":
            continue
        number = node.meta.get("seq_nr", -1)
        if node in backward:
            facts[node] = NodeFacts("backward", forward_by_number.get(number))
        else:
            forward_by_number[number] = node.name
            facts[node] = NodeFacts("forward")
    outputs: Any = joint.graph.output_node().args[0]
    tg = TrainingGraph(joint, facts, tuple(inputs), len(outputs))
    return _forward_first(tg)


def _input_fact(node: fx.Node, static: bool) -> InputFact:
    if "tangents" in str(node.target):
        return InputFact(node.name, "tangent")
    return InputFact(node.name, "parameter" if static else "input")


def _forward_first(tg: TrainingGraph) -> TrainingGraph:
    """The same graph with its forward nodes ahead of its backward nodes, else in order.

    Constants come first: the first reader of one that the backward met may be the forward's.
    """
    phases = [tg.phase(node) for node in tg.nodes()]
    if phases == sorted(phases, key=("forward", "backward").index):
        return tg
    moved, mapping = tg.copy()
    anchor = mapping[next(node for node in tg.nodes() if tg.phase(node) == "backward")]
    for node in (*tg.graph.find_nodes(op="get_attr"), *tg.nodes("forward")):
        anchor.prepend(mapping[node])
    moved.gm.recompile()
    return moved


def choose_for_joint(
    tg: TrainingGraph,
    num_fwd_outputs: int,
    static_indices: Sequence[int] = (),
    memory_budget: float | None = None,
    *,
    recompute: bool = True,
) -> Choice:
    """What the forward of a joint saves; only static inputs live through the step anyway."""
    static, demanded = _lasting(tg, num_fwd_outputs, static_indices)
    if not recompute:
        return save_all(tg, static_inputs=static, demanded=demanded)
    return choose(tg, memory_budget, static_inputs=static, demanded=demanded)


def _lasting(
    tg: TrainingGraph, num_fwd_outputs: int, static_indices: Sequence[int]
) -> tuple[set[fx.Node], set[fx.Node]]:
    """Inputs that live through the step anyway, and forward values that the backward returns."""
    placeholders = [node for node in tg.graph.nodes if node.op == "placeholder"]
    static = {placeholders[index] for index in static_indices}
    gradients = tg.output_nodes[num_fwd_outputs:]
    demanded = {
        node
        for node in gradients
        if isinstance(node, fx.Node) and (node.op == "placeholder" or tg.phase(node) == "forward")
    }
    return static, demanded
