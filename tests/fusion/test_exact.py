"""What is compared with something made of it is made once, whatever is recomputed and copied."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from autodiff import ops
from autodiff.exact import exact_pairs, made_once
from autodiff.graph import TrainingGraph
from autodiff.recompute import choose
from autodiff.reference import run_nodes
from tests.autodiff.training_graphs import Builder, training_graph
from tests.fusion.helpers import check
from trainfuse.codegen.targets import SIMULATED
from trainfuse.fields import Settings
from trainfuse.fusion.plan import FusionPlan
from trainfuse.pipeline import Facts, State, run_passes
from trainfuse.runtime import launch

aten: Any = torch.ops.aten


def rough(x: Tensor) -> Tensor:
    """Values whose last bit depends on who computes them."""
    return torch.tanh(x) * 1.7 + 0.3 * x


def top_three(x: Tensor) -> Tensor:
    y = rough(x)
    least = y.topk(3, -1).values[..., -1:]
    return y.masked_fill(y < least, -math.inf).softmax(-1)


def all_but_the_greatest(x: Tensor) -> Tensor:
    """Reduced by columns, then read by a kernel of rows."""
    y = rough(x)
    return y.masked_fill(y >= y.amax(0).detach(), -math.inf).softmax(-1)


def beside_a_part(x: Tensor) -> Tensor:
    """Two overlapping parts of one value, one compared with the other's greatest."""
    y = rough(x)
    return torch.where(y[:, 4:12] >= y[:, :8].amax(-1, True).detach(), x[:, 4:12], 0.0)


PROGRAMS: dict[str, Callable[[Tensor], Any]] = {
    "amax": lambda x: rough(x).amax(-1),
    "amin of columns": lambda x: rough(x).amin(0),
    "of all": lambda x: rough(x).amax(),
    "of a cast": lambda x: rough(x.bfloat16()).float().amax(-1),
    "in a half type": lambda x: rough(x.bfloat16()).amax(-1),
    "of absolute values": lambda x: rough(x).abs().amax(-1),
    "infinity norm": lambda x: torch.linalg.vector_norm(rough(x), float("inf"), -1),
    "spread": lambda x: (rough(x).amax(-1) - rough(x).amin(-1), rough(x) * 2),
    "the best three": top_three,
    "root of a distance": lambda x: (rough(x).amax(-1, True) - rough(x) + 1e-12).sqrt(),
    "greatest difference": lambda x: torch.cdist(rough(x), rough(x).flip(0), p=float("inf")),
    "all but the greatest": all_but_the_greatest,
    "of what is read anyway": lambda x: (torch.tanh(x) * 1.7 + 0.3).amax(-1),
    "of a part": lambda x: rough(x)[:, 4:].amax(-1),
    "a part beside another's maximum": beside_a_part,
    "returned both": lambda x: (rough(x), rough(x).amax(-1), rough(x).cos()),
}

ROUGH = ("of a cast", "in a half type", "root of a distance")
"""A last bit moves their gradients, eager's too: between ties, or where the slope is 1e6."""


def planned(fn: Callable[[Tensor], Any], budget: float | None = None) -> State:
    graph = training_graph(fn, [torch.randn(48, 40)], [0])
    settings = Settings(autotune="off", memory_budget=budget)
    return run_passes(graph, Facts(settings, SIMULATED, "triton", "whole_step"))


class Noisy:
    """Runs a plan; what rounds has another last bit in every kernel that computes it."""

    rounding = frozenset({"aten.tanh.default", "aten.mul.Tensor", "aten.add.Tensor"})

    def __init__(self, tg: TrainingGraph, plan: FusionPlan) -> None:
        self.tg, self.plan = tg, plan

    def __call__(self, args: list[Tensor]) -> list[Any]:
        placeholders = [node for node in self.tg.graph.nodes if node.op == "placeholder"]
        env: dict[fx.Node, Any] = dict(zip(placeholders, args, strict=True))
        for item in self.plan.order:
            if isinstance(item, fx.Node):
                self.run(item, env, "aten")
                continue
            local = dict(env)
            for node in item.nodes:
                self.run(node, local, item.name)
            env.update((node, local[node]) for node in item.outputs)
        return [env[out] if isinstance(out, fx.Node) else out for out in self.tg.output_nodes]

    def run(self, node: fx.Node, env: dict[fx.Node, Any], kernel: str) -> None:
        value = env[node] = run_nodes([node], env)[node]
        if ops.op_name(node.target) in self.rounding and value.is_floating_point():
            seed = zlib.crc32(f"{kernel} {node.name}".encode())
            step = torch.randint(-1, 2, value.shape, generator=torch.manual_seed(seed))
            env[node] = value * (1 + step * torch.finfo(value.dtype).eps)


