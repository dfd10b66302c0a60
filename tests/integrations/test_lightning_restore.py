"""The module and the Trainer are left as they were found, whatever happened in between."""

from __future__ import annotations

import copy
import io
import pickle
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning_helpers import BATCHES, Net, fit, fresh, fusion, loaders, pl, said, trainer_with

from trainfuse.integrations.lightning_loop import FusedLoop

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

LIGHTNINGS_OWN = {"_current_fx_name", "_device", "_metric_attributes"}
"""Attributes that Lightning itself writes during a fit."""


class Snapshots(pl.Callback):
    """What the module looked like when the fit began, and at each batch."""

    def __init__(self, at_batch: Callable[[Any], None] | None = None) -> None:
        self.at_batch = at_batch
        self.seen = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.before = dict(vars(pl_module))
        self.names = names(pl_module)
        self.loop = dict(vars(trainer.fit_loop.epoch_loop.automatic_optimization))

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.check(trainer, pl_module)
        self.seen += 1
        if self.at_batch is not None:
            self.at_batch(pl_module)

    def check(self, trainer: Any, module: Any) -> None:
        """Assert that the module's own attributes, names and keys are the snapshot's."""
        now = vars(module)
        assert now.keys() - LIGHTNINGS_OWN == self.before.keys() - LIGHTNINGS_OWN
        for key, value in self.before.items():
            if key not in LIGHTNINGS_OWN:
                assert now[key] is value, key
        assert names(module) == self.names

    def check_loop(self, trainer: Any) -> None:
        """Assert that the optimization loop has its own methods again."""
        loop = trainer.fit_loop.epoch_loop.automatic_optimization
        assert vars(loop).keys() == self.loop.keys()


def names(module: Any) -> tuple[list[str], ...]:
    """Every name that a checkpoint, an EMA or a summary goes by."""
    return (
        [n for n, _ in module.named_parameters()],
        [n for n, _ in module.named_buffers()],
        [f"{n} {type(m).__name__}" for n, m in module.named_modules()],
        list(module.state_dict()),
    )


class FailsAt(Net):
    """Raises in training_step when told to."""

    failing = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss)
        if self.failing:
            raise RuntimeError("planned")
        return loss


class FailSwitch(pl.Callback):
    """Lets the third batch fail: inside the step, or by Ctrl-C around it."""

    def __init__(self, interrupt: bool = False) -> None:
        self.interrupt = interrupt

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 2 and self.interrupt:
            raise KeyboardInterrupt
        if batch_idx == 2:
            type(pl_module).failing = True


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Lightning ignores Ctrl-C from the first one on: give the test process its handler back."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def test_nothing_is_on_the_module_between_batches_or_after() -> None:
    module, snapshots, callback = fresh(), Snapshots(), fusion()
    trainer = fit(module, snapshots, callback, max_epochs=2)
    assert callback.report.kind == "whole_step", callback.report.reason
    assert snapshots.seen == 2 * BATCHES
    snapshots.check(trainer, module)
    snapshots.check_loop(trainer)
    assert "step" not in vars(trainer.optimizers[0]) or not hasattr(
        trainer.optimizers[0].step, "__wrapped_by_trainfuse__"
    )
    fresh().load_state_dict(module.state_dict(), strict=True)


@pytest.mark.covers("L10")
def test_copies_and_pickles_during_a_fit_are_plain() -> None:
    copies: list[Any] = []

    def take(module: Any) -> None:
        copies.append(copy.deepcopy(module))
        buffer = io.BytesIO()
        trainer, module._trainer = module._trainer, None
        pickle.dump(module, buffer)
        module._trainer = trainer
        copies.append(pickle.loads(buffer.getvalue()))

    module, callback = fresh(), fusion()
    fit(module, Snapshots(take), callback, limit_train_batches=2)
    assert callback.report.kind == "whole_step", callback.report.reason
    assert len(copies) == 4
    for made in copies:
        assert type(made) is Net
        assert not vars(made).keys() & {"log", "log_dict", "training_step", "_compiled_call_impl"}
        assert names(made) == names(module)
        made.net[0].weight.data.zero_()
    assert float(module.net[0].weight.detach().abs().sum()) > 0


