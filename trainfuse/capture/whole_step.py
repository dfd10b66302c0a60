"""Whole-step capture: forward, backward and update of one training step in one guarded graph."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

from autodiff import ops
from autodiff.graph import Refusal
from trainfuse.capture import compat, escapes
from trainfuse.capture.layouts import with_eager_strides
from trainfuse.capture.lift import (
    PHASE_KEY,
    Captured,
    CaptureRefused,
    input_fact,
    lift,
    user_line,
)
from trainfuse.capture.objects import Found, find_objects
from trainfuse.capture.optimizers import UpdateHandle, admit_optimizer
from trainfuse.capture.overlap import OVERLAP, OverlapGuard
from trainfuse.capture.own_results import with_own_results
from trainfuse.capture.shadow import Shadow
from trainfuse.errors import GradientsDropped

Build = Callable[[Captured], Callable[[list[Any]], Sequence[Any]]]
"""Turns a captured graph into a callable over its placeholders' values."""


_LOST = 0
"""In a handle's place: the update needs gradients that an earlier call dropped."""

_ESCAPES = "an output can still be differentiated after the step, which would cut it off"
_HOOKED = "a parameter has a gradient hook, which a whole step would skip"
_COLLECTIVE = "it communicates with other processes, which would not join a comparison or a replay"
_UNASSUMED = "a size or number that the data decides is not what the capture assumed"


class PlanBudget(Exception):
    """The step met more kinds of call than it may have plans for; nothing was changed."""


class _Swap:
    """Traceable stand-ins for one optimizer's step and zero_grad, made once per handle.

    Gradients that a step sets to None before it makes them are dropped once it has ended, so that
    they stay temporaries of the graph. Without that zero_grad the user may be adding them up.
    zeroed, used: in this call, set to None, and updated with after that. adds_up: some call used
    gradients that it had not cleared, so that none are dropped. dropped: some were.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, handle: UpdateHandle, keep: bool) -> None:
        self.optimizer = optimizer
        self.handle = handle
        self.params = params = handle.params
        self.zeroed = self.used = self.dropped = False
        self.adds_up = keep
        number, swap = handle.id, self

        def step(self: torch.optim.Optimizer, closure: None = None) -> None:
            assert closure is None, "a closure can't be part of a whole step"
            updated, grads = [], []
            for p in params:
                if p.grad is not None:
                    updated.append(p)
                    grads.append(p.grad)
            if swap.zeroed:
                swap.used = True
            else:
                swap.adds_up = True
            if updated:
                lost = not swap.zeroed and swap.dropped
                torch.ops.trainfuse.update(updated, grads, _LOST if lost else number)

        def zero_grad(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
            if set_to_none:
                swap.zeroed = True
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

    @property
    def drops(self) -> bool:
        """Whether this call's gradients are needed by nobody after it."""
        return self.used and not self.adds_up

    def end(self) -> None:
        """Drop the gradients that only this call needed; traced at the end of the step."""
        if self.drops:
            self.dropped = True
            for p in self.params:
                p.grad = None

    def __enter__(self) -> None:
        attributes = self.optimizer.__dict__
        self.zeroed = self.used = False
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


def _detached(target: Callable[..., Any], swaps: list[_Swap]) -> Callable[..., Any]:
    """The target with detached outputs, on a code object of its own.

    swaps: those of the call's optimizers.

    Dynamo keys its cache by code object: two compiled steps must not share plans or limits.
    """

    def whole_step(*args: Any, **kwargs: Any) -> Any:
        results = target(*args, **kwargs)
        for swap in swaps:
            swap.end()
        return tree_map_only(Tensor, _without_history, results)

    return types.FunctionType(
        whole_step.__code__.replace(),
        whole_step.__globals__,
        "whole_step",
        whole_step.__defaults__,
        whole_step.__closure__,
    )


