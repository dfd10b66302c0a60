"""What keeps a step from being whole, or from being compiled at all: one line, right results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning_helpers import BATCHES, Net, Recorder, fit, fresh, fusion, pl, said

from trainfuse.errors import CaptureError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


class ScalesGradients(Net):
    """Overrides a hook between the backward and the update."""

    calls = 0

    def on_after_backward(self) -> None:
        type(self).calls += 1
        for p in self.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)


class OwnClipping(Net):
    def configure_gradient_clipping(self, optimizer: Any, **kwargs: Any) -> None:
        for group in optimizer.param_groups:
            torch.nn.utils.clip_grad_value_(group["params"], 1e-3)


class OwnZeroGrad(Net):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class OwnStep(Net):
    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        optimizer.step(closure=optimizer_closure)
        with torch.no_grad():
            self.head.bias.clamp_(-0.1, 0.1)


class HookedParameter(Net):
    def on_fit_start(self) -> None:
        self.head.weight.register_hook(lambda gradient: gradient * 2)


class ReadsTrainer(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.mse_loss(self(batch[0]), batch[1]) * (1 + self.global_step)
        self.log("epoch", float(self.current_epoch))
        self.log("loss", loss)
        return loss


class UsesBatchIndex(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.mse_loss(self(batch[0]), batch[1]) * (1 + batch_idx)
        self.log("loss", loss)
        if batch_idx % 2 == 0:
            self.log("even", 2 * loss)
        return loss


class SkipsBatches(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else F.mse_loss(self(batch[0]), batch[1])


class BranchesOnData(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.mse_loss(self(batch[0]), batch[1])
        if loss.item() > 0.9:
            loss = 2 * loss
        self.log("loss", loss)
        return loss


class LogsGraph(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, enable_graph=True)
        return loss


class Watcher(pl.Callback):
    """A callback between the phases."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for p in pl_module.parameters():
            p.grad.mul_(0.5)


def compare(
    kind: type[Any], make: Any = fusion, extra: Any = (), **arguments: Any
) -> tuple[Any, list[str]]:
    """Train plainly and through a callback; assert equal; returns the callback and its lines."""
    ends = {}
    callback = make()
    optimizer = arguments.pop("optimizer", torch.optim.SGD)
    for name in ("plain", "fused"):
        module, recorder = fresh(kind, optimizer=optimizer), Recorder()
        callbacks = [recorder, *(c() for c in extra), *([callback] if name == "fused" else [])]
        with said() as lines:
            trainer = fit(module, *callbacks, **arguments)
        ends[name] = module, recorder, trainer
    (fused, ours, _), (plain, theirs, _) = ends["fused"], ends["plain"]
    assert ours.counters == theirs.counters
    for a, b in zip(ours.gradients, theirs.gradients, strict=True):
        for key, value in b.items():
            torch.testing.assert_close(a[key], value, rtol=1e-4, atol=1e-5, msg=key)
    for a, b in zip(ours.metrics, theirs.metrics, strict=True):
        assert a == pytest.approx(b, rel=1e-4)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(fused.state_dict()[key], value, rtol=1e-4, atol=1e-5, msg=key)
    return callback, lines


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (ScalesGradients, "ScalesGradients overrides on_after_backward"),
        (OwnClipping, "OwnClipping overrides configure_gradient_clipping"),
        (OwnZeroGrad, "OwnZeroGrad overrides optimizer_zero_grad"),
        (OwnStep, "OwnStep overrides optimizer_step"),
        (HookedParameter, "gradient hook"),
        (ReadsTrainer, "training_step reads or changes the Trainer (test_lightning_regions.py:"),
        (UsesBatchIndex, "batch_idx"),
        (SkipsBatches, "training_step returned no loss"),
        (BranchesOnData, "test_lightning_regions.py:"),
        (LogsGraph, "enable_graph=True"),
    ],
)
def test_what_splits_a_step(kind: type[Any], reason: str) -> None:
    callback, lines = compare(kind, max_epochs=1)
    assert callback.report.kind == "regions"
    assert reason in callback.report.reason
    assert callback.report.plans >= 1
    first = [line for line in lines if line.startswith("training runs")]
    assert first == [f"training runs as regions: {callback.report.reason}"]


