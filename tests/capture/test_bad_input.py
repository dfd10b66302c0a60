"""Bad input: a clear error, or a recorded refusal and a right result; never a changed state.

"Right" is what eager does: parameters, optimizer state, generator and gradients are compared with
an eager twin after the same calls.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import trainfuse
from trainfuse.runtime import plan as plans
from trainfuse.runtime.foreach import UpdateCall

BACKENDS = ("triton", "eager")

# Dynamo looks at `.grad` of what it meets between two graphs, and torch warns of that; torch 2.11
# also warns of its own use of torch.jit
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:`torch.jit"),
]


class Twin:
    """One training, twice: eager and to be compiled, with equal weights and optimizers."""

    def __init__(
        self,
        make_step: Callable[[nn.Module, Any], Callable[..., Any]],
        make_optimizer: Callable[..., Any] | None = None,
    ) -> None:
        torch.manual_seed(7)
        self.model = nn.Sequential(
            nn.Linear(6, 9), nn.GELU(), nn.LayerNorm(9), nn.Dropout(0.2), nn.Linear(9, 4)
        )
        self.model[3].p = 0.0  # masks are compared elsewhere
        self.twin = copy.deepcopy(self.model)
        optimizer = make_optimizer or (lambda params: torch.optim.AdamW(params, lr=1e-2))
        self.optimizers = [optimizer(m.parameters()) for m in (self.model, self.twin)]
        self.ours = make_step(self.model, self.optimizers[0])
        self.eager = make_step(self.twin, self.optimizers[1])

    def same_state(self, exact: bool = False) -> None:
        """Both sides agree: parameters, gradients, optimizer state."""
        close = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-4, "atol": 1e-5}
        for (name, p), q in zip(self.model.named_parameters(), self.twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, **close, msg=lambda m, n=name: f"{n}: {m}")
            assert (p.grad is None) == (q.grad is None), f"{name}: gradient left otherwise"
            if p.grad is not None:
                torch.testing.assert_close(p.grad, q.grad, **close)
        ours, eager = (o.state_dict()["state"] for o in self.optimizers)
        assert ours.keys() == eager.keys()
        for key, state in eager.items():
            assert ours[key].keys() == state.keys()
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    torch.testing.assert_close(
                        ours[key][name], value, **close, check_dtype=False, equal_nan=True
                    )


def _batch(rows: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 6, generator=generator)
    return x, torch.randint(4, (rows,), generator=generator)


def ordinary(model: nn.Module, optimizer: Any) -> Callable[..., torch.Tensor]:
    """Nothing wrong with this one."""

    def step(x, y):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def _run_both(twin: Twin, step: Any, *args: Any, steps: int = 3) -> None:
    with trainfuse.settings.patch(keep_gradients=True):
        for _ in range(steps):
            torch.manual_seed(11)
            expected = twin.eager(*args)
            after = torch.get_rng_state()
            torch.manual_seed(11)
            got = step(*args)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
            assert torch.equal(torch.get_rng_state(), after), (
                "the generator is not where eager's is"
            )
    twin.same_state()


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
    _run_both(twin, step, *_batch())
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
        step(*_batch())
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
        step(*_batch())
    assert len(calls) == 3


# ------------------------------------------------------------------------------ wrong tensors


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_the_input(backend):
    """As eager: the loss and what depends on it are NaN, and no kernel is blamed for it."""
    twin = Twin(ordinary)
    step = trainfuse.compile(twin.ours, backend=backend)
    x, y = _batch()
    _run_both(twin, step, x, y, steps=2)
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
    x, y = _batch()
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
    x, y = _batch()
    before = torch.get_rng_state()
    with pytest.raises((RuntimeError, trainfuse.TrainfuseError), match=r"meta|device"):
        step(x.to("meta"), y)
    twin.optimizers[1].zero_grad()
    twin.same_state(exact=True)
    assert torch.equal(torch.get_rng_state(), before)
    _run_both(twin, step, x, y)  # and the step is not spoilt for good input


# --------------------------------------------------------------------------------- exceptions


def raises_when_told(model, optimizer):
    plain = ordinary(model, optimizer)

    def step(x, y, fail):
        if fail:
            raise ZeroDivisionError("told to")
        return plain(x, y)

    return step


def test_an_exception_inside_the_step():
    twin = Twin(raises_when_told)
    step = trainfuse.compile(twin.ours, backend="eager")
    with pytest.raises(ZeroDivisionError, match="told to"):
        step(*_batch(), True)
    twin.same_state(exact=True)
    _run_both(twin, step, *_batch(), False)
    with pytest.raises(ZeroDivisionError, match="told to"):
        step(*_batch(), True)
    twin.same_state()
    _run_both(twin, step, *_batch(), False)


def test_wrong_shape_is_eager_s_error_and_leaves_the_step_usable():
    twin = Twin(ordinary)
    step = trainfuse.compile(twin.ours, backend="eager")
    _run_both(twin, step, *_batch())
    with pytest.raises(Exception, match=r"shape|size|mat1|multiplied"):
        step(torch.randn(5, 7), _batch()[1])
    for optimizer in twin.optimizers:
        optimizer.zero_grad()
    twin.same_state()
    _run_both(twin, step, *_batch())


class Tripwire:
    """An identity, opaque to the compiler, that raises once when armed: forward or backward."""

    armed: tuple[str, type[BaseException]] | None = None

    @classmethod
    def arm(cls, place: str, error: type[BaseException]) -> None:
        cls.armed = (place, error)

    @classmethod
    def pass_by(cls, place: str) -> None:
        if cls.armed is not None and cls.armed[0] == place:
            error, cls.armed = cls.armed[1], None
            raise error


@torch.library.custom_op("trainfuse_tests::tripwire", mutates_args=())
def tripwire(x: torch.Tensor) -> torch.Tensor:
    Tripwire.pass_by("forward")
    return x.clone()


@torch.library.custom_op("trainfuse_tests::tripwire_backward", mutates_args=())
def tripwire_backward(grad: torch.Tensor) -> torch.Tensor:
    Tripwire.pass_by("backward")
    return grad.clone()


tripwire.register_fake(torch.empty_like)
tripwire_backward.register_fake(torch.empty_like)
tripwire.register_autograd(lambda ctx, grad: tripwire_backward(grad))


def with_tripwire(model, optimizer):
    def step(x, y):
        optimizer.zero_grad()
        loss = functional.cross_entropy(tripwire(model(x)), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("place", ["compile", "forward", "backward", "update"])
def test_interrupted_in_the_first_call(place, error, backend, monkeypatch):
    """Ctrl-C while the first call runs: state, generator and gradients as before it."""
    twin = Twin(with_tripwire)
    step = trainfuse.compile(twin.ours, backend=backend)
    before = torch.get_rng_state()
    with monkeypatch.context() as patch:
        if place == "update":
            _raise_after(patch, UpdateCall, "__call__", error)
        elif place == "compile":
            _raise_after(patch, plans, "build_program", error)
        else:
            Tripwire.arm(place, error)
        with pytest.raises(error):
            step(*_batch())
    twin.same_state(exact=True)
    assert torch.equal(torch.get_rng_state(), before)
    for optimizer in twin.optimizers:
        assert "step" not in vars(optimizer), "the optimizer is left with a swapped method"
        assert "zero_grad" not in vars(optimizer)
    _run_both(twin, step, *_batch())


def _raise_after(patch: pytest.MonkeyPatch, owner: Any, name: str, error: type[BaseException]):
    """Let the real function do its work, then raise: the worst moment."""
    real = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        real(*args, **kwargs)
        raise error

    patch.setattr(owner, name, wrapped)
