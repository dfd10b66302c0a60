"""How much of a Lightning step can be compiled: all of it, the forward and backward, or nothing."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from trainfuse.integrations.lightning_tree import part

Kind = Literal["whole_step", "regions", "plain"]

CALLBACK_HOOKS = (
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
"""What the Trainer calls on callbacks between the forward and the end of the update."""

MODULE_HOOKS = (
    *CALLBACK_HOOKS,
    "backward",
    "manual_backward",
    "clip_gradients",
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
)
"""The same on the module, and the methods that do the work in between."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a training step runs, and why not better (None for a whole step)."""

    kind: Kind
    reason: str | None


def decide(trainer: Any, module: Any) -> Verdict:
    """Judge what the Trainer was asked for. Called in `on_fit_start`, when all is set up."""
    for reason in _against_compiling(trainer, module):
        return Verdict("plain", reason)
    for reason in _against_whole_step(trainer, module):
        return Verdict("regions", reason)
    return Verdict("whole_step", None)


def unsupported(trainer: Any, module: Any) -> str | None:
    """Why nothing is compiled, as far as `setup` can know; None if nothing forbids it."""
    return next(_against_compiling(trainer, module), None)


def _against_compiling(trainer: Any, module: Any) -> Iterator[str]:
    if not module.automatic_optimization:
        yield "the module optimizes manually"
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    if type(loop) is not part(trainer, "loops.optimization.automatic")._AutomaticOptimization:
        yield f"the optimization loop is {type(loop).__name__}"
    strategy = trainer.strategy
    if type(strategy) is not part(trainer, "strategies").SingleDeviceStrategy:
        yield f"the strategy is {type(strategy).__name__}; only one device is supported"
    elif strategy.root_device.type not in ("cpu", "cuda"):
        yield f"the device is {strategy.root_device}"
    elif strategy.model is not None and strategy.model is not module:
        yield f"the module is wrapped in {type(strategy.model).__name__}"
    yield from _against_precision(trainer)
    yield from _already_compiled(module)
    if trainer._detect_anomaly:
        yield "detect_anomaly needs autograd's own engine"
    if len(trainer.optimizers) > 1:
        yield f"there are {len(trainer.optimizers)} optimizers"
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        yield "training_step takes the data loader's iterator"


def _against_precision(trainer: Any) -> Iterator[str]:
    plugins = part(trainer, "plugins.precision")
    plugin = trainer.precision_plugin
    mixed = type(plugin) is plugins.MixedPrecision and plugin.precision == "bf16-mixed"
    if not mixed and type(plugin) is not plugins.Precision:
        kind = type(plugin).__name__
        yield f"precision is {plugin.precision} ({kind}), not 32-true or bf16-mixed"


def _already_compiled(module: Any) -> Iterator[str]:
    if getattr(module, "_compiler_ctx", None) is not None:
        yield "the module is compiled by torch.compile already"
    for name, child in module.named_modules():
        if hasattr(child, "_orig_mod") or child.__dict__.get("_compiled_call_impl") is not None:
            yield f"{name or 'the module'} is compiled by torch.compile already"


def _against_whole_step(trainer: Any, module: Any) -> Iterator[str]:
    if trainer.accumulate_grad_batches != 1:
        yield f"gradients are accumulated over {trainer.accumulate_grad_batches} batches"
    root = part(trainer, "core").LightningModule
    for hook in MODULE_HOOKS:
        if overridden(module, root, hook):
            yield f"{type(module).__name__} overrides {hook}"
    base = part(trainer, "callbacks").Callback
    for callback in trainer.callbacks:
        for hook in CALLBACK_HOOKS:
            if overridden(callback, base, hook):
                yield f"{type(callback).__name__} overrides {hook}"


def overridden(instance: object, base: type, name: str) -> bool:
    """True if the instance's method is not the base's own; wrapped and assigned ones count."""
    return name in vars(instance) or getattr(type(instance), name) is not getattr(base, name)


def cuda(trainer: Any) -> torch.device | None:
    """The GPU that the Trainer trains on, or None."""
    device = trainer.strategy.root_device
    return device if device.type == "cuda" else None