@pytest.mark.parametrize("kind", ["raise", "ctrl-c"])
def test_an_error_at_step_three(kind: str, tmp_path: Path, interrupts: None) -> None:
    FailsAt.failing = False
    module, snapshots, callback = fresh(FailsAt), Snapshots(), fusion()
    saver = pl.callbacks.OnExceptionCheckpoint(dirpath=tmp_path)
    trainer = trainer_with(
        snapshots,
        FailSwitch(interrupt=kind == "ctrl-c"),
        callback,
        saver,
        enable_checkpointing=True,
        default_root_dir=tmp_path,
    )
    expected = SystemExit if kind == "ctrl-c" else RuntimeError
    try:
        with pytest.raises(expected, match="planned" if kind == "raise" else None):
            trainer.fit(module, *loaders())
    finally:
        FailsAt.failing = False
    assert snapshots.seen == 2
    assert trainer.global_step == 2
    snapshots.check(trainer, module)
    snapshots.check_loop(trainer)
    callback.on_exception(trainer, module, RuntimeError())
    callback.teardown(trainer, module, "fit")
    assert callback.report.plans >= 1

    # the failed batch's forward has moved the running statistics, as it does without us
    plain = fresh(FailsAt)
    with pytest.raises(expected):
        fit(plain, FailSwitch(interrupt=kind == "ctrl-c"))
    FailsAt.failing = False
    saved = torch.load(tmp_path / "on_exception.ckpt", weights_only=True)
    fresh(FailsAt).load_state_dict(saved["state_dict"], strict=True)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(saved["state_dict"][key], value)

    fit(module, callback)
    assert callback.report.kind == "whole_step"


def test_ctrl_c_inside_the_compiled_step(monkeypatch: pytest.MonkeyPatch, interrupts: None) -> None:
    module, snapshots, callback = fresh(), Snapshots(), fusion()
    compiled = FusedLoop._compiled

    def interrupted(self: FusedLoop, optimizer: Any) -> Any:
        step = compiled(self, optimizer)

        def call(*args: Any) -> Any:
            if snapshots.seen == 2:
                assert "log" in vars(module)
                raise KeyboardInterrupt
            return step(*args)

        return call

    monkeypatch.setattr(FusedLoop, "_compiled", interrupted)
    trainer = trainer_with(snapshots, callback, max_epochs=1)
    with pytest.raises(SystemExit):
        trainer.fit(module, *loaders())
    assert trainer.global_step == 2
    progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer
    assert progress.step.total.ready == 3
    snapshots.check(trainer, module)
    snapshots.check_loop(trainer)


def test_sanity_check_validation_and_test_compile_nothing() -> None:
    module, callback = fresh(), fusion()
    plans: list[tuple[str, int]] = []

    class Counts(pl.Callback):
        def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
            plans.append(("sanity", callback.report.plans))

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            plans.append(("train", callback.report.plans))

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            plans.append(("validation", callback.report.plans))

    trainer = trainer_with(callback, Counts(), max_epochs=2, num_sanity_val_steps=2)
    trainer.fit(module, *loaders())
    assert plans[0] == ("validation", 0)
    assert plans[1] == ("sanity", 0)
    assert {count for _, count in plans[2:]} == {1}
    with said() as lines:
        (result,) = trainer.validate(module, loaders()[1], verbose=False)
    assert lines == []
    plain = fresh()
    plain.load_state_dict(module.state_dict())
    (expected,) = trainer_with().validate(plain, loaders()[1], verbose=False)
    assert result == expected


def test_a_second_fit_starts_afresh() -> None:
    module, callback = fresh(), fusion()
    fit(module, callback)
    first = callback.report
    fit(module, callback, precision="64-true")
    assert callback.report.kind == "plain"
    assert first.kind == "whole_step"
    module.float()
    fit(module, callback)
    assert callback.report.kind == "whole_step"
    assert callback.report.plans == 1
