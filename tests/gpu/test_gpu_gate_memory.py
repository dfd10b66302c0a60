"""The gate beside a model that fills most of the card: bounded memory, right values."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trainfuse
from trainfuse import plans
from trainfuse.runtime import reference, reference_schedule, room
from trainfuse.runtime.gate import Gate, bytes_to_check

Step = Callable[..., Tensor]
FILLED = 0.7


class Block(nn.Module):
    """Attention and a network around residuals, with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.project(self.norms[0](x)).unflatten(-1, (3, -1, 64)).unbind(-3)
        q, k, v = (part.transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(-2)))
        return x + self.drop(self.down(F.gelu(self.up(self.norms[1](x)))))


def make(layers: int, width: int, batch: int) -> tuple[Step, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(layers)), nn.Linear(width, 1000)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(x)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    x = torch.randn(batch, 256, width, device="cuda")
    return step, (x, torch.randint(1000, (batch, 256), device="cuda"))


MEMORY_BOUND = (8, 1024, 24)  # activations are most of it
STATE_BOUND = (24, 1536, 1)  # parameters and optimizer state are


@pytest.fixture
def small_card() -> Iterator[Callable[[int], None]]:
    """Caps the process at a size of card that a model fills to FILLED."""

    def cap(used: int) -> None:
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(used / FILLED / total, 1.0))

    yield cap
    torch.cuda.set_per_process_memory_fraction(1.0)


def peak_of(step: Step, batch: tuple[Tensor, ...]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        step(*batch)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("size", [MEMORY_BOUND, STATE_BOUND], ids=["activations", "state"])
def test_the_step_gate_works_where_the_model_fills_the_card(
    size: tuple[int, int, int],
    small_card: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    step, batch = make(*size)
    used = peak_of(step, batch)
    small_card(used)
    monkeypatch.setattr(plans, "GATE", Gate())
    spilled: list[int] = []
    for module in (reference, room):
        own = module.to_host
        monkeypatch.setattr(
            module, "to_host", lambda t, own=own: (spilled.append(t.numel()), own(t))[1]
        )
    caplog.set_level(logging.INFO, logger="trainfuse.gate")
    compiled = trainfuse.compile(step, verify="step")
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    losses = [float(compiled(*batch))]
    first_s = time.perf_counter() - began
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    again = "ran out of memory" in caplog.text
    (record,) = compiled.plans
    assert record.plan is not None
    step_bytes, kernels = record.plan._step_bytes, record.plan.program.groups
    checks = max((bytes_to_check(c.group) for c in kernels.values()), default=0)
    mib = [n / 2**20 for n in (used, used / FILLED, allocated, reserved, step_bytes or 0, checks)]
    print(
        "eager {:.0f} MiB of {:.0f}; first call allocated {:.0f}, reserved {:.0f}; planned: step "
        "{:.0f}, largest check {:.0f}".format(*mib),
        f"; to the host {len(spilled)} values; {first_s:.1f} s; a second attempt: {again}",
    )
    print(torch.cuda.memory_summary(abbreviated=True))
    losses += [float(compiled(*batch)) for _ in range(5)]
    assert compiled.stats()["gate"] == "pass"
    assert "not compared" not in caplog.text
    assert spilled, "everything fitted: the test shows nothing"
    assert torch.cuda.max_memory_allocated() <= used / FILLED
    assert losses[-1] < losses[0]


def test_the_bytes_that_a_reference_takes_are_those_that_were_planned() -> None:
    step, batch = make(4, 512, 8)
    compiled = trainfuse.compile(step, verify="step")
    compiled(*batch)
    (plan,) = compiled.plans
    assert plan.plan is not None
    assert plan.plan.checks is not None
    captured = plan.plan.checks._captured
    tg = captured.tg
    args: list[Any] = [
        torch.randn(n.meta["val"].shape, device="cuda").to(n.meta["val"].dtype)
        if n.meta["val"].is_floating_point()
        else torch.zeros(n.meta["val"].shape, dtype=n.meta["val"].dtype, device="cuda")
        for n in tg.graph.find_nodes(op="placeholder")
    ]
    for wide in (False, True):
        planned = reference_schedule.schedule(tg.nodes(), captured._wanted, wide=wide).peak_bytes
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        results = captured.run(args, wide=wide)
        torch.cuda.synchronize()
        taken = torch.cuda.max_memory_allocated() - before
        del results
        assert taken <= 1.3 * planned, f"{taken / 2**20:.0f} MiB for {planned / 2**20:.0f}"
        assert taken >= 0.5 * planned


def test_a_nan_is_traced_in_a_replayed_step(caplog: pytest.LogCaptureFixture) -> None:
    """nan_check copies the state before each replay; the user's own NaN is said once."""
    weight = nn.Parameter(torch.ones(1 << 14, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=1e-3)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (weight * x).log().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = trainfuse.compile(step, nan_check=True)
    good, bad = torch.ones(1 << 14, device="cuda"), -torch.ones(1 << 14, device="cuda")
    for _ in range(4):
        assert compiled(good).isfinite()
    assert compiled.stats()["cuda_graphs"] == 1
    assert compiled(bad).isnan()
    (line,) = [r.getMessage() for r in caplog.records if "not finite" in r.getMessage()]
    assert "in eager neither" in line
    assert "aten.log" in line


def test_a_watched_loss_waits_for_nothing() -> None:
    """By default a flag is queued every 32nd call, and read when it has arrived."""
    from trainfuse.runtime.finite import EVERY, Watch

    watch = Watch()
    loss = torch.ones((), device="cuda")
    bad = torch.full((), float("nan"), device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        assert not any(watch.see([loss]) for _ in range(2 * EVERY + 1))
        torch.cuda._sleep(200_000_000)
        began = time.perf_counter()
        seen = [watch.see([bad]) for _ in range(EVERY)]
        assert time.perf_counter() - began < 0.05, "it waited for the device"
        assert not any(seen)
        torch.cuda.synchronize()
        assert watch.see([loss])