def _without_history(tensor: Tensor) -> Tensor:
    return escapes.CUT(tensor) if tensor.requires_grad else tensor


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
            return Refusal("capture", _HOOKED)
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
        self._swapped: list[_Swap] = []
        self._derived = False
        self._handles: list[UpdateHandle] = []
        self._code = _detached(target, self._swapped)
        self._compiled = torch.compile(
            self._code, backend=self._backend, fullgraph=True, dynamic=False
        )
        self._settings = compat.DynamoSettings(
            parameters_are_inputs=True,
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
        with compat.CALLS:  # another thread's call has replaced the methods that are looked at
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
        with compat.CALLS:  # other threads must not meet swapped methods
            return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        swaps = [self._swap(handle) for handle in self._handles]
        self._swapped[:] = swaps
        result: Any = None
        try:
            for swap in swaps:
                swap.handle.before_step()
                swap.__enter__()
            with self._settings:
                result = self._compiled(*args, **kwargs)
        except (*compat.CAPTURE_ERRORS, CaptureRefused) as error:
            refusal, cause = _refusal_behind(error), error
        else:
            refusal = cause = None
        finally:
            for swap in reversed(swaps):
                swap.__exit__()
        if refusal is not None:
            if self._met_optimizers(args, kwargs):
                return self._call(args, kwargs)
            self.refusal = refusal
            raise CaptureRefused(refusal.reason, refusal.where) from cause
        for swap in swaps:
            if swap.drops:
                swap.handle.gradients_dropped()
            # what learning-rate schedulers look at to warn about a wrong order of calls
            swap.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's own mark
        return result

    def _met_optimizers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the step has come to refer to optimizers that it did not before."""
        assert self.found is not None
        values = (*args, *kwargs.values())
        now = find_objects(self.target, values)
        new = [o for o in now.optimizers if all(o is not old for old in self.found.optimizers)]
        now.optimizers = [*self.found.optimizers, *new]
        self.found = now
        return bool(new) and self.ready(values)

    def close(self) -> None:
        """Forget every plan."""
        compat.reset_frame(self._code)

    def _swap(self, handle: UpdateHandle) -> _Swap:
        swap = self._swaps.get(handle.id)
        if swap is None:
            optimizer = handle.optimizer
            older = [s for s in self._swaps.values() if s.optimizer is optimizer]
            swap = self._swaps[handle.id] = _Swap(optimizer, handle, self._keep)
            if older:  # the same optimizer with other options
                swap.adds_up, swap.dropped = older[-1].adds_up, older[-1].dropped
        return swap

    def _backend(self, gm: fx.GraphModule, examples: Sequence[Any], **_: Any) -> Any:
        """Dynamo's backend: label phases, derive with AOTAutograd, hand over the training graph."""
        update = torch.ops.trainfuse.update
        if any(n.target is update and n.args[2] == _LOST for n in gm.graph.nodes):
            raise GradientsDropped
        label_phases(gm.graph)
        shadow = Shadow(gm)
        compile_ = functools.partial(self._lift, shadow, tuple(examples))
        self._derived = False
        try:
            run = compat.aot(gm, examples, forward=_refuse_forward, inference=compile_)
        except compat.CAPTURE_ERRORS:
            raise  # Dynamo's own signals, such as that it has to trace again
        except (RuntimeError, AssertionError) as error:
            if self._derived:
                raise
            line = str(error).strip().partition("\n")[0]
            raise CaptureRefused(f"its gradients could not be derived: {line}") from error
        return shadow.beside(with_eager_strides(gm, run))

    def _lift(self, shadow: Shadow, examples: tuple[Any, ...], gm: fx.GraphModule, _: Any) -> Any:
        self._derived = True
        for node in gm.graph.nodes:
            if ops.is_collective(node):
                raise CaptureRefused(_COLLECTIVE, user_line(node))
        dynamo = shadow.gm
        assert self.found is not None
        names = self.found.parameter_names()
        placeholders = dynamo.graph.find_nodes(op="placeholder")
        facts, values, sources = [], [], []
        for node in gm.graph.find_nodes(op="placeholder"):
            if compat.stands_for_overlapping(node):
                raise CaptureRefused(OVERLAP)
            value, source = compat.origin(node, dynamo, placeholders, examples)
            static = source is None or compat.static_by_address(source)
            facts.append(input_fact(node.name, value, static, names.get(id(value))))
            values.append(value)
            sources.append(None if source is None else placeholders.index(source))
        captured = lift(gm, facts, values, "whole_step", shadow, sources)
        overlaps = _overlap_guard(captured)
        if overlaps.overlaps:
            raise CaptureRefused(OVERLAP)
        program = with_own_results(gm, self._build(captured))
        admitted = {id(p) for handle in self._handles for p in handle.params}
        leaves = [
            i
            for i, value in enumerate(values)
            if isinstance(value, Tensor) and value.requires_grad and id(value) not in admitted
        ]

        def checked(args: list[Any]) -> Any:
            if compat.any_parameter_hooks([args[i] for i in leaves]):
                raise CaptureRefused(_HOOKED)
            if overlaps.needed and overlaps.violated(args):
                raise CaptureRefused(OVERLAP)
            try:
                return program(args)
            except RuntimeError as error:
                # nothing was written yet: assertions run before every write
                if compat.failed_assumption(error):
                    raise CaptureRefused(_UNASSUMED) from error
                raise

        return compat.boxed(checked)


def _overlap_guard(captured: Captured) -> OverlapGuard:
    inputs = captured.graph.inputs
    written = [i for i, fact in enumerate(inputs) if fact.name in captured.graph.mutations]
    static = [i for i, fact in enumerate(inputs) if fact.kind in ("parameter", "buffer")]
    return OverlapGuard(captured.examples, written, static)


def _refusal_behind(error: BaseException) -> Refusal:
    """Why a call was not captured; raises what is no refusal."""
    cause = compat.user_cause(error)
    if compat.over_budget(cause):
        raise PlanBudget from error
    if isinstance(cause, CaptureRefused):
        return Refusal("capture", cause.reason, where=cause.where)
    if isinstance(cause, compat.CAPTURE_ERRORS):
        return compat.refusal_of(cause)
    raise cause from error


def label_phases(graph: fx.Graph) -> None:
    """Label Dynamo's nodes by phase, and link backward nodes to the forward.

    Raises CaptureRefused when the step has no backward of its own, or an output that its backward
    did not free: either may be differentiated outside, which a detached whole step would cut off.
    """
    grads = [n for n in graph.nodes if n.target is torch.autograd.grad]
    if not grads:
        raise CaptureRefused("the function calls no backward(): its outputs stay differentiable")
    escaping = escapes.escaping_output(graph)
    if escaping is not None:
        raise CaptureRefused(_ESCAPES, user_line(escaping))
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
