"""Results written over operands: only over what is computed, owned and read for the last time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autodiff.accumulation import carry_dtype
from autodiff.reference import run_graph
from tests.runtime.graphs import cloned, randn, trace
from trainfuse.runtime.program import RuntimeOptions, build_program

accumulate: Any = torch.ops.trainfuse.accumulate.default
Results = tuple[Tensor, ...]


def _twice(c: Tensor, a: Tensor, b: Tensor) -> Results:
    first = accumulate(None, a, b)
    return (accumulate(accumulate(first, a, b), a, b),)


def _of_an_input(c: Tensor, a: Tensor, b: Tensor) -> Results:
    return (accumulate(c, a, b),)


def _returned(c: Tensor, a: Tensor, b: Tensor) -> Results:
    first = accumulate(None, a, b)
    return first, accumulate(first, a, b)


def _view_returned(c: Tensor, a: Tensor, b: Tensor) -> Results:
    first = accumulate(None, a, b)
    return first.t(), accumulate(first, a, b)


def _read_later(c: Tensor, a: Tensor, b: Tensor) -> Results:
    first = accumulate(None, a, b)
    second = accumulate(first, a, b)
    return (torch.sin(second) + first,)


def _read_twice_at_once(c: Tensor, a: Tensor, b: Tensor) -> Results:
    first = accumulate(None, a, b)
    return (accumulate(first, first.t(), b),)


@pytest.mark.parametrize(
    ("function", "reused"),
    [
        (_twice, 2),
        (_of_an_input, 0),
        (_returned, 0),
        (_view_returned, 0),
        (_read_later, 0),
        (_read_twice_at_once, 0),
    ],
)
def test_a_sum_takes_the_memory_of_what_it_continues(
    function: Callable[..., Results], reused: int
) -> None:
    args = [randn(4, 4), randn(4, 4), randn(4, 4)]
    tg = trace(function, args)
    program = build_program(tg, None, {}, {}, RuntimeOptions("eager"))
    assert program.source.count("accumulate_.default(") == reused
    for _ in range(2):
        torch.testing.assert_close(program(cloned(args)), run_graph(tg, args), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_half_products_are_summed_wide(dtype: torch.dtype) -> None:
    pieces = [(torch.randn(5, 40, dtype=dtype), torch.randn(40, 7, dtype=dtype)) for _ in range(9)]
    total: Tensor | None = None
    for a, b in pieces:
        total = accumulate(total, a, b)
    assert total is not None
    assert total.dtype is carry_dtype(dtype)
    exact = sum(a.double() @ b.double() for a, b in pieces)
    torch.testing.assert_close(total.double(), exact, rtol=1e-5, atol=1e-5)
    torch.library.opcheck(accumulate, (total, *pieces[0]))
