"""One training run twice, eagerly and compiled, for what must not tell them apart."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import trainfuse

BACKENDS = ("triton", "eager")


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


def batch(rows: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
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


def run_both(twin: Twin, step: Any, *args: Any, steps: int = 3) -> None:
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
