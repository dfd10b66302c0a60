"""Lightning's training step, rebuilt as one function, and `self.log` that survives capture.

Lightning runs `training_step`, `zero_grad` and `backward` in a closure inside `optimizer.step`,
with hooks in between. When nobody overrides them, the same work is `lightning_step` below, which
trainfuse captures whole. Logging is Python that no graph holds: for the time of a call `self.log`
writes to a tape that the step returns, and the real `self.log` is called with it afterwards.
Nothing is synchronised.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Entry = tuple[int, str, tuple[Any, ...], dict[str, Any]]
"""Index of the LightningModule that logged, "log" or "log_dict", and the call's arguments."""


GATE_REASONS = (
    "training_step reads or changes the Trainer",
    "training_step logs with enable_graph=True",
    "training_step returned no loss",
)
"""What breaks the graph below: a whole step is refused for it, regions are split by it."""


@torch.compiler.disable(reason=GATE_REASONS[0])
def _reads_trainer(name: str) -> None:
    """Called when an attribute of the Trainer is used while tracing."""


@torch.compiler.disable(reason=GATE_REASONS[1])
def _logs_graph() -> None:
    """Called when a logged value must keep the graph that a whole step doesn't have."""


@torch.compiler.disable(reason=GATE_REASONS[2])
def _no_loss() -> None:
    """Called when Lightning would skip the batch."""


class TrainerGate:
    """Stands for `module.trainer` while a whole step is traced, and refuses to be used.

    What is read from the Trainer changes from step to step and would be baked in. Outside tracing
    (the eager rescue runs the user's code itself) it is the Trainer. It shows no `__dict__`: who
    walks the module's attributes must not meet the Trainer's optimizers.
    """

    __slots__ = ("_real",)

    def __init__(self, trainer: Any) -> None:
        object.__setattr__(self, "_real", trainer)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if torch.compiler.is_compiling():
            _reads_trainer(name)
        return getattr(self._real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if torch.compiler.is_compiling():
            _reads_trainer(name)
        setattr(self._real, name, value)


def _kept(value: Any) -> Any:
    """The value as of now: later in-place changes must not show in what is logged."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _kept(item) for key, item in value.items()}
    return value


@dataclass(slots=True)
class Tape:
    """Collects `self.log` and `self.log_dict` calls in the order they are made.

    whole: refuse values that keep their graph, since a whole step's graph is gone when it returns.
    """

    whole: bool
    entries: list[Entry] = field(default_factory=list)

    def recorder(self, index: int, method: str) -> Callable[..., None]:
        """A function to be called instead of `method` of LightningModule number `index`."""
        entries, whole = self.entries, self.whole

        def record(*args: Any, **kwargs: Any) -> None:
            if kwargs.get("enable_graph"):
                if whole:
                    _logs_graph()
                entries.append((index, method, args, kwargs))
                return
            kept = {key: _kept(value) for key, value in kwargs.items()}
            entries.append((index, method, tuple(_kept(arg) for arg in args), kept))

        return record


class LogCapture:
    """Replaces logging on a module and the LightningModules in it, for the time of a call.

    gate: what stands for their trainer meanwhile: when its attributes are read, regions split there
    and a whole step is refused. Nothing of this is on the module between calls, so that copies and
    pickles of it are plain.
    """

    def __init__(self, modules: Sequence[Any], tape: Tape, gate: TrainerGate) -> None:
        self.tape = tape
        self._modules = tuple(modules)
        self._patches: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for index, module in enumerate(modules):
            attributes: dict[str, Any] = {
                method: tape.recorder(index, method) for method in ("log", "log_dict")
            }
            attributes["_trainer"] = gate
            self._patches.append((vars(module), attributes))

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Patch, and put everything back on the way out, whatever happens."""
        saved = [
            {name: target[name] for name in attributes if name in target}
            for target, attributes in self._patches
        ]
        self.tape.entries.clear()
        try:
            for target, attributes in self._patches:
                target.update(attributes)
            yield
        finally:
            for (target, attributes), old in zip(self._patches, saved, strict=True):
                for name in attributes:
                    if name not in old:
                        target.pop(name, None)
                target.update(old)

    def replay(self, entries: Sequence[Entry]) -> None:
        """Call the real `self.log` as `training_step` would have."""
        for index, method, args, kwargs in entries:
            module = self._modules[index]
            previous = module._current_fx_name
            module._current_fx_name = "training_step"
            try:
                getattr(module, method)(*args, **kwargs)
            finally:
                module._current_fx_name = previous


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What the rebuilt step bakes in; when one of these changes it is rebuilt.

    optimizer: identity and number of parameters of each group (fine-tuning adds groups).
    clip: None, or ("norm" | "value", limit). autocast: device type for bf16 autocast, or None.
    """

    optimizer: tuple[int, ...]
    clip: tuple[str, float] | None
    autocast: str | None


def facts_of(trainer: Any, optimizer: Any) -> StepFacts:
    """Read the facts of the coming step: plain attribute reads, called before every step."""
    limit = trainer.gradient_clip_val
    clip = None
    if limit is not None and limit > 0:
        clip = (str(getattr(trainer.gradient_clip_algorithm, "value", "norm")), float(limit))
    return StepFacts(
        optimizer=(id(optimizer), *(len(group["params"]) for group in optimizer.param_groups)),
        clip=clip,
        autocast=getattr(trainer.precision_plugin, "device", None),
    )


def build_step(
    module: Any, optimizer: torch.optim.Optimizer, tape: Tape, facts: StepFacts
) -> Callable[..., tuple[Any, list[Entry]]]:
    """Lightning's closure and optimizer step as one function of `training_step`'s arguments.

    Returns `training_step`'s own result, and what it logged. Order as in Lightning: training_step
    under autocast, zero_grad, backward, clip, update. autocast keeps no cache, as Lightning's.
    """
    entries = tape.entries
    clip = _clipper(module, optimizer, facts.clip)
    device = facts.autocast

    def lightning_step(*args: Any) -> tuple[Any, list[Entry]]:
        entries.clear()
        if device is None:
            result = module.training_step(*args)
        else:
            with torch.autocast(device, dtype=torch.bfloat16, cache_enabled=False):
                result = module.training_step(*args)
        loss = result.get("loss") if isinstance(result, Mapping) else result
        if loss is None:
            _no_loss()
        optimizer.zero_grad()
        loss.backward()
        clip()
        optimizer.step()
        logged = list(entries)
        entries.clear()
        return result, logged

    return lightning_step


def _clipper(
    module: Any, optimizer: torch.optim.Optimizer, clip: tuple[str, float] | None
) -> Callable[[], object]:
    if clip is None:
        return lambda: None
    how, limit = clip
    parameters = [param for group in optimizer.param_groups for param in group["params"]]
    function = torch.nn.utils.clip_grad_value_ if how == "value" else torch.nn.utils.clip_grad_norm_

    def clip_gradients() -> None:
        function(parameters, limit)

    return clip_gradients