def test_an_overridden_hook_runs_once_a_step() -> None:
    ScalesGradients.calls = 0
    fit(fresh(ScalesGradients), fusion())
    assert ScalesGradients.calls == BATCHES


def test_a_callback_between_the_phases_splits_the_step() -> None:
    callback, _ = compare(Net, extra=[Watcher])
    assert callback.report.kind == "regions"
    assert callback.report.reason == "Watcher overrides on_before_optimizer_step"


def test_an_unsupported_optimizer_keeps_its_own_step() -> None:
    callback, _ = compare(Net, optimizer=torch.optim.Adadelta)
    assert callback.report.kind == "regions"
    assert "Adadelta" in callback.report.reason


def test_accumulation_runs_as_regions() -> None:
    callback, _ = compare(Net, accumulate_grad_batches=3, gradient_clip_val=0.1)
    assert callback.report.kind == "regions"
    assert "accumulated over 3 batches" in callback.report.reason


def test_accumulation_that_a_callback_starts_later() -> None:
    scheduler = pl.callbacks.GradientAccumulationScheduler
    callback, _ = compare(Net, extra=[lambda: scheduler({1: 2})], max_epochs=3)
    assert callback.report.kind == "whole_step"


class Manual(Net):
    """Optimizes manually, toggling."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.toggle_optimizer(optimizer)
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)


class HalfCompiled(Net):
    """Has a submodule under torch.compile."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.head = torch.compile(self.head, backend="eager")


@pytest.mark.parametrize(
    ("kind", "arguments", "reason"),
    [
        (Manual, {}, "the module optimizes manually"),
        (HalfCompiled, {}, "head is compiled by torch.compile already"),
        (Net, {"precision": "64-true"}, "precision is 64-true"),
        (Net, {"detect_anomaly": True}, "detect_anomaly"),
    ],
)
def test_what_runs_as_plain_lightning(
    kind: type[Any], arguments: dict[str, Any], reason: str
) -> None:
    callback, lines = compare(kind, **arguments)
    assert callback.report.kind == "plain"
    assert reason in callback.report.reason
    assert callback.report.plans == 0
    assert lines == [f"training runs as plain Lightning: {callback.report.reason}"]


def test_a_strategy_of_ones_own_is_left_alone() -> None:
    class Own(pl.strategies.SingleDeviceStrategy):
        pass

    callback, lines = compare(Net, strategy=Own(device="cpu"), accelerator="auto")
    assert callback.report.kind == "plain"
    assert lines == [
        "training runs as plain Lightning: the strategy is Own; only one device is supported"
    ]


class Thaws(pl.callbacks.BaseFinetuning):
    """Trains the head alone for an epoch, then the rest too, as a new parameter group."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net, optimizer, lr=0.02)


class HeadFirst(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def test_finetuning_that_adds_parameters() -> None:
    callback, _ = compare(HeadFirst, extra=[Thaws], max_epochs=3)
    assert callback.report.kind == "whole_step", callback.report.reason


def test_a_module_from_torch_compile_is_left_alone() -> None:
    module = torch.compile(fresh(), backend="eager")
    callback = fusion()
    with said() as lines:
        fit(module, callback)
    assert callback.report.plans == 0
    assert lines == [
        "training runs as plain Lightning: the module is compiled by torch.compile already"
    ]


@pytest.mark.parametrize(
    ("kind", "arguments"), [(Manual, {}), (Net, {"precision": "64-true"}), (OwnStep, {})]
)
def test_strict_raises_instead(kind: type[Any], arguments: dict[str, Any]) -> None:
    module = fresh(kind)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    with pytest.raises(CaptureError):
        fit(module, fusion(strict=True), **arguments)
    for key, value in module.state_dict().items():
        assert torch.equal(value, before[key].to(value.dtype))
