"""Gradients through reads at an index and sums by index, against fp64; what became of each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import trainfuse
from autodiff import ops
from tests.autodiff.training_graphs import training_graph
from trainfuse.fusion.plan import FusionGroup
from trainfuse.fusion.rewrites import scatter_sums
from trainfuse.fusion.rewrites.scatter_sums import sum_sorted_segments
from trainfuse.testing import Training, assert_gradients_match, gradient_report


def _t(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def _ids(rows: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(0, rows, shape, dtype=dtype)


def embedded(table, ids):
    return functional.embedding(ids, table) * 2


def padded(table, ids):
    return functional.embedding(ids, table, padding_idx=3).tanh()


def with_positions(table, positions, ids, gain):
    """One row kernel forward; a sort, and a padding, backward."""
    where = torch.arange(ids.shape[-1])
    x = functional.embedding(ids, table) + functional.embedding(where, positions)
    return functional.layer_norm(x, (x.shape[-1],), gain)


def indexed(x, ids):
    return x[ids].exp()


def indexed_inside(x, ids):
    return x[:, ids] * 3


def counted_from_the_end(x, ids):
    return x[ids - x.shape[0]].sin()


def selected(x, ids):
    return x.index_select(1, ids) * 2


def gathered_rows(x, ids):
    """As masked autoencoders pick patches: another choice in each sample."""
    return x.gather(1, ids.unsqueeze(-1).expand(-1, -1, x.shape[-1])).relu()


def added(x, ids, y):
    return torch.index_add(x.sin(), 0, ids, y * 2, alpha=0.5)


def scattered(x, ids, y):
    """As graph networks sum messages."""
    return x.scatter_add(0, ids.unsqueeze(-1).expand_as(y), y.square())


def put(x, ids, y):
    return torch.index_put(x, (ids,), y.exp(), accumulate=True)


# 256 indices of rows of 65 are just worth a sort; 65 columns fill no block.
CASES = {
    "embedding": (embedded, lambda: (_t(70, 65), _ids(70, 4, 64))),
    "int32": (embedded, lambda: (_t(70, 65), _ids(70, 4, 64, dtype=torch.int32))),
    "all the same": (embedded, lambda: (_t(70, 65), torch.full((256,), 69))),
    "most rows empty": (embedded, lambda: (_t(700, 65), _ids(9, 256) * 77)),
    "one row": (embedded, lambda: (_t(1, 65), _ids(1, 256))),
    "padding": (padded, lambda: (_t(20, 65), _ids(20, 256))),
    "positions": (with_positions, lambda: (_t(70, 64), _t(200, 64), _ids(70, 4, 64), _t(64))),
    "all positions": (with_positions, lambda: (_t(70, 64), _t(64, 64), _ids(70, 4, 64), _t(64))),
    "index": (indexed, lambda: (_t(70, 65), _ids(70, 256))),
    "index of rank 2": (indexed, lambda: (_t(70, 5, 13), _ids(70, 4, 64))),
    "index inside": (indexed_inside, lambda: (_t(3, 50, 65), _ids(50, 90))),
    "negative": (counted_from_the_end, lambda: (_t(70, 65), _ids(70, 256))),
    "index_select": (selected, lambda: (_t(3, 50, 65), _ids(50, 90))),
    "gathered rows": (gathered_rows, lambda: (_t(4, 60, 65), _ids(60, 4, 65))),
    "index_add": (added, lambda: (_t(70, 65), _ids(70, 256), _t(256, 65))),
    "scatter_add": (scattered, lambda: (_t(70, 65), _ids(70, 256), _t(256, 65))),
    "index_put": (put, lambda: (_t(70, 65), _ids(70, 256), _t(256, 65))),
}


def planned(compiled) -> list[FusionGroup]:
    return [group for plan in compiled.plans for group in plan.state.fusion.groups]


def aten(compiled) -> set[str]:
    """Operators that stayed ATen, views left out."""
    nodes = [node for plan in compiled.plans for node in plan.state.fusion.aten]
    return {ops.op_name(n.target) for n in nodes if ops.lookup(n.target).kind != "view"}


class Watched:
    """A compile_fn that keeps what it compiled."""

    def __call__(self, fn):
        self.compiled = trainfuse.compile(fn, backend="triton")
        return self.compiled


@pytest.mark.parametrize("name", CASES)
def test_gradients(name):
    fn, arguments = CASES[name]
    watched = Watched()
    assert_gradients_match(fn, arguments(), compile_fn=watched)
    assert watched.compiled.stats()["gate"] == "pass"
    kinds = {group.domain.kind for group in planned(watched.compiled)}
    assert "segment" in kinds
    assert not aten(watched.compiled) & {
        "aten.embedding_dense_backward.default",
        "aten.index_put.default",
        "aten.index_add.default",
        "aten.scatter_add.default",
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["embedding", "padding", "gathered rows", "index_add"])
def test_types(name, dtype):
    fn, arguments = CASES[name]
    assert_gradients_match(fn, arguments(), dtype=dtype, compile_fn=Watched())


def test_what_stays_aten():
    """Each with its reason: too few rows, an option, an index that differs along a row."""
    few = Watched()
    assert_gradients_match(embedded, (_t(9, 65), _ids(9, 40)), compile_fn=few)

    def by_frequency(table, ids):
        return functional.embedding(ids, table, scale_grad_by_freq=True) * 2

    frequency = Watched()
    assert_gradients_match(by_frequency, (_t(70, 65), _ids(70, 256)), compile_fn=frequency)
    ragged = Watched()
    arguments = (_t(70, 65), _ids(70, 256, 65))
    assert_gradients_match(lambda x, ids: x.gather(0, ids) * 2, arguments, compile_fn=ragged)
    for watched, reason in ((few, "too few"), (frequency, "how often"), (ragged, "along a row")):
        refusals = [r.reason for plan in watched.compiled.plans for r in plan.state.refusals]
        assert any(reason in text for text in refusals), refusals


def scattered(launches_cost: bool, fn, *args) -> list[str]:
    """Why what a function adds by index stays ATen."""
    _, refusals = sum_sorted_segments(
        training_graph(fn, list(args), [0]), launches_cost=launches_cost
    )
    return [refusal.reason for refusal in refusals]


def test_few_keys_are_ranked_in_a_launch_of_ours_which_pays_where_launches_cost():
    for costs in (False, True):
        assert scattered(costs, embedded, _t(70, 65), _ids(70, 256)) == []


def test_atomics_are_slow_in_large_numbers_and_one_launch_is_faster():
    def added(x, ids):
        return torch.zeros(70, x.shape[1]).index_add(0, ids, x) * 2

    ids = _ids(70, 8192)
    assert scattered(True, added, _t(8192, 512), ids) == []
    (few,) = scattered(True, added, _t(8192, 256), ids)
    assert "launches" in few
    (odd,) = scattered(True, added, _t(8192, 513), ids)
    assert "vectors" in odd
    assert scattered(True, added, _t(256, 65), _ids(70, 256)) == []


def rotary(q, cos, sin):
    """As its models write it: halves swapped and one negated."""
    half = q.shape[-1] // 2
    return q * cos + torch.cat((-q[..., half:], q[..., :half]), -1) * sin


def rotary_in_chunks(q, cos, sin):
    first, second = q.chunk(2, -1)
    return q * cos + torch.cat((-second, first), -1) * sin


def rotary_in_turns(q, cos, sin):
    even, odd = q[..., ::2], q[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def rotary_in_part(q, cos, sin):
    width = cos.shape[-1]
    return torch.cat((rotary(q[..., :width], cos, sin), q[..., width:]), -1)


def heads(width: int, part: int | None = None):
    """Queries as a projection leaves them, and tables of angles."""
    part = part or width
    return lambda: (
        torch.randn(2, 80, 8, width).transpose(1, 2).requires_grad_(),
        torch.randn(80, part),
        torch.randn(80, part),
    )


def padded_and_cropped(x):
    return functional.pad(x.sin(), (1, 2, 3, 4)) * functional.pad(x.cos(), (2, 1, 4, 3))


def rolled(x):
    return x.sin() - torch.roll(x.sin(), 1, 1)


def joined_and_padded(x, y):
    """The halves change places."""
    half = x.shape[1] // 2
    return functional.pad(torch.cat((x[:, half:] * 2, -y[:, :half]), 1), (0, 16))


# Forward and backward are one kernel each.
MOVES = {
    "rotary": (rotary, heads(32)),
    "rotary in chunks": (rotary_in_chunks, heads(32)),
    "rotary in turns": (rotary_in_turns, heads(32, 16)),
    "rotary in part": (rotary_in_part, heads(40, 24)),
    "padded": (padded_and_cropped, lambda: (_t(130, 140),)),
    "rolled": (rolled, lambda: (_t(130, 140),)),
    "joined and padded": (joined_and_padded, lambda: (_t(130, 160), _t(130, 160))),
}


BOTH_TYPES = ("rotary", "joined and padded")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in MOVES] + [(name, torch.bfloat16) for name in BOTH_TYPES],
)
def test_moves_are_one_kernel_each_way(name, dtype):
    fn, arguments = MOVES[name]
    watched = Watched()
    assert_gradients_match(fn, arguments(), dtype=dtype, compile_fn=watched)
    assert watched.compiled.stats()["gate"] == "pass"
    assert [group.phase for group in planned(watched.compiled)] == ["forward", "backward"]
    assert not aten(watched.compiled)


@pytest.mark.parametrize("ranked", [0, 600])
def test_equal_indices_share_a_sort(ranked, monkeypatch):
    """Few are not sorted apart: the kernel that sums ranks them."""
    monkeypatch.setattr(scatter_sums, "RANKED", ranked)

    def two_tables(a, b, ids):
        return functional.embedding(ids, a) * functional.embedding(ids, b)

    watched = Watched()
    arguments = (_t(70, 65), _t(70, 65), _ids(70, 600))
    assert_gradients_match(two_tables, arguments, compile_fn=watched)
    plans = [plan.state for plan in watched.compiled.plans]
    left = [node.target for state in plans for node in state.fusion.aten]
    assert left.count(torch.ops.aten.sort.stable) == (0 if ranked else 1)
    keys = torch.ops.trainfuse.row_keys.default
    assert sum(node.target is keys for state in plans for node in state.graph.nodes()) == 1


def test_few_indices_are_summed_as_they_are():
    watched = Watched()
    arguments = (_t(70, 65), _ids(70, 256))
    assert_gradients_match(
        lambda table, ids: functional.embedding(ids, table).relu(), arguments, compile_fn=watched
    )
    groups = [(group.phase, group.domain.kind) for group in planned(watched.compiled)]
    assert groups.count(("backward", "segment")) == 1
    nodes = [n for plan in watched.compiled.plans for n in plan.state.graph.nodes()]
    assert torch.ops.trainfuse.row_keys.default not in {node.target for node in nodes}


def test_embedding_positions_and_norm_are_one_kernel():
    watched = Watched()
    fn, arguments = CASES["positions"]
    assert_gradients_match(fn, arguments(), compile_fn=watched)
    forward = [group for group in planned(watched.compiled) if group.phase == "forward"]
    assert len(forward) == 1
    assert forward[0].domain.kind == "row"
    assert "aten.embedding.default" not in aten(watched.compiled)


def ring_step(compiled: bool) -> torch.Tensor:
    """Two steps of a model with a buffer whose next state reads its neighbours' last."""
    torch.manual_seed(0)
    model = nn.Linear(128, 128)
    # more than the interpreter's one program holds: the second would see what the first wrote
    ring = torch.randn(300, 128)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - ring).square().mean()
        loss.backward()
        optimizer.step()
        ring.copy_(ring * 0.5 + torch.roll(ring, 1, 0))
        return loss.detach()

    run = trainfuse.compile(step, backend="triton") if compiled else step
    for _ in range(2):
        run(torch.ones(300, 128))
    if compiled:
        assert [plan.kind for plan in run.plans] == ["whole_step"]
        assert run.stats()["gate"] == "pass"
    return ring


