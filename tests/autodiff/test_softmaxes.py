"""A softmax that the forward has in registers alone is not saved: the backward makes it again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, nop
from torch import Tensor, fx

from autodiff.split import partition
from tests.autodiff.training_graphs import step_graph
from trainfuse.capture.compat import capture_decompositions
from trainfuse.codegen.targets import H200
from trainfuse.fields import Settings
from trainfuse.pipeline import Facts, run_passes

ROWS, COLS = 8, 48
aten = torch.ops.aten


def split(fn: Callable[..., Any], *args: Tensor, recompute: bool = True) -> tuple[Any, fx.Graph]:
    """The result of a function's forward, and the graph of that."""
    seen: list[fx.GraphModule] = []

    def partition_fn(*given: Any, **facts: Any) -> Any:
        pair = partition(*given, **facts, recompute=recompute)
        seen.append(pair[0])
        return pair

    result = aot_function(fn, fw_compiler=nop, bw_compiler=nop, partition_fn=partition_fn)(*args)
    return result, seen[0].graph


def whole(graph: fx.Graph) -> list[fx.Node]:
    """What a forward computes and hands on that is as large as the softmax, its result aside."""
    outputs: Any = graph.output_node().args[0]
    return [
        node
        for node in outputs[1:]
        if node.op == "call_function" and tuple(node.meta["val"].shape) == (ROWS, COLS)
    ]


def masked(x: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(x.masked_fill(mask, -torch.inf), -1) * ~mask.roll(5) * 1.25


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_made_again(dtype: torch.dtype) -> None:
    x = torch.randn(ROWS, COLS, dtype=dtype, requires_grad=True)
    mask = torch.rand(ROWS, COLS) < 0.3
    mask[3] = True  # a row without any scores is NaN
    given = torch.randn(ROWS, COLS, dtype=dtype)
    result, graph = split(masked, x, mask)
    assert [node for node in whole(graph) if node.meta["val"].is_floating_point()] == []
    (mine,) = torch.autograd.grad(result, x, given)
    (eager,) = torch.autograd.grad(masked(x, mask), x, given)
    exact = x.detach().double().requires_grad_()
    (truth,) = torch.autograd.grad(masked(exact, mask), exact, given.double())
    rows = torch.arange(ROWS) != 3
    errors = [(grad.double() - truth)[rows].norm() for grad in (mine, eager)]
    assert errors[0] <= 1.5 * errors[1]
    assert torch.equal(mine.isnan(), eager.isnan())


SAVED: dict[str, Callable[[Tensor], Any]] = {
    "it is a result": lambda x: torch.softmax(x, -1),
    "a product reads it": lambda x: torch.softmax(x, -1) @ torch.ones(COLS, 3),
    "two gradients read it": lambda x: torch.softmax(x, -1).square(),
}


@pytest.mark.parametrize("name", SAVED)
def test_it_stays_whole(name: str) -> None:
    x = torch.randn(ROWS, COLS, requires_grad=True)
    _, graph = split(SAVED[name], x)
    assert len(graph.find_nodes(op="call_function", target=aten._softmax.default)) == 1


def test_without_recompute_it_is_saved() -> None:
    x = torch.randn(ROWS, COLS, requires_grad=True)
    _, graph = split(masked, x, torch.rand(ROWS, COLS) < 0.3, recompute=False)
    assert aten._softmax.default in {node.target for node in whole(graph)}


@pytest.mark.parametrize("recompute", [True, False])
def test_in_a_whole_step(recompute: bool) -> None:
    """Behind a mask: the forward's kernel writes what the next product reads, and no more."""

    def step(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
        return (torch.softmax(q @ k.transpose(-1, -2), -1) * kept @ v).float().square().sum()

    shapes = [*[((4, 128, 64), torch.bfloat16)] * 3, ((4, 128, 128), torch.bool)]
    graph = step_graph(step, shapes, [0, 1, 2], capture_decompositions())
    settings = Settings(autotune="off", recompute=recompute)
    state = run_passes(graph, Facts(settings, H200, "triton", "whole_step"))
    assert state.fusion is not None
    written = [
        node
        for group in state.fusion.groups
        if group.phase == "forward"
        for node in group.outputs
        if tuple(node.meta["val"].shape) == (4, 128, 128)
    ]
    assert len(written) == (1 if recompute else 2)
