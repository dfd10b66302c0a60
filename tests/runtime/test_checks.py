"""What becomes of a call that fails a check: the update, the plan or the capture is replaced."""

from __future__ import annotations

import gc
import re
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trainfuse
from autodiff import mismatch, norms
from tests.planting import of_phase, plant
from tests.runtime.checked import QUIET, batches, make, make_squares, train, warnings_of
from tests.runtime.graphs import run_alone
from trainfuse import pipeline, plans
from trainfuse.capture import optimizers, whole_step
from trainfuse.runtime import finite, foreach, gate, program, step_gate, update_check
from trainfuse.runtime.captured import CapturedStep
from trainfuse.runtime.gate import Gate

pytestmark = [*QUIET, pytest.mark.usefixtures("fresh_gate")]


# -- updates, captures, results -----------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_a_wrong_update_becomes_torch_s_own_step(
    optimizer: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain_model, plain = make(optimizer)
    train(trainfuse.compile(plain, backend="triton"))
    monkeypatch.setattr(foreach, "compare_update", lambda *_: None)  # its own check sees nothing
    launch = foreach.ForeachLauncher.__call__

    def twice(self: Any, entries: Any) -> None:
        launch(self, entries)
        launch(self, entries)

    monkeypatch.setattr(foreach.ForeachLauncher, "__call__", twice)
    model, step = make(optimizer)
    compiled = trainfuse.compile(step, backend="triton", verify="step")
    train(compiled)
    (line,) = warnings_of(caplog)
    assert "update of 0.weight" in line
    (plan,) = compiled.plans
    assert plan.plan is not None
    assert plan.plan.program.groups, "right kernels went with the update"
    assert all(update.by_torch for update in plan.plan.program.updates.values())
    torch.testing.assert_close(model.state_dict(), plain_model.state_dict(), rtol=1e-4, atol=1e-5)


def test_what_was_compared_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update's results differ from fp64 by finite errors: there is no NaN among them."""
    looked: list[int] = []
    own = finite.all_finite
    monkeypatch.setattr(
        "trainfuse.runtime.checks.all_finite",
        lambda tensors: (looked.append(len(tensors)), own(tensors))[1],
    )
    for verify in ("kernels", "step"):
        model, step = make("AdamW")
        train(trainfuse.compile(step, backend="triton", verify=verify), 1)
    state = 3 * len([*model.parameters()])
    assert looked[0] > state
    assert looked[1] <= 2, "the loss"


def test_nothing_is_read_before_the_plan_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of eager and of the plan are measured, and only then is the device waited for."""
    events: list[str] = []

    def noted(owner: type, name: str, event: str) -> None:
        own = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **k: (events.append(event), own(*a, **k))[1])

    noted(norms.Measurement, "__init__", "measured")
    noted(norms.Measurement, "read", "read")
    noted(program.Program, "__call__", "launched")
    train(trainfuse.compile(make()[1], backend="triton", verify="step"), 1)
    assert events[:4] == ["measured", "launched", "measured", "read"]


def plain_runs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Collects, as they come, runs of the captured graph in its own precision."""
    runs: list[bool] = []
    own = CapturedStep.run

    def counted(self: CapturedStep, args: Any, *, wide: bool, **more: Any) -> Any:
        if not wide:
            runs.append(True)
        return own(self, args, wide=wide, **more)

    monkeypatch.setattr(CapturedStep, "run", counted)
    return runs


