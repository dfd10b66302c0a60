"""Every schedule against ATen: shapes that divide and shapes that don't, all kinds of operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from codegen_support import check, error, lowered, reference, run_case, trace
from torch import Tensor
from torch._decomp import get_decompositions
from torch._subclasses import FakeTensorMode

from autodiff.graph import Refusal
from trainfuse.codegen.choices import Choice
from trainfuse.codegen.lower import lower_nodes
from trainfuse.codegen.targets import H200, SIMULATED, CodegenOptions, Target
from trainfuse.codegen.tile import cover, snug

aten = torch.ops.aten
randn = torch.randn
NORMS = get_decompositions(
    [aten.native_layer_norm, aten.native_layer_norm_backward, aten._softmax, aten._log_softmax]
)
# The interpreter's own target takes few, big programs; a GPU's blocks on two multiprocessors give
# several programs, partial results and tails.
TARGETS = {"interpreter": SIMULATED, "gpu": Target("sm_90", 2)}
Maker = Callable[[], list[Tensor]]
Spec = tuple[str, Callable[..., Any], Maker]


def norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b)


def norm_backward(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor) -> Any:
    width = [x.shape[-1]]
    return aten.native_layer_norm_backward(g, x, width, mean, rstd, w, w, [True, True, True])


def backward_of(rows: tuple[int, ...], width: int) -> Maker:
    return lambda: [
        randn(*rows, width),
        randn(*rows, width),
        randn(*rows, 1),
        randn(*rows, 1).exp(),
        randn(width),
    ]


def row_loss(x: Tensor, target: Tensor) -> Tensor:
    return -F.log_softmax(x, -1).gather(1, target[:, None]).mean()


CASES: dict[str, Spec] = {
    # flat
    "add": ("pointwise", lambda x, y: x * 2 + y.relu(), lambda: [randn(33, 7), randn(33, 7)]),
    "divides": ("pointwise", lambda x, y: x - y, lambda: [randn(64, 64), randn(64, 64)]),
    "bias gelu": ("pointwise", lambda x, b: F.gelu(x + b), lambda: [randn(9, 24), randn(24)]),
    "one element": ("pointwise", lambda a: a * 2 + 1, lambda: [randn(())]),
    "scalar operand": ("pointwise", lambda x, s: x * s, lambda: [randn(9, 5), randn(())]),
    "channels last": (
        "pointwise",
        lambda x, w: (x * w[:, None, None]).relu(),
        lambda: [randn(2, 16, 5, 5).to(memory_format=torch.channels_last), randn(16)],
    ),
    "heads": (
        "pointwise",
        lambda q, k: (q.view(2, 8, 3, 4).transpose(1, 2) * k).transpose(1, 2).reshape(2, 8, 12) * 2,
        lambda: [randn(2, 8, 12), randn(2, 3, 8, 4)],
    ),
    "rotary": (
        "pointwise",
        lambda q, k, c: (q * c, k * c),
        lambda: [randn(2, 3, 8, 4), randn(2, 3, 8, 4), randn(8, 4)],
    ),
    "value of fewer axes": (
        "pointwise",
        lambda x, b: (x + b.exp(), b.exp()),
        lambda: [randn(9, 24), randn(24)],
    ),
    "expanded operand": (
        "pointwise",
        lambda x, b: x * b.expand(4, 6, 10),
        lambda: [randn(4, 6, 10), randn(6, 1)],
    ),
    "strided operand": ("pointwise", lambda x: x.exp(), lambda: [randn(20, 30)[::2, 5:]]),
    "causal mask": (
        "pointwise",
        lambda x: torch.where(
            torch.arange(10) <= torch.arange(7)[:, None], x, torch.full((), -torch.inf)
        ),
        lambda: [randn(7, 10)],
    ),
    # tiled: an operand that is dense along another axis
    "transpose": ("tiled", lambda x, y: x.t() + y, lambda: [randn(40, 70), randn(70, 40)]),
    "transpose 128": ("tiled", lambda x, y: x.t() + y, lambda: [randn(128, 128), randn(128, 128)]),
    "batched transpose": (
        "tiled",
        lambda x, y: x.transpose(1, 2) * y,
        lambda: [randn(3, 40, 70), randn(3, 70, 40)],
    ),
    # rows in registers
    "softmax": ("row", lambda x: F.softmax(x, -1), lambda: [randn(5, 3, 100)]),
    "softmax 64": ("row", lambda x: F.softmax(x, -1), lambda: [randn(130, 64)]),
    "softmax, other axis": ("row", lambda x: F.softmax(x, 1), lambda: [randn(5, 30, 12)]),
    # 768 = 512 + 256: two segments, no mask
    "norm 768": ("row", norm, lambda: [randn(2, 5, 768), randn(768), randn(768)]),
    # 700: masked
    "norm 700": ("row", norm, lambda: [randn(2, 5, 700), randn(700), randn(700)]),
    # 5120 = 4096 + 1024
    "norm 5120": ("row", norm, lambda: [randn(3, 5120), randn(5120), randn(5120)]),
    "norm of a vector": ("row", lambda x: x / x.square().sum().sqrt(), lambda: [randn(30, 10)]),
    "row variance": ("row", lambda x: x.var(-1), lambda: [randn(9, 50)]),
    "row extremes": ("row", lambda x: (x.amax(-1), x.amin(-1)), lambda: [randn(9, 50)]),
    "row of one element": ("pointwise", lambda x: x.sum(-1) * 2, lambda: [randn(9, 1)]),
    "expanded row": ("row", lambda x: x.expand(9, 50).sum(-1), lambda: [randn(9, 1)]),
    "gather": (
        "row",
        lambda x, t: F.log_softmax(x, -1).gather(1, t[:, None]),
        lambda: [randn(20, 50), torch.randint(0, 50, (20,))],
    ),
    # rows in chunks
    "softmax 20000": ("row", lambda x: F.softmax(x, -1), lambda: [randn(3, 20000)]),
    "norm 20001": ("row", norm, lambda: [randn(2, 20001), randn(20001), randn(20001)]),
    "log-softmax 20001": ("row", lambda x: F.log_softmax(x, -1), lambda: [randn(2, 20001) * 5]),
    "cross-entropy of 20000": (
        "row",
        lambda x, t: -F.log_softmax(x, -1).gather(1, t[:, None]).squeeze(1),
        lambda: [randn(3, 20000) * 5, torch.tensor([7, 19999, 0])],
    ),
    "extremes and sums of 20000": (
        "row",
        lambda x: (x.amax(-1), x.exp().sum(-1), (x - x.amin(-1, keepdim=True)).exp().sum(-1)),
        lambda: [randn(3, 20000)],
    ),
    # walked backwards: the block with lanes outside the row comes first, or there is none
    "variance in a second pass": (
        "row",
        lambda x: (x - x.amax(-1, keepdim=True)).var(-1),
        lambda: [randn(2, 20001)],
    ),
    "variance in a second pass, whole blocks": (
        "row",
        lambda x: (x - x.amax(-1, keepdim=True)).var(-1),
        lambda: [randn(2, 24576)],
    ),
    # columns
    "bias gradient": (
        "column",
        lambda g, x: ((g * (x > 0)).sum((0, 1)), g * (x > 0)),
        lambda: [randn(4, 50, 24), randn(4, 50, 24)],
    ),
    "few long rows": ("column", lambda x: x.square().mean(-1), lambda: [randn(3, 40000)]),
    "few rows": ("column", lambda x: x.sum(0), lambda: [randn(3, 200)]),
    "many rows": ("column", lambda x: x.sum(0).sqrt() + 1, lambda: [randn(2000, 8).abs()]),
    "middle axis": ("column", lambda x: x.mean(1), lambda: [randn(3, 40, 24)]),
    "column extremes": ("column", lambda x: (x.amax(0), x.amin(0)), lambda: [randn(300, 20)]),
    "batch norm statistics": (
        "column",
        lambda x: torch.var_mean(x, (0, 2, 3), correction=1),
        lambda: [randn(3, 16, 15, 15).to(memory_format=torch.channels_last) + 3],
    ),
    "batch norm statistics, dense rows": (
        "column",
        lambda x: torch.var_mean(x, (0, 2, 3), correction=1),
        lambda: [randn(4, 6, 90, 100)],
    ),
    # both
    "norm backward": ("row_column", norm_backward, backward_of((4, 9), 96)),
    "norm backward, many rows": ("row_column", norm_backward, backward_of((301,), 128)),
    "norm backward 768": ("row_column", norm_backward, backward_of((5,), 768)),
    "row loss": (
        "row_column",
        row_loss,
        lambda: [randn(50, 100), torch.randint(0, 100, (50,))],
    ),
    "loss and gradients": (
        "row_column",
        lambda a, b: ((a - b) * 0.01, (a - b).square().mean(), ((a - b) * 2).sum(0)),
        lambda: [randn(300, 10), randn(300, 10)],
    ),
    # everything
    "loss": (
        "full",
        lambda a, b: (a - b).square().mean(),
        lambda: [randn(300, 100), randn(300, 100)],
    ),
    "norm and largest": (
        "full",
        lambda a: (a.square().sum().sqrt() * 2, a.amax()),
        lambda: [randn(301, 100)],
    ),
    "variance of everything": ("full", lambda a: a.var() + a.mean(), lambda: [randn(301, 100)]),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CASES)
def test_against_aten(name: str, target: str) -> None:
    schedule, fn, make = CASES[name]
    kernel = check(fn, make(), table=NORMS, target=TARGETS[target])
    assert kernel.launches[0].function == f"{schedule}_kernel"


@pytest.mark.parametrize(
    ("size", "widest", "block"),
    [
        (160, 256, 32),
        (160, 64, 32),
        (768, 1024, 256),
        (4099, 64, 64),
        (1000, 1024, 1024),
        (5, 8, 8),
    ],
)
def test_blocks_waste_few_lanes(size: int, widest: int, block: int) -> None:
    assert snug(size, widest) == block


@pytest.mark.parametrize(("width", "rows"), [(4096, 32), (4099, 64)])
def test_rows_that_no_vectors_divide_are_summed_in_taller_tiles(width: int, rows: int) -> None:
    kernel = lowered(trace(lambda x: x.sum(0), [torch.empty(2048, width)]), H200)
    assert f"tl.full(({rows}, 64), 0.0, tl.float32)" in kernel.source


def test_channels_in_snug_blocks() -> None:
    """160 of them: in blocks of 64 or 256 a sixth or a third of the lanes would have none."""
    values = [randn(16, 57, 57, 160), *(randn(160) for _ in range(3))]
    sums = lowered(trace(lambda x, *_: x.square().sum((0, 1, 2)), values[:1]), H200)
    rest = lowered(trace(lambda x, a, b, c: (x - a) * b + c, values), H200)
    for kernel in (sums, rest):
        assert "col_mask" not in kernel.source.split("def tail")[0]
        assert kernel.launches[0].grid[1] == 5


def test_few_short_rows_in_odd_pieces_have_more_warps() -> None:
    """Their addresses are most of the work; rows that vectors divide, or many, take one."""

    def normed(x: Tensor) -> Tensor:
        return x / x.square().sum((0, 2), keepdim=True).sqrt()

    shapes = {(8, 32, 49): 4, (8, 32, 56): 1, (8, 512, 49): 1, (2, 32, 49): 1}
    for shape, warps in shapes.items():
        kernel = lowered(trace(normed, [randn(shape)]), H200)
        assert [launch.num_warps for launch in kernel.launches] == [warps], shape


def test_a_tile_of_few_rows_has_no_more() -> None:
    """One program a tile of columns, no tail; the rows that there are, in one step."""
    case = trace(lambda x: x.sum(0), [randn(16, 768)])
    kernel = lowered(case, TARGETS["gpu"])
    assert [launch.function for launch in kernel.launches] == ["column_kernel"]
    assert "row_mask" not in kernel.source
    assert "in range(0, ROWS, 16)" in kernel.source


HALF = ["bias gelu", "norm 768", "norm 700", "softmax", "bias gradient", "norm backward", "loss"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", HALF)
def test_other_floating_types(name: str, dtype: torch.dtype) -> None:
    _, fn, make = CASES[name]
    kernel = check(fn, [value.to(dtype) for value in make()], table=NORMS)
    assert ("tl.float64" in kernel.source) <= (dtype == torch.float64)


KEPT: dict[str, tuple[int, Any]] = {
    "softmax": (20000, lambda x: F.softmax(x, -1)),
    "whole segments": (24576, lambda x: F.softmax(x, -1)),
    # the last of eight segments is read again in each pass
    "a segment too many": (32000, lambda x: F.softmax(x, -1)),
    "norm": (20000, lambda x: F.layer_norm(x, x.shape[-1:])),
    "two rows": (
        9000, lambda x: F.layer_norm(x[:2] * x[2:], x.shape[-1:])
    ),
    "an element of it": (
        20000, lambda x: F.log_softmax(x, -1).gather(1, torch.full((x.shape[0], 1), 19999))
    ),
    # what is computed at the one column must not stand in for what is computed along them all
    "an element, then the row": (
        20000,
        lambda x: (lambda y: y + y.gather(1, torch.full((x.shape[0], 1), 19999)))(
            F.log_softmax(x, -1)
        ),
    ),
    "values of rows": (
        20000,
        lambda x: (x.amax(-1), x.amin(-1), (x - x.amin(-1, keepdim=True)).exp().sum(-1)),
    ),
    "variance in a second pass": (20000, lambda x: (x - x.amax(-1, keepdim=True)).var(-1)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", KEPT)
def test_rows_kept_as_they_are_read(name: str, target: str, dtype: torch.dtype) -> None:
    width, fn = KEPT[name]
    choice = Choice(block=4096, held=True)
    kernel = check(
        fn, [randn(4, width).to(dtype)], table=NORMS, target=TARGETS[target], choice=choice
    )
    assert kernel.launches[0].function == "row_kernel"
    assert "lib.widen(" in kernel.source


def test_which_rows_are_kept() -> None:
    """Those that are gone over twice, start at whole vectors, and fit; nothing is drawn."""

    def source(width: int, fn: Any, dtype: torch.dtype = torch.bfloat16) -> str:
        return lowered(trace(fn, [randn(2, width).to(dtype)], NORMS), TARGETS["gpu"]).source

    def softmax(x: torch.Tensor) -> torch.Tensor:
        return F.softmax(x, -1)

    assert "lib.widen(" in source(32000, softmax)
    assert "lib.widen(" not in source(32001, softmax)
    assert "lib.widen(" not in source(65536, softmax)
    assert "lib.widen(" not in source(4096, softmax)
    assert "lib.widen(" not in source(32000, softmax, torch.float32)
    assert "lib.widen(" not in source(32000, lambda x: x.float().exp().sum(-1))


def test_nan_wins_extremes() -> None:
    x = randn(5, 40)
    x[2, 7] = torch.nan
    x[3, :] = -torch.inf
    check(lambda x: (x.amax(-1), x.amin(-1), x.relu().amax(-1)), [x])
    check(lambda x: (x.amax(0), x.amin(0)), [x])
    check(lambda x: x.amax(), [x])


def test_long_rows_of_minus_infinity() -> None:
    """The running maximum of a chunk may be -inf: a mask of attention, or of a vocabulary."""
    x = randn(3, 20000)
    x[:, :9000] = -torch.inf
    x[1, 12] = torch.nan
    check(lambda x: F.softmax(x, -1), [x], table=NORMS)


def test_integers_accumulate_in_int64() -> None:
    x = torch.randint(-100, 100, (50, 30), dtype=torch.int32)
    check(lambda x: (x.sum(0), x.sum(-1)), [x])
    check(lambda x: (x > 3).sum(), [x])


WITH_LARGE_MEAN: dict[str, tuple[Callable[..., Any], Maker]] = {
    "held": (lambda x: x.var(-1), lambda: [randn(4, 900)]),
    "chunks": (lambda x: x.var(-1), lambda: [randn(2, 20000)]),
    "columns": (lambda x: x.var(0), lambda: [randn(900, 4)]),
    "everything": (lambda x: x.var(), lambda: [randn(900, 4)]),
}


@pytest.mark.parametrize("name", WITH_LARGE_MEAN)
def test_variance_survives_a_large_mean(name: str) -> None:
    """In fp32 at 1e4, E[x^2] - E[x]^2 would be off by more than the variance itself."""
    fn, make = WITH_LARGE_MEAN[name]
    args = [x + 1e4 for x in make()]
    case = trace(fn, args)
    (ours,) = run_case(case, args, lowered(case, TARGETS["gpu"]))
    assert error(ours, reference(case, args, torch.float64)[0]) < 1e-4


def test_short_chunks_agree_with_registers() -> None:
    options = CodegenOptions(max_row_in_registers=128, chunk=64)
    check(norm, [randn(4, 300), randn(300), randn(300)], table=NORMS, options=options)
    check(lambda x: F.softmax(x, -1), [randn(4, 256) * 9], table=NORMS, options=options)


def test_equal_groups_have_one_key() -> None:
    first = lowered(trace(norm, [randn(4, 64), randn(64), randn(64)], NORMS))
    second = lowered(trace(lambda a, b, c: norm(a, b, c), [randn(4, 64)] + [randn(64)] * 2, NORMS))
    other = lowered(trace(norm, [randn(4, 128), randn(128), randn(128)], NORMS))
    assert first.key == second.key
    assert first.key != other.key
    assert first.source != other.source


def test_results_repeat_bit_for_bit() -> None:
    args = [randn(3000, 16)]
    case = trace(lambda x: (x.sum(0), x.mean()), args)
    kernel = lowered(case, TARGETS["gpu"])
    first, second = run_case(case, args, kernel), run_case(case, args, kernel)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.allclose(first[0], reference(case, args, None)[0], atol=1e-3)


def test_a_wrong_kernel_fails_the_check() -> None:
    """The comparison itself: a factor of 1 + 1e-6 is seen."""
    args = [randn(50, 50)]
    case = trace(lambda x: x * 2.0, args)
    kernel = lowered(case)
    wrong = run_case(case, args, lowered(trace(lambda x: x * 2.000002, args)))
    right = reference(case, args, torch.float64)
    assert error(run_case(case, args, kernel)[0], right[0]) <= 1e-7
    assert error(wrong[0], right[0]) > 1e-7


@pytest.mark.parametrize("width", [4096, 4097, 4099, 4224, 5000, 5120, 7000, 9000, 20000])
def test_rows_are_covered_with_few_lanes_to_spare(width: int) -> None:
    blocks = cover(width)
    assert [start for start, _ in blocks] == [
        sum(w for _, w in blocks[:i]) for i in range(len(blocks))
    ]
    lanes = sum(w for _, w in blocks)
    assert width <= lanes <= 1.34 * width
    assert all(start + w <= width for start, w in blocks[:-1])
    assert len(blocks) <= 8


def test_threads_hold_as_many_columns_as_their_rows_can_move() -> None:
    """Where weights beside them would have them hold more."""

    def source(fn: Any, width: int, dtype: torch.dtype = torch.bfloat16) -> str:
        args = [randn(4, width).to(dtype), randn(width).to(dtype), randn(width).to(dtype)]
        return lowered(trace(fn, args, NORMS), TARGETS["gpu"]).source

    assert "tl.max_contiguous(tl.arange(0, 1024), 1)" in source(norm, 1001)
    assert "tl.max_contiguous(tl.arange(0, 1024), 4)" in source(norm, 1004)
    assert "max_contiguous" not in source(norm, 1008)
    assert "max_contiguous" not in source(norm, 1004, torch.float32)
    assert "max_contiguous" not in source(lambda x, *_: F.softmax(x, -1), 1001)


def test_threads_hold_no_more_of_a_mask_than_of_its_rows() -> None:
    """A byte an element would have them hold sixteen, and move results between them."""

    def source(dtype: torch.dtype, masks: torch.dtype, width: int = 1024) -> str:
        args = [randn(4, width).to(dtype), randn(1, width).gt(0).to(masks)]
        case = trace(lambda x, m: F.softmax(torch.where(m > 0, x, 0.0), -1), args, NORMS)
        return lowered(case, TARGETS["gpu"]).source

    assert "tl.max_contiguous(tl.arange(0, 1024), 8)" in source(torch.bfloat16, torch.bool)
    assert "tl.max_contiguous(tl.arange(0, 1024), 4)" in source(torch.float32, torch.bfloat16)
    assert "tl.max_contiguous(tl.arange(0, 1024), 4)" in source(torch.bfloat16, torch.bool, 1004)
    assert "max_contiguous" not in source(torch.bfloat16, torch.float32)


def test_64_bit_offsets_when_a_tensor_needs_them() -> None:
    with FakeTensorMode():
        huge = torch.empty(1 << 17, 1 << 15)
    case = trace(lambda x: x * 2, [huge])
    assert "tl.cast(tl.program_id(0), tl.int64)" in lowered(case).source
    small = trace(lambda x: x * 2, [randn(4, 4)])
    assert "int64" not in lowered(small).source


WIDE = ["bias gelu", "transpose", "softmax", "norm 768", "norm 20001", "bias gradient", "loss"]


@pytest.mark.parametrize("name", [*WIDE, "norm backward", "norm backward 768"])
def test_64_bit_offsets_are_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainfuse.codegen.tile.INT32_LIMIT", 1)
    _, fn, make = CASES[name]
    kernel = check(fn, make(), table=NORMS, target=TARGETS["gpu"])
    assert "tl.int64)" in kernel.source


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "complex": (lambda x: x.to(torch.complex64) * 2, "complex64"),
    "integer power": (lambda x: torch.pow(x.long(), x.long()), "power"),
    "empty": (lambda x: torch.ops.aten.empty_like(x) + x, "creation"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    fn, reason = REFUSED[name]
    case = trace(fn, [randn(4, 4)])
    found = lower_nodes(case.nodes, case.outputs, SIMULATED)
    assert isinstance(found, Refusal)
    assert found.stage == "codegen"
    assert reason in found.reason
