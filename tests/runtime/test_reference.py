"""The reference's memory: known before it runs, bounded by a budget, and the same values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from autodiff import ops
from autodiff.graph import TrainingGraph
from autodiff.masks import Masks
from autodiff.reference import Operation, converts_as_it_reads, prepare, run_node
from tests.runtime.graphs import trace
from tests.runtime.live import Live
from trainfuse.runtime import captured, reference, room
from trainfuse.runtime.fallback import Boundary
from trainfuse.runtime.reference import Native, Widened, evaluate
from trainfuse.runtime.reference_schedule import (
    Schedule,
    computing_dtype,
    keeps_precision,
    schedule,
)

DEPTH, ROWS, WIDTH = 12, 64, 48


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Live:
    """Counts what is on the device, which here is whatever was not sent to the host."""
    counter = Live()
    away = counter.uncounted(torch.clone)
    monkeypatch.setattr(reference, "to_host", lambda tensor: away(tensor.detach()))
    monkeypatch.setattr(reference, "to_device", lambda tensor, device: tensor.clone())
    return counter


def network(dtype: torch.dtype = torch.float32) -> tuple[TrainingGraph, list[Tensor]]:
    """Gradients of a deep network: every layer's activations wait for the backward."""
    args = [torch.randn(ROWS, WIDTH, dtype=dtype)]
    args += [torch.randn(WIDTH, WIDTH, dtype=dtype) / WIDTH**0.5 for _ in range(DEPTH)]

    def gradients(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        leaves = [w.detach().requires_grad_() for w in weights]
        for w in leaves:
            x = functional.layer_norm(torch.tanh(x @ w) + x, (WIDTH,))
        parts = torch.split(x, WIDTH // 2, 1)
        return torch.autograd.grad((parts[0] * parts[1].exp()).sum(), leaves)

    return trace(gradients, args), args


def run(tg: TrainingGraph, args: Sequence[Tensor], plan: Schedule) -> list[Tensor]:
    given: dict[fx.Node, Any] = dict(zip(tg.graph.find_nodes(op="placeholder"), args, strict=True))
    values = evaluate(plan, given, Widened(Boundary()) if plan.wide else Native())
    return [values[node] for node in tg.output_nodes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("share", [None, 0.5, 0.15])
def test_bytes_are_known_before_and_stay_within_the_budget(
    wide: bool, share: float | None, dtype: torch.dtype, live: Live
) -> None:
    tg, args = network(dtype)
    free = schedule(tg.nodes(), tg.output_nodes, wide=wide)
    budget = None if share is None else int(share * free.peak_bytes)
    plan = schedule(tg.nodes(), tg.output_nodes, wide=wide, budget=budget, keep=budget)
    with live:
        values = run(tg, args, plan)
    # what an operator takes inside of itself is not known: at most its own operands again
    inner = 4 * ROWS * WIDTH * 8
    assert live.peak <= plan.peak_bytes + inner
    assert live.peak >= 0.6 * plan.peak_bytes, "the figure says more than it takes"
    if budget is not None:
        assert plan.peak_bytes <= budget
        assert live.now <= budget + inner
        assert any(verb == "spill" for verb, _ in plan.actions)
    expected = run(tg, args, free)
    torch.testing.assert_close(values, expected, rtol=0, atol=0)


def test_a_reference_twice_as_wide_takes_twice_the_bytes() -> None:
    """fp64 beside fp32, fp32 beside halves: never four times."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tg, _ = network(dtype)
        narrow, wide = (
            schedule(tg.nodes(), tg.output_nodes, wide=w).peak_bytes for w in (False, True)
        )
        assert narrow < wide <= 2.6 * narrow, dtype


def test_the_value_read_last_waits_on_the_host() -> None:
    tg, _ = network()
    peak = schedule(tg.nodes(), tg.output_nodes, wide=False).peak_bytes
    plan = schedule(tg.nodes(), tg.output_nodes, wide=False, budget=peak // 2)
    order = {node: i for i, node in enumerate(tg.nodes())}
    first = next(node for verb, node in plan.actions if verb == "spill")
    assert order[first] < 0.1 * len(order), "activations of the first layers are read last"


def test_values_by_another_precision_agree_and_views_are_made_when_read() -> None:
    def odd(x: Tensor, y: Tensor) -> list[Tensor]:
        a, b = torch.split(x * 2, 4, 0)
        mean = torch.var_mean(a, 1)[1]
        return [(b.t() @ y).t(), x[1:3], mean, torch.cat([a, b]).view(2, -1), x.long().argmax()]

    args = [torch.randn(8, 6), torch.randn(4, 6)]
    tg = trace(odd, args)
    for wide in (False, True):
        for budget in (None, 1):
            plan = schedule(tg.nodes(), tg.output_nodes, wide=wide, budget=budget)
            values = run(tg, args, plan)
            for value, expected in zip(values, odd(*args), strict=True):
                torch.testing.assert_close(value, expected, check_dtype=not wide)
            assert values[1].untyped_storage().data_ptr() != args[0].untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("dtype", "product", "sum_"),
    [
        (torch.float32, torch.float64, torch.float64),
        (torch.bfloat16, torch.bfloat16, torch.float32),
    ],
)
def test_each_operator_s_precision(
    dtype: torch.dtype, product: torch.dtype, sum_: torch.dtype
) -> None:
    args = [torch.randn(4, 4, dtype=dtype), torch.randn(4, 4, dtype=dtype)]
    tg = trace(lambda x, y: (x @ y, (x + y).sum()), args)
    seen: dict[str, torch.dtype] = {}
    run_one = Widened(Boundary())

    def watched(node: fx.Node) -> Operation:
        def looked_at(env: dict[fx.Node, Any]) -> Any:
            made = run_one(node)(env)
            seen[str(node.target)] = made.dtype
            return made

        return looked_at

    plan = schedule(tg.nodes(), tg.output_nodes, wide=True)
    evaluate(plan, dict(zip(tg.graph.find_nodes(op="placeholder"), args, strict=True)), watched)
    assert seen["aten.mm.default"] is product
    assert seen["aten.sum.default"] is sum_


def test_what_only_products_read_or_make_is_held_as_they_have_it() -> None:
    """A higher precision would be rounded away at once; whatever else is read keeps it."""

    def layers(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
        hidden = torch.tanh(x @ w)  # read by a product, through a view, alone
        shown = torch.sigmoid(b)  # by a product and by a sum
        return [(hidden.t() @ shown).exp(), shown.sum(0)]

    args = [torch.randn(4, 4, dtype=torch.bfloat16) for _ in range(3)]
    tg = trace(layers, args)
    plan = schedule(tg.nodes(), tg.output_nodes, wide=True)
    held = {
        ops.op_name(part.target): dtype
        for work in plan.works.values()
        for part, _, dtype in work.results
    }
    assert held == {
        "aten.mm.default": torch.bfloat16,
        "aten.tanh.default": torch.bfloat16,
        "aten.sigmoid.default": torch.float32,
        "aten.exp.default": torch.float32,
        "aten.sum.dim_IntList": torch.float32,
    }
    given = dict(zip(tg.graph.find_nodes(op="placeholder"), args, strict=True))
    values = evaluate(plan, given, Widened(Boundary()))
    x, w, b = args
    hidden = torch.tanh((x @ w).float()).bfloat16()
    shown = torch.sigmoid(b.float())
    first, second = (values[node] for node in tg.output_nodes)
    assert torch.equal(first, (hidden.t() @ shown.bfloat16()).float().exp())
    torch.testing.assert_close(second, shown.sum(0))


class Conversions(TorchDispatchMode):
    """Counts copies to another element type."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def test_what_only_moves_is_held_as_what_it_moves() -> None:
    """Of a product's halves, or of an input, a higher precision knows nothing more."""
    args = [torch.randn(4, 4, dtype=torch.bfloat16) for _ in range(2)]
    rows = torch.tensor([1, 0, 3])

    def moved(x: Tensor, w: Tensor, rows: Tensor) -> list[Tensor]:
        product = x @ w
        joined = torch.cat([product.t(), x[rows]]).clone()
        return [
            joined,
            torch.cat([product.exp(), product]),
            functional.pad(product, (1, 0), value=0.1),
        ]

    tg = trace(moved, [*args, rows])
    plan = schedule(tg.nodes(), tg.output_nodes, wide=True)
    given = dict(zip(tg.graph.find_nodes(op="placeholder"), [*args, rows], strict=True))
    with Conversions() as conversions:
        joined, mixed, padded = evaluate(plan, given, Widened(Boundary())).values()
    product = args[0] @ args[1]
    assert torch.equal(joined, torch.cat([product.t(), args[0][rows]]))
    assert mixed.dtype is torch.float32, "half of it is known better"
    assert torch.equal(mixed, torch.cat([product.float().exp(), product.float()]))
    assert padded.dtype is torch.float32, "0.1 is no bfloat16"
    assert conversions.count == 3, "the product, read by three that compute"


def test_what_rounds_once_by_itself_is_not_converted() -> None:
    """Between products a function of halves computes in fp32 and rounds, whoever asks it to."""
    args = [torch.randn(8, 8, dtype=torch.bfloat16) for _ in range(2)]

    def layers(x: Tensor, w: Tensor) -> list[Tensor]:
        product = x @ w
        return [functional.gelu(product) @ w, torch.softmax(product, -1) @ w]

    tg = trace(layers, args)
    plan = schedule(tg.nodes(), tg.output_nodes, wide=True)
    given = dict(zip(tg.graph.find_nodes(op="placeholder"), args, strict=True))
    plain = {ops.op_name(n.target) for n, work in plan.works.items() if work.plain is not None}
    assert plain == {"aten.gelu.default"}, "a softmax's parts may be rounded"
    first, _ = evaluate(plan, given, Widened(Boundary())).values()
    product = (args[0] @ args[1]).float()
    assert torch.equal(first, functional.gelu(product).bfloat16() @ args[1])


def test_what_converts_as_it_reads_is_given_what_is_held() -> None:
    """The same numbers as from converted operands, in half the copies; sums are told the type."""
    half, full = torch.randn(6, 4, dtype=torch.bfloat16), torch.randn(6, 4)
    row, number, whole = torch.randn(4), torch.tensor(1.7), torch.arange(4)

    def mixed(half: Tensor, full: Tensor, row: Tensor, number: Tensor, whole: Tensor) -> Any:
        return [
            half + full,
            full.sub(row, alpha=0.3),
            row * number,  # a number alone doesn't say the type
            (full / row) * whole,
            number * number,
            half.sum(0),
            full.sum(),
            full.sum(dtype=torch.float32),
            whole.sum(),
            half.sum(0, dtype=torch.float32),
        ]

    args = [half, full, row, number, whole]
    tg = trace(mixed, args)
    env: dict[fx.Node, Any] = dict(zip(tg.graph.find_nodes(op="placeholder"), args, strict=True))
    counts = [0, 0]
    for node in tg.nodes():
        dtype = computing_dtype(node)
        with Conversions() as own:
            expected = run_node(node, env, dtype)
        with Conversions() as ours:
            made = prepare(node, dtype)(env)
        counts = [counts[0] + own.count, counts[1] + ours.count]
        assert made.dtype is expected.dtype, node.target
        torch.testing.assert_close(
            made, expected, rtol=1e-14 if dtype.itemsize == 8 else 1e-6, atol=0
        )
        env[node] = expected
    assert converts_as_it_reads(tg.nodes()[0])
    assert counts[1] * 2 <= counts[0], counts


def test_a_cast_that_knows_nothing_more_is_not_made() -> None:
    """A product's halves stay halves, for one reader, for many that convert, or for none."""

    def casts(x: Tensor, w: Tensor, g: Tensor) -> list[Tensor]:
        cast = torch.ops.prims.convert_element_type
        last, one, many, two = (cast(torch.mm(x, w * i), torch.float32) for i in range(1, 5))
        return [last, one.t().exp(), many + g, many * g, two.exp(), two.tanh()]

    args = [torch.randn(8, 8, dtype=torch.bfloat16) for _ in range(2)] + [torch.randn(8, 8)]
    tg = trace(casts, args)
    plan = schedule(tg.nodes(), tg.output_nodes, wide=True)
    held = [
        dtype
        for node, work in plan.works.items()
        if ops.op_name(node.target) == "prims.convert_element_type.default"
        for _, _, dtype in work.results
    ]
    assert held == [torch.bfloat16] * 3 + [torch.float64]
    given: dict[fx.Node, Any] = dict(zip(tg.graph.find_nodes(op="placeholder"), args, strict=True))
    values = evaluate(plan, given, Widened(Boundary())).values()
    x, w, g = args
    last, one, many, two = (torch.mm(x, w * i).double() for i in range(1, 5))
    expected = [last, one.t().exp(), many + g, many * g, two.exp(), two.tanh()]
    for value, wanted in zip(values, expected, strict=True):
        assert torch.equal(value.double(), wanted)


def test_a_product_s_dropout_is_not_rounded_to_halves() -> None:
    """Masks are drawn beside `Widened`, from what a product has made."""
    args = [torch.randn(16, 16, dtype=torch.bfloat16) for _ in range(2)]
    tg = trace(lambda x, w: torch.native_dropout(x @ w, 0.1, True)[0], args)
    plan = schedule(tg.nodes(), tg.output_nodes, wide=True)
    given = dict(zip(tg.graph.find_nodes(op="placeholder"), args, strict=True))
    masked = captured._with_masks(Widened(Boundary()), set(tg.nodes()), Masks(), wide=True)
    (value,) = evaluate(plan, given, masked).values()
    product = (args[0] @ args[1]).float()
    assert value.dtype is torch.float32
    torch.testing.assert_close(value[value != 0], (product / 0.9)[value != 0])


@pytest.mark.parametrize("wide", [False, True])
def test_a_gradient_s_copy_to_its_layout_is_passed_on(wide: bool) -> None:
    """Its target is not even made; one that something computes with has the layout it asked for."""

    def copied(x: Tensor) -> list[Tensor]:
        last, read = (torch.empty_strided((4, 6), (1, 4)) for _ in range(2))
        read = torch.ops.aten.copy(read, x.exp())
        return [torch.ops.aten.copy(last, x.exp()), read.t().reshape(24) * 2]

    args = [torch.randn(4, 6)]
    tg = trace(copied, args)
    plan = schedule(tg.nodes(), tg.output_nodes, wide=wide)
    ran = [ops.op_name(node.target) for verb, node in plan.actions if verb == "run"]
    assert sum("empty" in name for name in ran) == 1
    for value, expected in zip(run(tg, args, plan), copied(*args), strict=True):
        torch.testing.assert_close(value, expected, check_dtype=not wide)


@contextlib.contextmanager
def _free(monkeypatch: pytest.MonkeyPatch, free: int | None) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(room, "free_bytes", lambda device: free)
        yield


def test_copies_go_to_the_host_when_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    def to_host(tensor: Tensor) -> Tensor:
        sent.append(tensor.numel())
        return tensor.clone()

    monkeypatch.setattr(room, "to_host", to_host)
    tensors = [torch.randn(n) for n in (100, 50, 10)]

    def copies(free: int | None, needed: int = 0) -> list[Tensor]:
        with _free(monkeypatch, free):
            place = room.Room(torch.device("cpu"), needed)
            return place.copies(tensors)

    copies(None)
    assert sent == []
    made = copies(2 * 4 * 120)  # half of it, in fp32
    assert sent == [50]
    torch.testing.assert_close(made, tensors, rtol=0, atol=0)
    sent.clear()
    copies(2 * 4 * 120, needed=2 * 4 * 120)  # all of it is needed by something else
    assert sent == [100, 50, 10]


@pytest.mark.parametrize(("device", "kept"), [("cuda", True), ("cpu", False)])
def test_attention_stays_in_its_precision_on_a_gpu(device: str, kept: bool) -> None:
    """Called with fp64 tensors it may return noise, and raise nothing."""
    graph = fx.Graph()
    with FakeTensorMode():
        q = graph.placeholder("q")
        q.meta["val"] = torch.empty(2, 3, 8, 64, dtype=torch.bfloat16, device=device)
        attention = torch.ops.aten._scaled_dot_product_cudnn_attention.default
        node = graph.call_function(attention, (q, q, q, None, True))
        node.meta["val"] = (q.meta["val"], q.meta["val"].new_empty(2, 3, 8, dtype=torch.float32))
    assert keeps_precision(node) == kept
