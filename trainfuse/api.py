"""The front door: compile, explain, restore, and the compiled step."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from torch import nn

from autodiff.graph import Refusal
from trainfuse import log
from trainfuse.capture import compat
from trainfuse.capture.lift import CaptureRefused
from trainfuse.capture.regions import PartFailed, Regions, eager_part
from trainfuse.capture.second_order import AGAIN
from trainfuse.capture.whole_step import PlanBudget, WholeStep
from trainfuse.debug.bisect import Culprit, search
from trainfuse.debug.doctor import Diagnosis, diagnose
from trainfuse.debug.explain import Explanation
from trainfuse.errors import CaptureError, NotCompilable
from trainfuse.fields import Settings
from trainfuse.options import CUDA_GRAPH, MODE, VERIFY, CompileOptions, resolve
from trainfuse.plans import Builder, PlanOnly, PlanRecord, explain_plans

Module = TypeVar("Module", bound=nn.Module)
_log = log.get_logger("capture")


_GLOBAL_HOOKS = "a hook on every module is registered: calls run eagerly while it is"


class _Runner:
    """One target under one resolved set of settings: a whole step, or regions."""

    def __init__(
        self, target: Callable[..., Any], options: CompileOptions, settings: Settings
    ) -> None:
        self.target = target
        self.options = options
        self.settings = settings
        self.builder = Builder(settings)
        self.refusals: list[Refusal] = []
        self.whole: WholeStep | None = None
        self._regions: Regions | None = None
        self._eager = False
        if isinstance(target, nn.Module) or inspect.ismethod(target):
            self.refuse(Refusal("capture", "a module's outputs are differentiated outside it"))
        elif not settings.whole_step:
            self.refuse(Refusal("capture", "whole_step is off"))
        else:
            self.whole = WholeStep(
                target,
                self.builder,
                max_plans=settings.max_plans,
                keep_gradients=settings.keep_gradients,
            )

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._eager:
            return self.target(*args, **kwargs)
        if compat.any_global_module_hooks():
            self._refuse_hooks()
            return self.target(*args, **kwargs)
        if self.whole is not None:
            if self.whole.ready((*args, *kwargs.values())):
                try:
                    return self.whole(*args, **kwargs)
                except CaptureRefused as refused:
                    self._leave_whole(refused)
                except PlanBudget:
                    log.say_once(
                        "capture",
                        f"plans-{id(self)}",
                        f"more than max_plans={self.settings.max_plans} kinds of call:"
                        " further kinds run eagerly",
                    )
                    return self.target(*args, **kwargs)
            else:
                self._leave_whole(None)
        return self.regions(*args, **kwargs)

    def _refuse_hooks(self) -> None:
        if not any(refusal.reason == _GLOBAL_HOOKS for refusal in self.refusals):
            self.refuse(Refusal("capture", _GLOBAL_HOOKS))
        if self.options.fullgraph or self.settings.cuda_graph == "require":
            raise CaptureError(reason=_GLOBAL_HOOKS)

    def _leave_whole(self, error: CaptureRefused | None) -> None:
        assert self.whole is not None and self.whole.refusal is not None
        refusal = self.whole.refusal
        self.whole = None
        self.refuse(refusal)
        if self.options.fullgraph or self.settings.cuda_graph == "require":
            raise CaptureError(reason=refusal.reason, where=refusal.where) from error

    def _notice(self, refusal: Refusal) -> None:
        """A region runs eagerly; once its gradient got a graph of its own, everything does."""
        if refusal in self.refusals:
            return
        self.refusals.append(refusal)
        if refusal is AGAIN:
            self._eager = True
            line = f"{AGAIN.reason}: it runs eagerly from now on (a whole step may be compiled)"
            _log.warning("%s: %s", _name_of(self.target), line)
        else:
            where = f" ({refusal.where})" if refusal.where else ""
            _log.warning("%s: %s%s", _name_of(self.target), refusal.reason, where)

    def _failed(self, fault: Refusal, kind: PartFailed, error: Exception) -> None:
        """A part of the target could not be taken, and runs eagerly unless this raises."""
        if self.settings.strict or not self.settings.fallback:
            raise kind(reason=fault.reason, where=fault.where) from error
        if self.builder.plans_only:
            self._notice(eager_part(fault, kind))
            raise PlanOnly

    def refuse(self, refusal: Refusal) -> None:
        """Record why this target is not captured whole."""
        self.refusals.append(refusal)
        where = f" ({refusal.where})" if refusal.where else ""
        _log.info("not a whole step: %s%s", refusal.reason, where)

    @property
    def regions(self) -> Regions:
        """The region form of the target, made when first needed."""
        if self._regions is None:
            self._regions = Regions(
                self.target,
                self.builder,
                joint_passes=self.builder.joint_passes,
                notice=self._notice,
                failed=self._failed,
                max_plans=self.settings.max_plans,
                fullgraph=self.options.fullgraph,
                dynamic=self.options.dynamic,
            )
        return self._regions

    def forget_captures(self) -> None:
        """Let Dynamo forget this target; the plans stay readable."""
        for capture in (self.whole, self._regions):
            if capture is not None:
                capture.close()

    def close(self) -> None:
        """Forget every plan and free what they hold."""
        self.forget_captures()
        self.builder.close()


def _name_of(target: Callable[..., Any]) -> str:
    owner = getattr(target, "__self__", None)
    name = getattr(target, "__qualname__", type(target).__name__)
    return type(owner).__name__ if isinstance(owner, nn.Module) else name


class CompiledStep:
    """A compiled function: same arguments, same results.

    Plans are made per settings, input shapes and module modes, and kept until `close`.
    """

    def __init__(self, target: Callable[..., Any], options: CompileOptions) -> None:
        functools.update_wrapper(self, target)
        self._target = target
        self._options = options
        self._runners: dict[tuple[Any, ...], _Runner] = {}
        self._last: tuple[Settings, _Runner] | None = None
        self._used: _Runner | None = None

    def __repr__(self) -> str:
        name = getattr(self._target, "__qualname__", type(self._target).__name__)
        kinds = [plan.kind.replace("_", " ") for plan in self.plans]
        return f"<trainfuse.CompiledStep of {name}, plans: {', '.join(kinds) or 'none yet'}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step on these arguments; inside another compiled function, be a part of it."""
        if torch.compiler.is_dynamo_compiling():
            return self._target(*args, **kwargs)
        runner = self._runner()
        if runner is None:
            return self._target(*args, **kwargs)
        self._used = runner
        return runner(args, kwargs)

    def _runner(self) -> _Runner | None:
        settings = self._options.settings()
        if self._last is not None and self._last[0] is settings:
            return self._last[1]
        if settings.chosen_backend == "none":
            return None
        key = settings.plan_key()
        runner = self._runners.get(key)
        if runner is None:
            runner = self._runners[key] = _Runner(self._target, self._options, settings)
        self._last = (settings, runner)
        return runner

    @property
    def plans(self) -> tuple[PlanRecord, ...]:
        """Every plan made so far, oldest first."""
        return tuple(p for runner in self._runners.values() for p in runner.builder.plans)

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """What was fused, what was not, and why; of the plans so far, or of a call with `args`.

        With arguments and no plan yet, the step is captured and planned but not run.
        """
        runner = self._planned(args, kwargs)
        left = runner.whole is None
        plans = runner.builder.plans
        return explain_plans(plans, runner.refusals, runner.settings, left_whole=left)

    def graph_for(self, *args: Any, **kwargs: Any) -> str:
        """The fused graph as text: subgraphs, groups with their kernel ids, ATen nodes."""
        plans = self._planned(args, kwargs).builder.plans
        return "\n".join(plan.graph_text() for plan in plans)

    def source(self, *args: Any, **kwargs: Any) -> str:
        """The Python program that runs, and the kernels it launches."""
        plans = self._planned(args, kwargs).builder.plans
        return "\n\n".join(plan.source() for plan in plans)

    def _planned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Runner:
        """The runner with the plans to show: the one called last, or one that only plans the call.

        Settings may differ between the call and the question: what ran is what is shown.
        """
        if self._used is not None:
            return self._used
        runner = _Runner(self._target, self._options, self._options.settings())
        if runner.settings.chosen_backend != "none" and (args or kwargs):
            with runner.builder.plan_only() as stopped, contextlib.suppress(stopped):
                runner(args, kwargs)
            runner.forget_captures()
        return runner

    def stats(self) -> dict[str, Any]:
        """Figures so far: plans, calls, kernels, compile seconds, CUDA graphs, gate verdict."""
        merged: dict[str, Any] = {
            "plans": 0, "calls": 0, "kernels": 0, "compile_s": 0.0, "cuda_graphs": 0,
            "gate": "pass",
        }  # fmt: skip
        for plan in self.plans:
            row = plan.stats()
            merged["plans"] += 1
            for name in ("calls", "kernels", "compile_s", "cuda_graphs"):
                merged[name] += row[name]
            if row["gate"] != "pass":
                merged["gate"] = row["gate"]
        return merged

    def report(self, path: str | Path) -> Path:
        """Write the explanation of the plans so far as one HTML page; returns its path."""
        return self.explain().to_html(path)

    def close(self) -> None:
        """Forget every plan and free its memory; the next call plans again."""
        for runner in self._runners.values():
            runner.close()
        self._runners.clear()
        self._last = self._used = None


