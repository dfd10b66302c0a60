"""Values dropped where memory is full and made again later: less is alive, gradients stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_budget import dropped, extreme, graph_of, residual, routed, same_gradients
from torch import Tensor
from training_graphs import Builder, training_graph

from autodiff import ops
from autodiff.budget import search
from autodiff.cut import CutProblem
from autodiff.derive import cleanup
from autodiff.graph import NodeFacts, TrainingGraph
from autodiff.liveness import Liveness, peak_bytes
from autodiff.recompute import choose, plan_recompute
from autodiff.relief import Relieved, relieve
from autodiff.rng import functionalize_dropout
from autodiff.verify import verify

aten: Any = torch.ops.aten
LAYERS = 6


def relieved(tg: TrainingGraph, limit: int) -> Relieved:
    """A graph relieved of forward values, and of copies of them."""
    return relieve(tg, limit, {node.name for node in tg.nodes() if tg.phase(node) != "forward"})


@pytest.mark.parametrize("net", [residual, dropped, routed, extreme])
def test_gradients_stay_where_values_are_made_more_than_twice(net: Callable[..., Tensor]) -> None:
    tg, inputs = graph_of(net, LAYERS)
    tg = functionalize_dropout(tg)
    least_at_once = search(CutProblem(tg, None, ()), 0).peak
    planned, report = plan_recompute(tg, 0.0)
    verify(planned)
    same_gradients(planned, tg, inputs)
    assert report.peak == peak_bytes(planned).num_bytes < least_at_once
    makings = {planned.facts[node].again for node in planned.nodes("backward")}
    assert len(makings) > 2
    why = Counter(note.why for note in report.again)
    assert why["memory_budget: once more, for later"] > 0


def test_a_budget_that_one_more_making_keeps() -> None:
    """Between the least of a value made again once, and the least of values made again often."""
    tg, inputs = graph_of(residual, LAYERS)
    once = search(CutProblem(tg, None, ()), 0).peak
    often = plan_recompute(tg, 0.0)[1].peak
    assert often is not None
    limit = (once + often) // 2
    planned, report = plan_recompute(tg, limit)
    assert report.within_budget
    assert peak_bytes(planned).num_bytes <= limit
    same_gradients(planned, tg, inputs)
    # no more than it must: a budget that can be kept without costs nothing more
    assert not [n for n in plan_recompute(tg, once)[1].again if "once more" in n.why]


def test_the_report_says_what_crosses_in_the_end() -> None:
    tg, _ = graph_of(residual, LAYERS)
    planned, report = plan_recompute(tg, 0.0)
    later = [node for node in planned.nodes() if planned.phase(node) != "forward"]
    crossing = {
        parent.name
        for node in later
        for parent in node.all_input_nodes
        if parent.op == "call_function" and planned.phase(parent) == "forward"
    }
    assert set(report.saved) == crossing
    assert {note.name for note in report.kept} == crossing


def test_regions_make_values_again_once() -> None:
    """AOTAutograd cuts their backward out by what is saved: there is one copy of each value."""
    tg, _ = graph_of(residual, LAYERS)
    choice = choose(tg, 0.0)
    assert choice.report.peak == search(CutProblem(tg, None, ()), 0).peak
    assert not any("once more" in note.why for note in choice.report.again)


def test_masks_are_drawn_from_one_seed_and_choices_made_once() -> None:
    for net, once in ((dropped, "trainfuse.seed.default"), (routed, "aten.topk.default")):
        tg, _ = graph_of(net, LAYERS)
        tg = functionalize_dropout(tg)
        planned, _ = plan_recompute(tg, 0.0)
        count = Counter(ops.op_name(node.target) for node in planned.nodes())
        assert count[once] == Counter(ops.op_name(n.target) for n in tg.nodes())[once] > 0


def test_gradients_are_not_made_again() -> None:
    tg, _ = graph_of(residual, LAYERS)
    planned, _ = plan_recompute(tg, 0.0)
    for name in ("aten.gelu_backward.default", "aten.native_layer_norm_backward.default"):
        counts = [
            sum(ops.op_name(node.target) == name for node in each.nodes()) for each in (tg, planned)
        ]
        assert counts[0] == counts[1] > 0


def test_another_making_is_no_repeat() -> None:
    """Joined with the first, it would be alive in between again."""
    tg, _ = graph_of(residual, LAYERS)
    planned, _ = plan_recompute(tg, 0.0)
    tidy = cleanup(planned)
    assert peak_bytes(tidy).num_bytes <= peak_bytes(planned).num_bytes
    makings = [{each.facts[node].again for node in each.nodes()} for each in (planned, tidy)]
    assert makings[0] == makings[1]


def _chain(late_phase: str = "backward") -> tuple[Builder, dict[str, Any]]:
    """y is read first and last, and three large values are alive in between."""
    b = Builder()
    x, w = b.input(64, 64), b.input(64, 64)
    y = b.call(aten.mm.default, x, w)
    g = b.call(aten.mm.default, y, y, phase="backward")
    wide = b.call(aten.mm.default, g, g, phase="backward")
    wide = b.call(aten.mm.default, wide, g, phase="backward")
    wide = b.call(aten.mm.default, wide, wide, phase="backward")
    last = b.call(aten.mm.default, wide, y, phase=late_phase)
    return b, {"x": x, "w": w, "y": y, "last": last}


def test_a_value_is_dropped_between_its_readers() -> None:
    b, nodes = _chain()
    tg = b.finish(nodes["last"])
    found = relieved(tg, 0)
    assert [node.target for node in found.again] == [aten.mm.default]
    (copy,) = found.again
    assert found.peak == peak_bytes(found.graph).num_bytes == peak_bytes(tg).num_bytes - 64 * 64 * 4
    assert {user.name for user in copy.users} == {nodes["last"].name}
    order = found.graph.nodes()
    assert order.index(copy) + 1 == order.index(next(iter(copy.users)))
    assert found.graph.facts[copy].phase == "backward"


def test_a_limit_that_is_kept_changes_nothing() -> None:
    b, nodes = _chain()
    tg = b.finish(nodes["last"])
    assert relieved(tg, peak_bytes(tg).num_bytes).graph is tg


def test_nothing_is_made_again_of_parameters_after_their_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write: Any = aten.copy_.default  # stands for the update: it writes a parameter
    monkeypatch.setitem(ops.TABLE, ops.op_name(write), ops.TABLE["trainfuse.update.default"])
    b, nodes = _chain("update")
    effect = b.graph.call_function(write, ([nodes["w"]], [nodes["y"]]))
    b.facts[effect] = NodeFacts("update")
    nodes["last"].prepend(effect)
    tg = b.finish(nodes["last"])
    assert relieved(tg, 0).again == ()


def test_a_result_takes_the_memory_of_an_operand_that_dies() -> None:
    """A kernel writes tanh(h) over h where nothing reads h later, and both are of one type."""
    size = 64 * 64 * 4

    def alive(*, cast: bool, read_later: bool) -> int:
        b = Builder()
        x = b.input(64, 64)
        h = b.call(aten.mm.default, x, x)
        t = b.call(aten.tanh.default, h)
        t = b.call(aten._to_copy.default, t, dtype=torch.bfloat16) if cast else t
        z = b.call(aten.mm.default, t, t)
        y = b.call(aten.mm.default, h, h) if read_later else z
        lives = Liveness(b.finish(y, z))
        return lives.live[lives.position[t]]

    assert alive(cast=False, read_later=False) == size
    assert alive(cast=False, read_later=True) == 2 * size
    assert alive(cast=True, read_later=False) == size + size // 2


def test_attention_by_chunks_is_dropped_with_its_views() -> None:
    """What is read through views is dropped whole, and copies read copies of the views."""

    def fn(x: Tensor, *weights: Tensor) -> Tensor:
        for w in weights:
            q, k, v = (x @ w).view(16, 4, 3, 8).unbind(2)
            mixed = F.softmax(q @ k.transpose(1, 2), -1) @ v
            x = x + mixed.reshape(16, 32)
        return x

    args = [torch.randn(16, 32), *(torch.randn(32, 96) / 6 for _ in range(8))]
    tg = training_graph(fn, args, range(len(args)))
    planned, report = plan_recompute(tg, 0.0)
    verify(planned)
    same_gradients(planned, tg, [*args, torch.randn(16, 32)])
    assert any("once more" in note.why for note in report.again)
