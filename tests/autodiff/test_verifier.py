"""The verifier finds every planted defect, and the evaluator says what it lacks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from training_graphs import Builder, training_graph

from autodiff.graph import NodeFacts, TrainingGraph
from autodiff.reference import run_graph, run_nodes
from autodiff.verify import GraphDefect, defects, verify

aten: Any = torch.ops.aten


def sound() -> tuple[TrainingGraph, dict[str, fx.Node]]:
    b = Builder()
    x = b.input(4, 6)
    y = b.call(aten.sin.default, x)
    g = b.call(aten.cos.default, x, phase="backward", of=y)
    tg = b.finish(y, g)
    return tg, {"x": x, "y": y, "g": g}


def test_sound_graph_passes() -> None:
    tg, _ = sound()
    assert defects(tg) == []
    assert verify(tg, "nothing") is tg


def test_write_is_found() -> None:
    tg, nodes = sound()
    with tg.graph.inserting_after(nodes["y"]):
        write = tg.graph.call_function(aten.mul_.Tensor, (nodes["y"], 2))
    write.meta["val"] = nodes["y"].meta["val"]
    bad = tg.replace(facts={**tg.facts, write: NodeFacts("forward")})
    assert any("writes its arguments" in found for found in defects(bad))
    with pytest.raises(GraphDefect, match="after planting is unsound"):
        verify(bad, "planting")


def test_missing_facts_and_values_are_found() -> None:
    tg, nodes = sound()
    bad = tg.replace(facts={nodes["y"]: tg.facts[nodes["y"]]})
    assert any("no facts" in found for found in defects(bad))
    del nodes["y"].meta["val"]
    assert any("no meta['val']" in found for found in defects(tg))


@pytest.mark.parametrize("link", ["nowhere", "cos_default"])
def test_false_links_are_found(link: str) -> None:
    tg, nodes = sound()
    bad = tg.replace(facts={**tg.facts, nodes["g"]: NodeFacts("backward", link)})
    assert any("no forward node" in found for found in defects(bad))
    forward = tg.replace(facts={**tg.facts, nodes["y"]: NodeFacts("forward", "sin_default")})
    assert any("a forward node links" in found for found in defects(forward))


def test_work_after_the_update_is_found() -> None:
    tg, nodes = sound()
    bad = tg.replace(facts={nodes["y"]: NodeFacts("update"), nodes["g"]: NodeFacts("backward")})
    assert any("after the update began" in found for found in defects(bad))


def test_wrong_boundary_is_found() -> None:
    tg, _ = sound()
    assert any("2 outputs" in found for found in defects(tg.replace(num_outputs=1)))
    mutated = tg.replace(num_outputs=1, mutations=("nobody",))
    assert any("no placeholder" in found for found in defects(mutated))
    assert any("not the placeholders" in found for found in defects(tg.replace(inputs=())))


def test_oracle_computes_in_fp64_whatever_the_graph_casts_to() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        half = x.to(torch.bfloat16) @ w.to(torch.bfloat16)
        return torch.softmax(half, 1, dtype=torch.float32).to(torch.float16).sum(0)

    args = [torch.randn(5, 7), torch.randn(7, 3)]
    tg = training_graph(fn, args, [0, 1])
    inputs = [*args, torch.randn(3, dtype=torch.float16)]
    kept = [value.clone() for value in inputs]
    output, *gradients = run_graph(tg, inputs, torch.float64)
    wide = [value.double().requires_grad_() for value in args]
    wanted = torch.softmax(wide[0] @ wide[1], 1).sum(0)
    wanted_gradients = torch.autograd.grad(wanted, wide, inputs[2].double())
    torch.testing.assert_close(output, wanted.detach(), rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    for value, before in zip(inputs, kept, strict=True):
        assert torch.equal(value, before)


def test_oracle_ignores_half_to_float() -> None:
    # the form that a GPU's autocast softmax takes; on fp64 inputs the flag would raise
    b = Builder()
    x = b.input(4, 6, dtype=torch.float16)
    y = b.graph.call_function(aten._softmax.default, (x, 1, True))
    with b.mode:
        y.meta["val"] = torch.empty(4, 6)
    b.facts[y] = NodeFacts("forward")
    value = torch.randn(4, 6, dtype=torch.float16)
    (output,) = run_graph(b.finish(y), [value], torch.float64)
    torch.testing.assert_close(output, torch.softmax(value.double(), 1))


def test_nodes_run_from_given_values_and_env_is_left_alone() -> None:
    tg, nodes = sound()
    env = {nodes["x"]: torch.ones(4, 6)}
    values = run_nodes([nodes["y"]], env)
    assert torch.equal(values[nodes["y"]], torch.sin(torch.ones(4, 6)))
    assert list(env) == [nodes["x"]]
    assert len(run_nodes(tg.nodes(), env, dtype=torch.float64)) == 3
