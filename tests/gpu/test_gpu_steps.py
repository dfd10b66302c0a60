"""What changes between steps on the GPU: rates, shapes, modes, flags, masks, memory."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import trainfuse


class Pair:
    """A compiled training and its eager twin, stepped side by side."""

    def __init__(self, model: nn.Module, make_optimizer: Any, **options: Any) -> None:
        self.models = [model.cuda(), copy.deepcopy(model).cuda()]
        self.optimizers = [make_optimizer(m.parameters()) for m in self.models]
        self.eager = [self._step(m, o) for m, o in zip(self.models, self.optimizers, strict=True)]
        self.ours = trainfuse.compile(self.eager[0], backend="triton", **options)

    @staticmethod
    def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        return step

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """One step of both: losses, and every gradient, agree."""
        with trainfuse.settings.patch(keep_gradients=True):
            ours = self.ours(x.clone(), y.clone())
        theirs = self.eager[1](x.clone(), y.clone())
        torch.testing.assert_close(ours, theirs.detach(), rtol=2e-4, atol=1e-5)
        for (name, p), q in zip(
            self.models[0].named_parameters(), self.models[1].parameters(), strict=True
        ):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None:
                torch.testing.assert_close(
                    p.grad, q.grad, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
                )


def _net() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(20, 33),
        nn.GELU(),
        nn.LayerNorm(33),
        nn.Linear(33, 17),
        nn.ReLU(),
        nn.Linear(17, 5),
    )


def _batch(rows: int = 24, width: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, width, device="cuda"), torch.randint(5, (rows,), device="cuda")


@pytest.fixture
def pair() -> Iterator[Pair]:
    """SGD with momentum over a small net: parameters stay comparable."""
    made = Pair(_net(), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    yield made
    made.ours.close()


def test_one_graph_one_replay(pair):
    for _ in range(5):
        pair.step(*_batch())
    stats = pair.ours.stats()
    assert stats["plans"] == 1
    assert stats["cuda_graphs"] == 1
    assert stats["gate"] == "pass"
    explanation = pair.ours.explain()
    assert explanation.capture == "whole_step"
    assert explanation.graph_count == 1
    assert explanation.graph_break_count == 0
    (record,) = pair.ours.plans
    assert record.plan.stats.captures == 1
    assert record.plan.stats.replays == 4


def test_a_replay_is_one_launch(pair):
    """The profiler sees a graph launch and no kernel launched by the host besides the copies."""
    x, y = _batch()
    for _ in range(4):
        pair.ours(x, y)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        pair.ours(x, y)
        torch.cuda.synchronize()
    counts = {e.key: e.count for e in profile.key_averages()}
    assert counts.get("cudaGraphLaunch", 0) in (0, 1)  # 0 where CUPTI is not there
    assert counts.get("aten::addmm", 0) == 0
    assert counts.get("aten::mm", 0) == 0


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_schedule_needs_no_new_plan(optimizer):
    make = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9),
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    }[optimizer]
    pair = Pair(_net(), make)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in pair.optimizers]
    for _ in range(8):
        pair.step(*_batch())
        for schedule in schedules:
            schedule.step()
    assert pair.optimizers[0].param_groups[0]["lr"] == pair.optimizers[1].param_groups[0]["lr"]
    assert pair.ours.stats()["plans"] == 1
    (record,) = pair.ours.plans
    assert record.plan.stats.captures == 1
    pair.ours.close()


def test_three_shapes(pair):
    for rows in (24, 13, 7, 24, 7, 13, 24):
        pair.step(*_batch(rows))
    assert 1 <= pair.ours.stats()["plans"] <= 3


def test_train_and_eval_differ():
    """Dropout is off in eval(), on again in train(): each mode has its own plan."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.Dropout(0.9), nn.Linear(64, 5))
    pair = Pair(model, lambda p: torch.optim.SGD(p, lr=0.05))
    batch = _batch()
    losses = [pair.ours(*batch) for _ in range(4)]
    assert len({float(loss) for loss in losses}) == 4
    pair.models[1].load_state_dict(pair.models[0].state_dict())
    for m in pair.models:
        m.eval()
    for _ in range(4):
        pair.step(*batch)
    pair.models[0].train()
    state = copy.deepcopy(model.state_dict())
    masked = []
    for _ in range(3):
        model.load_state_dict(state)
        masked.append(float(pair.ours(*batch)))
    assert len(set(masked)) == 3
    pair.ours.close()


