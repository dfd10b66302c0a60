"""Each switch changes what a compiled step does, end to end: one without effect would be a lie."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trainfuse
from trainfuse.errors import CaptureError
from trainfuse.runtime.cache import Variant

Step = Callable[[Tensor], Tensor]


def make_step(rate: float = 0.0) -> tuple[nn.Module, Step, Tensor]:
    """Two linears with a fusible chain between them, SGD; 5 rows: no multiple of any block."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(rate), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.softplus(model(x)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, step, torch.randn(5, 6)


def explained(x: Tensor, step: Step, **options: Any) -> trainfuse.Explanation:
    compiled = trainfuse.compile(step, backend="eager", **options)
    compiled(x)
    return compiled.explain()


def ops(explanation: trainfuse.Explanation) -> set[str]:
    return {node.op for group in explanation.groups for node in group.nodes}


def test_off_is_the_step_itself() -> None:
    model, step, x = make_step()
    compiled = trainfuse.compile(step)
    with trainfuse.fuser("none"):
        loss = compiled(x)
    other, plain, _ = make_step()
    assert torch.equal(loss, plain(x))
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert compiled.plans == ()
    before = trainfuse.set_enabled(False)
    compiled(x)
    assert before is True
    assert compiled.plans == ()
    trainfuse.set_enabled(True)
    with trainfuse.fuser("eager"):
        compiled(x)
    assert len(compiled.plans) == 1


@pytest.mark.parametrize("name", ["eager", "triton", "inductor"])
def test_the_backend_that_is_asked_for_runs(name: str) -> None:
    _, step, x = make_step()
    compiled = trainfuse.compile(step, backend=name)
    compiled(x)
    assert compiled.explain().backend == name


def test_whole_step_off_runs_regions() -> None:
    _, step, x = make_step()
    assert explained(x, step).capture == "whole_step"
    _, step, x = make_step()
    without = explained(x, step, whole_step=False)
    assert without.capture == "regions"
    assert "whole_step" in without.capture_reason


@pytest.mark.covers("B switches")
def test_skip_op_keeps_an_operator_aten_in_both_phases() -> None:
    _, step, x = make_step()
    fused = ops(explained(x, step))
    assert "aten.mul.Tensor" in fused
    trainfuse.skip_op("aten::mul")
    _, step, x = make_step()
    without = explained(x, step)
    assert "aten.mul.Tensor" not in ops(without)
    assert {n.phase for n in without.aten_nodes if n.op == "aten.mul.Tensor"} >= {"backward"}


def test_fuse_first_leaves_later_groups_aten() -> None:
    _, step, x = make_step()
    everything = explained(x, step)
    assert len(everything.groups) > 1
    for count in (0, 1):
        _, step, x = make_step()
        assert len(explained(x, step, fuse_first=count).groups) == count


@pytest.mark.covers("B switches")
@pytest.mark.parametrize(
    ("options", "groups"),
    [({}, 0), ({"single_node": True}, 1), ({"single_node": True, "min_subgraph_nodes": 5}, 0)],
    ids=str,
)
def test_single_node_and_the_threshold(options: dict[str, Any], groups: int) -> None:
    """One sigmoid between matrix products: dissolved, unless a group of one is asked for."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, cotangent: Tensor) -> None:
        optimizer.zero_grad()
        model(x).backward(cotangent)
        optimizer.step()

    compiled = trainfuse.compile(step, backend="eager", **options)
    compiled(torch.randn(4, 4), torch.randn(4, 4))
    explanation = compiled.explain()
    assert explanation.capture == "whole_step"
    assert explanation.count("forward") == groups


@pytest.mark.covers("B switches")
def test_horizontal_joins_siblings() -> None:
    def siblings(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 0.5, x + 1

    x = torch.randn(64, 64)
    groups = {}
    for horizontal in (True, False):
        compiled = trainfuse.compile(
            siblings, backend="eager", whole_step=False, horizontal=horizontal
        )
        compiled(x)
        groups[horizontal] = len(compiled.explain().groups)
    assert groups == {True: 1, False: 0}


@pytest.mark.covers("B switches")
def test_strict_fusion_names_the_operator() -> None:
    def forward(x: Tensor) -> Tensor:
        return x.exp().cumsum(0).log()

    compiled = trainfuse.compile(forward, backend="eager")
    with trainfuse.strict_fusion(), pytest.raises(Exception, match=r"strict_fusion: .*cumsum"):
        compiled(torch.rand(4, 4, requires_grad=True))
    assert compiled(torch.rand(4, 4, requires_grad=True)).requires_grad


def test_a_required_cuda_graph_is_an_error_on_the_cpu() -> None:
    for options in ({"mode": "reduce-overhead"}, {"cuda_graph": "require"}):
        model, step, x = make_step()
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(CaptureError):
            trainfuse.compile(step, **options)(x)
        assert all(map(torch.equal, before, model.parameters()))


def test_max_plans_is_a_budget(caplog: pytest.LogCaptureFixture) -> None:
    _, step, x = make_step()
    compiled = trainfuse.compile(step, backend="eager", max_plans=1, dynamic=False)
    compiled(x)
    _, plain, _ = make_step()
    plain(x)
    with caplog.at_level(logging.WARNING, "trainfuse"):
        assert torch.allclose(compiled(x[:3]), plain(x[:3]))
    assert len(compiled.plans) == 1
    assert any("max_plans" in record.getMessage() for record in caplog.records)


def test_rng_eager_draws_eagers_masks() -> None:
    _, step, x = make_step(rate=0.5)
    compiled = trainfuse.compile(step, backend="eager", rng="eager")
    torch.manual_seed(3)
    ours = compiled(x)
    _, plain, _ = make_step(rate=0.5)
    torch.manual_seed(3)
    assert torch.allclose(ours, plain(x))


def test_keep_gradients_leaves_them_in_place() -> None:
    for keep in (False, True):
        model, step, x = make_step()
        trainfuse.compile(step, backend="eager", keep_gradients=keep)(x)
        assert all((p.grad is not None) is keep for p in model.parameters())


def test_dumps_show_what_runs(tmp_path: Path) -> None:
    _, step, x = make_step()
    with trainfuse.settings.patch(dump=f"kernel({tmp_path}),program({tmp_path}),graph({tmp_path})"):
        compiled = trainfuse.compile(step, backend="triton")
        compiled(x)
        source = compiled.source()
    texts = [path.read_text().strip() for path in tmp_path.iterdir()]
    assert any("@triton.jit" in text for text in texts)
    assert any("torch.ops.aten" in path.read_text() for path in tmp_path.glob("after_*.txt"))
    for path in tmp_path.glob("program*"):
        assert path.read_text().strip() in source


def test_refusals_are_logged_with_their_line(capsys: pytest.CaptureFixture[str]) -> None:
    _, step, x = make_step()
    with trainfuse.settings.patch(log=">grouping"):
        explained(x, step, skip_ops="aten.mul")
    assert "aten.mul" in capsys.readouterr().err


def test_fma_reaches_every_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter never fuses: what the compiler is asked for is looked at instead."""
    asked: list[tuple[str, bool]] = []

    def noted(name: str, *rest: Any) -> Variant:
        variant = Variant(name, *rest)
        asked.append((name, variant.fma))
        return variant

    monkeypatch.setattr("trainfuse.runtime.launch.Variant", noted)
    for fma in (True, False):
        asked.clear()
        _, step, x = make_step()
        trainfuse.compile(step, backend="triton", fma=fma)(x)
        assert len(asked) > 2
        assert "update" in dict(asked)
        assert {on for _, on in asked} == {fma}
