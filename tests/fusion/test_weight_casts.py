"""Casts of weights made together: what is taken, what is left, and that the values are the same."""

from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from autodiff.graph import InputFact, NodeFacts, TrainingGraph
from autodiff.verify import verify
from trainfuse.fusion.rewrites.weight_casts import batch_weight_casts


def linear_chain(x, w, v, b):
    """Two weights cast for a contraction each, the first cast ahead of everything; a bias that
    joins a pointwise kernel."""
    first = w.to(torch.bfloat16)
    h = x.to(torch.bfloat16) @ first.t()
    second = v.to(torch.bfloat16)
    return (h @ second.t() + b.to(torch.bfloat16),)


def graph_of(kinds: tuple[str, ...]) -> tuple[TrainingGraph, list[torch.Tensor]]:
    inputs = [torch.randn(4, 8), torch.randn(6, 8), torch.randn(5, 6), torch.randn(5)]
    gm = make_fx(linear_chain, tracing_mode="fake")(*inputs)
    facts = {n: NodeFacts("forward") for n in gm.graph.nodes if n.op == "call_function"}
    names = [n.name for n in gm.graph.find_nodes(op="placeholder")]
    rows = tuple(InputFact(n, k) for n, k in zip(names, kinds, strict=True))
    return TrainingGraph(gm, facts, rows, 1), inputs


def together(tg: TrainingGraph) -> list[int]:
    op = torch.ops.trainfuse.cast_all.default
    return [len(n.args[0]) for n in tg.nodes() if n.target is op]


def test_casts_for_contractions_are_made_together() -> None:
    tg, inputs = graph_of(("input", "parameter", "parameter", "parameter"))
    batched = batch_weight_casts(tg)
    verify(batched)
    assert together(batched) == [2]
    assert torch.equal(batched.gm(*inputs)[0], tg.gm(*inputs)[0])


def test_inputs_and_single_casts_stay() -> None:
    tg, _ = graph_of(("input", "parameter", "input", "input"))
    assert batch_weight_casts(tg) is tg