def test_batch_norm_statistics_freeze_in_eval():
    model = nn.Sequential(nn.Linear(20, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5))
    pair = Pair(model, lambda p: torch.optim.SGD(p, lr=0.05))
    for _ in range(4):
        pair.step(*_batch())
    for ours, theirs in zip(pair.models[0].buffers(), pair.models[1].buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    before = pair.models[0][1].running_mean.clone()
    for m in pair.models:
        m.eval()
    for _ in range(3):
        pair.step(*_batch())
    assert torch.equal(pair.models[0][1].running_mean, before)
    pair.ours.close()


def test_changed_requires_grad(pair):
    """Freeze, then un-freeze a layer: it stands still, then trains again."""
    for _ in range(3):
        pair.step(*_batch())
    for m in pair.models:
        m[0].requires_grad_(False)
        m[0].weight.grad = m[0].bias.grad = None
    still = pair.models[0][0].weight.detach().clone()
    for _ in range(3):
        pair.step(*_batch())
    assert torch.equal(pair.models[0][0].weight, still)
    for m in pair.models:
        m[0].requires_grad_(True)
    for _ in range(3):
        pair.step(*_batch())
    assert not torch.equal(pair.models[0][0].weight, still)


@pytest.mark.covers("B CUDA graph", "U4")
def test_a_hundred_replays_draw_a_hundred_masks():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).cuda()
    nn.init.zeros_(model[0].weight)
    nn.init.ones_(model[0].bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        out = model(x)
        out.square().mean().backward()
        optimizer.step()
        return out

    compiled = trainfuse.compile(step, backend="triton")
    x = torch.randn(64, 8, device="cuda")
    masks = {tuple((compiled(x) == 0).flatten().tolist()) for _ in range(102)}
    assert len(masks) == 102
    rate = sum(sum(mask) for mask in masks) / (102 * 512)
    assert abs(rate - 0.5) < 4 * (0.25 / (102 * 512)) ** 0.5 + 0.005
    assert compiled.stats()["cuda_graphs"] == 1
    # equal seeds, equal sequence: replays advance the generator like the ungraphed program
    torch.manual_seed(3)
    replayed = [compiled(x) == 0 for _ in range(3)]
    plain = trainfuse.compile(step, backend="triton", cuda_graph="off")
    plain(x)
    torch.manual_seed(3)
    for mask in replayed:
        assert torch.equal(plain(x) == 0, mask)
    compiled.close()
    plain.close()


@pytest.mark.covers("U5")
def test_kept_losses_keep_their_values(pair):
    losses, copies = [], []
    for _ in range(20):
        loss = pair.ours(*_batch())
        losses.append(loss)
        copies.append(loss.clone())
    assert torch.equal(torch.stack(losses), torch.stack(copies))
    assert len({float(loss) for loss in losses}) == 20


def test_weights_that_move_in_memory_are_captured_again(pair):
    for _ in range(3):
        pair.step(*_batch())
    for m in pair.models:
        state = {n: t.clone() + 0.01 for n, t in m.state_dict().items()}
        for p, t in zip(m.parameters(), state.values(), strict=True):
            p.data = t
    for _ in range(4):
        pair.step(*_batch())
    (record,) = pair.ours.plans
    assert record.plan.stats.captures == 2


def test_reduce_overhead_says_why_not():
    model = nn.Linear(4, 4).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x)[x[:, 0] > 0].sum()
        loss.backward()
        optimizer.step()
        return loss

    compiled = trainfuse.compile(step, mode="reduce-overhead")
    with pytest.raises(trainfuse.CaptureError):
        compiled(torch.randn(6, 4, device="cuda"))


def test_peak_memory_is_not_above_eager_s():
    """Reserved bytes of a training whose activations dominate, once it replays.

    Each runs where nothing else has been: blocks that earlier work left free count for nobody.
    """
    model = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(256, 256), nn.GELU())])
    batch = (torch.randn(16384, 256, device="cuda"), torch.randint(256, (16384,), device="cuda"))
    peaks = []
    for use in ("eager", "ours"):
        pair = Pair(copy.deepcopy(model), lambda p: torch.optim.SGD(p, lr=0.1))
        run = pair.ours if use == "ours" else pair.eager[1]
        gc.collect()
        torch.cuda.empty_cache()
        base = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        for _ in range(3):
            run(*batch)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            run(*batch)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_reserved() - base)
        pair.ours.close()
    assert peaks[1] <= 1.1 * peaks[0]
