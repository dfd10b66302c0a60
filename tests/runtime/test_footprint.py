"""The bytes that a planned step holds at once, against sums by hand."""

from __future__ import annotations

from typing import Any

import torch
from graphs import trace
from torch import Tensor

from trainfuse.runtime.footprint import footprint, planned_steps

aten: Any = torch.ops.aten
KIB = 16 * 16 * 4


def test_values_die_at_their_last_read() -> None:
    def step(x: Tensor, w: Tensor) -> Tensor:
        a = x.sin()
        b = a.exp()  # a and b
        c = b + a  # a, b and c
        return (c @ w).cos()

    tg = trace(step, [torch.randn(16, 16), torch.randn(16, 16)])
    found = footprint(tg, planned_steps(tg.nodes()), {})
    assert (found.peak, found.at) == (3 * KIB, "aten.add.Tensor")
    assert found.results == KIB
    assert found.between == 0


def test_a_view_holds_the_whole_and_an_expansion_nothing() -> None:
    def step(x: Tensor) -> Tensor:
        a = x.sin()
        part = a[:1]
        b = part.exp()  # a, for one row of it, and a row
        wide = b.expand(16, 16)
        return wide.cos().sum()  # a is gone: a row, and cos

    tg = trace(step, [torch.randn(16, 16)])
    found = footprint(tg, planned_steps(tg.nodes()), {})
    assert (found.peak, found.at) == (KIB + KIB // 16, "aten.exp.default")
    assert found.results == 4


def test_parts_of_a_tuple_live_apart() -> None:
    def step(x: Tensor, w: Tensor) -> Tensor:
        normed, mean, rstd = aten.native_layer_norm(x, [16], None, None, 1e-5)
        y = normed @ w  # normed, and two numbers a row
        return (y * rstd + mean).sum()

    tg = trace(step, [torch.randn(16, 16), torch.randn(16, 16)])
    found = footprint(tg, planned_steps(tg.nodes()), {})
    rows = 16 * 4
    # mul: y, its product, mean and rstd
    assert (found.peak, found.at) == (2 * KIB + 2 * rows, "aten.mm.default")


def test_what_the_backward_needs_lies_between() -> None:
    def step(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = (x @ w).sin()
        y = h @ w
        return y, h.cos() @ w

    args = [torch.randn(16, 16), torch.randn(16, 16)]
    tg = trace(step, args, backward_from=3)
    found = footprint(tg, planned_steps(tg.nodes()), {})
    assert found.between == KIB
    assert found.peak == 2 * KIB
    assert found.results == 2 * KIB


def test_a_new_value_of_an_input_is_given_back() -> None:
    def step(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        grown = state + x.sin()
        return grown.exp().sum(), grown

    args = [torch.randn(16, 16), torch.randn(16, 16)]
    tg = trace(step, args, mutates=[1])
    found = footprint(tg, planned_steps(tg.nodes()), {})
    assert found.peak == KIB  # sin, then exp; never both
    assert found.results == KIB + 4
