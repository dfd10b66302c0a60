"""Operands that the L2 cache can't hold: the order of programs, and what the cache is told."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from codegen_support import check, lowered, trace
from torch import Tensor

import autodiff.rng  # noqa: F401 -- registers trainfuse.keep_mask
from trainfuse.codegen import triton_lib
from trainfuse.codegen.targets import H200, Target

SMALL = Target("sm_90", 2, l2_bytes=1 << 12)
SWEPT = "neighbours share what has no outer dims"
randn = torch.randn
SEED = torch.tensor([-1234567890123456789])


def dropped(seed: Tensor, x: Tensor, table: Tensor) -> Tensor:
    return torch.ops.trainfuse.keep_mask(seed, 3, 0.25, list(x.shape)) * (x * table)


CASES: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "a table": (lambda x, t: x * t, [randn(6, 16, 64), randn(16, 64)]),
    "two tables": (
        lambda x, s, t: x * s + t,
        [randn(2, 3, 16, 64), randn(16, 64), randn(1, 16, 64)],
    ),
    "a table amid outer dims": (lambda x, t: x * t, [randn(3, 4, 16, 64), randn(4, 16, 64)]),
    "a table without columns": (lambda x, t: x + t, [randn(6, 1024, 8), randn(1024, 1)]),
    "a value of the table alone": (
        lambda x, t: (x * t.exp(), t.exp()),
        [randn(6, 32, 64), randn(32, 64)],
    ),
    "a mask": (dropped, [SEED, randn(6, 16, 64), randn(16, 64)]),
    "halves": (lambda x, t: x * t, [randn(6, 32, 64).bfloat16(), randn(32, 64).bfloat16()]),
}


@pytest.mark.parametrize("name", CASES)
def test_periods_in_turn(name: str) -> None:
    fn, args = CASES[name]
    kernel = check(fn, args, target=SMALL)
    assert SWEPT in kernel.source


@pytest.mark.parametrize(
    ("shapes", "target"),
    [
        ([(6, 16, 64), (16, 64)], H200),  # the cache holds the table
        ([(6, 17, 61), (17, 61)], SMALL),  # blocks don't divide it
        ([(6, 16, 64), (6, 16, 64)], SMALL),  # nothing is read again
        ([(16, 64), (64,)], SMALL),  # nor is it far away
    ],
)
def test_blocks_in_a_row_elsewhere(shapes: list[tuple[int, ...]], target: Target) -> None:
    case = trace(lambda x, t: x * t, [randn(shape) for shape in shapes])
    assert SWEPT not in lowered(case, target).source


def softmax_of_rows(width: int, target: Target) -> str:
    def fn(x: Tensor) -> Tensor:
        shifted = (x - x.amax(-1, keepdim=True)).exp()
        return shifted / shifted.sum(-1, keepdim=True)

    x = torch.empty(4096, width)
    return lowered(trace(fn, [x]), target).source


def test_what_is_read_again_is_kept_in_the_cache() -> None:
    """The last pass lets go of it; what is written makes way where rows under work are too many."""
    lines = softmax_of_rows(1 << 17, H200).splitlines()
    loads = [line for line in lines if "tl.load(in0" in line]
    stores = [line for line in lines if "tl.store(out0" in line]
    assert ["evict_last" in line for line in loads] == [True] * (len(loads) - 2) + [False] * 2
    assert ["evict_first" in line for line in loads] == [False] * (len(loads) - 2) + [True] * 2
    assert loads
    assert all("evict_first" in line for line in stores)
    assert stores
    large = Target("sm_90", 132, l2_bytes=1 << 40)
    assert "evict_last" in softmax_of_rows(1 << 17, large)
    assert not any(
        "evict" in line for line in softmax_of_rows(1 << 17, large).splitlines() if "store(" in line
    )


def test_helpers_leave_no_text_to_a_default() -> None:
    """Triton 3.6 takes a name for a parameter from its callers alone."""
    tree = ast.parse(Path(triton_lib.__file__).read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert len(functions) > 20
    for function in functions:
        given = [d.value for d in function.args.defaults if isinstance(d, ast.Constant)]
        assert not any(isinstance(value, str) for value in given), function.name