@pytest.mark.parametrize("budget", [None, 0.0], ids=["free", "tight"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_last_bits_of_kernels_decide_nothing(name: str, budget: float | None) -> None:
    torch.manual_seed(3)
    x = torch.randn(48, 40)
    state = planned(PROGRAMS[name], budget)
    assert state.fusion is not None
    check(state.graph, state.fusion)
    wanted = x.clone().requires_grad_()
    outputs = PROGRAMS[name](wanted)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    cotangents = [torch.randn_like(out) for out in outputs]
    (gradient,) = torch.autograd.grad(outputs, wanted, cotangents)
    got = Noisy(state.graph, state.fusion)([x, *cotangents])[-1]
    assert got.isfinite().all()
    if name not in ROUGH:
        torch.testing.assert_close(got, gradient, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_that_make_such_values_round_products_and_sums_apart(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two loops of a kernel, or a value kept twice, may be contracted each in its own way."""
    state = planned(PROGRAMS[name])
    assert state.fusion is not None
    once = made_once(state.graph)
    assert once
    for group in state.fusion.groups:
        assert group.exact == bool(once & set(group.nodes)), group.name
    taken: list[bool] = []
    monkeypatch.setattr(launch, "BoundFunction", lambda *args: taken.append(args[-1]))
    cache: Any = SimpleNamespace(entry=lambda *_: Path())
    for group in state.fusion.groups:
        for fma in (True, False):
            taken.clear()
            launch.GroupLauncher(group, state.kernels[group.name], cache, "sm_90", fma=fma)
            assert set(taken) == {fma and not group.exact}
    assert any(group.exact for group in state.fusion.groups)


def row_maximum(x: Tensor) -> Tensor:
    return rough(x).amax(-1)


def test_a_checkpoint_makes_a_row_and_its_maximum_again_or_keeps_the_row() -> None:
    tg = training_graph(row_maximum, [torch.randn(64, 64)], [0])
    for node in tg.nodes("forward"):
        node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
        node.meta["ac_graph_id"] = 1
    ((value, made),) = exact_pairs(tg)
    assert {value, made} <= set(choose(tg).recomputed)
    made.meta["recompute"] = None  # now it is outside
    choice = choose(tg)
    assert value not in choice.recomputed
    assert value in choice.saved


def test_a_maximum_further_outside_a_checkpoint_keeps_the_row() -> None:
    """Nothing outside reads the row itself, so the checkpoint alone would forbid to save it."""
    b = Builder()
    x = b.input(64, 64)
    value = b.call(aten.tanh.default, x)
    most = b.call(aten.amax.default, value, [-1], True)
    made = b.call(aten.mul.Tensor, most, 1.0)
    g = b.call(aten.ones_like.default, value, phase="backward")
    equal = b.call(aten.eq.Tensor, value, made, phase="backward", of=most)
    g = b.call(aten.mul.Tensor, g, equal, phase="backward", of=most)
    g = b.call(aten.mul.Tensor, g, value, phase="backward", of=value)
    tg = b.finish(made, g)
    assert exact_pairs(tg) == [(value, made)]
    for node in (value, most):
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        node.meta["ac_graph_id"] = 1
    assert set(choose(tg).recomputed) >= {value, most, made}
    made.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    choice = choose(tg)
    assert value in choice.saved
    assert made in choice.saved


def bind_nothing_strangers(x: Tensor, y: Tensor) -> Tensor:
    a, b = torch.tanh(x), torch.tanh(y)
    return torch.where(a == b, a, b * 2) + torch.where(a == 0.5, b, a)


def bind_nothing_softmax(x: Tensor, y: Tensor) -> Tensor:
    z = torch.tanh(x @ y)
    shifted = z - z.amax(-1, True).detach()
    return shifted - shifted.exp().sum(-1, True).log()


def bind_nothing_cast(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y).float().amax(-1)


@pytest.mark.parametrize("name", ["strangers", "softmax", "cast"])
def test_what_no_last_bit_decides_may_be_made_again(name: str) -> None:
    dtype = torch.bfloat16 if name == "cast" else torch.float32
    args = [torch.randn(8, 8, dtype=dtype), torch.randn(8, 8, dtype=dtype)]
    assert exact_pairs(training_graph(globals()[f"bind_nothing_{name}"], args, [0, 1])) == []


def test_choices_of_elements_are_never_made_again() -> None:
    """An index that is sorted again, of operands with another last bit, may be another."""

    def fn(x: Tensor) -> Tensor:
        y = rough(x)
        values, index = y.topk(3, -1)
        return values * y.gather(-1, index).sin()

    tg = training_graph(fn, [torch.randn(64, 64)], [0])
    recomputed = {ops.op_name(node.target) for node in choose(tg, 0.0).recomputed}
    assert "aten.tanh.default" in recomputed
    assert "aten.topk.default" not in recomputed
