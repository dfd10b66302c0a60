"""What kernels are timed with: indices in range, keys in order, and nothing that isn't known."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from graphs import trace
from torch import Tensor

from autodiff.reference import run_nodes
from trainfuse.fusion import segment_ops
from trainfuse.fusion.domains import infer
from trainfuse.fusion.plan import FusionGroup
from trainfuse.runtime.stand_ins import stand_ins

own = torch.ops.trainfuse
randn = torch.randn


def group(function, *args: Tensor) -> FusionGroup:
    graph = trace(function, args)
    nodes = tuple(graph.nodes())
    read = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in nodes)
    outputs = tuple(graph.graph.output_node().all_input_nodes)
    domain = infer(nodes)
    return FusionGroup("group", "forward", nodes, tuple(read), outputs, domain)


def ids(rows: int, *shape: int) -> Tensor:
    return torch.randint(rows, shape)


KNOWN = {
    "embedding": (lambda w, i: F.embedding(i, w) * 2, lambda: (randn(50, 8), ids(50, 4, 7))),
    "of int32": (lambda w, i: F.embedding(i, w) * 2, lambda: (randn(50, 8), ids(50, 9).int())),
    "two tables": (
        lambda v, w, i: F.embedding(i, v) + F.embedding(i, w),
        lambda: (randn(50, 8), randn(9, 8), ids(9, 4)),
    ),
    "repeated index": (
        lambda x, i: x.gather(0, i[:, None].expand(-1, 8)) * 2,
        lambda: (randn(50, 8), ids(50, 3)),
    ),
    "computed": (lambda x, i: x[(i * 2).clamp(max=49)] * 2, lambda: (randn(50, 8), ids(50, 3))),
    "wrapping": (lambda x, i: x[-1 - i.clamp(max=9)] * 2, lambda: (randn(10, 8), ids(50, 3))),
    "of nothing": (lambda x, i: x[i] * 2, lambda: (randn(10, 8), ids(10, 0))),
}


@pytest.mark.parametrize("name", KNOWN)
def test_indices_are_in_range(name: str) -> None:
    function, make = KNOWN[name]
    made = group(function, *make())
    values = stand_ins(made, torch.Generator())
    assert values is not None
    for node, value in zip(made.inputs, values, strict=True):
        wanted = node.meta["val"]
        assert (value.shape, value.stride()) == (wanted.shape, wanted.stride())
        assert value.dtype == wanted.dtype
    run_nodes(made.nodes, dict(zip(made.inputs, values, strict=True)))  # ATen checks its indices


def test_direct_indices_go_all_over_the_table() -> None:
    made = group(lambda w, i: F.embedding(i, w) * 2, randn(50, 8), ids(50, 50))
    values = dict(zip(made.inputs, stand_ins(made, torch.Generator()) or (), strict=True))
    (index,) = (v for v in values.values() if v.dtype == torch.int64)
    assert index.unique().numel() == 50


BEYOND = {
    "too low": (lambda x, i: x.index_select(0, i - 5) * 2, lambda: (randn(50, 8), ids(50, 3))),
    "too high": (lambda x, i: x[i + 50] * 2, lambda: (randn(50, 8), ids(50, 3))),
    "no rows": (lambda x, i: x[i] * 2, lambda: (randn(50, 8)[:0], ids(1, 3))),
}


@pytest.mark.parametrize("name", BEYOND)
def test_what_might_be_out_of_range_is_not_timed(name: str) -> None:
    function, make = BEYOND[name]
    assert stand_ins(group(function, *make()), torch.Generator()) is None


@pytest.mark.parametrize("rows", [1, 129, 40000, 70000])
def test_keys_are_sorted_rows_of_the_table(rows: int) -> None:
    """Keys of two bytes are biased: zeros among them would be row 32768."""
    count = 300
    keys = segment_ops.row_keys(ids(rows, count), None, rows, rows, False)

    def summed(source: Tensor, keys: Tensor, order: Tensor) -> Tensor:
        return own.segment_sum(source, keys, order, rows, -1) * 2

    made = group(summed, randn(count, 16), keys, torch.arange(count))
    values = stand_ins(made, torch.Generator())
    assert values is not None
    _, keys, order = values
    found = keys.long() + segment_ops.key_bias(keys.dtype)
    assert torch.equal(found, found.sort().values)
    assert int(found[0]) == 0
    assert rows - rows // count - 1 <= int(found[-1]) < rows
    assert torch.equal(order.sort().values, torch.arange(count))


def test_keys_that_kernels_sort_lie_in_no_order() -> None:
    keys = segment_ops.row_keys(ids(50, 300), None, 50, 50, False)
    made = group(lambda s, k: own.segment_sum(s, k, None, 50, -1) * 2, randn(300, 16), keys)
    values = stand_ins(made, torch.Generator())
    assert values is not None
    rows = values[1].long() + segment_ops.key_bias(values[1].dtype)
    assert not torch.equal(rows, rows.sort().values)
    assert torch.equal(rows.bincount(), torch.full((50,), 6))
