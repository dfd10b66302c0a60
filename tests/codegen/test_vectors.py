"""Rows that begin at any address, moved in aligned vectors: with others' ends, never over them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from codegen_support import check, check_row_of_nan, launch, lowered, trace
from torch import Tensor
from torch._decomp import get_decompositions

from trainfuse.codegen.choices import Choice
from trainfuse.codegen.targets import SIMULATED, CodegenOptions, Target

aten = torch.ops.aten
TABLE = get_decompositions([aten._softmax, aten._log_softmax])
GPU = Target("sm_90", 2)
SMALL = CodegenOptions(max_row_in_registers=64, chunk=256)
COUNTS = {torch.float32: 4, torch.bfloat16: 8, torch.float16: 8, torch.float64: 2}
# a first vector that ends at once, and one that all but belongs to the row before
WIDTHS = [1025, 1028, 2303]


def standardized(x: Tensor) -> Tensor:
    var, mean = torch.var_mean(x.float(), 1, keepdim=True)
    return ((x - mean) * torch.rsqrt(var + 1e-5)).to(x.dtype)


WALKED: dict[str, Callable[..., Any]] = {
    "softmax": lambda x: F.softmax(x, 1),
    "log softmax and its backward": lambda x: (
        F.log_softmax(x, 1),
        (x - x.exp() * x.float().sum(1, True)).to(x.dtype),
    ),
    # each lane counts its elements: the first block lacks some
    "variance": standardized,
    "extremes": lambda x: x - x.amax(1, True) + x.amin(1, True),
    "columns and rows that are stored": lambda x: (
        x.float().sum(1),
        (x * torch.arange(x.shape[1])).to(x.dtype),
    ),
}


@pytest.mark.parametrize("dtype", COUNTS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", WALKED)
def test_rows_in_chunks(name: str, width: int, dtype: torch.dtype) -> None:
    ahead = None if width % 2 else False
    choice = Choice(warps=4, block=512, held=False, ahead=ahead)
    args = [torch.randn(9, width).to(dtype)]
    kernel = check(WALKED[name], args, table=TABLE, choice=choice, options=SMALL, walk=True)
    moved = width % COUNTS[dtype] != 0 and (width >= COUNTS[dtype] ** 2)
    assert ("lib.load_row(" in kernel.source) == moved
    assert kernel.whole_vectors == moved


def gradient(x: Tensor, top: Tensor, total: Tensor, scale: Tensor, target: Tensor) -> Tensor:
    """Of a cross-entropy, made of the logits again."""
    hot = torch.arange(x.shape[1]) == target
    return ((x - top - total).exp() * scale - torch.where(hot, scale, 0.0)).to(x.dtype)


def banded_arguments(rows: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    x = torch.randn(rows, width).to(dtype)
    targets = torch.randint(width, (rows, 1))
    return [x, x.float().amax(1, True), torch.rand(rows, 1) + 5, torch.rand(rows, 1), targets]


@pytest.mark.parametrize("dtype", COUNTS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("target", ["interpreter", "gpu"])
def test_bands_of_one_row(width: int, dtype: torch.dtype, target: str) -> None:
    args = banded_arguments(9, width, dtype)
    kernel = check(gradient, args, target=GPU if target == "gpu" else SIMULATED)
    assert kernel.launches[0].function == "banded_kernel"
    assert ("lib.store_row(" in kernel.source) == (width % COUNTS[dtype] != 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["walked", "banded"])
def test_other_rows_are_neither_changed_nor_felt(kind: str, dtype: torch.dtype) -> None:
    """NaN in a row stays in it, and what lies around a result stays as it is."""
    rows, width = 7, 1027
    fn, args, choice = gradient, banded_arguments(rows, width, dtype), Choice()
    if kind == "walked":
        fn, args, choice = WALKED["softmax"], args[:1], Choice(warps=4, block=512, held=False)
    args[0][3] = float("nan")
    case = trace(fn, args, TABLE)
    kernel = lowered(case, SIMULATED, SMALL, choice)
    assert "lib.load_row(" in kernel.source
    check_row_of_nan(case, args, kernel)


def test_rows_written_over() -> None:
    """The result has the operand's memory: a program's last vector is its neighbour's first."""
    x = torch.randn(9, 1027)
    case = trace(WALKED["softmax"], [x], TABLE)
    kernel = lowered(case, SIMULATED, SMALL, Choice(warps=4, block=512, held=False))
    assert kernel.in_place == frozenset({(0, 0)})
    memory = x.clone()
    launch(kernel, [memory], [memory])
    torch.testing.assert_close(memory, x.softmax(1))


REFUSED: dict[str, tuple[Callable[..., Any], Callable[[], list[Tensor]]]] = {
    "even rows": (WALKED["softmax"], lambda: [torch.randn(9, 1032)]),
    # its own vectors would begin at other lanes
    "a weight a column": (
        lambda x, w: F.softmax(x * w, 1),
        lambda: [torch.randn(9, 1027), torch.randn(1027)],
    ),
    "gaps between rows": (WALKED["softmax"], lambda: [torch.randn(9, 1031)[:, :1027]]),
    "rows that lie side by side": (WALKED["softmax"], lambda: [torch.randn(1027, 9).t()]),
    "short rows": (WALKED["softmax"], lambda: [torch.randn(9, 63).bfloat16()]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_stays_element_by_element(name: str) -> None:
    fn, make = REFUSED[name]
    choice = Choice(warps=4, block=32, held=False)
    kernel = check(fn, make(), table=TABLE, choice=choice, options=CodegenOptions(32, 256))
    assert "_row(" not in kernel.source
    assert not kernel.whole_vectors


def test_operands_of_several_types_are_read_in_vectors_of_their_own() -> None:
    """16 bytes each: of the narrowest one's elements, wider ones could lie past the memory."""

    def fn(x: Tensor, y: Tensor, keep: Tensor) -> Tensor:
        return F.softmax(torch.where(keep, x.float() + y, 0.0), 1)

    args = [torch.randn(9, 1027).bfloat16(), torch.randn(9, 1027), torch.rand(9, 1027) > 0.1]
    choice = Choice(warps=4, block=512, held=False)
    kernel = check(fn, args, table=TABLE, choice=choice, options=SMALL)
    counts = dict(re.findall(r"lib.load_row\(in(\d) .*?, (\d+)[,)]", kernel.source))
    assert sorted(map(int, counts.values())) == [4, 8, 16]
    for index, value in enumerate(args):
        assert int(counts[str(index)]) * value.element_size() == 16
