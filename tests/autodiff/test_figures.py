"""Figures of many tensors are those of each by itself, whatever company a launch puts it in."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from autodiff import norms
from autodiff.norms import Measurement, measure, measure_parts, rms, rmse

PIECE = 1 << 10
"""A piece for these tests; up to 64 elements are small, and 256 of them go together."""


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "_PIECE", PIECE)


def items(count: int) -> list[tuple[Tensor, ...]]:
    """Ours, eager and exact: sizes around every limit, mixed types, some not contiguous."""
    torch.manual_seed(0)
    sizes = [(), (0,), (1,), (7, 9), (64,), (65,), (3, 0, 2), (30, 40), (PIECE,), (2 * PIECE + 3,)]
    found = []
    for i in range(count):
        exact = torch.randn(sizes[i % len(sizes)], dtype=torch.float64)
        exact = exact.float() if i % 3 == 0 else exact
        dtype = (torch.float32, torch.bfloat16, torch.float64)[i % 7 % 3]
        near = [(exact + 1e-3 * torch.randn_like(exact)).to(dtype) for _ in range(2)]
        if exact.dim() == 2 and i % 2:
            near = [t.t().contiguous().t() for t in near]
        found.append((*near, exact))
    return found


def plainly(item: tuple[Tensor, ...]) -> tuple[float, ...]:
    *others, exact = (t.double() for t in item)
    away = [exact, *(t - exact for t in reversed(others))]
    return tuple(float(t.square().sum().div(max(t.numel(), 1)).sqrt()) for t in away)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_many_tensors_give_what_each_gives(width: int) -> None:
    many = [item[-width:] for item in items(100)]
    together = measure(many)
    for item, found in zip(many, together, strict=True):
        assert found == pytest.approx(measure([item])[0], rel=1e-12)
        assert found == pytest.approx(plainly(item), rel=1e-6)  # a difference is rounded


@pytest.mark.parametrize("size", [3, 3000], ids=["together", "alone"])
@pytest.mark.parametrize("scale", [1e-35, 1e-30, 1e18, 3e38])
def test_errors_whose_squares_no_fp32_holds(size: int, scale: float) -> None:
    torch.manual_seed(0)
    exact = scale * torch.randn(size, dtype=torch.float64).sign()
    item = (-exact).float(), (exact * (1 - 2**-10)).float(), exact
    assert measure([item])[0] == pytest.approx(plainly(item), rel=1e-6)


@pytest.mark.parametrize("size", [3, 65, 3000], ids=["small", "alone", "in pieces"])
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)], ids=str)
def test_what_is_not_finite_is_seen_in_any_company(
    size: int, odd: float, place: tuple[int, ...]
) -> None:
    ordinary = items(20)
    special = tuple(torch.randn(size, dtype=torch.float64) for _ in range(3))
    for i in place:
        special[i][size // 2] = odd
    found = measure([*ordinary[:10], special, *ordinary[10:]])
    assert found[10] == pytest.approx(norms._measure_special(*special), nan_ok=True)
    assert found[10][0] == pytest.approx(rms(special[2]), nan_ok=True)
    assert found[10][1] == pytest.approx(rmse(special[1], special[2]), nan_ok=True)
    assert found[:10] + found[11:] == measure(ordinary)
    if place == (0,):  # ours alone has it: that is no rounding
        assert not math.isfinite(found[10][2])


def test_what_is_known_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    many = items(60)
    whole = measure(many)
    before = [figures[:2] if i % 4 else None for i, figures in enumerate(whole)]
    launched: list[Any] = []
    own = norms._differences

    def counted(piece: Any, whole: bool) -> Any:
        made = [*own(piece, whole)]
        launched.append(len(made))
        return made

    monkeypatch.setattr(norms, "_differences", counted)
    for again, found in zip(measure(many, before), whole, strict=True):
        assert again == pytest.approx(found, rel=1e-12)
    assert set(launched) == {1, 3}
    assert measure(many, whole) == whole
    errors = Measurement([(ours, exact) for ours, _, exact in many], errors_only=True)
    for (error,), found in zip(errors.read(), whole, strict=True):
        assert error == pytest.approx(found[2], rel=1e-12)
    assert set(launched) == {1, 3}
    # an infinity of ours is judged with all three at hand, whatever is known
    many[1] = (torch.tensor([math.inf]), torch.tensor([math.inf]), torch.ones(1))
    assert measure([many[1]], [(1.0, 0.5)])[0] == measure([many[1]])[0]


@pytest.mark.parametrize("odd", [None, math.nan, math.inf])
def test_parts_of_flat_tensors_give_what_each_gives(odd: float | None) -> None:
    lengths = [1, 64, 65, 3000, 7]
    torch.manual_seed(0)
    flat = [[torch.randn(sum(lengths), dtype=torch.float64) for _ in range(3)] for _ in range(2)]
    if odd is not None:
        flat[1][0][70] = odd
    found = measure_parts([(*item,) for item in flat], lengths)
    for item, figures in zip(flat, found, strict=True):
        parts = zip(*(t.split(lengths) for t in item), strict=True)
        for alone, together in zip(measure([*parts]), figures, strict=True):
            assert together == pytest.approx(alone, rel=1e-12, nan_ok=True)


def test_launches_do_not_grow_with_the_number_of_small_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(norms, "_PIECE", 1 << 22)
    calls = []
    for name in ("cat", "_foreach_norm", "stack"):
        own = getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda *a, own=own, name=name, **k: (calls.append(name), own(*a, **k))[1]
        )
    measure([(torch.randn(9), torch.randn(9), torch.randn(9).double()) for _ in range(500)])
    assert sorted(calls) == ["_foreach_norm"] * 2 + ["cat"] * 3 + ["stack"]
