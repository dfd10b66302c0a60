"""Rows that are reduced in parts: parts of their own, and parts that programs cut them in."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from codegen_support import check, lowered, trace
from torch import Tensor
from torch._decomp import get_decompositions

from autodiff.graph import Refusal
from trainfuse.codegen.choices import Choice
from trainfuse.codegen.lower import lower_nodes
from trainfuse.codegen.targets import SIMULATED, Target

aten = torch.ops.aten
randn = torch.randn
TABLE = get_decompositions([aten._softmax])
TARGETS = {"interpreter": SIMULATED, "gpu": Target("sm_90", 2)}
Maker = Callable[[], list[Tensor]]
Spec = tuple[Callable[..., Any], Maker]


def group_norm_backward(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor) -> Any:
    """Behind a silu; x: [rows, parts, elements of a part]."""
    h = (x.float() - mean) * rstd
    y = (h * w).to(x.dtype)
    g = (g * torch.sigmoid(y) * (1 + y * (1 - torch.sigmoid(y)))).to(x.dtype)
    sums, dots = g.float().sum(2, True), (g * h).sum(2, True)
    means = [(value * w).sum(1, True) / x[0].numel() for value in (sums, dots)]
    return sums, dots, ((g * w - means[0] - h * means[1]) * rstd).to(x.dtype)


def groups(rows: int, parts: int, width: int) -> Maker:
    return lambda: [
        randn(rows, parts, width),
        randn(rows, parts, width),
        randn(rows, 1, 1),
        randn(rows, 1, 1).exp(),
        randn(parts, 1),
    ]


NESTED: dict[str, Spec] = {
    "group norm": (group_norm_backward, groups(5, 4, 96)),
    "parts and widths that divide nothing": (group_norm_backward, groups(5, 3, 1000)),
    "one long part": (group_norm_backward, groups(2, 2, 5000)),
    # values of rows and of parts, before the reductions, after them, and themselves
    "small outputs": (
        lambda x, w, r: (
            w.exp() * r,
            r.exp(),
            x.float().amax(2, True),
            (x.float().amax(2, True) * w).sum(1, True),
            (x.float().amax(2, True) * w).sum(1, True).sqrt() + r,
            x.float().amax(2, True) * 2 + w,
            (x - x.float().amax(2, True) - (x.float().amax(2, True) * w).sum(1, True)).to(x.dtype),
        ),
        lambda: [randn(5, 3, 200), randn(3, 1).abs(), randn(5, 1, 1)],
    ),
    "whole rows, too": (
        lambda x, w: (
            lambda mean, var: ((x - mean) * var.rsqrt() * (x.float() * w).sum(2, True)).to(x.dtype)
        )(*torch.var_mean(x.float(), (1, 2), keepdim=True)[::-1]),
        lambda: [randn(5, 3, 200) + 2, randn(3, 1)],
    ),
}


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", NESTED)
def test_rows_in_parts(name: str, target: str, dtype: torch.dtype, held: bool) -> None:
    """Walked in chunks, or read once and kept; statistics are fp32 beside halves."""
    fn, make = NESTED[name]
    first, *rest = [value.to(dtype) for value in make()]
    args = [first, *(v if v.shape == first.shape else v.float() for v in rest)]
    if held and dtype == torch.float32:
        pytest.skip("what is kept is kept in halves")
    choice = Choice(held=held, block=None if held or target != "gpu" else 128)
    kernel = check(fn, args, table=TABLE, target=TARGETS[target], choice=choice, walk=True)
    assert kernel.launches[0].function == "nested_kernel"
    assert ("lib.widen(" in kernel.source) == held


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["group norm", "parts and widths that divide nothing"])
def test_what_is_made_of_a_row_is_kept_alone(name: str, target: str, dtype: torch.dtype) -> None:
    """Two programs a multiprocessor have room for that: x is read in both passes, dy in one."""
    fn, make = NESTED[name]
    args = [
        value.to(dtype) if value.dim() == 3 and value.numel() > 9 else value for value in make()
    ]
    choice = Choice(held=True, per_sm=2)
    kernel = check(fn, args, table=TABLE, target=TARGETS[target], choice=choice, walk=True)
    assert kernel.launches[0].num_warps == 8
    reads = re.findall(r"x(\d+)_r(\d)_0 = tl.load", kernel.source)
    assert sorted(Counter(number for number, _ in reads).values()) == [1, 2]
    assert len(set(re.findall(r"t\d+_r\ds0 = lib.widen\(t\d+_0\)", kernel.source))) == 1


def test_rows_are_not_read_again_where_nothing_made_of_them_is_kept() -> None:
    fn, make = NESTED["whole rows, too"]
    case = trace(fn, [value.to(torch.bfloat16) for value in make()])
    made = lower_nodes(case.nodes, case.outputs, TARGETS["gpu"], choice=Choice(held=True, per_sm=2))
    assert isinstance(made, Refusal)


def test_a_rounded_value_is_kept_in_place_of_its_operand() -> None:
    """The second pass computes no sigmoid: it has the gradient behind it, and x."""
    args = [v.to(torch.bfloat16) if v.shape == (5, 4, 96) else v for v in groups(5, 4, 96)()]
    case = trace(group_norm_backward, args)
    source = lowered(case, TARGETS["gpu"]).source
    first, second = source.split("aten.sum.dim_IntList")[0], source.split("reduce_sum")[-1]
    assert "lib.sigmoid(" in first
    assert "lib.sigmoid(" not in second
    assert len(set(re.findall(r"lib.widen\((x\d+)_", first))) == 2
    assert len(set(re.findall(r"lib.widen\((x\d+)_", second))) == 1
    assert len(set(re.findall(r"lib.widen\((t\d+)_", second))) == 1


SPLIT: dict[str, Spec] = {
    "softmax": (lambda x: F.softmax(x, 0), lambda: [randn(300, 40) * 9]),
    "softmax of a middle axis": (lambda x: F.softmax(x, 1), lambda: [randn(3, 200, 50)]),
    "its backward": (
        lambda g, y: y * g - y * (y * g).sum(0),
        lambda: [randn(257, 33), randn(257, 33).softmax(0)],
    ),
    # a row of -inf is NaN everywhere; one with an inf, too
    "infinite": (
        lambda x: F.softmax(x, 0),
        lambda: [
            torch.where(torch.arange(8) == 3, -torch.inf, randn(300, 8)).index_put(
                (torch.tensor([7, 8]), torch.tensor([1, 2])), torch.tensor([torch.inf, -torch.inf])
            )
        ],
    ),
    "NaN": (
        lambda x: F.softmax(x, 0),
        lambda: [torch.where(torch.arange(300 * 8).view(300, 8) == 777, torch.nan, randn(300, 8))],
    ),
    # of one element a row: before the reductions, after them, and themselves
    "values of rows": (
        lambda x, scale: (
            scale.exp(),
            x.amax(0),
            (x - x.amax(0)).exp().sum(0).log() + x.amax(0) * scale,
            F.softmax(x, 0),
        ),
        lambda: [randn(300, 40), randn(40)],
    ),
    "three levels": (
        lambda x: (lambda y: (y / y.abs().amax(0)).exp())(x - x.mean(0)),
        lambda: [randn(300, 40)],
    ),
    "variance": (
        lambda x: (x - torch.var_mean(x, 0)[1]) * torch.rsqrt(torch.var_mean(x, 0)[0] + 1e-5),
        lambda: [randn(301, 40) + 3],
    ),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", SPLIT)
def test_rows_side_by_side_in_parts(name: str, target: str, dtype: torch.dtype) -> None:
    """Partial results of several programs and steps, of rows whose number divides nothing."""
    fn, make = SPLIT[name]
    choice = Choice(held=False, block=512 if target == "gpu" else None)
    args = [value.to(dtype) for value in make()]
    kernel = check(fn, args, table=TABLE, target=TARGETS[target], choice=choice)
    assert [launch.function for launch in kernel.launches[:2]] == ["part_kernel", "merge_kernel"]
