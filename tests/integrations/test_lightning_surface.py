"""Arguments, state, logging and the lines of `FusionCallback`."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning_helpers import BATCHES, Net, Recorder, fit, fresh, fusion, pl, pl_loggers, said

from trainfuse.errors import OptionError
from trainfuse.integrations import lightning_progress
from trainfuse.lightning import FusionCallback

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def test_arguments_are_json_and_typed() -> None:
    parameters = dict(inspect.signature(FusionCallback.__init__).parameters)
    parameters.pop("self")
    hints = typing.get_type_hints(FusionCallback.__init__)
    for name, parameter in parameters.items():
        assert parameter.kind is parameter.POSITIONAL_OR_KEYWORD, name
        assert name in hints
        json.dumps(parameter.default)
    first = FusionCallback(
        mode="reduce-overhead", verify=5, options={"max_plans": 3}, compare_steps=2
    )
    again = FusionCallback(**json.loads(json.dumps(first.arguments)))
    assert again.arguments == first.arguments
    assert set(first.arguments) == set(parameters)


@pytest.mark.parametrize(
    "arguments",
    [
        {"mode": "fastest"},
        {"verify": "sometimes"},
        {"options": {"max_plan": 3}},
        {"compare_steps": -1},
        {"options": {"guards": False}},  # a name that is no option
    ],
)
def test_bad_arguments_raise_at_once(arguments: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        FusionCallback(**arguments)


def test_state_is_small_plain_and_under_its_own_key() -> None:
    callback = fusion()
    assert callback.state_key == "trainfuse.FusionCallback"
    assert callback.state_dict() == {}
    fit(fresh(), callback)
    state = callback.state_dict()
    assert state["mode"] == "default"
    assert state["kind"] == "whole_step"
    assert state["gate"] == "pass"
    assert state["torch"] == torch.__version__
    assert len(json.dumps(state)) < 1000
    other = fusion()
    other.load_state_dict({**state, "version": 99, "new": None})
    assert other.state_dict()["version"] == 99


def test_one_summary_line_with_the_figures_of_the_report() -> None:
    callback = fusion(compare_steps=2)
    with said() as lines:
        fit(fresh(), callback, max_epochs=2)
    report = callback.report
    assert report.kind == "whole_step", report.reason
    assert report.plain_ms is not None
    assert report.fused_ms is not None
    assert lines == [report.line()]
    assert f"{report.fused_ms:.2f} ms a step" in lines[0]
    assert f"{report.plain_ms / report.fused_ms:.2f}x plain Lightning" in lines[0]
    assert f"{report.groups} groups fused" in lines[0]
    assert f"{report.aten_nodes} ATen" in lines[0]
    assert f"gate {report.gate}" in lines[0]


def test_comparing_steps_changes_no_result() -> None:
    ends = []
    for callbacks in ([], [fusion(compare_steps=3)]):
        module = fresh(optimizer=torch.optim.AdamW)
        recorder = Recorder()
        fit(module, recorder, *callbacks)
        ends.append((module.state_dict(), recorder.counters))
    assert ends[0][1] == ends[1][1]
    for key, value in ends[0][0].items():
        torch.testing.assert_close(ends[1][0][key], value, rtol=1e-4, atol=1e-5)


class Logs(Net):
    """Logs in every way that a captured step can."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log("step", loss, on_step=True, on_epoch=False)
        self.log("epoch", loss, False, on_step=False, on_epoch=True, batch_size=x.shape[0])
        self.log("most", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("number", 0.25)
        changed = loss.detach() * 1
        self.log("before", changed)
        changed += 1
        self.log_dict({"after": changed, "two": 2}, on_step=True, on_epoch=True)
        return {"loss": loss, "rows": x.shape[0]}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("hook", outputs["loss"] * outputs["rows"])


class Memory(pl_loggers.Logger):
    """Keeps what the Trainer hands to a logger."""

    name, version = "memory", "0"

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((int(step or 0), dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


@pytest.mark.covers("L6")
def test_every_way_of_logging() -> None:
    seen = {}
    for name, callbacks in {"plain": [], "fused": [fusion()]}.items():
        logger, recorder = Memory(), Recorder()
        fit(fresh(Logs), recorder, *callbacks, logger=logger, max_epochs=2)
        seen[name] = logger.rows, recorder.metrics
    assert callbacks[0].report.kind == "whole_step", callbacks[0].report.reason
    assert callbacks[0].report.plans == 1
    for a, b in zip(seen["fused"][0], seen["plain"][0], strict=True):
        assert a[0] == b[0]
        assert a[1] == pytest.approx(b[1], rel=1e-4)
    for a, b in zip(seen["fused"][1], seen["plain"][1], strict=True):
        assert a == pytest.approx(b, rel=1e-4)
        assert b["after"] == pytest.approx(b["before"] + 1)


def test_our_metrics_are_ours_by_name_and_only_on_request() -> None:
    logger = Memory()
    fit(fresh(), fusion(metrics=True), logger=logger, log_every_n_steps=4)
    ours = [(step, row) for step, row in logger.rows if any("trainfuse" in k for k in row)]
    assert [step for step, _ in ours] == list(range(4, BATCHES + 1, 4))
    assert ours[0][1] == {"trainfuse/plans": 1, "trainfuse/whole_step": 1}


def test_a_callback_of_the_loaded_tree() -> None:
    assert issubclass(FusionCallback, pl.Callback)
    assert FusionCallback.__module__ == "trainfuse.integrations.lightning"


SCRIPT = """
import sys, warnings
warnings.simplefilter("ignore")
import torch, pytorch_lightning as pl
from trainfuse.lightning import FusionCallback
assert "lightning.pytorch" not in sys.modules

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(3, 1)
    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

callback = FusionCallback(backend="eager", compare_steps=0)
trainer = pl.Trainer(accelerator="cpu", max_steps=3, logger=False, enable_checkpointing=False,
                     enable_progress_bar=False, enable_model_summary=False, callbacks=[callback])
trainer.fit(Net(), torch.utils.data.DataLoader(torch.randn(12, 3), batch_size=4))
print(callback.report.kind, callback.report.plans, trainer.global_step)
"""


def test_the_other_tree() -> None:
    pytest.importorskip("pytorch_lightning")
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["whole_step", "1", "3"]


class Reader(pl.Callback):
    """Reads the progress bar's values after batch 2, and once training has ended."""

    def __init__(self) -> None:
        self.conversions: list[int] = []
        self.read: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            self.read.append(dict(trainer.progress_bar_metrics))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.read.append(dict(trainer.progress_bar_metrics))


def test_progress_bar_values_reach_the_host_when_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number for each step is a wait for the GPU at each step; the numbers are Lightning's."""
    results = sys.modules[f"{pl.__name__}.trainer.connectors.logger_connector.result"]
    convert, count = results.convert_tensors_to_scalars, [0]

    def counted(value: Any) -> Any:
        count[0] += 1
        return convert(value)

    monkeypatch.setattr(results, "convert_tensors_to_scalars", counted)
    readers, counts = [], []
    for callbacks in ([], [fusion()]):
        count[0] = 0
        readers.append(Reader())
        trainer = fit(fresh(), *callbacks, readers[-1])
        counts.append(count[0])
        assert not isinstance(trainer._logger_connector, lightning_progress._Late)
        readers[-1].read.append(dict(trainer.progress_bar_metrics))
    assert readers[0].read == readers[1].read
    assert all(isinstance(v, float) for values in readers[1].read for v in values.values())
    assert len(readers[1].read[1]) == 2  # of the step and of the epoch
    assert counts[1] <= counts[0] - BATCHES + 3
