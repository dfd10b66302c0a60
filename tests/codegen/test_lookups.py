"""Loads at computed places and sums by sorted key: exact, in every schedule, never outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from codegen_support import check, load_module, lowered, printed, reference, run_case, trace
from test_schedules import NORMS, TARGETS
from torch import Tensor

from trainfuse.codegen.schedules import chunks, segment, tables
from trainfuse.codegen.targets import H200
from trainfuse.fusion import segment_ops

aten, randn = torch.ops.aten, torch.randn
Case = tuple[Callable[..., Any], Callable[[], list[Tensor]]]


def ids(rows: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(0, rows, shape, dtype=dtype)


def norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],))


# What only moves elements must be exact: each is compared bit for bit.
MOVES: dict[str, Case] = {
    "embedding": (lambda i, w: F.embedding(i, w).neg(), lambda: [ids(50, 4, 7), randn(50, 24)]),
    "int32": (
        lambda i, w: F.embedding(i, w).neg(),
        lambda: [ids(50, 4, 7, dtype=torch.int32), randn(50, 24)],
    ),
    "one index": (lambda i, w: F.embedding(i, w).neg(), lambda: [ids(50), randn(50, 24)]),
    # 24 columns of a wider table: a row's stride is not its length
    "strided table": (
        lambda i, w: F.embedding(i, w).neg(),
        lambda: [ids(50, 9), randn(50, 40)[:, 3:27]],
    ),
    "transposed table": (
        lambda i, w: F.embedding(i, w).neg(),
        lambda: [ids(50, 9), randn(24, 50).t()],
    ),
    "a range": (lambda w: F.embedding(torch.arange(3, 12), w).neg(), lambda: [randn(12, 24)]),
    "two reads of a table": (
        lambda i, j, w: torch.where(i[:, None] > j[:, None], F.embedding(i, w), F.embedding(j, w)),
        lambda: [ids(50, 9), ids(50, 9), randn(50, 24)],
    ),
    "index_select": (
        lambda x, i: torch.index_select(x, 1, i).neg(),
        lambda: [randn(5, 9, 6), torch.tensor([3, 8, 0, 0])],
    ),
    "index": (lambda x, i: x[i].neg(), lambda: [randn(9, 20), torch.tensor([3, -9, 0, 8])]),
    "index inside": (
        lambda x, i: x[:, i].neg(),
        lambda: [randn(5, 9, 6), torch.tensor([[3, -9], [0, -1]])],
    ),
    "two indices": (
        lambda x, i, j: x[i, j].neg(),
        lambda: [randn(5, 9, 6), torch.tensor([[3, -5], [0, 1]]), torch.tensor([3, 0])],
    ),
    # a slice between the indices puts their dims in front
    "two indices apart": (
        lambda x, i, j: x[i, :, j].neg(),
        lambda: [randn(5, 9, 6), torch.tensor([[3, -5], [0, 1]]), torch.tensor([3, 0])],
    ),
    "gather": (lambda x, i: x.gather(1, i).neg(), lambda: [randn(5, 9, 6), ids(9, 4, 3, 6)]),
    "gather of rows": (
        lambda x, i: x.gather(1, i[..., None].expand(5, 3, 20)).neg(),
        lambda: [randn(5, 9, 20), ids(9, 5, 3)],
    ),
    "computed index": (
        lambda x, i: x[(i * 2).clamp(max=8)].neg(),
        lambda: [randn(9, 20), ids(9, 7)],
    ),
    "pad": (lambda x: F.pad(x, (1, 2, 3, 4), value=-1.5).neg(), lambda: [randn(5, 9)]),
    "pad and crop": (
        lambda x: F.pad(x, (-1, 2, 3, -2), value=-torch.inf).neg(),
        lambda: [randn(5, 9)],
    ),
    "pad of a mask": (
        lambda m: F.pad(m, (1, 2), value=True).logical_not(),
        lambda: [randn(5, 9) > 0],
    ),
    "roll": (lambda x: torch.roll(x, (1, -2, 11), (0, 1, 0)).neg(), lambda: [randn(5, 9)]),
    "flip": (lambda x: torch.flip(x, (0, -1)).neg(), lambda: [randn(5, 3, 9)]),
    "repeat": (lambda x: x.repeat(2, 1, 3).neg(), lambda: [randn(5, 9)]),
    "rows reversed": (lambda x: torch.ops.prims.rev(x, [0]).neg(), lambda: [randn(5, 9)]),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", MOVES)
def test_moves_are_exact(name: str, target: str) -> None:
    fn, make = MOVES[name]
    case, args = trace(fn, make()), make()
    kernel = lowered(case, TARGETS[target])
    for ours, theirs in zip(run_case(case, args, kernel), reference(case, args, None), strict=True):
        assert torch.equal(ours, theirs), kernel.source


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lookups_in_other_schedules(dtype: torch.dtype) -> None:
    """Rows with a norm, sums over rows, both, and all: the index is read where it varies."""
    table, index = randn(50, 24).to(dtype), ids(50, 3, 40)
    for kind, fn in {
        "row_kernel": lambda w, i: norm(F.embedding(i, w)),
        "column_kernel": lambda w, i: F.embedding(i, w).sum((0, 1)),
        "row_column_kernel": lambda w, i: (
            F.embedding(i, w).softmax(-1),
            (F.embedding(i, w) * F.embedding(i, w).amax(-1, True)).sum((0, 1)),
        ),
        "full_kernel": lambda w, i: F.embedding(i, w).square().mean(),
    }.items():
        kernel = check(fn, [table, index], table=NORMS, target=TARGETS["gpu"])
        assert kind in kernel.source


# Out of range.

LOOKUPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "embedding": lambda w, i: F.embedding(i, w) * 2,
    "index": lambda w, i: w[i] * 2,
    "gather": lambda w, i: w.gather(0, i[:, None].expand(-1, w.shape[1])) * 2,
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_out_of_range_is_never_read(name: str) -> None:
    """The table lies inside another tensor: a load outside it would find a number, not NaN."""
    whole = torch.full((70, 24), 7.0)
    table = whole[10:60].copy_(randn(50, 24))
    wrong = [-51, 50, 2**40] if name == "index" else [-1, 50, -(2**40)]
    index = torch.tensor([3, *wrong, 49])
    case = trace(LOOKUPS[name], [table, index])
    kernel = lowered(case)
    (ours,) = run_case(case, [table, index], kernel)
    assert torch.equal(ours[[0, 4]], table[[3, 49]] * 2)
    assert ours[1:4].isnan().all()
    assert "tl.device_assert(" in kernel.source


def test_a_known_range_needs_no_check() -> None:
    def rolled(x: Tensor) -> Tensor:
        return x[torch.fmod(torch.arange(9) + 7, 9)] * 2

    assert "device_assert" not in lowered(trace(rolled, [randn(9, 20)])).source

    def beyond(x: Tensor) -> Tensor:
        return x[torch.fmod(torch.arange(9) + 7, 10)] * 2

    assert "device_assert" in lowered(trace(beyond, [randn(9, 20)])).source


@pytest.mark.parametrize("width", [256, 261])
def test_many_long_odd_rows_of_paddings_are_walked_in_bands(width: int) -> None:
    """261 elements: no vectors divide them. The last tile of each has lanes outside."""

    def joined(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return F.pad(x, (0, 140)) * 2 - F.pad(y, (120, -3)) + z.flip(0, 1)

    args = [randn(80, width - 140), randn(80, width - 117), randn(80, width)]
    case = trace(joined, args)
    kernel = lowered(case, TARGETS["gpu"])
    banded = "pointwise" if width == 256 else "banded"
    assert [launch.function for launch in kernel.launches] == [f"{banded}_kernel"]
    (result,) = run_case(case, args, kernel)
    assert torch.equal(result, joined(*args))


# Sums by key.


def sums(count: int, rows: int, width: int, keys: Callable[[int], Tensor]) -> list[Tensor]:
    """A source, and the sorted keys of its rows with the order that sorts them."""
    index = segment_ops.row_keys(keys(count), None, rows, rows, False)
    sorted_keys, order = torch.sort(index, stable=True)
    return [randn(count, width), sorted_keys, order]


KEYS: dict[str, tuple[int, int, int, Callable[[int], Tensor]]] = {
    # (source rows, table rows, columns)
    "few": (7, 5, 16, lambda n: torch.randint(0, 5, (n,))),
    "one": (1, 1, 16, lambda n: torch.zeros(n, dtype=torch.int64)),
    "one level": (300, 50, 24, lambda n: torch.randint(0, 50, (n,))),
    # sums of 1024 entries, too
    "two levels": (4200, 3, 16, lambda n: torch.randint(0, 3, (n,))),
    "all the same": (300, 50, 40, lambda n: torch.full((n,), 49)),
    "all different": (300, 300, 24, lambda n: torch.randperm(n)),
    "hot row": (300, 50, 24, lambda n: torch.where(torch.rand(n) < 0.7, 20, torch.arange(n) % 50)),
    # runs end at a chunk's end, and begin there: 32 entries a chunk
    "runs of a chunk": (256, 8, 24, lambda n: torch.arange(n) // 32),
    "runs across chunks": (256, 8, 24, lambda n: (torch.arange(n) + 31) // 63),
    # more rows than two bytes count: keys of four
    "wide keys": (90, 65536, 16, lambda n: torch.randint(0, 65536, (n,))),
    "narrow keys": (90, 65535, 16, lambda n: torch.randint(65000, 65535, (n,))),
}


def total(rows: int, skip: int = -1) -> Callable[..., Tensor]:
    return lambda s, k, o: torch.ops.trainfuse.segment_sum(s, k, o, rows, skip)


@pytest.mark.parametrize("name", KEYS)
def test_sums_by_key_that_the_kernels_sort(name: str) -> None:
    count, rows, width, keys = KEYS[name]
    target = TARGETS["interpreter"] if rows > 1000 else H200
    index = segment_ops.row_keys(keys(count), None, rows, rows, False)

    def unsorted(s: Tensor, k: Tensor) -> Tensor:
        return torch.ops.trainfuse.segment_sum(s, k, None, rows, -1)

    kernel = check(unsorted, [randn(count, width), index], target=target)
    names = [launch.function for launch in kernel.launches]
    if segment_ops.unsorted(count, rows, width):
        assert names == ["few_kernel"]
    else:
        assert names[0] == "rank_kernel"


@pytest.mark.parametrize("skip", [-1, 3])
def test_few_indices_need_no_keys(skip: int) -> None:
    """A slice of 16 finds up to 4 of a row: as they come, and none beside the table."""

    def few(s: Tensor, i: Tensor, base: Tensor) -> Tensor:
        return torch.ops.trainfuse.segment_sum(s, i, None, 70, skip) + base

    index = torch.where(torch.rand(100) < 0.3, 3, torch.arange(100) % 69)
    args = [randn(100, 40), index, randn(70, 40)]
    kernel = check(few, args, target=H200)
    assert [launch.function for launch in kernel.launches] == ["few_kernel"]
    case = trace(few, args)
    (inside,) = run_case(case, args, lowered(case))
    index[50:] = torch.tensor([70, -1, 2**32, 2**40, 100] * 10)
    with pytest.raises(IndexError):
        few(*args)
    (ours,) = run_case(case, args, lowered(case))
    args[0], args[1] = args[0][:50], index[:50]
    assert torch.allclose(ours, few(*args))
    assert not torch.equal(ours, inside)


def test_ranks_of_keys_too_wide_for_one_number_of_32_bits() -> None:
    """A key and its place together; in 32 bits some of these would be negative."""
    rows = 1 << 22
    index = torch.tensor([rows - 1, 5, rows - 1, 0, 5, *range(rows - 700, rows - 5)]).int()
    args = [randn(700, 16), index]

    def unsorted(s: Tensor, k: Tensor) -> Tensor:
        return torch.ops.trainfuse.segment_sum(s, k, None, rows, -1)

    case = trace(unsorted, args)
    kernel = lowered(case, TARGETS["interpreter"])
    assert "tl.int64) * 1024 + own" in kernel.source
    keys, order = torch.empty(2, 700, dtype=torch.int32)
    load_module(kernel.source).rank_kernel[kernel.launches[0].grid](index, keys, order)
    wanted, places = torch.sort(index, stable=True)
    assert torch.equal(keys, wanted)
    assert torch.equal(order.long(), places)


@pytest.mark.parametrize("schedule", [chunks, tables])
@pytest.mark.parametrize("name", KEYS)
def test_sums_by_key(name: str, schedule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "build", schedule.build)
    count, rows, width, keys = KEYS[name]
    # an H200's many programs take few entries each; the interpreter's one fills a long table fast
    target = TARGETS["interpreter"] if rows > 1000 else H200
    kernel = check(total(rows), sums(count, rows, width, keys), target=target)
    names = [launch.function for launch in kernel.launches]
    if schedule is tables:
        deeper = ["level_2_kernel"] if name == "two levels" else []
        assert names == ["runs_kernel", *deeper, "rows_kernel"]
    else:
        levels = {"few": 1, "one": 1, "two levels": 3}.get(name, 2)
        wanted = [f"level_{number}_kernel" for number in range(1, levels + 1)]
        assert names == ["fill_kernel", *wanted]


@pytest.mark.parametrize(("count", "width"), [(300, 1024), (300, 1000), (40, 1024)])
def test_programs_belong_to_long_rows_that_have_entries(count: int, width: int) -> None:
    index = torch.arange(count) % 40
    args = sums(count, 50 if count < 50 else 40, width, lambda n: index)
    rows = 50 if count < 50 else 40
    kernel = lowered(trace(total(rows), args), H200)
    of_rows = any(launch.function == "rows_kernel" for launch in kernel.launches)
    assert of_rows == (count >= rows and width >= 1024)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_sums_by_key_in_other_types(dtype: torch.dtype) -> None:
    source, keys, order = sums(300, 20, 300, lambda n: torch.randint(0, 20, (n,)))
    check(total(20), [source.to(dtype), keys, order], target=TARGETS["gpu"])


def test_a_skipped_row_stays_zero() -> None:
    args = sums(300, 9, 16, lambda n: torch.randint(0, 9, (n,)))
    case = trace(total(9, skip=4), args)
    (ours,) = run_case(case, args, lowered(case, TARGETS["gpu"]))
    assert not ours[4].any()
    assert ours[[3, 5]].all()


def test_what_follows_is_done_in_the_same_kernels() -> None:
    """On rows with and without a sum: another dtype, a table that lies by columns, two results."""

    def after(s: Tensor, k: Tensor, o: Tensor, base: Tensor) -> Any:
        gradient = torch.ops.trainfuse.segment_sum(s, k, o, 60, 2).float() * 0.5
        return gradient + base, gradient.exp(), base * 2

    source, keys, order = sums(300, 60, 24, lambda n: torch.randint(0, 40, (n,)))
    for base in (randn(60, 24), randn(24, 60).t(), randn(24), randn(60, 1)):
        args = [source.bfloat16(), keys, order, base]
        whole = base.numel() == 60 * 24  # a smaller value is written by no program of this kernel
        check(after if whole else lambda *a: after(*a)[:2], args, target=TARGETS["gpu"])


def test_infinities_stay_in_their_rows() -> None:
    source, keys, order = sums(300, 50, 24, lambda n: torch.arange(n) % 50)
    source[order[7]] = torch.inf
    source[order[150], 3] = torch.nan
    check(total(50), [source, keys, order], target=TARGETS["gpu"])


def test_out_of_range_is_an_error_of_the_keys() -> None:
    keys = segment_ops.row_keys
    with pytest.raises(IndexError):
        keys(torch.tensor([0, 5]), None, 5, 5, False)
    with pytest.raises(IndexError):
        keys(torch.tensor([0, -6]), None, 5, 5, True)
    assert torch.equal(
        keys(torch.tensor([0, -5, 4, -1]), None, 5, 5, True) + segment_ops.NARROW_BIAS,
        torch.tensor([0, 0, 4, 4], dtype=torch.int16),
    )


def test_out_of_range_keys_touch_no_row() -> None:
    """The kernel that makes the keys marks such an index; the sum then leaves it out."""
    case = trace(
        lambda i: torch.ops.trainfuse.row_keys(i, None, 50, 50, True), [torch.zeros(9).long()]
    )
    index = torch.tensor([3, -51, 50, 2**40, -(2**40), 49, -1, 0, -50])
    (made,) = run_case(case, [index], lowered(case))
    rows = made.long() + segment_ops.NARROW_BIAS
    assert rows.tolist() == [3, 50, 50, 50, 50, 49, 49, 0, 0]
    keys, order = torch.sort(made, stable=True)
    args = [randn(9, 16), keys, order]
    case = trace(total(50), args)
    (ours,) = run_case(case, args, lowered(case))
    assert torch.equal(ours, total(50)(*args))


CHECKED = ("banded_kernel", "row_kernel", "level_1_kernel", "runs_kernel", "few_kernel")
SCRIPT = """
from codegen_support import lowered, trace
from test_golden import CASES, NORMS, fakes
from trainfuse.codegen.check import compile_only
from trainfuse.codegen.targets import H200

POSITIONS = ("embedding_positions", "embedding_positions_norm")
SUMS = ("embedding_backward", "embedding_backward_one", "index_add")
for name in (*POSITIONS, *SUMS):
    fn, shapes = CASES[name]
    case = trace(fn, fakes(shapes), NORMS)
    types = [[n.meta["val"].dtype for n in nodes] for nodes in (case.externals, case.outputs)]
    for use in compile_only(lowered(case, H200), *types, H200):
        stops = "__assertfail" in use.ptx
        print("use", name, use.function, use.registers, use.stack, use.vector_bytes, stops)
"""


def test_compiled() -> None:
    """No spills, whole vectors along a row, and the check of an index is really there."""
    uses = [line.split()[1:] for line in printed(SCRIPT) if line.startswith("use ")]
    assert len(uses) == 10
    for name, function, registers, stack, vector, stops in uses:
        assert int(stack) == 0, (name, function)
        assert int(registers) <= 224, (name, function)
        assert function == "fill_kernel" or int(vector) == 16, (name, function)
        assert (stops == "True") == (function in CHECKED), (name, function)
