"""Optimizers as one effect node: what is supported, and the state that stands behind the node."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autodiff.graph import Refusal
from trainfuse.capture import compat
from trainfuse.capture.update_templates import ROWS, UpdateTemplate, template_of
from trainfuse.log import say_once

_ADDED = (
    "an optimizer stepped outside the compiled step, without a zero_grad() since: if its gradients"
    " were to be added to those of the compiled step, these are missing, as it did not keep them;"
    " compile with keep_gradients=True"
)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that one launch updates: same template, same dtypes, same group.

    positions: indices into the parameter list of the effect node.
    """

    template: UpdateTemplate
    positions: tuple[int, ...]


class StateWatch:
    """Whether an optimizer's state still consists of the tensors that a capture has baked in.

    Compares identities only, without hashing a parameter: it is asked before every replay.
    """

    __slots__ = ("_dicts", "_optimizer", "_state", "_tensors")

    def __init__(self, optimizer: torch.optim.Optimizer, names: Sequence[str]) -> None:
        self._optimizer = optimizer
        self._state = optimizer.state
        self._dicts = list(self._state.values())
        self._tensors = [(d, name, d[name]) for d in self._dicts for name in names if name in d]

    def holds(self) -> bool:
        """True while nothing was loaded, replaced or removed."""
        state = self._optimizer.state
        if state is not self._state or len(state) != len(self._dicts):
            return False
        for now, before in zip(state.values(), self._dicts, strict=True):
            if now is not before:
                return False
        for where, name, tensor in self._tensors:
            if where.get(name) is not tensor:
                return False
        return True