def _compile_module(module: nn.Module, options: CompileOptions) -> nn.Module:
    compat.set_compiled_call(module, CompiledStep(module._call_impl, options))
    return module


@overload
def compile(target: None = None, **options: Any) -> Callable[[Any], Any]: ...
@overload
def compile(target: Module, **options: Any) -> Module: ...  # pyright: ignore[reportOverlappingOverload] -- a module is callable too, but comes back itself
@overload
def compile(target: Callable[..., Any], **options: Any) -> CompiledStep: ...


def compile(
    target: Any = None,
    *,
    mode: str = MODE,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    backend: str | None = None,
    verify: str | int = VERIFY,
    cuda_graph: str = CUDA_GRAPH,
    memory_budget: float | int | None = None,
    options: Mapping[str, Any] | None = None,
    **more: Any,
) -> Any:
    """Make a training step, a module or a function faster, with the same gradients.

    target: a function gives back a `CompiledStep`; a module is compiled in place and given back
    itself (`restore` undoes it); without a target this is a decorator. Options are described in
    docs/switches.md. Raises OptionError, before anything is changed, for what it does not know.
    """
    resolved = resolve(
        mode=mode,
        dynamic=dynamic,
        fullgraph=fullgraph,
        backend=backend,
        verify=verify,
        cuda_graph=cuda_graph,
        memory_budget=memory_budget,
        options=options,
        **more,
    )
    if target is None:
        return functools.partial(_compile_target, options=resolved)
    return _compile_target(target, options=resolved)


