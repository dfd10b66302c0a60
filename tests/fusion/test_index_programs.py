"""Random programs that cut, join, pad, roll and compute: to the bit what ATen gives.

The whole way: joins, moves, grouping, and the kernels in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from autodiff import joins
from autodiff.reference import run_nodes
from autodiff.rewrite import same_strides
from tests.codegen.codegen_support import launch
from tests.fusion.helpers import planned
from trainfuse.codegen.ir import GroupKernel
from trainfuse.codegen.lower import lower
from trainfuse.codegen.targets import SIMULATED, CodegenOptions

SHAPES = ((4, 12), (6, 12), (2, 3, 8), (5, 1))
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
Step = tuple[int, int, int, int]


def advance(values: list[Tensor], step: Step) -> Tensor:
    """One more value, of one of the last few; a step that doesn't fit leaves it as it is."""
    kind, choice, one, two = step
    x = values[-1 - choice % min(3, len(values))]
    dim = one % x.dim()
    size = x.shape[dim]
    match kind:
        case 0:
            return [lambda: x * 2, lambda: x * -1, lambda: x.abs(), lambda: x.relu()][two % 4]()
        case 1:
            low = two % size
            return x.narrow(dim, low, 1 + choice % (size - low))
        case 2:
            return x[(slice(None),) * dim + (slice(two % 2, None, 2),)] if size > 2 else x
        case 3:
            likes = [
                v
                for v in values
                if v.dim() == x.dim()
                and all(v.shape[d] == x.shape[d] for d in range(x.dim()) if d != dim)
            ]
            return torch.cat([x, likes[two % len(likes)], *likes[: choice % 2]], dim)
        case 4:
            amounts = [0, 0] * (x.dim() - 1 - dim) + [two % 4, choice % 3 - (size > 3)]
            return F.pad(x, amounts, value=float(two % 2))
        case 5:
            return torch.roll(x, two % 5 - 2, dim)
        case 6:
            return x.flip(dim)
        case 7:
            low = two % size
            piece = (x * -1).narrow(dim, low, 1 + choice % (size - low))
            return torch.slice_scatter(x, piece, dim, low, low + piece.shape[dim])
        case 8:
            return torch.select_scatter(x, x.select(dim, two % size) * -1, dim, choice % size)
        case 9:
            return x.transpose(0, -1)
        case _:
            alike = [v for v in values if v.shape == x.shape]
            exact = not x.dtype.is_floating_point or x.dtype == torch.float32
            return x + alike[two % len(alike)] if exact else x * -1


def program(steps: list[Step]) -> Callable[..., Any]:
    def fn(*inputs: Tensor) -> list[Tensor]:
        values = [*inputs, inputs[0] * 2]
        for step in steps:
            values.append(advance(values, step))
        return [values[-1] * -1, values[-2] * 2]

    return fn


def by_kernels(fn: Callable[..., Any], args: list[Tensor]) -> list[Tensor]:
    """The results with every group run by its kernels."""
    graph, plan = planned(fn, args)
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    env: dict[fx.Node, Any] = dict(zip(placeholders, args, strict=True))
    for item in plan.order:
        if isinstance(item, fx.Node):
            env[item] = run_nodes([item], env)[item]
            continue
        kernel = lower(item, SIMULATED, CodegenOptions())
        assert isinstance(kernel, GroupKernel), kernel
        made = []
        for node in item.outputs:
            value = node.meta["val"]
            empty = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
            made.append(empty.fill_(77))
        launch(kernel, [env[node] for node in item.inputs], made)
        env.update(zip(item.outputs, made, strict=True))
    return [env[node] for node in graph.output_nodes]


STEPS = st.lists(
    st.tuples(st.integers(0, 10), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)),
    min_size=2,
    max_size=6,
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(steps=STEPS, shape=st.sampled_from(SHAPES), dtype=st.sampled_from((*BITS, torch.int64)))
def test_to_the_bit(
    monkeypatch: pytest.MonkeyPatch, steps: list[Step], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    monkeypatch.setattr(joins, "MIN_ELEMENTS", 1)
    args = [torch.randn(shape).mul(8).to(dtype), torch.randn(shape).mul(8).to(dtype)]
    fn = program(steps)
    for made, expected in zip(by_kernels(fn, args), fn(*args), strict=True):
        assert made.shape == expected.shape
        assert same_strides(made, expected)
        assert made.dtype == expected.dtype
        bits = BITS.get(dtype, dtype)
        assert torch.equal(made.contiguous().view(bits), expected.contiguous().view(bits))
