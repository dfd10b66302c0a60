"""Whole-step capture: one graph, right values, and a recorded reason wherever it refuses."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trainfuse.capture.lift import CaptureRefused
from trainfuse.capture.whole_step import PlanBudget, WholeStep


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(16, 4)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(self.norm(F.gelu(self.first(x)))))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def batch(rows: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 8), torch.randint(0, 4, (rows,))


def run(whole: WholeStep, *args: Any) -> Any:
    assert whole.ready(args), whole.refusal
    return whole(*args)


def pair(model: nn.Module | None = None, **options: Any) -> tuple[Any, Any, Any, Any]:
    """A model and its copy, each with a step of its own."""
    ours = model or Net()
    theirs = copy.deepcopy(ours)
    options = {"lr": 0.1, **options}
    return (
        ours,
        theirs,
        torch.optim.SGD(ours.parameters(), **options),
        torch.optim.SGD(theirs.parameters(), **options),
    )


def assert_same_state(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")


def test_three_steps_equal_eager(recorder) -> None:
    ours, theirs, opt, ref = pair(momentum=0.9)
    whole = WholeStep(train_step(ours, opt), recorder, max_plans=4, keep_gradients=False)
    eager = train_step(theirs, ref)
    for seed in range(3):
        data = batch()
        torch.manual_seed(seed)
        loss = run(whole, *data)
        torch.manual_seed(seed)
        expected = eager(*data)
        torch.testing.assert_close(loss, expected.detach())
        assert not loss.requires_grad
        assert_same_state(ours, theirs)
    assert len(recorder.captured) == 1
    assert opt.state_dict()["state"].keys() == ref.state_dict()["state"].keys()


def test_phases_links_and_lines(recorder) -> None:
    ours, _, opt, _ = pair()
    whole = WholeStep(train_step(ours, opt), recorder, max_plans=4, keep_gradients=False)
    run(whole, *batch())
    (captured,) = recorder.captured
    tg = captured.graph
    phases = [tg.phase(n) for n in tg.nodes()]
    assert set(phases) == {"forward", "backward", "update"}
    assert phases == sorted(phases, key=["forward", "backward", "update"].index)
    forward = {n.name for n in tg.nodes("forward")}
    linked = [tg.facts[n].forward_of for n in tg.nodes("backward")]
    assert sum(link in forward for link in linked) >= len(linked) - 2
    assert any((tg.where(n) or "").startswith("test_whole_step.py:") for n in tg.nodes("backward"))
    kinds = {fact.target: fact.kind for fact in tg.inputs}
    assert kinds["first.weight"] == "parameter"
    assert kinds["norm.running_mean"] == "buffer"
    assert len(tg.mutations) == 3  # running mean, running variance, number of batches
    ((_, indices),) = captured.updates.values()
    assert len(indices) == 6  # the unused layer has no gradient


def test_new_shapes_modes_and_frozen_layers_make_new_plans(recorder) -> None:
    ours, theirs, opt, ref = pair()
    whole = WholeStep(train_step(ours, opt), recorder, max_plans=8, keep_gradients=False)
    eager = train_step(theirs, ref)

    def both(rows: int = 12) -> None:
        data = batch(rows)
        torch.manual_seed(0)
        loss = run(whole, *data)
        torch.manual_seed(0)
        torch.testing.assert_close(loss, eager(*data).detach())
        assert_same_state(ours, theirs)

    for rows in (12, 7, 5, 12):
        both(rows)
    for training in (False, True):
        ours.train(training), theirs.train(training)
        both()
    for trainable in (False, True):
        ours.first.requires_grad_(trainable), theirs.first.requires_grad_(trainable)
        both()
    assert len(recorder.captured) == 5


@pytest.mark.covers("C5")
def test_a_schedule_of_learning_rates_takes_one_plan(recorder) -> None:
    ours, theirs, opt, ref = pair()
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 6) for o in (opt, ref)]
    whole = WholeStep(train_step(ours, opt), recorder, max_plans=4, keep_gradients=False)
    eager = train_step(theirs, ref)
    for seed in range(6):
        data = batch()
        for step in (lambda *d: run(whole, *d), eager):
            torch.manual_seed(seed)
            step(*data)
        for scheduler in schedulers:
            scheduler.step()
    assert_same_state(ours, theirs)
    assert len(recorder.captured) == 1


def test_gradients_are_temporaries_unless_kept(recorder) -> None:
    ours, theirs, opt, ref = pair()
    step = train_step(ours, opt)
    data = batch()
    run(WholeStep(step, recorder, max_plans=4, keep_gradients=False), *data)
    assert all(p.grad is None for p in ours.parameters())
    ours, theirs, opt, ref = pair()
    torch.manual_seed(0)
    run(WholeStep(train_step(ours, opt), recorder, max_plans=4, keep_gradients=True), *data)
    torch.manual_seed(0)
    train_step(theirs, ref)(*data)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad)


def test_a_step_that_never_clears_its_gradients_accumulates(recorder) -> None:
    """Without zero_grad eager sums gradients over calls; so must we."""
    ours, theirs, opt, ref = pair(nn.Linear(8, 4))

    def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        return step

    whole = WholeStep(step_of(ours, opt), recorder, max_plans=4, keep_gradients=False)
    eager = step_of(theirs, ref)
    for _ in range(3):
        data = batch()
        run(whole, *data)
        eager(*data)
        assert_same_state(ours, theirs)
        torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)


def test_the_optimizer_is_as_it_was(recorder) -> None:
    ours, _, opt, _ = pair()
    torch.optim.lr_scheduler.StepLR(opt, 1)
    before = {"step": opt.__dict__.get("step"), "zero_grad": opt.__dict__.get("zero_grad")}
    whole = WholeStep(train_step(ours, opt), recorder, max_plans=4, keep_gradients=False)
    run(whole, *batch())
    after = {"step": opt.__dict__.get("step"), "zero_grad": opt.__dict__.get("zero_grad")}
    assert before == after


def test_more_kinds_of_call_than_plans(recorder) -> None:
    ours, theirs, opt, ref = pair()
    whole = WholeStep(train_step(ours, opt), recorder, max_plans=2, keep_gradients=False)
    eager = train_step(theirs, ref)
    for rows in (4, 5):
        data = batch(rows)
        for step in (lambda *d: run(whole, *d), eager):
            torch.manual_seed(rows)
            step(*data)
    whole.ready(batch(6))
    with pytest.raises(PlanBudget):
        whole(*batch(6))
    assert whole.refusal is None
    assert_same_state(ours, theirs)


def branch_on_data(x: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    return loss * 2 if loss > 0 else loss


def read_back(x: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    return loss * (1 + int(loss.item() > 0))


@pytest.mark.parametrize("trick", [branch_on_data, read_back])
def test_a_refused_step_changes_nothing(recorder, trick) -> None:
    ours, _, opt, _ = pair()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        opt.zero_grad()
        loss = trick(x, y, F.cross_entropy(ours(x), y))
        loss.backward()
        opt.step()
        return loss

    before = copy.deepcopy(ours.state_dict())
    rng = torch.get_rng_state()
    whole = WholeStep(step, recorder, max_plans=4, keep_gradients=False)
    data = batch()
    rng = torch.get_rng_state()
    assert whole.ready(data)
    with pytest.raises(CaptureRefused):
        whole(*data)
    assert whole.refusal is not None
    assert "Python" in whole.refusal.reason
    assert (whole.refusal.where or "").startswith("test_whole_step.py:")
    assert torch.equal(rng, torch.get_rng_state())
    assert all(torch.equal(before[k], v) for k, v in ours.state_dict().items())
    assert all(p.grad is None for p in ours.parameters())
    assert not opt.state_dict()["state"]


def test_preconditions(recorder) -> None:
    ours, _, opt, _ = pair()
    step = train_step(ours, opt)
    whole = WholeStep(step, recorder, max_plans=4, keep_gradients=False)
    run(whole, *batch())
    handle = ours.first.weight.register_hook(lambda grad: grad * 2)
    assert not whole.ready(batch())
    assert "hook" in whole.refusal.reason
    handle.remove()

    def without_backward(x: torch.Tensor) -> torch.Tensor:
        return ours(x).sum()

    whole = WholeStep(without_backward, recorder, max_plans=4, keep_gradients=False)
    assert whole.ready(batch()[:1])
    with pytest.raises(CaptureRefused, match="backward"):
        whole(batch()[0])


def test_one_eager_step_before_the_first_call(recorder) -> None:
    """Gradients left by eager, of several shapes, and a region compiled after the whole step.

    torch 2.14 shares one None among all traces: a source written on it broke both.
    """
    ours, theirs, opt, ref = pair()
    step, eager = train_step(ours, opt), train_step(theirs, ref)
    data = batch()
    whole = WholeStep(step, recorder, max_plans=4, keep_gradients=False)
    for seed, call in enumerate((step, lambda *d: run(whole, *d), lambda *d: run(whole, *d))):
        torch.manual_seed(seed)
        call(*data)
        torch.manual_seed(seed)
        eager(*data)
        assert_same_state(ours, theirs)
    other = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    compiled = torch.compile(other, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(data[0]), other(data[0]))


def test_threads_take_turns(recorder) -> None:
    """Steps of their own, and one step from two threads: what a call changes is the process's."""
    models = [nn.Linear(8, 4) for _ in range(3)]
    twins = copy.deepcopy(models)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    shared = [0, 1, 2, 2]
    wholes = [
        WholeStep(train_step(m, o), recorder, max_plans=4, keep_gradients=False)
        for m, o in zip(models, optimizers, strict=True)
    ]
    data = batch()
    failures: list[BaseException] = []

    def work(which: int) -> None:
        try:
            for _ in range(3):
                run(wholes[which], *data)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(which,)) for which in shared]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for which in shared:
        eager = train_step(twins[which], torch.optim.SGD(twins[which].parameters(), lr=0.1))
        for _ in range(3):
            eager(*data)
    for model, twin in zip(models, twins, strict=True):
        assert_same_state(model, twin)
    assert all("step" not in vars(o) for o in optimizers)
    assert not torch._dynamo.config.trace_autograd_ops