@pytest.mark.parametrize("fallback", [True, False])
def test_what_the_plan_rounds_as_well_needs_no_third_run(
    fallback: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of nothing but roundings are far from fp64 in eager, and in the plan no less."""
    monkeypatch.setattr(step_gate, "_SUSPICIOUS", 1e-9)
    monkeypatch.setattr(step_gate, "_NOISE", 0.0)
    runs = plain_runs(monkeypatch)
    explained: list[Any] = []
    explain = step_gate.StepGate.explain
    monkeypatch.setattr(
        step_gate.StepGate, "explain", lambda *a: (explained.append(a), explain(*a))[1]
    )
    compiled = trainfuse.compile(make()[1], backend="triton", verify="step", fallback=fallback)
    train(compiled)
    assert len(explained) == 2, "the gradients, and what is written"
    assert not runs
    assert compiled.stats()["gate"] == "pass"


def test_what_the_plan_does_not_explain_is_settled_by_the_captured_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plan that is much better than eager says nothing of the capture: ATen does, once."""
    monkeypatch.setattr(step_gate, "_SUSPICIOUS", 1e-9)
    monkeypatch.setattr(step_gate, "_NOISE", 0.0)
    runs = plain_runs(monkeypatch)

    def unexplained(*_: Any) -> None:
        raise step_gate.Unexplained

    monkeypatch.setattr(step_gate.StepGate, "explain", unexplained)
    plain_model, plain = make("AdamW")
    train(trainfuse.compile(plain, backend="triton"))
    model, step = make("AdamW")
    compiled = trainfuse.compile(step, backend="triton", verify="step")
    train(compiled)
    assert runs == [True]
    assert compiled.stats()["gate"] == "pass"
    torch.testing.assert_close(model.state_dict(), plain_model.state_dict(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("elements", [1 << 24, 5], ids=["together", "in pieces"])
def test_one_parameter_s_wrong_update_is_seen_in_company(
    elements: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Parameters are updated together by torch, and judged each by itself."""
    monkeypatch.setattr(update_check, "_LARGEST", elements)
    monkeypatch.setattr(update_check, "_LEAST", elements)
    monkeypatch.setattr(foreach, "compare_update", lambda *_: None)
    launch = foreach.ForeachLauncher.__call__

    def nearly(self: Any, entries: Any) -> None:
        launch(self, entries)
        last = entries[-1]["param"]
        assert last.numel() == 2
        last[1] *= 1.00001

    monkeypatch.setattr(foreach.ForeachLauncher, "__call__", nearly)
    _, step = make("AdamW")
    train(trainfuse.compile(step, backend="triton", verify="step"), 1)
    (line,) = warnings_of(caplog)
    assert "update of 3.bias (param)" in line


def test_all_batches_of_an_update_are_launched_before_one_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device is waited for once, however many there are; infinity takes another look."""
    monkeypatch.setattr(update_check, "_LARGEST", 5)
    monkeypatch.setattr(update_check, "_LEAST", 5)
    monkeypatch.setattr(foreach, "compare_update", lambda *_: None)
    events: list[str] = []

    def noted(name: str) -> None:
        own = getattr(update_check, name)
        monkeypatch.setattr(update_check, name, lambda *args: (events.append(name), own(*args))[1])

    for name in ("norms_of_parts", "figures_of_parts", "measure_parts"):
        noted(name)
    looked: list[int] = []
    own = finite.all_finite
    monkeypatch.setattr(
        "trainfuse.runtime.checks.all_finite", lambda t: (looked.append(len(t)), own(t))[1]
    )
    model, step = make("AdamW")
    compiled = trainfuse.compile(step, backend="triton", verify=1)
    train(compiled, 1)
    launched = events.index("figures_of_parts")
    assert events == ["norms_of_parts"] * launched + ["figures_of_parts"] * launched
    assert launched == -(-sum(p.numel() for p in model.parameters()) // 5)
    events.clear()
    with torch.no_grad():
        model[0].weight[0, 0] = torch.inf  # behind the tanh all is finite
    compiled(torch.ones(5, 4))
    assert "measure_parts" in events
    assert looked[0] <= 2 < looked[1], "an infinity that eager has, too, is one"
    assert compiled.stats()["gate"] == "pass"


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"maximize": True, "eps": 1e-3}])
def test_an_update_s_exact_side_is_torch_s_step_in_fp64(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreach, "compare_update", lambda *_: None)
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    update = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1, **options)

    def step(x: Tensor) -> Tensor:
        update.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        update.step()
        return loss.detach()

    seen: list[tuple[Any, ...]] = []
    own = update_check._beside_fp64

    def kept(call: Any, step: Any, batch: Any) -> Any:
        made = own(call, step, batch)
        before = {r: torch.cat([piece.before[r] for piece in batch]) for r in batch[0].now}
        seen.append((step, before, torch.cat([piece.grad for piece in batch]), made))
        return made

    monkeypatch.setattr(update_check, "_beside_fp64", kept)
    monkeypatch.setattr(update_check, "_distance", lambda size, _: (size, 0.0, size))  # all are far
    train(trainfuse.compile(step, backend="triton", verify=1))
    assert [count for count, *_ in seen] == [0, 1, 2]
    for count, before, grad, made in seen:
        wide = {role: value.double() for role, value in before.items()}
        param = nn.Parameter(wide.pop("param"))
        param.grad = grad.double()
        alone = torch.optim.AdamW([param], lr=0.05, weight_decay=0.1, **options)
        alone.state[param] = {"step": torch.tensor(float(count)), **wide}
        alone.step()
        expected = {"param": param.detach(), **wide}
        for role, (_, native, exact) in zip(before, made, strict=True):
            torch.testing.assert_close(exact, expected[role], rtol=1e-12, atol=1e-300)
            assert native.dtype is torch.float32
            torch.testing.assert_close(native.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("off", "wrong"), [(1.0, False), (1 + 5e-7, False), (1 + 1e-6, True)])
def test_only_what_is_far_from_torch_s_step_is_computed_in_fp64(
    off: float,
    wrong: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An error is at most torch's own and the distance to it: a rounding's distance will do."""
    monkeypatch.setattr(foreach, "compare_update", lambda *_: None)
    launch = foreach.ForeachLauncher.__call__

    def nearly(self: Any, entries: Any) -> None:
        launch(self, entries)
        entries[0]["param"].mul_(off)  # 24 elements

    monkeypatch.setattr(foreach.ForeachLauncher, "__call__", nearly)
    asked: list[list[int]] = []
    own = update_check._beside_fp64
    monkeypatch.setattr(
        update_check,
        "_beside_fp64",
        lambda call, step, batch: (
            asked.append([piece.position for piece in batch]),
            own(call, step, batch),
        )[1],
    )
    _, step = make("AdamW")
    train(trainfuse.compile(step, backend="triton", verify="step"), 1)
    assert asked == ([] if off == 1.0 else [[0]]), "the one parameter alone"
    assert bool(warnings_of(caplog)) is wrong


def test_where_most_are_far_torch_alone_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_check, "_distance", lambda size, _: (size, 0.0, size))
    asked: list[str] = []
    for name in ("_beside_torch", "_beside_operators", "_beside_fp64"):
        own = getattr(update_check, name)
        monkeypatch.setattr(
            update_check, name, lambda *a, n=name, own=own: (asked.append(n), own(*a))[1]
        )
    _, step = make("AdamW")
    compiled = trainfuse.compile(step, backend="triton", verify=1)
    train(compiled, 1)
    assert asked == ["_beside_torch", "_beside_fp64", "_beside_torch"]
    asked.clear()
    train(compiled, 1)
    assert asked == ["_beside_operators", "_beside_fp64", "_beside_torch"]
    asked.clear()
    train(compiled, 1)
    assert asked == ["_beside_fp64", "_beside_torch"], "what fp64 is held beside"
    assert compiled.stats()["gate"] == "pass"


def test_a_right_update_is_torch_s_own_step_to_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates, betas and counters as the user sees them, over steps, loads and a schedule."""
    seen: list[Any] = []
    own = whole_step.find_objects
    monkeypatch.setattr(whole_step, "find_objects", lambda *a: (seen.append(own(*a)), seen[-1])[1])
    _, step = make("Adam")
    compiled = trainfuse.compile(step, backend="triton", verify=1)
    data = batches()
    for i in range(5):
        compiled(next(data))
        (optimizer,) = seen[0].optimizers
        optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.param_groups[0]["betas"] = (0.5 + 0.1 * i, 0.9)
        if i == 2:
            optimizer.load_state_dict(optimizer.state_dict())
    assert compiled.stats()["gate"] == "pass"


def test_a_stale_rate_is_seen_at_the_step_that_uses_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(optimizers.UpdateHandle, "_refresh_scalar", _once())
    _, step = make("SGD")
    cell = [c for c in step.__closure__ or () if isinstance(c.cell_contents, torch.optim.SGD)]
    compiled = trainfuse.compile(step, backend="triton", verify=1)
    train(compiled, 1)
    assert not warnings_of(caplog)
    cell[0].cell_contents.param_groups[0]["lr"] = 0.01
    train(compiled, 1)
    assert "update of 0.weight" in warnings_of(caplog)[0]


def _once() -> Any:
    """The numbers of the first step, for good."""
    refresh = optimizers.UpdateHandle._refresh_scalar
    met: set[Any] = set()

    def first(self: Any, key: Any) -> None:
        if key not in met:
            met.add(key)
            refresh(self, key)

    return first


def test_a_wrong_result_is_seen_though_every_gradient_is_right(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = plans.run_passes

    def planted(graph: Any, facts: Any) -> Any:
        state = run(graph, facts)
        tg = state.graph
        output = tg.graph.output_node()
        loss, *rest = output.args[0]
        with tg.graph.inserting_before(output):
            scaled = tg.graph.call_function(torch.ops.aten.mul.Tensor, (loss, 1.01))
        scaled.meta = {"val": loss.meta["val"]}
        output.args = ((scaled, *rest),)
        facts_of = {**tg.facts, scaled: tg.facts[loss]}
        assert state.fusion is not None
        order = (*state.fusion.order, scaled)
        fusion = replace(state.fusion, order=order)
        return replace(state, graph=tg.replace(facts=facts_of), fusion=fusion)

    expected = train(trainfuse.compile(make()[1], backend="triton"))
    monkeypatch.setattr(plans, "run_passes", planted)
    losses = train(trainfuse.compile(make()[1], backend="triton", verify="step"))
    assert "output 0" in warnings_of(caplog)[0]
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)


def test_the_repro_of_an_update_runs_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lower = foreach.lower_foreach

    def planted(*args: Any, **kwargs: Any) -> Any:
        kernel = lower(*args, **kwargs)
        source = kernel.source.replace("s8 = 1.0 - s7", "s8 = 1.0 - s7 * 0.9")
        assert source != kernel.source
        return replace(kernel, source=source, key="planted")

    monkeypatch.setattr(foreach, "lower_foreach", planted)
    compiled = trainfuse.compile(make("Adam")[1], backend="triton")
    train(compiled, 1)
    done = run_alone(_repro_of(compiled), tmp_path)
    assert done.returncode == 1, done.stderr
    assert re.search(r"param of tensor 0.*error", done.stdout)
    assert re.search(r"exp_avg_sq of tensor 0.*right", done.stdout)


@pytest.mark.parametrize("backend", ["triton", "inductor", "eager"])
def test_the_repro_of_a_step_runs_alone(
    backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A pass that scales a gradient, in a step with dropout, statistics and a constant."""
    planted = [*pipeline.PASSES]
    planted.insert(3, ("planted", _scaled_gradient, "scales a gradient"))
    monkeypatch.setattr(pipeline, "PASSES", tuple(planted))
    torch.manual_seed(0)
    weights = torch.tensor([1.0, 2.0, 0.5])
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(F.gelu(model(x)), y, weights)
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = trainfuse.compile(step, backend=backend, verify="step")
    compiled(torch.randn(7, 4), torch.randint(3, (7,)))
    script = _repro_of(compiled)
    done = run_alone(script, tmp_path)
    assert done.returncode == 1, done.stderr
    lines = dict(line.split(":", 1) for line in done.stdout.splitlines() if ":" in line)
    assert "error" in lines["gradient of 0.weight"]
    wrong = {name for name, text in lines.items() if "right" not in text}
    assert wrong == {"gradient of 0.weight"}, done.stdout


def _repro_of(compiled: trainfuse.CompiledStep) -> str:
    (plan,) = compiled.plans
    assert plan.plan is not None
    (failure,) = plan.plan.failures.values()
    assert failure.repro.endswith(".py"), failure.repro
    return failure.repro


def _scaled_gradient(state: Any) -> Any:
    graph, _ = state.graph.copy()
    (update,) = (n for n in graph.nodes() if n.target is torch.ops.trainfuse.update.default)
    params, grads, number = update.args
    with graph.graph.inserting_before(update):
        scaled = graph.graph.call_function(torch.ops.aten.mul.Tensor, (grads[0], 1.01))
    scaled.meta = {"val": grads[0].meta["val"]}
    update.args = (params, [scaled, *grads[1:]], number)
    facts = {**graph.facts, scaled: graph.facts[grads[0]]}
    return replace(state, graph=graph.replace(facts=facts))


@pytest.mark.parametrize("backend", ["triton", "eager"])
def test_a_wrong_capture_gives_way_to_eager_autograd(
    backend: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain_model, plain = make()
    expected = train(plain)
    lift = whole_step.lift

    def wrong(*args: Any) -> Any:
        captured = lift(*args)
        tg = captured.graph
        node = next(n for n in tg.nodes("backward") if n.target is torch.ops.aten.sum.dim_IntList)
        with tg.graph.inserting_after(node):
            halved = tg.graph.call_function(torch.ops.aten.mul.Tensor, (node, 0.5))
        halved.meta = {"val": node.meta["val"]}
        node.replace_all_uses_with(halved, delete_user_cb=lambda user: user is not halved)
        return replace(captured, graph=tg.replace(facts={**tg.facts, halved: tg.facts[node]}))

    monkeypatch.setattr(whole_step, "lift", wrong)
    model, step = make()
    compiled = trainfuse.compile(step, backend=backend, verify="step")
    losses = train(compiled)
    (line,) = warnings_of(caplog)
    assert "as captured" in line
    assert compiled.stats()["gate"] != "pass"
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.state_dict(), plain_model.state_dict(), rtol=1e-5, atol=1e-6)
    assert "no graph" not in compiled.explain().cuda_graph


def test_a_region_is_compared_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A module compiled in place has no update to watch: its results are its gradients."""

    def gradients(**options: Any) -> list[Tensor | None]:
        model, _ = make()
        trainfuse.compile(model, backend="triton", **options)
        for x in (torch.ones(5, 4), torch.full((5, 4), 0.3)):
            model(x).exp().sum().backward()
        return [p.grad for p in model.parameters()]

    expected = gradients(verify="step")
    assert not warnings_of(caplog)
    plant(monkeypatch, "value * 1.05", of_phase("backward"))
    monkeypatch.setattr(Gate, "compare", lambda *_: None)
    found = gradients(verify="step")
    assert len(warnings_of(caplog)) == 1
    assert "output" in warnings_of(caplog)[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_a_kernel_that_todays_values_show_to_be_wrong_goes_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own check saw other values: a later comparison of the step finds it, and only it."""
    value = "tl.where(value > 9.0, value * 1.1, value)"
    plant(monkeypatch, value, of_phase("forward"), into="out0, ")
    weight, step = make_squares()
    compiled = trainfuse.compile(step, backend="triton", verify=2)
    for x in (1.0, 1.0, 4.0, 4.0):
        expected = (weight.detach() * x).square().sum()
        torch.testing.assert_close(compiled(torch.full((3,), x)), expected)
    (line,) = warnings_of(caplog)
    assert line.startswith("forward_")
    (plan,) = compiled.plans
    assert plan.plan is not None
    assert plan.plan.program.groups, "right kernels went with the wrong one"


def test_a_step_whose_reference_does_not_fit_runs_uncompared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(CapturedStep, "run", full)
    compiled = trainfuse.compile(make()[1], backend="triton", verify="step")
    train(compiled)
    assert "no memory" in caplog.text
    assert compiled.stats()["gate"] == "pass"


@pytest.mark.parametrize("verify", ["kernels", "step", 2])
def test_a_plan_keeps_no_batch_alive(verify: str | int) -> None:
    compiled = trainfuse.compile(make()[1], backend="triton", verify=verify)
    batches_ = [torch.randn(5, 4) for _ in range(3)]
    seen = [weakref.ref(x) for x in batches_]
    while batches_:
        compiled(batches_.pop())
    gc.collect()
    assert [ref() for ref in seen] == [None] * 3


def test_an_update_s_own_check_plans_its_reference_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all parameters, whose results are all launched before one is waited for."""
    planned: list[bool] = []
    own, compare = gate.schedule, foreach.compare_update
    monkeypatch.setattr(gate, "schedule", lambda *a, **k: (planned.append(True), own(*a, **k))[1])
    events: list[str] = []
    for name in ("__init__", "wrong"):
        method = getattr(mismatch.Comparison, name)
        monkeypatch.setattr(
            mismatch.Comparison,
            name,
            lambda *a, name=name, method=method: (events.append(name), method(*a))[1],
        )
    counts: list[int] = []

    def counted(*args: Any) -> str | None:
        planned.clear()
        events.clear()
        wrong = compare(*args)
        counts.append(len(planned))
        launched = events.index("wrong")
        assert launched == len(events) - launched == 4 * 6
        return wrong

    monkeypatch.setattr(foreach, "compare_update", counted)
    train(trainfuse.compile(make("AdamW")[1], backend="triton"), 1)
    assert counts == [2, 2], "in its own precision and one higher, with new state and old"
