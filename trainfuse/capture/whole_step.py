"""Whole-step capture: forward, backward and update of one training step in one guarded graph."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

from autodiff.graph import Refusal
from trainfuse.capture import compat
from trainfuse.capture.lift import PHASE_KEY, Captured, CaptureRefused, input_fact, lift
from trainfuse.capture.objects import Found, find_objects
from trainfuse.capture.optimizers import UpdateHandle, admit_optimizer

Build = Callable[[Captured], Callable[[list[Any]], Sequence[Any]]]
"""Turns a captured graph into a callable over its placeholders' values."""


class PlanBudget(Exception):
    """The step met more kinds of call than it may have plans for; nothing was changed."""


class _Swap:
    """Traceable stand-ins for one optimizer's step and zero_grad, made once per handle."""

    def __init__(self, optimizer: torch.optim.Optimizer, handle: UpdateHandle, keep: bool) -> None:
        self.optimizer = optimizer
        self.handle = handle
        params, number = handle.params, handle.id

        def step(self: torch.optim.Optimizer, closure: None = None) -> None:
            assert closure is None, "a closure can't be part of a whole step"
            updated, grads = [], []
            for p in params:
                if p.grad is not None:
                    updated.append(p)
                    grads.append(p.grad)
            if updated:
                torch.ops.trainfuse.update(updated, grads, number)
            # Gradients that the step itself clears stay temporaries of the graph; without a
            # zero_grad in the step the user may be accumulating, so they must survive it.
            if handle.zeroed and not keep:
                for p in updated:
                    p.grad = None

        def zero_grad(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
            handle.zeroed = True
            for p in params:
                if set_to_none:
                    p.grad = None
                elif p.grad is not None:
                    p.grad.zero_()

        self.methods = {
            "step": types.MethodType(step, optimizer),
            "zero_grad": types.MethodType(zero_grad, optimizer),
        }
        self._saved: dict[str, Any] = {}

    def __enter__(self) -> None:
        attributes = self.optimizer.__dict__
        self.handle.zeroed = False
        for name, method in self.methods.items():
            if name in attributes:
                self._saved[name] = attributes[name]
            attributes[name] = method

    def __exit__(self, *_: object) -> None:
        attributes = self.optimizer.__dict__
        for name in self.methods:
            if name in self._saved:
                attributes[name] = self._saved.pop(name)
            else:
                del attributes[name]


def _detached(target: Callable[..., Any]) -> Callable[..., Any]:
    """The target with detached outputs, on a code object of its own.

    Dynamo keys its cache by code object: two compiled steps must not share plans or limits.
    """

    def whole_step(*args: Any, **kwargs: Any) -> Any:
        return tree_map_only(Tensor, lambda t: t.detach(), target(*args, **kwargs))

    return types.FunctionType(
        whole_step.__code__.replace(),
        whole_step.__globals__,
        "whole_step",
        whole_step.__defaults__,
        whole_step.__closure__,
    )


def admit_whole_step(found: Found) -> list[UpdateHandle] | Refusal:
    """Handles of the step's optimizers, or the precondition that fails; asked before every call."""
    if found.wrappers:
        return Refusal("capture", f"{found.wrappers[0]} needs its own backward hooks")
    handles = []
    for optimizer in found.optimizers:
        admitted = admit_optimizer(optimizer)
        if isinstance(admitted, Refusal):
            return admitted
        if compat.any_parameter_hooks(admitted.params):
            return Refusal(
                "capture", "a parameter has a gradient hook, which a whole step would skip"
            )
        handles.append(admitted)
    return handles


class WholeStep:
    """One step function captured whole.

    Calling it runs the step; `refusal` says why it can't be captured, and then nothing of the
    user's state has changed. max_plans: how many shapes or modes may have a plan of their own.
    """

    def __init__(
        self, target: Callable[..., Any], build: Build, *, max_plans: int, keep_gradients: bool
    ) -> None:
        self.target = target
        self.refusal: Refusal | None = None
        self.found: Found | None = None
        self._build = build
        self._keep = keep_gradients
        self._swaps: dict[int, _Swap] = {}
        self._handles: list[UpdateHandle] = []
        self._code = _detached(target)
        self._compiled = torch.compile(
            self._code, backend=self._backend, fullgraph=True, dynamic=False
        )
        self._settings = compat.DynamoSettings(
            trace_autograd_ops=True,
            recompile_limit=max_plans,
            accumulated_recompile_limit=1 << 20,
            fail_on_recompile_limit_hit=True,
            skip_nnmodule_hook_guards=False,
            allow_unspec_int_on_nn_module=True,
            allow_rnn=True,
        )

    def ready(self, args: Sequence[Any]) -> bool:
        """Check what must hold before this call; a failure is recorded in `refusal`."""
        if self.found is None or not self.found.optimizers:
            self.found = find_objects(self.target, args)
        if self.refusal is None:
            admitted = admit_whole_step(self.found)
            if isinstance(admitted, Refusal):
                self.refusal = admitted
            else:
                self._handles = admitted
        return self.refusal is None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step; raises CaptureRefused, with nothing changed, when it can't be captured."""
        swaps = [self._swap(handle) for handle in self._handles]
        try:
            for swap in swaps:
                swap.handle.before_step()
                swap.__enter__()
            with self._settings:
                result = self._compiled(*args, **kwargs)
        except compat.CAPTURE_ERRORS as error:
            cause = compat.user_cause(error)
            if compat.over_budget(cause):
                raise PlanBudget from error
            if isinstance(cause, CaptureRefused):
                self.refusal = Refusal("capture", cause.reason, where=cause.where)
            elif isinstance(cause, compat.CAPTURE_ERRORS):
                self.refusal = compat.refusal_of(cause)
            else:
                raise cause from error
            raise CaptureRefused(self.refusal.reason, self.refusal.where) from error
        finally:
            for swap in reversed(swaps):
                swap.__exit__()
        for swap in swaps:
            # what learning-rate schedulers look at to warn about a wrong order of calls
            swap.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's own mark
        return result

    def close(self) -> None:
        """Forget every plan."""
        compat.reset_frame(self._code)

    def _swap(self, handle: UpdateHandle) -> _Swap:
        swap = self._swaps.get(handle.id)
        if swap is None:
            swap = self._swaps[handle.id] = _Swap(handle.optimizer, handle, self._keep)
        return swap

    def _backend(self, gm: fx.GraphModule, examples: Sequence[Any], **_: Any) -> Any:
        """Dynamo's backend: label phases, derive with AOTAutograd, hand over the training graph."""
        label_phases(gm.graph)
        compile_ = functools.partial(self._lift, gm, tuple(examples))
        return compat.aot(gm, examples, forward=_refuse_forward, inference=compile_)

    def _lift(
        self, dynamo: fx.GraphModule, examples: tuple[Any, ...], gm: fx.GraphModule, _: Any
    ) -> Any:
        assert self.found is not None
        names = self.found.parameter_names()
        placeholders = dynamo.graph.find_nodes(op="placeholder")
        facts, values = [], []
        for node in gm.graph.find_nodes(op="placeholder"):
            value, source = compat.origin(node, dynamo, placeholders, examples)
            static = source is None or compat.static_by_address(source)
            facts.append(input_fact(node.name, value, static, names.get(id(value))))
            values.append(value)
        return compat.boxed(self._build(lift(gm, facts, values, "whole_step")))


def label_phases(graph: fx.Graph) -> None:
    """Label Dynamo's nodes by phase, and link backward nodes to the forward.

    Raises CaptureRefused when the step has no backward of its own: its outputs may then be
    differentiated outside, which a detached whole step would cut off.
    """
    grads = [n for n in graph.nodes if n.target is torch.autograd.grad]
    if not grads:
        raise CaptureRefused("the function calls no backward(): its outputs stay differentiable")
    last = grads[-1]
    phase = "forward"
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        own = phase
        if node.target is torch.autograd.grad:
            own = "backward"
            phase = "update" if node is last else "forward"
            node.target = compat.linked_grad
        node.meta["custom"] = {**(node.meta.get("custom") or {}), PHASE_KEY: own}


def _refuse_forward(*_: Any) -> Any:
    raise CaptureRefused("an output of the step still needs a gradient after it")
