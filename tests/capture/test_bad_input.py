"""Bad input: a clear error, or a recorded refusal and a right result; never a changed state.

"Right" is what eager does: parameters, optimizer state, generator and gradients are compared with
an eager twin after the same calls.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import trainfuse
from tests.capture.twins import BACKENDS, Twin, batch, ordinary, run_both

# Dynamo looks at `.grad` of what it meets between two graphs, and torch warns of that; torch 2.11
# also warns of its own use of torch.jit
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:`torch.jit"),
]


# ------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("target", [3, "step", None.__class__, torch.ones(2)])
def test_a_target_that_is_not_callable(target):
    with pytest.raises(trainfuse.TrainfuseError, match="takes a train step"):
        trainfuse.compile(target)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"fulgraph": True}, "fullgraph"),
        ({"options": {"veryfy": "off"}}, "verify"),
        ({"backend": "cuda"}, "triton"),
        ({"verify": -1}, "verify"),
        ({"memory_budget": "half"}, "memory_budget"),
        ({"max_plans": 1.5}, "max_plans"),
        ({"mode": "fastest"}, "reduce-overhead"),
        ({"dynamic": "yes"}, "dynamic"),
    ],
)
def test_an_unknown_option_or_wrong_type(options, named):
    with pytest.raises(trainfuse.OptionError, match=named):
        trainfuse.compile(lambda x: x, **options)


# ----------------------------------------------------------------------------------- refusals


def reads_item(model, optimizer):
    plain = ordinary(model, optimizer)

    def step(x, y):
        loss = plain(x, y)
        return loss * 1.0 if loss.item() > 0 else loss

    return step


def branches(model, optimizer):
    def step(x, y):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        if loss > 1.0:
            loss = loss * 0.5
        loss.backward()
        optimizer.step()
        return loss

    return step


def parameter_hooks(model, optimizer):
    for p in model.parameters():
        p.register_hook(lambda grad: grad * 0.5)
    return ordinary(model, optimizer)


class Halving(torch.optim.Optimizer):
    """A user's own optimizer."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"])


def with_closure(model, optimizer):
    """LBFGS calls the closure as often as it likes."""

    def step(x, y):
        def closure():
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return optimizer.step(closure).detach()

    return step


REFUSED = {
    "item": (reads_item, None),
    "branch": (branches, None),
    "parameter hooks": (parameter_hooks, None),
    "custom optimizer": (ordinary, Halving),
    "LBFGS": (with_closure, lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=3)),
    "Adagrad": (ordinary, lambda params: torch.optim.Adagrad(params, lr=0.1)),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", REFUSED)
def test_refused_whole_but_right(name, backend):
    twin = Twin(*REFUSED[name])
    step = trainfuse.compile(twin.ours, backend=backend)
    run_both(twin, step, *batch())
    with trainfuse.settings.patch(keep_gradients=True):
        explanation = step.explain()
    assert explanation.capture == "regions"
    reasons = [r.reason for r in explanation.refusals if r.stage == "capture"]
    assert reasons, "no reason is recorded"
    assert all(len(reason) > 10 for reason in reasons)


@pytest.mark.parametrize("name", REFUSED)
def test_fullgraph_raises_instead_and_changes_nothing(name):
    twin = Twin(*REFUSED[name])
    step = trainfuse.compile(twin.ours, backend="eager", fullgraph=True)
    state = torch.get_rng_state()
    with pytest.raises(trainfuse.CaptureError):
        step(*batch())
    twin.same_state(exact=True)
    assert torch.equal(torch.get_rng_state(), state)


def test_hooks_still_fire():
    """A hook that whole-step capture would have dropped runs once a step and parameter."""
    calls = []

    def hooked(model, optimizer):
        if not calls:
            model[0].weight.register_hook(lambda grad: calls.append(1))
        return ordinary(model, optimizer)

    twin = Twin(hooked)
    calls.clear()
    step = trainfuse.compile(twin.ours, backend="eager")
    for _ in range(3):
        step(*batch())
    assert len(calls) == 3


# ------------------------------------------------------------------------------ wrong tensors


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_the_input(backend):
    """As eager: the loss and what depends on it are NaN, and no kernel is blamed for it."""
    twin = Twin(ordinary)
    step = trainfuse.compile(twin.ours, backend=backend)
    x, y = batch()
    run_both(twin, step, x, y, steps=2)
    x[1, 2] = float("nan")
    loss = step(x, y)
    assert torch.isnan(loss)
    assert torch.isnan(twin.eager(x, y))
    for p, q in zip(twin.model.parameters(), twin.twin.parameters(), strict=True):
        assert torch.equal(p.isnan(), q.isnan())
    assert step.stats()["gate"] == "pass"


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_the_first_input(backend):
    """The gate's first comparison meets the NaN, and accepts it where ATen gives it too."""
    twin = Twin(ordinary)
    step = trainfuse.compile(twin.ours, backend=backend)
    x, y = batch()
    x[0, 0] = float("nan")
    assert torch.isnan(step(x, y))
    assert torch.isnan(twin.eager(x, y))
    for p, q in zip(twin.model.parameters(), twin.twin.parameters(), strict=True):
        assert torch.equal(p.isnan(), q.isnan())
    assert step.stats()["gate"] == "pass"


def test_tensors_on_two_devices():
    """The error is the one that eager gives, and nothing has changed."""
    twin = Twin(ordinary)
    step = trainfuse.compile(twin.ours, backend="eager")
    x, y = batch()
    before = torch.get_rng_state()
    with pytest.raises((RuntimeError, trainfuse.TrainfuseError), match=r"meta|device"):
        step(x.to("meta"), y)
    twin.optimizers[1].zero_grad()
    twin.same_state(exact=True)
    assert torch.equal(torch.get_rng_state(), before)
    run_both(twin, step, x, y)  # and the step is not spoilt for good input
