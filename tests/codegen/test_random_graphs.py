"""Random small graphs of pointwise ops, views, broadcasts and reductions, against ATen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from codegen_support import check, trace
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from autodiff.graph import Refusal
from trainfuse.codegen.lower import lower_nodes
from trainfuse.codegen.targets import Target
from trainfuse.fusion.domains import infer

GPU = Target("sm_90", 2)
UNARY: list[Callable[[Tensor], Tensor]] = [
    torch.relu,
    torch.tanh,
    torch.sigmoid,
    torch.neg,
    torch.abs,
    lambda x: x * 0.5 + 1,
    lambda x: x.clamp(-1, 1),
    lambda x: torch.where(x > 0, x, x * 0.1),
    lambda x: (x * x + 1).rsqrt(),
]
BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.add,
    torch.sub,
    torch.mul,
    torch.maximum,
    lambda x, y: x / (y * y + 1),
]
REDUCED: list[Callable[..., Tensor]] = [torch.sum, torch.mean, torch.amax, torch.amin]


Program = tuple[Callable[..., Any], list[tuple[int, ...]]]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """A function of a few tensors, and their shapes: [a, b, c] and what broadcasts to it."""
    sizes = [draw(st.sampled_from((1, 2, 3, 8, 17))) for _ in range(3)]
    shapes = [tuple(sizes)]
    for _ in range(draw(st.integers(0, 2))):
        start = draw(st.integers(0, 3))
        shapes.append(tuple(1 if draw(st.booleans()) else size for size in sizes[start:]))
    steps = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 99)), min_size=1, max_size=7))
    outputs = draw(st.integers(1, 3))

    def fn(*inputs: Tensor) -> list[Tensor]:
        values = [*inputs, inputs[0] * 1.5]
        for kind, choice in steps:
            last, other = values[-1], values[choice % len(values)]
            if kind <= 1:
                values.append(UNARY[choice % len(UNARY)](last))
            elif kind == 2:
                values.append(BINARY[choice % len(BINARY)](last, other))
            elif kind == 3:
                dims = [[-1], [0, 1], [0], [1, 2], [0, 1, 2]][choice % 5]
                if last.dim() == 3:
                    values.append(REDUCED[choice % 4](last, dims, keepdim=choice % 3 > 0))
            elif kind == 4:
                source = values[len(inputs)]
                values.append(UNARY[choice % len(UNARY)](source))
            elif last.dim() == 3:
                a, b, c = last.shape
                values.append(last.reshape(a * b, c) * 2)
                values.append(values[-1].view(a, b, c) + 1)
        computed = values[len(inputs) :]
        return [value + 0 for value in computed[-outputs:]]

    return fn, shapes


def broadcasts(fn: Callable[..., Any], inputs: list[Tensor]) -> bool:
    try:
        fn(*inputs)
    except RuntimeError:
        return False
    return True


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
@given(programs(), st.integers(0, 2**16))
@pytest.mark.covers("B outputs")
def test_random_graphs(program: Program, seed: int) -> None:
    fn, shapes = program
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    if not broadcasts(fn, inputs):
        return
    case = trace(fn, inputs)
    if isinstance(infer(case.nodes), Refusal):
        return
    kernel = lower_nodes(case.nodes, case.outputs, GPU)
    if isinstance(kernel, Refusal):
        assert kernel.stage == "codegen"
        return
    check(fn, inputs, target=GPU, walk=True)


def test_most_random_graphs_have_kernels() -> None:
    """The property above would hold of a generator that refuses everything."""
    taken, refused = 0, 0

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(programs())
    def count(program: Program) -> None:
        nonlocal taken, refused
        fn, shapes = program
        inputs = [torch.randn(shape) for shape in shapes]
        if not broadcasts(fn, inputs):
            return
        case = trace(fn, inputs)
        kernel = lower_nodes(case.nodes, case.outputs, GPU)
        taken, refused = (
            taken + (not isinstance(kernel, Refusal)),
            refused + isinstance(kernel, Refusal),
        )

    count()
    assert taken > 2 * refused