class UpdateHandle:
    """What stands behind one effect node: an optimizer, its state, and device scalars.

    The handle is bound to the group options it was made with; `handle_for` makes another one when
    they change. Learning rates, betas and momenta are device scalars, refreshed by `before_step`.
    """

    def __init__(self, number: int, optimizer: torch.optim.Optimizer, signature: list[Any]) -> None:
        self.id = number
        self.signature = signature
        self._optimizer = weakref.ref(optimizer)
        self.row = ROWS[type(optimizer)]
        self.params: list[Tensor] = [p for g in optimizer.param_groups for p in g["params"]]
        self._index = {id(p): i for i, p in enumerate(self.params)}
        self._group_of = [n for n, g in enumerate(optimizer.param_groups) for _ in g["params"]]
        self._scalars: dict[tuple[int, str, torch.device], Tensor] = {}
        self._seen: dict[tuple[int, str, torch.device], float] = {}
        self._steps: dict[torch.device, Tensor] = {}
        self._steps_stale = True
        self._visible_steps: list[tuple[Tensor, list[int]]] = []
        self._views: list[tuple[dict[str, Any], Tensor]] = []
        self._versions: list[int] = []
        self._advances: dict[tuple[int, ...], list[tuple[Tensor, Tensor | int]]] = {}
        self.refusal = self._refuse(optimizer)
        optimizer.register_load_state_dict_post_hook(self.mark_stale)
        optimizer.register_step_post_hook(self.stepped_outside)
        self._dropped = False

    def _refuse(self, optimizer: torch.optim.Optimizer) -> Refusal | None:
        name = type(optimizer).__name__
        reasons = (self.row.refuse(group) for group in optimizer.param_groups)
        return next((Refusal("capture", f"{name}: {r}", name) for r in reasons if r), None)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer itself, alive as long as the user's step holds it."""
        optimizer = self._optimizer()
        assert optimizer is not None, "the optimizer of a live plan was collected"
        return optimizer

    def mark_stale(self, *_: object) -> None:
        """Something else may have changed the step counters: read them before the next step."""
        self._steps_stale = True

    def stepped_outside(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """torch's own step has run; with gradients, perhaps, that miss those of a whole step."""
        self.mark_stale()
        if self._dropped and not compat.zero_grad_was_called(optimizer):
            say_once("capture", f"added-{self.id}", _ADDED)
        self._dropped = False

    def gradients_dropped(self) -> None:
        """A whole step did not keep its gradients: a step after no zero_grad may miss them."""
        self._dropped = True
        compat.watch_zero_grad(self.optimizer)

    def index_of(self, param: Tensor) -> int:
        """Position of a parameter in the optimizer's flat list."""
        return self._index[id(param)]

    def group_of(self, index: int) -> dict[str, Any]:
        """The parameter group of a flat index, with its options of now."""
        return self.optimizer.param_groups[self._group_of[index]]

    def visible_steps(self, indices: Sequence[int]) -> list[float | None]:
        """The step counts that the user sees in the optimizer's state, where there are any."""
        state = self.optimizer.state
        params = [self.params[index] for index in indices]
        steps = [state[p].get("step") if p in state else None for p in params]
        by_device: dict[torch.device, list[Tensor]] = {}
        for step in steps:
            if isinstance(step, Tensor):
                by_device.setdefault(step.device, []).append(step)
        read = {d: iter(torch.stack(found).tolist()) for d, found in by_device.items()}
        return [next(read[s.device]) if isinstance(s, Tensor) else s for s in steps]

    # -- binding a plan -----------------------------------------------------------------------

    def buckets(
        self, indices: Sequence[int], grad_dtypes: Sequence[torch.dtype]
    ) -> tuple[Bucket, ...]:
        """Group the parameters of one effect node by template; makes missing state.

        indices: flat parameter indices in the node's order; grad_dtypes: one a parameter.
        """
        groups = self.optimizer.param_groups
        found: dict[tuple[int, torch.dtype, torch.dtype, torch.device], list[int]] = {}
        for position, (index, grad_dtype) in enumerate(zip(indices, grad_dtypes, strict=True)):
            param = self.params[index]
            key = (self._group_of[index], param.dtype, grad_dtype, param.device)
            found.setdefault(key, []).append(position)
            self.make_state(index)
        return tuple(
            Bucket(template_of(self.row, groups[number], dtype, grad_dtype), tuple(positions))
            for (number, dtype, grad_dtype, _), positions in found.items()
        )

    def make_state(self, index: int) -> None:
        """Create a parameter's optimizer state as torch would on its first step."""
        param = self.params[index]
        optimizer = self.optimizer
        group = optimizer.param_groups[self._group_of[index]]
        names = self.row.states(group)
        if not names and not self.row.has_step:
            return  # torch makes no entry either
        state = optimizer.state[param]
        if self.row.has_step and "step" not in state:
            on_device = group.get("capturable") or group.get("fused")
            double = torch.get_default_dtype() == torch.float64 and not group.get("fused")
            state["step"] = torch.zeros(
                (),
                dtype=torch.float64 if double else torch.float32,
                device=param.device if on_device else "cpu",
            )
            self._steps_stale = True
        for name in names:
            if state.get(name) is None:
                # a zero momentum buffer gives torch's first step too: 0 * momentum + grad
                state[name] = torch.zeros_like(param, memory_format=torch.preserve_format)

    def tensor(self, index: int, role: str) -> Tensor:
        """The device tensor that plays a role ("param", a state name, "step", "lr" ...)."""
        param = self.params[index]
        match role:
            case "param":
                return param
            case "step":
                return self.step_vector(param.device)[index]
            case _ if role in self.row.scalars:
                return self._scalar((self._group_of[index], role, param.device))
            case _:
                state = self.optimizer.state
                if param not in state or role not in state[param]:
                    self.make_state(index)  # the user has cleared it since
                return state[param][role]

    def _scalar(self, key: tuple[int, str, torch.device]) -> Tensor:
        if key not in self._scalars:
            self._scalars[key] = torch.empty((), dtype=torch.float64, device=key[2])
            self._refresh_scalar(key)
        return self._scalars[key]

    def _refresh_scalar(self, key: tuple[int, str, torch.device]) -> None:
        value = self.row.scalars[key[1]](self.optimizer.param_groups[key[0]])
        if isinstance(value, Tensor):
            self._scalars[key].copy_(value)
        elif value != self._seen.get(key):
            self._scalars[key].fill_(value)
            self._seen[key] = value

    def step_vector(self, device: torch.device) -> Tensor:
        """The device's step counters, one a parameter of the optimizer."""
        if device not in self._steps:
            self._steps[device] = torch.zeros(len(self.params), device=device)
            self._steps_stale = True
        if self._steps_stale:
            self._refresh_steps()
        return self._steps[device]

    def _refresh_steps(self) -> None:
        """Take the visible step counters over to the device, and make them advance together.

        Each counter becomes a view of one vector a device and type: one addition a step moves all,
        where a list of 0-d tensors on the host takes one each.
        """
        found: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        state = self.optimizer.state
        values = [0.0] * len(self.params)
        for index, p in enumerate(self.params):
            step = state[p].get("step") if p in state else None
            if step is not None:
                values[index] = float(step)
                found.setdefault((step.device, step.dtype), []).append(index)
        self._visible_steps.clear()
        self._views.clear()
        self._advances.clear()
        for (device, dtype), indices in found.items():
            vector = torch.tensor([values[i] for i in indices], dtype=dtype, device=device)
            for position, index in enumerate(indices):
                entries, view = state[self.params[index]], vector[position]
                entries["step"] = view
                self._views.append((entries, view))
            self._visible_steps.append((vector, indices))
        for vector in self._steps.values():
            vector.copy_(torch.tensor(values))
        self._versions = [vector._version for vector, _ in self._visible_steps]
        self._steps_stale = False

    # -- around each step ----------------------------------------------------------------------

    def before_step(self) -> None:
        """Bring device scalars up to date with what the user or a scheduler changed."""
        for key in self._scalars:
            self._refresh_scalar(key)
        if not self._steps:
            return
        if self._steps_stale or self._steps_changed():
            self._refresh_steps()

    def _steps_changed(self) -> bool:
        """Whether the user, or torch, wrote to a visible step counter or put another in place."""
        if self._versions != [vector._version for vector, _ in self._visible_steps]:
            return True
        for entries, view in self._views:
            if entries.get("step") is not view:
                return True
        return False

    def after_step(self, indices: tuple[int, ...]) -> None:
        """Advance the visible step counters after a kernel advanced the device's.

        indices: flat indices of the parameters that the executed plan updated.
        """
        if not self.row.has_step:
            return
        advances = self._advances.get(indices)
        if advances is None:
            chosen = set(indices)
            advances = self._advances[indices] = []
            for vector, members in self._visible_steps:
                moved = [index in chosen for index in members]
                if all(moved):
                    advances.append((vector, 1))
                elif any(moved):
                    advances.append((vector, torch.tensor(moved).to(vector)))
        for vector, amount in advances:
            vector.add_(amount)
        self._versions = [vector._version for vector, _ in self._visible_steps]

    def watch_state(self) -> StateWatch:
        """A watch over the optimizer's state as it is now."""
        names = {name for g in self.optimizer.param_groups for name in self.row.states(g)}
        return StateWatch(self.optimizer, sorted(names))

    def run_eager(self, indices: Sequence[int], grads: Sequence[Tensor]) -> None:
        """torch's own step for these gradients, with every other gradient set aside."""
        kept = [p.grad for p in self.params]
        dropped, self._dropped = self._dropped, False
        try:
            for p in self.params:
                p.grad = None
            for index, grad in zip(indices, grads, strict=True):
                self.params[index].grad = grad.to(self.params[index].dtype)
            type(self.optimizer).step(self.optimizer)
        finally:
            for p, grad in zip(self.params, kept, strict=True):
                p.grad = grad
            self._steps_stale, self._dropped = True, dropped


_HANDLES: weakref.WeakValueDictionary[int, UpdateHandle] = weakref.WeakValueDictionary()
_LATEST: weakref.WeakKeyDictionary[torch.optim.Optimizer, UpdateHandle] = (
    weakref.WeakKeyDictionary()
)
_NUMBERS = itertools.count(1)


def admit_optimizer(optimizer: torch.optim.Optimizer) -> Refusal | UpdateHandle:
    """The optimizer's handle, or why its step can't be part of a whole step."""
    name = type(optimizer).__name__
    if type(optimizer) not in ROWS:
        known = ", ".join(sorted(t.__name__ for t in ROWS))
        return Refusal("capture", f"optimizer {name} has no traced update (known: {known})", name)
    if compat.has_step_hooks(optimizer, ours=UpdateHandle.stepped_outside):
        return Refusal("capture", f"{name} has step hooks, which a whole step would skip", name)
    replaced = compat.replaced_method(optimizer)
    if replaced is not None:
        return Refusal(
            "capture", f"{name}.{replaced} was replaced by a function that we can't see into", name
        )
    handle = handle_for(optimizer)
    return handle.refusal or handle


def handle_for(optimizer: torch.optim.Optimizer) -> UpdateHandle:
    """The optimizer's handle; a new one once its options or parameter list changed."""
    row = ROWS[type(optimizer)]
    signature = [
        (row.options(group), tuple(map(id, group["params"]))) for group in optimizer.param_groups
    ]
    handle = _LATEST.get(optimizer)
    if handle is None or handle.signature != signature:
        handle = UpdateHandle(next(_NUMBERS), optimizer, signature)
        _HANDLES[handle.id] = handle
        _LATEST[optimizer] = handle
    return handle


def find_handle(number: int) -> UpdateHandle:
    """The live handle behind an effect node's number."""
    return _HANDLES[number]


@torch.library.custom_op("trainfuse::update", mutates_args=("params",))
def update(params: list[Tensor], grads: list[Tensor], handle: int) -> None:
    """One optimizer step over `params`; state and options stand behind `handle`."""
    owner = find_handle(handle)
    owner.run_eager([owner.index_of(p) for p in params], grads)


@update.register_fake
def _(params: list[Tensor], grads: list[Tensor], handle: int) -> None:
    return None
