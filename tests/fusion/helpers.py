"""What the fusion tests share: a stand-in for the code generator, and a runner of plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from autodiff import ops
from autodiff.derive import decompose
from autodiff.graph import InputFact, NodeFacts, TrainingGraph
from autodiff.joins import joins, padded_joins
from autodiff.reference import run_nodes
from autodiff.verify import verify
from trainfuse.codegen.support import unsupported
from trainfuse.fusion.grouping import plan_fusion
from trainfuse.fusion.plan import FusionGroup, FusionPlan
from trainfuse.fusion.rewrites.index_maps import move_indexing_up, nested_joins
from trainfuse.pipeline import tidy

FUSIBLE = ("pointwise", "reduction", "view", "creation", "gather")


def supports(node: fx.Node) -> str | None:
    """A code generator that builds everything of the elementwise and reduction kinds."""
    row = ops.lookup(node.target)
    if row.kind in FUSIBLE or row.name == "trainfuse.keep_mask.default":
        return None
    return f"{row.kind} has no kernel"


def check(tg: TrainingGraph, plan: FusionPlan) -> None:
    """Every obligation of a plan: who runs, how often, after what, in which phase."""
    made: dict[fx.Node, str] = {
        node: "input" for node in tg.graph.nodes if node.op in ("placeholder", "get_attr")
    }
    for item in plan.order:
        if isinstance(item, fx.Node):
            assert item not in made, f"{item.name} runs twice"
            assert all(source in made for source in item.all_input_nodes), item.name
            made[item] = "aten"
            continue
        own = set(item.nodes)
        assert {tg.phase(node) for node in item.nodes} == {item.phase}
        assert set(item.outputs) <= own
        assert len(item.inputs) + len(item.outputs) <= 24
        for source in item.inputs:
            assert source not in own
            assert source in made, f"{item.name} runs before {source.name}"
        known = own | set(item.inputs)
        for node in item.nodes:
            if ops.lookup(node.target).kind != "creation":
                assert set(node.all_input_nodes) <= known, node.name
        for output in item.outputs:
            assert output not in made, f"{output.name} is written twice"
            made[output] = item.name
    for output in tg.graph.output_node().all_input_nodes:
        assert output in made, f"{output.name} is never made"
    phases = [
        item.phase if isinstance(item, FusionGroup) else tg.phase(item) for item in plan.order
    ]
    assert phases == sorted(phases, key=("forward", "backward", "update").index)
    effects = [node for node in tg.nodes() if ops.is_effect(node)]
    assert all(node in plan.aten for node in effects)


def run_plan(
    tg: TrainingGraph, plan: FusionPlan, args: Sequence[torch.Tensor], update: Any = None
) -> list[Any]:
    """Execute a plan with ATen: a group sees its inputs only and gives its outputs only."""
    placeholders = [node for node in tg.graph.nodes if node.op == "placeholder"]
    env: dict[fx.Node, Any] = dict(zip(placeholders, args, strict=True))
    for item in plan.order:
        if isinstance(item, fx.Node):
            env[item] = run_nodes([item], env, update=update)[item]
        else:
            local = {node: env[node] for node in item.inputs}
            # a constant shaped like a value that the group doesn't read
            for node in item.nodes:
                if ops.lookup(node.target).kind == "creation":
                    local.update((n, n.meta["val"]) for n in node.all_input_nodes if n not in local)
            local = run_nodes(item.nodes, local)
            env.update((node, local[node]) for node in item.outputs)
    return [env[out] if isinstance(out, fx.Node) else out for out in tg.output_nodes]


def forward_graph(fn: Callable[..., Any], args: Sequence[torch.Tensor]) -> TrainingGraph:
    """A training graph without gradients: fn traced on fake copies of args."""
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(arg) for arg in args]

    def outputs(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = fn(*values)
        return tuple(made) if isinstance(made, tuple | list) else (made,)

    with mode:
        gm = make_fx(outputs)(*fakes)
    facts = {node: NodeFacts("forward") for node in gm.graph.nodes if node.op == "call_function"}
    names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    inputs = tuple(InputFact(name, "input") for name in names)
    return verify(TrainingGraph(gm, facts, inputs, len(gm.graph.output_node().args[0])))


def planned(
    fn: Callable[..., Any], args: Sequence[torch.Tensor]
) -> tuple[TrainingGraph, FusionPlan]:
    """The graph of a function with joins and index maps as the pipeline makes them; its plan."""
    graph = forward_graph(fn, args)
    graph = decompose(graph, padded_joins(parts=False), only=nested_joins(graph))
    graph = decompose(decompose(graph, joins()), padded_joins())
    moved = verify(tidy(move_indexing_up(graph)))
    plan = plan_fusion(moved, supports=unsupported)
    check(moved, plan)
    return moved, plan
