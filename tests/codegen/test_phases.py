"""Rows that begin anywhere, by programs whose rows begin alike: whole vectors and single ends."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from codegen_support import check, check_row_of_nan, lowered, trace
from torch import Tensor

import autodiff.rng  # noqa: F401 -- registers trainfuse.keep_mask
from trainfuse.codegen.choices import Choice
from trainfuse.codegen.schedules.phases import Phases
from trainfuse.codegen.targets import SIMULATED, Target

GPU = Target("sm_90", 8)
COUNTS = {torch.float32: 4, torch.bfloat16: 8, torch.float64: 2}
# ends in the first vector after whole ones, all but fills one, and is no power of two's neighbour
WIDTHS = [1025, 1028, 2303]


def norm(x: Tensor, w: Tensor, b: Tensor) -> Any:
    var, mean = torch.var_mean(x.float(), 1, keepdim=True)
    return (((x - mean) * torch.rsqrt(var + 1e-5)) * w + b).to(x.dtype), mean


def norm_backward(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor) -> Any:
    dy, made = g.float() * w, (x - mean) * rstd
    dx = (dy - dy.mean(1, True) - made * (dy * made).mean(1, True)) * rstd
    return dx.to(x.dtype), (g.float() * made).sum(0), g.float().sum(0)


def dropped(seed: Tensor, x: Tensor, w: Tensor) -> Any:
    keep = torch.ops.trainfuse.keep_mask(seed, 3, 0.3, list(x.shape))
    total = x * keep / 0.7
    return total, (total * torch.rsqrt(total.float().square().mean(1, True)) * w).to(x.dtype)


def softmax(x: Tensor) -> Tensor:
    e = (x - x.amax(1, True)).exp()
    return (e / e.float().sum(1, True)).to(x.dtype)


def arguments(name: str, rows: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    x, w = torch.randn(rows, width).to(dtype), torch.randn(width).to(dtype)
    match name:
        case "norm":
            return [x, w, torch.randn(width).to(dtype)]
        case "norm_backward":
            y = x.float()
            return [
                torch.randn(rows, width).to(dtype),
                x,
                y.mean(1, True),
                1 / y.std(1, keepdim=True),
                w,
            ]
        case "dropped":
            return [torch.tensor([12345]), x, w]
        case _:
            return [x]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "norm": norm,
    "norm_backward": norm_backward,
    "dropped": dropped,
    "softmax": softmax,
}


@pytest.mark.parametrize("dtype", COUNTS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows(name: str, width: int, dtype: torch.dtype) -> None:
    args = arguments(name, 19, width, dtype)
    kernel = check(FUNCTIONS[name], args, walk=True)
    moved = width % COUNTS[dtype] != 0
    assert ("place_0" in kernel.source) == moved
    if moved:  # each is moved so, and all rows of a program begin alike
        count = COUNTS[dtype]
        assert re.search(rf"row \* COLS // {count} \* {count} \+ place_0", kernel.source)
        grid = kernel.launches[0].grid[0]
        assert grid == 19 or grid % (count if width % 2 else count // 4) == 0


@pytest.mark.parametrize("name", ["norm", "norm_backward"])
def test_rows_loaded_ahead(name: str) -> None:
    args = arguments(name, 37, 1027, torch.bfloat16)
    kernel = check(FUNCTIONS[name], args, choice=Choice(ahead=True), walk=True)
    assert "x0_0_ahead" in kernel.source
    assert "place_0" in kernel.source


def sums(x: Tensor, w: Tensor) -> Any:
    return x.sum(0, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32) + w


def slopes(x: Tensor, w: Tensor) -> Any:
    y = x.float().sigmoid() * w
    return y.to(x.dtype), y.sum(0)


@pytest.mark.parametrize("dtype", COUNTS)
@pytest.mark.parametrize("width", WIDTHS[:2])
def test_sums_over_rows(width: int, dtype: torch.dtype) -> None:
    args = [torch.randn(1152, width).to(dtype), torch.randn(width)]
    choice = Choice(rows=16, block=256, per_sm=16)
    kernel = check(sums, args, target=GPU, choice=choice, walk=True)
    moved = width % COUNTS[dtype] != 0
    assert ("lib.load_row(" in kernel.source) == moved
    assert kernel.whole_vectors == moved


def scaled(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return (x * w + b + r).relu()


@pytest.mark.parametrize("dtype", COUNTS)
@pytest.mark.parametrize("width", WIDTHS[:2])
@pytest.mark.parametrize("target", ["interpreter", "gpu"])
def test_bands(width: int, dtype: torch.dtype, target: str) -> None:
    rows = 512 if target == "gpu" else 128
    x, w, b = (torch.randn(*shape).to(dtype) for shape in ((rows, width), (width,), (width,)))
    args = [x, w, b, torch.randn(rows, 1).to(dtype)]
    kernel = check(scaled, args, target=GPU if target == "gpu" else SIMULATED)
    moved = width % COUNTS[dtype] != 0
    assert ("lib.store_row(" in kernel.source) == kernel.whole_vectors == moved


@pytest.mark.parametrize("why", ["no steps divide the rows", "arithmetic"])
def test_sums_over_rows_as_they_lie(why: str) -> None:
    args = [torch.randn(1152 if why == "arithmetic" else 1153, 1025), torch.randn(1025)]
    choice = Choice(rows=16, block=256, per_sm=16)
    fn = slopes if why == "arithmetic" else sums
    kernel = check(fn, args, target=GPU, choice=choice, walk=True)
    assert "place" not in kernel.source


def test_rows_whose_weights_are_of_part_of_the_columns_lie_as_they_do() -> None:
    """Such weights are read element by element: whole vectors of the rest would only be spilled."""

    def grouped(x: Tensor, w: Tensor) -> Any:
        var, mean = torch.var_mean(x.float(), (1, 2), keepdim=True)
        return (((x - mean) * torch.rsqrt(var + 1e-5)) * w).to(x.dtype), mean

    args = [torch.randn(19, 5, 205).to(torch.bfloat16), torch.randn(5, 1).to(torch.bfloat16)]
    assert "lead" not in check(grouped, args).source
    alike = [args[0], torch.randn(5, 205).to(torch.bfloat16)]
    assert "lead" in check(grouped, alike).source


@pytest.mark.parametrize("name", ["norm", "softmax"])
def test_other_rows_are_neither_changed_nor_felt(name: str) -> None:
    """NaN in a row stays in it, and what lies around a result stays as it is."""
    rows, width = 19, 1027
    args = arguments(name, rows, width, torch.bfloat16)
    args[0][3] = float("nan")
    case = trace(lambda *a: FUNCTIONS[name](*a)[0] if name == "norm" else softmax(*a), args)
    kernel = lowered(case, SIMULATED)
    assert "place_0" in kernel.source
    check_row_of_nan(case, args, kernel)


@pytest.mark.parametrize("width", [1025, 1028, 1030, 2303, 4099])
def test_blocks_cover_every_row_exactly(width: int) -> None:
    """Whole vectors and ends, of a row at each place that one can begin."""
    phases = Phases(width, 8, {1: 8, 3: 8, 4: 2, 6: 4, 7: 8}[width % 8])
    *blocks, ends = phases.segments(8)
    for row in range(phases.period):
        lead = row * width % 8
        whole = (lead + width) // 8 * 8
        found, start = [], 8
        for block in blocks:
            places = range(start, start + block.width)
            if not block.mask:
                assert places[-1] < whole
            found += [place - lead for place in places if place < whole]
            start += block.width
        places = [lane if lane < 8 else whole - 8 + lane for lane in range(ends.width)]
        found += [place - lead for place in places if 0 <= place - lead < width]
        assert sorted(found) == list(range(width))
        assert lead + width <= phases.padded
