"""Kernels that write a result over an operand: where they may, and that results stay the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autodiff.reference import run_graph
from tests.runtime.graphs import cloned, group_of, plan_of, randn, trace
from trainfuse.codegen.ir import GroupKernel
from trainfuse.codegen.lower import lower
from trainfuse.codegen.targets import H200, SIMULATED, Target
from trainfuse.fusion.plan import FusionGroup
from trainfuse.runtime.cache import KernelCache
from trainfuse.runtime.footprint import footprint, planned_steps
from trainfuse.runtime.program import RuntimeOptions, build_program
from trainfuse.runtime.reuse import memory_of

aten: Any = torch.ops.aten
SIZE = 64 * 64 * 4


def flat(x: Tensor, h: Tensor) -> Tensor:
    return torch.tanh(h) * x


def banded(x: Tensor, h: Tensor) -> Tensor:
    """Several values a column, as in batch norm: a tile of rows walks down its columns."""
    return (h - x[0]) * x[1] * x[2] + x[3]


def tiled(x: Tensor, h: Tensor) -> Tensor:
    """Read along the other axis than it is written."""
    return torch.tanh(h) * x.t()


def summed(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """A masked gradient, and its sums over rows."""
    masked = torch.where(x > 0, h, 0.0)
    return masked, masked.sum([0])


FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "pointwise_kernel": flat,
    "banded_kernel": banded,
    "tiled_kernel": tiled,
    "column_kernel": summed,
}


def fused(
    step: Callable[..., Any], args: list[Tensor], target: Target = SIMULATED
) -> tuple[Any, FusionGroup, GroupKernel]:
    """A traced step and one group of all that follows its first product, with its kernel."""
    tg = trace(step, args)
    nodes = tg.nodes()
    first = next(i for i, node in enumerate(nodes) if node.target is aten.mm.default)
    last = next((i for i, n in enumerate(nodes) if i > first and n.target is aten.mm.default), None)
    views = [n for n in nodes[first + 1 : last] if n.target in (aten.select.int, aten.t.default)]
    group = group_of(tg, "forward_0", [n for n in nodes[first + 1 : last] if n not in views])
    kernel = lower(group, target)
    assert isinstance(kernel, GroupKernel)
    return tg, group, kernel


@pytest.mark.parametrize("name", FORMS)
def test_a_dying_operand_is_written_over(name: str) -> None:
    def step(x: Tensor, w: Tensor) -> Any:
        made = FORMS[name](x, x @ w)
        made = made if isinstance(made, tuple) else (made,)
        return made[0] @ w, *made[1:]

    args = [randn(64, 64), randn(64, 64)]
    tg, group, kernel = fused(step, args)
    assert name in kernel.source
    h = next(i for i, node in enumerate(group.inputs) if node.target is aten.mm.default)
    assert (0, h) in kernel.in_place
    options = RuntimeOptions("triton", cache=KernelCache(None))
    program = build_program(tg, plan_of(tg, group), {group.name: kernel}, {}, options)
    assert "= memory_of(mm, " in program.source
    for _ in range(2):
        torch.testing.assert_close(program(cloned(args)), run_graph(tg, args))
    steps = planned_steps(plan_of(tg, group).order)
    apart, over = footprint(tg, steps, {}), footprint(tg, steps, {group.name: kernel})
    assert apart.peak - over.peak == SIZE


def test_kernels_for_a_gpu_are_written_so_too() -> None:
    def step(x: Tensor, w: Tensor) -> Any:
        return summed(x, x @ w)[0] @ w

    _, _, kernel = fused(step, [randn(256, 256), randn(256, 256)], H200)
    assert kernel.in_place


def test_a_result_is_not_written_over_what_it_is_not_made_of() -> None:
    """Another thread may load that later than this one stores."""

    def step(x: Tensor, w: Tensor) -> Any:
        h = x @ w
        return torch.tanh(x) @ w, h.exp() @ w

    tg = trace(step, [randn(64, 64), randn(64, 64)])
    _, tanh, _, exp, _ = tg.nodes()
    group = group_of(tg, "forward_0", [tanh, exp])
    kernel = lower(group, SIMULATED)
    assert isinstance(kernel, GroupKernel)
    own = {(o, i) for o, out in enumerate(group.outputs) for i, source in enumerate(group.inputs)
           if source in out.all_input_nodes}  # fmt: skip
    assert len(own) == 2
    assert kernel.in_place == own


def test_a_tensor_that_is_looked_up_is_not_written_over() -> None:
    """Other programs read it at any place."""

    def step(x: Tensor, w: Tensor) -> Any:
        h = x @ w
        return (h + aten.index_select.default(h, 0, torch.arange(63, -1, -1))) @ w

    tg = trace(step, [randn(64, 64), randn(64, 64)])
    nodes = tg.nodes()
    group = group_of(tg, "forward_0", [n for n in nodes if n.target is not aten.mm.default])
    kernel = lower(group, SIMULATED)
    assert isinstance(kernel, GroupKernel)
    assert not kernel.in_place


def test_what_an_operator_may_have_returned_as_it_got_it_is_left_alone() -> None:
    """Dropout in evaluation gives back its operand, which is an input here."""

    def step(x: Tensor, w: Tensor) -> Any:
        return torch.tanh(aten.native_dropout.default(x, 0.5, False)[0]) @ w

    args = [randn(64, 64), randn(64, 64)]
    tg = trace(step, args)
    tanh = next(node for node in tg.nodes() if node.target is aten.tanh.default)
    group = group_of(tg, "forward_0", [tanh])
    kernel = lower(group, SIMULATED)
    assert isinstance(kernel, GroupKernel)
    assert kernel.in_place == {(0, 0)}
    options = RuntimeOptions("triton", cache=KernelCache(None))
    program = build_program(tg, plan_of(tg, group), {group.name: kernel}, {}, options)
    assert "memory_of" not in program.source
    given = cloned(args)
    x = given[0]
    torch.testing.assert_close(program(given), run_graph(tg, args))
    torch.testing.assert_close(x, args[0], rtol=0, atol=0)


def test_memory_that_lies_otherwise_is_not_taken() -> None:
    dead = torch.randn(4, 6)
    assert memory_of(dead, (6, 1)) is dead
    assert memory_of(torch.randn(1, 6), (17, 1)).stride() == (6, 1)
    other = memory_of(dead, (1, 4))
    assert other.data_ptr() != dead.data_ptr()
    assert (other.shape, other.stride(), other.dtype) == (dead.shape, (1, 4), dead.dtype)
