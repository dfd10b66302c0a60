"""Through the callback a fit is plain Lightning's: gradients, metrics, counters, checkpoints."""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_helpers import BATCHES, Net, Recorder, fit, fresh, fusion, loaders, pl, trainer_with
from torch.utils.data import DataLoader

from autodiff.compare import GradientReport, judge
from trainfuse.testing.steps import clones

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

EXAMPLES = Path(__file__).parents[2] / "examples"


def load_example() -> Any:
    """The module examples/lightning_gpt.py."""
    spec = importlib.util.spec_from_file_location("lightning_gpt", EXAMPLES / "lightning_gpt.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Oracle(pl.Callback):
    """At each batch, computes the gradients from the same weights eagerly, in fp32 and fp64."""

    def __init__(self, clip: float) -> None:
        self.clip = clip
        self.report: list[Any] = []
        self.moved = 0.0

    def gradients(self, module: Any, batch: Any, dtype: torch.dtype) -> dict[str, Any]:
        plain = copy.deepcopy(module).to(dtype)
        loss, _ = plain.loss(batch)
        grads = torch.autograd.grad(loss, list(plain.parameters()))
        for param, grad in zip(plain.parameters(), grads, strict=True):
            param.grad = grad
        torch.nn.utils.clip_grad_norm_(plain.parameters(), self.clip)
        return clones((n, p.grad) for n, p in plain.named_parameters())

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.eager = self.gradients(pl_module, batch, torch.float32)
        self.fp64 = self.gradients(pl_module, batch, torch.float64)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        ours = clones((n, p.grad) for n, p in pl_module.named_parameters())
        self.report += judge(ours, self.eager, self.fp64, k=2.0, step=trainer.global_step)


def test_fifty_steps_of_the_example_equal_plain_lightning(tmp_path: Path) -> None:
    example = load_example()
    text = example.Text(length=16)
    runs = {}
    for name in ("plain", "fused"):
        torch.manual_seed(0)
        model = example.GPT(len(text.alphabet), length=16, width=32, layers=1, heads=2, lr=1e-2)
        oracle, recorder = Oracle(clip=1.0), Recorder()
        callback = fusion(backend=None)
        trainer = trainer_with(
            oracle,
            recorder,
            *([callback] if name == "fused" else []),
            max_steps=50,
            max_epochs=None,
            gradient_clip_val=1.0,
            limit_val_batches=2,
            val_check_interval=25,
        )
        batches = DataLoader(text, batch_size=4)
        before = [p.detach().clone() for p in model.parameters()]
        trainer.fit(model, batches, batches)
        moved = max(
            float((p - q).norm() / q.norm().clamp(min=1e-3))
            for p, q in zip(model.parameters(), before, strict=True)
        )
        trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
        runs[name] = recorder
    assert callback.report is not None
    assert callback.report.kind == "whole_step", callback.report.reason
    assert callback.report.plans == 1
    assert len(recorder.counters) == 50
    # 800 ratios of errors, of tensors as small as 32 elements: a few may pass 2 by luck, none far
    report = GradientReport(tuple(oracle.report), 3.0, moved).check()
    assert sum(e.ratio > 2.0 for e in report.errors) <= len(report.errors) // 100

    plain, fused = runs["plain"], runs["fused"]
    assert fused.counters == plain.counters
    assert fused.rates == plain.rates
    assert fused.metrics[-1].keys() == plain.metrics[-1].keys()
    for ours, theirs in zip(fused.metrics, plain.metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-3, abs=0.01)
    saved = {n: torch.load(tmp_path / f"{n}.ckpt", weights_only=True) for n in runs}
    assert saved["fused"]["state_dict"].keys() == saved["plain"]["state_dict"].keys()
    for part in ("optimizer_states", "lr_schedulers", "loops"):
        assert _shape(saved["fused"][part]) == _shape(saved["plain"][part])
    example.GPT.load_from_checkpoint(tmp_path / "fused.ckpt", strict=True)


def _shape(tree: Any) -> Any:
    """A tree with tensors replaced by their type and shape, and floats by their type."""
    if isinstance(tree, dict):
        return {key: _shape(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_shape(value) for value in tree]
    if isinstance(tree, torch.Tensor):
        return tree.dtype, tuple(tree.shape)
    return type(tree) if isinstance(tree, float) else tree


@pytest.mark.parametrize(
    ("arguments", "optimizer"),
    [
        ({}, torch.optim.SGD),
        ({"max_epochs": 2}, torch.optim.AdamW),
        ({"gradient_clip_val": 0.05}, torch.optim.Adam),
        ({"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, torch.optim.SGD),
        ({"precision": "bf16-mixed"}, torch.optim.SGD),
        ({"precision": "bf16-mixed", "gradient_clip_val": 0.05}, torch.optim.AdamW),
    ],
)
def test_a_whole_step_leaves_what_plain_lightning_leaves(
    arguments: dict[str, Any], optimizer: type[torch.optim.Optimizer]
) -> None:
    seen = {}
    for name in ("plain", "fused"):
        module, recorder, callback = fresh(optimizer=optimizer), Recorder(), fusion()
        trainer = fit(module, recorder, *([callback] if name == "fused" else []), **arguments)
        seen[name] = recorder, module, trainer
    assert callback.report is not None
    assert callback.report.kind == "whole_step", callback.report.reason
    assert callback.report.plans == 1
    (ours, fused, t1), (theirs, plain, t2) = seen["fused"], seen["plain"]
    assert len(ours.gradients) == BATCHES * arguments.get("max_epochs", 1)
    assert ours.counters == theirs.counters
    assert ours.rates == theirs.rates
    # ATen runs the same kernels in the same order here; only sums of casts may differ
    loose = 0.05 if "precision" in arguments else 1e-4
    for a, b in zip(ours.gradients, theirs.gradients, strict=True):
        for key, value in b.items():
            torch.testing.assert_close(a[key], value, rtol=loose, atol=loose * 0.1)
    for a, b in zip(ours.metrics, theirs.metrics, strict=True):
        assert a == pytest.approx(b, rel=loose)
    for a, b in zip(ours.outputs, theirs.outputs, strict=True):
        assert a.keys() == b.keys()
        assert not a["loss"].requires_grad
        torch.testing.assert_close(a["loss"], b["loss"], rtol=loose, atol=loose)
    for (key, a), b in zip(fused.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=loose, atol=loose * 0.1, msg=key)
    assert t1.callback_metrics.keys() == t2.callback_metrics.keys()


def test_outputs_keep_their_extra_keys() -> None:
    class Extra(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            prediction = self(batch[0])
            loss = (prediction - batch[1]).square().mean()
            return {"prediction": prediction, "loss": loss, "note": "kept"}

    recorder, callback = Recorder(), fusion()
    fit(fresh(Extra), recorder, callback, limit_train_batches=2)
    assert callback.report is not None
    assert callback.report.kind == "whole_step", callback.report.reason
    first = recorder.outputs[0]
    assert list(first) == ["loss", "prediction", "note"]
    assert first["note"] == "kept"
    plain = fresh(Extra)
    batch = next(iter(loaders()[0]))
    expected = plain.training_step(batch, 0)
    torch.testing.assert_close(first["prediction"], expected["prediction"].detach())
    # the second batch must not have written into what the first returned
    torch.testing.assert_close(first["loss"], expected["loss"].detach())


def test_resume_from_a_checkpoint_of_either_kind(tmp_path: Path) -> None:
    path = tmp_path / "half.ckpt"
    fit(fresh(), fusion(), max_epochs=1).save_checkpoint(path)
    checkpoint = torch.load(path, weights_only=True)
    state = checkpoint["callbacks"]["trainfuse.FusionCallback"]
    assert state["kind"] == "whole_step"
    state["from_the_future"] = {"unknown": [1, 2]}
    torch.save(checkpoint, path)
    ends = {}
    for name, callbacks in {"plain": [], "fused": [fusion()]}.items():
        module = fresh()
        trainer = fit(module, *callbacks, max_epochs=2, ckpt_path=str(path))
        ends[name] = module.state_dict()
        assert trainer.global_step == 2 * BATCHES
    for key, value in ends["plain"].items():
        torch.testing.assert_close(ends["fused"][key], value)


def test_ragged_last_batch_and_validation_in_between() -> None:
    seen = {}
    for name in ("plain", "fused"):
        module, recorder, callback = fresh(), Recorder(), fusion()
        trainer = trainer_with(
            recorder, *([callback] if name == "fused" else []), max_epochs=2, val_check_interval=2
        )
        trainer.fit(module, *loaders(rows=4 * 4 + 3))
        metrics = {k: float(v) for k, v in trainer.callback_metrics.items()}
        seen[name] = recorder, module, metrics
    assert callback.report is not None
    assert callback.report.kind == "whole_step", callback.report.reason
    assert callback.report.plans <= 2
    (ours, fused, m1), (theirs, plain, m2) = seen["fused"], seen["plain"]
    assert ours.counters == theirs.counters
    assert m1 == pytest.approx(m2, rel=1e-4)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(fused.state_dict()[key], value, rtol=1e-4, atol=1e-5)