def test_a_buffer_that_is_rolled_is_not_overwritten_under_way():
    torch.testing.assert_close(ring_step(compiled=True), ring_step(compiled=False))


class Tied(nn.Module):
    """Input and output share one table, so that its gradient is a product plus a sum by index."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(60, 64)
        self.norm = nn.LayerNorm(64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.table(ids))
        return functional.cross_entropy(hidden @ self.table.weight.t(), ids.roll(1))


def test_tied_weights_add_up_in_the_kernel():
    def make() -> Training:
        torch.manual_seed(0)
        model = Tied()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

        def step(ids: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(ids)
            loss.backward()
            optimizer.step()
            return loss

        return Training(step, model, [(torch.randint(0, 60, (260,)),) for _ in range(3)])

    seen = []

    def compile_fn(training: Training):
        seen.append(trainfuse.compile(training.step, backend="triton"))
        return seen[-1]

    gradient_report(make, compile_fn).check()
    (compiled,) = seen
    sums = [group for group in planned(compiled) if group.domain.kind == "segment"]
    assert len(sums) == 1
    assert any(node.target is torch.ops.aten.add.Tensor for node in sums[0].nodes)
    compiled.close()


@pytest.mark.parametrize("layout", ["permuted", "every second", "expanded"])
@pytest.mark.parametrize("index", [[2, 0], [1], 1])
@pytest.mark.parametrize("value", ["number", "tensor"])
def test_index_fill_keeps_its_operand_s_layout(value: str, index: Any, layout: str) -> None:
    """In one graph, its gradient too: torch 2.11's formula for such operands is none to derive."""
    lay = {
        "permuted": lambda t: t.mT,
        "every second": lambda t: t.mT[..., ::2],
        "expanded": lambda t: t[:1].expand(3, -1),
    }[layout]

    def filled(x: Tensor, fill: Tensor) -> Tensor:
        y = lay(x).index_fill(-1, torch.tensor(index), 0.3 if value == "number" else fill.detach())
        return y.index_fill(0, torch.tensor(0), 2) * 2

    explained = []

    def compile_fn(fn: Any) -> Any:
        explained.append(trainfuse.compile(fn, backend="triton", fallback=False, verify="off"))
        return explained[-1]

    args = (torch.randn(6, 4, requires_grad=True), torch.tensor(0.7))
    assert_gradients_match(filled, args, compile_fn=compile_fn)
    assert not [r for r in explained[0].explain().refusals if "runs eagerly" in r.reason]
