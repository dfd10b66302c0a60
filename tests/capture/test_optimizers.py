"""Updates are torch's own: the traced template, its state and its scalars against stock steps."""

from __future__ import annotations

import copy

import pytest
import torch

from autodiff.graph import Refusal
from trainfuse.capture.optimizers import UpdateHandle, admit_optimizer, handle_for
from trainfuse.capture.update_templates import UpdateTemplate

CASES = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "sgd-momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "sgd-nesterov": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    "sgd-maximize": (torch.optim.SGD, {"lr": 0.1, "maximize": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
    "adam-l2-amsgrad": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "adamw-fused-state": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
}


def apply_template(handle: UpdateHandle, index: int, grad: torch.Tensor) -> None:
    """One step of one parameter through the template, as a kernel would run it."""
    (bucket,) = handle.buckets([index], [grad.dtype])
    handle.before_step()
    template = bucket.template
    inputs = {r: grad if r == "grad" else handle.tensor(index, r) for r in template.roles}
    flat = [t.detach().reshape(-1) if t.dim() else t for t in inputs.values()]
    with torch.no_grad():
        for role, value in zip(template.written, template.gm(*flat), strict=True):
            target = handle.tensor(index, role)
            target.copy_(value.view_as(target))
    handle.after_step((index,))


@pytest.mark.parametrize("name", CASES)
def test_template_is_torchs_update(name: str) -> None:
    kind, options = CASES[name]
    ours = torch.nn.Parameter(torch.randn(5, 3))
    theirs, exact = (torch.nn.Parameter(ours.detach().clone()) for _ in range(2))
    exact.data = exact.data.double()
    optimizers = [kind([p], **options) for p in (ours, theirs, exact)]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in optimizers]
    handle = handle_for(optimizers[0])
    for _ in range(5):
        grad = torch.randn(5, 3)
        apply_template(handle, 0, grad)
        theirs.grad, exact.grad = grad.clone(), grad.double()
        for o in optimizers[1:]:
            o.step()
        optimizers[0]._opt_called = True
        for s in schedulers:
            s.step()
    error = (ours.double() - exact).abs().max()
    eager = (theirs.double() - exact).abs().max()
    assert error <= 2 * eager + 2e-7
    assert (exact - ours.detach()).abs().max() < 1e-4 < ours.detach().abs().max()
    ours_state = optimizers[0].state_dict()["state"][0] if optimizers[0].state else {}
    theirs_state = optimizers[1].state_dict()["state"].get(0, {})
    for key, value in theirs_state.items():
        if value is not None:
            torch.testing.assert_close(ours_state[key], value, atol=1e-6, rtol=1e-5)
            assert ours_state[key].device == value.device
            assert ours_state[key].dtype == value.dtype


@pytest.mark.covers("C5")
@pytest.mark.parametrize("name", ["sgd-momentum", "sgd-nesterov", "adam-l2-amsgrad", "adamw"])
def test_one_cycle_moves_betas_and_momentum(name: str) -> None:
    """OneCycleLR changes beta1, or the momentum, at every step: one template follows it."""
    kind, options = CASES[name]
    ours = torch.nn.Parameter(torch.randn(5, 3))
    theirs, exact = (torch.nn.Parameter(ours.detach().clone()) for _ in range(2))
    exact.data = exact.data.double()
    optimizers = [kind([p], **options) for p in (ours, theirs, exact)]
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=12) for o in optimizers
    ]
    handles = set()
    for _ in range(10):
        grad = torch.randn(5, 3)
        handle = handle_for(optimizers[0])
        handles.add(handle.id)
        apply_template(handle, 0, grad)
        theirs.grad, exact.grad = grad.clone(), grad.double()
        for o in optimizers[1:]:
            o.step()
        optimizers[0]._opt_called = True
        for s in schedulers:
            s.step()
    assert len(handles) == 1
    error = (ours.double() - exact).abs().max()
    eager = (theirs.double() - exact).abs().max()
    assert error <= 2 * eager + 2e-7


def test_eager_steps_and_loaded_state_are_seen() -> None:
    """A stock step in between, or load_state_dict, moves the device's step counter along."""
    param = torch.nn.Parameter(torch.randn(4))
    optimizer = torch.optim.AdamW([param], lr=0.1)
    handle = handle_for(optimizer)
    apply_template(handle, 0, torch.randn(4))
    saved = copy.deepcopy(optimizer.state_dict())
    param.grad = torch.randn(4)
    optimizer.step()
    handle.before_step()
    assert handle.tensor(0, "step").item() == 2
    optimizer.load_state_dict(saved)
    handle.before_step()
    assert handle.tensor(0, "step").item() == 1


def test_a_replaced_step_counter_is_seen() -> None:
    param = torch.nn.Parameter(torch.randn(4))
    optimizer = torch.optim.AdamW([param], lr=0.1)
    handle = handle_for(optimizer)
    apply_template(handle, 0, torch.randn(4))
    optimizer.state[param]["step"] = torch.tensor(7.0)
    handle.before_step()
    assert handle.tensor(0, "step").item() == 7
    apply_template(handle, 0, torch.randn(4))
    assert optimizer.state_dict()["state"][0]["step"] == 8


def test_changed_options_make_a_new_handle() -> None:
    param = torch.nn.Parameter(torch.randn(4))
    optimizer = torch.optim.AdamW([param], lr=0.1)
    first = handle_for(optimizer)
    optimizer.param_groups[0]["lr"] = 0.5
    assert handle_for(optimizer) is first
    optimizer.param_groups[0]["betas"] = (0.8, 0.9)
    assert handle_for(optimizer) is first, "betas are device scalars, as OneCycleLR moves them"
    optimizer.param_groups[0]["eps"] = 1e-6
    assert handle_for(optimizer) is not first


def test_equal_updates_are_traced_once() -> None:
    """Whatever parameters and schedules they have; another baked-in option is another update."""

    def template(**options: float) -> UpdateTemplate:
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.randn(4))], **options)
        (bucket,) = handle_for(optimizer).buckets([0], [torch.float32])
        return bucket.template

    first = template(lr=0.1, eps=1e-5)
    assert template(lr=0.2, eps=1e-5, betas=(0.7, 0.8)) is first
    assert template(lr=0.1, eps=1e-6) is not first
    # equal, as numbers
    assert template(lr=0.1, weight_decay=0.0) is not template(lr=0.1, weight_decay=-0.0)


@pytest.mark.parametrize(
    ("optimizer", "word"),
    [
        (lambda p: torch.optim.LBFGS([p]), "LBFGS"),
        (lambda p: torch.optim.SGD([p], lr=0.1, momentum=0.9, dampening=0.5), "dampening"),
        (lambda p: torch.optim.Adam([p], differentiable=True), "differentiable"),
    ],
)
def test_refusals_name_their_reason(optimizer, word: str) -> None:
    refusal = admit_optimizer(optimizer(torch.nn.Parameter(torch.randn(3))))
    assert isinstance(refusal, Refusal)
    assert word in refusal.reason


def test_a_users_step_hook_refuses() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.randn(3))], lr=0.1)
    handle_for(optimizer)
    assert isinstance(admit_optimizer(optimizer), UpdateHandle)
    optimizer.register_step_pre_hook(lambda *_: None)
    refusal = admit_optimizer(optimizer)
    assert isinstance(refusal, Refusal)
    assert "hook" in refusal.reason
