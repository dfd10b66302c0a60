"""Regions: breaks are harmless, hooks fire, results stay differentiable, gradients are eager's."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trainfuse.capture.regions import Regions


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.bn = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(F.gelu(self.first(x)))
        return self.last(self.bn(h) + h)


class Breaking(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.gelu(self.first(x))
        if h.sum() > 0:
            h = h * 2
        return self.last(self.norm(h))


def regions(target, recorder) -> Regions:
    return Regions(target, recorder, max_plans=8, fullgraph=False, dynamic=None)


@pytest.mark.parametrize("kind", [Net, Breaking])
@pytest.mark.parametrize("training", [True, False])
def test_gradients_equal_eager(recorder, kind, training) -> None:
    ours = kind().train(training)
    theirs = copy.deepcopy(ours)
    compiled = regions(ours._call_impl, recorder)
    for rows in (6, 6, 3):
        x = torch.randn(rows, 8, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        out, expected = compiled(x), theirs(y)
        cotangent = torch.randn_like(out)
        out.backward(cotangent)
        expected.backward(cotangent)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(x.grad, y.grad)
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            if q.grad is None:
                assert p.grad is None
            else:
                torch.testing.assert_close(p.grad, q.grad)
    for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(a, b)
    kinds = [c.kind for c in recorder.captured]
    assert set(kinds) == {"forward", "backward"}


def test_parameter_and_module_hooks_fire(recorder) -> None:
    ours = Net()
    theirs = copy.deepcopy(ours)
    calls = []
    for model in (ours, theirs):
        model.first.weight.register_hook(lambda g: g * 3)
        model.register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(6, 8)
    regions(ours._call_impl, recorder)(x).sum().backward()
    theirs(x).sum().backward()
    assert len(calls) == 2
    torch.testing.assert_close(ours.first.weight.grad, theirs.first.weight.grad)


def test_a_hook_added_after_the_first_call_runs(recorder) -> None:
    ours = Net()
    compiled = regions(ours._call_impl, recorder)
    x = torch.randn(6, 8)
    compiled(x)
    calls = []
    ours.register_forward_hook(lambda *_: calls.append(1))
    compiled(x)
    assert calls == [1]


def test_no_grad_then_grad(recorder) -> None:
    ours = Net().eval()
    compiled = regions(ours._call_impl, recorder)
    x = torch.randn(6, 8)
    with torch.no_grad():
        assert not compiled(x).requires_grad
    assert compiled(x).requires_grad
    assert {c.kind for c in recorder.captured} == {"inference", "forward"}


def test_dropout_masks_agree_between_forward_and_backward(recorder) -> None:
    drop = nn.Dropout(0.4)
    compiled = regions(drop._call_impl, recorder)
    x = torch.randn(50, 40, requires_grad=True)
    first, second = compiled(x), compiled(x)
    assert not torch.equal(first == 0, second == 0)
    (grad,) = torch.autograd.grad(first, x, torch.ones_like(first))
    assert torch.equal(grad == 0, first == 0)
    assert abs((first == 0).float().mean().item() - 0.4) < 0.05


@pytest.mark.parametrize("scheduled", [False, True])
def test_the_target_s_optimizer_runs_as_it_is(recorder, scheduled) -> None:
    """Adam in fp64 is fp64: Dynamo would compute 1 - beta2 ** step in fp32, 1e-5 off."""

    def trained(compile_):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(40, dtype=torch.float64))
        optimizer = torch.optim.Adam([p], lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1) if scheduled else None
        before = dict(vars(optimizer))

        def step(x):
            optimizer.zero_grad()
            loss = (p * x).sin().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        compiled = compile_(step)
        for _ in range(3):
            compiled(torch.randn(40, dtype=torch.float64))
            if schedule is not None:
                schedule.step()
        assert vars(optimizer).get("step") is before.get("step")
        return p.detach()

    ours, eager = trained(lambda step: regions(step, recorder)), trained(lambda step: step)
    torch.testing.assert_close(ours, eager, rtol=1e-14, atol=1e-14)