def _compile_target(target: Any, *, options: CompileOptions) -> Any:
    if isinstance(target, CompiledStep):
        return CompiledStep(target._target, options)
    if isinstance(target, nn.Module):
        return _compile_module(target, options)
    if not callable(target) or isinstance(target, type):
        raise NotCompilable(kind=type(target).__name__)
    return CompiledStep(target, options)


def restore(module: nn.Module) -> nn.Module:
    """Undo `compile(module)`; harmless on a module that is not compiled."""
    call = compat.compiled_call(module)
    if isinstance(call, CompiledStep):
        call.close()
        compat.set_compiled_call(module, None)
    return module


def explain(target: Any, *args: Any, **kwargs: Any) -> Explanation:
    """What would be fused of a call `target(*args)`, and what not, with reasons; runs nothing."""
    call = compat.compiled_call(target) if isinstance(target, nn.Module) else target
    if not isinstance(call, CompiledStep):
        function = target._call_impl if isinstance(target, nn.Module) else target
        if not callable(function):
            raise NotCompilable(kind=type(target).__name__)
        call = CompiledStep(function, resolve())
    return call.explain(*args, **kwargs)


def doctor(target: Any, *args: Any) -> Diagnosis:
    """What became of `target(*args)`, stage by stage, and the first stage to mend.

    Compiles the target anew with every check on, runs it, and times it against itself; the
    training state that it reaches is put back. `print()` the result.
    """
    plain, make = _remake(target)
    return diagnose(make, plain, args)


def bisect(target: Any, *args: Any, tolerance: float | None = None) -> Culprit:
    """The first fused group that makes `target(*args)` wrong, in about log2(groups) runs.

    Outputs and gradients are compared with those of the plan on ATen; the training state is put
    back. tolerance: largest relative RMS difference that is right, None for what rounding
    explains.
    """
    plain, make = _remake(target)
    return search(make, plain, args, tolerance)


def _remake(target: Any) -> tuple[Callable[..., Any], Callable[..., CompiledStep]]:
    """The plain function behind a target, and what compiles it anew under further options."""
    call = compat.compiled_call(target) if isinstance(target, nn.Module) else target
    if isinstance(call, CompiledStep):
        own = call._options
        given = {**own.layer.values, "dynamic": own.dynamic, "fullgraph": own.fullgraph}
        plain = call._target
    else:
        given, plain = {}, target._call_impl if isinstance(target, nn.Module) else target
    if not callable(plain):
        raise NotCompilable(kind=type(target).__name__)
    return plain, lambda **options: CompiledStep(plain, resolve(**{**given, **options}))
