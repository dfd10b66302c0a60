"""Exceptions and Ctrl-C inside a step: state, generator and gradients as eager would leave them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

import trainfuse
from tests.capture.twins import BACKENDS, Twin, batch, ordinary, run_both
from trainfuse.runtime import plan as plans
from trainfuse.runtime.foreach import UpdateCall

# Dynamo looks at `.grad` of what it meets between two graphs, and torch warns of that; torch 2.11
# also warns of its own use of torch.jit
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:`torch.jit"),
]


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
        step(*batch(), True)
    twin.same_state(exact=True)
    run_both(twin, step, *batch(), False)
    with pytest.raises(ZeroDivisionError, match="told to"):
        step(*batch(), True)
    twin.same_state()
    run_both(twin, step, *batch(), False)


def test_wrong_shape_is_eager_s_error_and_leaves_the_step_usable():
    twin = Twin(ordinary)
    step = trainfuse.compile(twin.ours, backend="eager")
    run_both(twin, step, *batch())
    with pytest.raises(Exception, match=r"shape|size|mat1|multiplied"):
        step(torch.randn(5, 7), batch()[1])
    for optimizer in twin.optimizers:
        optimizer.zero_grad()
    twin.same_state()
    run_both(twin, step, *batch())


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
            step(*batch())
    twin.same_state(exact=True)
    assert torch.equal(torch.get_rng_state(), before)
    for optimizer in twin.optimizers:
        assert "step" not in vars(optimizer), "the optimizer is left with a swapped method"
        assert "zero_grad" not in vars(optimizer)
    run_both(twin, step, *batch())


def _raise_after(patch: pytest.MonkeyPatch, owner: Any, name: str, error: type[BaseException]):
    """Let the real function do its work, then raise: the worst moment."""
    real = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        real(*args, **kwargs)
        raise error

    patch.setattr(owner, name, wrapped)
