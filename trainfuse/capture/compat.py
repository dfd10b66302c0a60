"""Every private torch name that trainfuse touches (autodiff has its own): torch 2.11 to 2.14."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd as _aot_autograd
from torch._dynamo.variables import builder
from torch._functorch._aot_autograd import runtime_wrappers
from torch._functorch._aot_autograd.schemas import MutationType, OutputType
from torch._functorch.autograd_function import autograd_function_apply
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_module
from torch.utils import _python_dispatch

from autodiff.graph import Refusal
from trainfuse.capture import comparisons
from trainfuse.capture.compat_aot import capture_decompositions, traced_as_eager
from trainfuse.capture.compat_dynamo import MENDED, apply_function
from trainfuse.errors import CompilingFailed

# -- optimizers ---------------------------------------------------------------------------------


@contextlib.contextmanager
def pretend_compiling() -> Iterator[None]:
    """Let torch.optim take its device-side branch without a device."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def has_step_hooks(optimizer: torch.optim.Optimizer, ours: Callable[..., Any]) -> bool:
    """Whether anyone but trainfuse hooked this optimizer's step, or every optimizer's."""
    if (
        optimizer._optimizer_step_pre_hooks
        or optimizer_module._global_optimizer_pre_hooks
        or optimizer_module._global_optimizer_post_hooks
    ):
        return True
    hooks = optimizer._optimizer_step_post_hooks
    return any(getattr(hook, "__func__", None) is not ours for hook in hooks.values())


_TORCH = os.path.dirname(torch.__file__) + os.sep


def replaced_method(optimizer: torch.optim.Optimizer) -> str | None:
    """Which of `step` and `zero_grad` someone but torch has put in the instance's way, or None.

    A learning-rate scheduler's wrapper, which only counts calls, is torch's own.
    """
    for name in ("step", "zero_grad"):
        method = vars(optimizer).get(name)
        while method is not None:
            code = getattr(getattr(method, "__func__", method), "__code__", None)
            if code is None or not code.co_filename.startswith(_TORCH):
                return name
            method = getattr(method, "__wrapped__", None)
    return None


_NAME_IN_PROFILES = "_zero_grad_profile_name"
"""An optimizer's attribute that zero_grad makes anew where it is missing, as in old pickles."""


def watch_zero_grad(optimizer: torch.optim.Optimizer) -> None:
    """Let `zero_grad_was_called` tell of calls from here on."""
    vars(optimizer).pop(_NAME_IN_PROFILES, None)


def zero_grad_was_called(optimizer: torch.optim.Optimizer) -> bool:
    """Whether torch's own zero_grad has run since `watch_zero_grad`."""
    return _NAME_IN_PROFILES in vars(optimizer)


def any_parameter_hooks(params: Sequence[Tensor]) -> bool:
    """Whether a hook would run when one of these tensors' gradients arrives."""
    for p in params:
        if p._backward_hooks or p._post_accumulate_grad_hooks:  # type: ignore[attr-defined]
            return True
    return False


def any_global_module_hooks() -> bool:
    """Whether a hook runs at every module's call, which no guard of Dynamo's watches."""
    return bool(
        module_hooks._global_forward_hooks
        or module_hooks._global_forward_pre_hooks
        or module_hooks._global_backward_hooks
        or module_hooks._global_backward_pre_hooks
    )


# -- Dynamo ---------------------------------------------------------------------------------------


def real_tensors() -> contextlib.AbstractContextManager[Any]:
    """Within the block tensors are made on their device, though a graph is being compiled."""
    return unset_fake_temporarily()


CALLS = threading.RLock()
"""Held while a compiled call may trace: what is changed for its length belongs to the process."""


class DynamoSettings:
    """Dynamo's configuration for the length of one call, cheap enough for every call.

    `torch._dynamo.config.patch`, and even plain assignment, cost more than a small step's launch.
    Other threads' calls wait, as the configuration is theirs too. parameters_are_inputs: also those
    that Dynamo would put into the graph, since it has met them in an optimizer. Nothing is told of
    side effects, which are what a step is for: Dynamo would walk the stack for every gradient.
    """

    __slots__ = ("_apply", "_draws", "_mark", "_reverts")
    depth: ClassVar[int] = 0

    def __init__(self, *, parameters_are_inputs: bool = False, **wanted: Any) -> None:
        wanted = {"side_effect_replay_policy": "silent", **wanted}
        self._apply = torch._dynamo.config._make_closure_patcher(**wanted)
        # eager draws what nobody reads, too; else AOTAutograd drops it, and later draws are others
        self._draws = torch._inductor.config._make_closure_patcher(fallback_random=True)
        self._mark = _mark_of_no_parameter if parameters_are_inputs else _STOCK_MARK
        self._reverts: list[tuple[Any, ...]] = []

    def __enter__(self) -> None:
        CALLS.acquire()
        DynamoSettings.depth += 1
        self._reverts.append((self._apply(), self._draws(), builder.get_static_address_type))
        builder.get_static_address_type = self._mark
        if DynamoSettings.depth == 1:  # a region's user code may call another compiled step
            for owner, name, ours, _ in MENDED:
                setattr(owner, name, ours)

    def __exit__(self, *_: object) -> None:
        DynamoSettings.depth -= 1
        if not DynamoSettings.depth:
            for owner, name, _, stock in MENDED:
                setattr(owner, name, stock)
        *reverts, builder.get_static_address_type = self._reverts.pop()
        for revert in reverts:
            revert()
        CALLS.release()


_STOCK_MARK = builder.get_static_address_type


def _mark_of_no_parameter(tensor: Any) -> Any:
    """Dynamo's mark of tensors that keep their address, without the parameters'.

    A parameter that it marks "guarded", when it compiles an optimizer's own step, becomes an
    attribute of later graphs; a backward() that is traced finds only inputs, and would do nothing.
    """
    return None if isinstance(tensor, torch.nn.Parameter) else _STOCK_MARK(tensor)


def static_by_address(placeholder: fx.Node) -> bool:
    """Whether Dynamo marked this graph input as one that keeps its address."""
    facts = placeholder.meta.get("tensor_dict") or {}
    return bool(facts.get("_dynamo_static_input_type"))


def user_cause(error: BaseException) -> BaseException:
    """The first error below the wrappers that Dynamo and its backends put around it."""
    wrappers = (torch._dynamo.exc.BackendCompilerFailed,)
    while isinstance(error, wrappers):
        inner = getattr(error, "inner_exception", None) or error.__cause__
        if inner is None:
            break
        error = inner
    return error


CAPTURE_ERRORS: tuple[type[BaseException], ...] = (
    torch._dynamo.exc.TorchDynamoException,
    torch._dynamo.exc.FailOnRecompileLimitHit,
)
"""What Dynamo raises when it can't take a whole frame."""


def reset_frame(code: object) -> None:
    """Forget every graph that Dynamo compiled for one code object."""
    torch._dynamo.eval_frame.remove_from_cache(code)


def make_lawful(gm: fx.GraphModule) -> None:
    """Let custom Functions in a graph of Dynamo's be run by `apply_function`, within it too."""
    for module in gm.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        calls = [n for n in module.graph.nodes if n.target is autograd_function_apply]
        for node in calls:
            node.target = apply_function
        if calls:
            module.recompile()


def is_compiled_node(node: Any) -> bool:
    """Whether a node of autograd's graph runs a backward that AOTAutograd compiled."""
    return node.name() == "CompiledFunctionBackward"


def without_values() -> contextlib.AbstractContextManager[Any]:
    """Within it tensors are made, and operators run, without memory or arithmetic."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def saving_is_hooked() -> bool:
    """Whether what autograd saves here goes through hooks, as within a checkpoint."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def autocasts() -> tuple[tuple[str, bool, torch.dtype], ...]:
    """Autocast as it is here: device type, whether it is on, its type."""
    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds)


def rng_states(values: Sequence[Any]) -> dict[int, Tensor]:
    """Random states of the host, under -1, and of the GPUs that these tensors are on."""
    devices = {v.device.index for v in values if isinstance(v, Tensor) and v.is_cuda}
    return {-1: torch.get_rng_state(), **{d: torch.cuda.get_rng_state(d) for d in devices}}


@contextlib.contextmanager
def rng_restored(states: Mapping[int, Tensor]) -> Iterator[None]:
    """Within the block the generators are where `rng_states` found them; afterwards as before."""
    devices = [device for device in states if device >= 0]
    with torch.random.fork_rng(devices):
        torch.set_rng_state(states[-1])
        for device in devices:
            torch.cuda.set_rng_state(states[device], device)
        yield


# -- autograd links -------------------------------------------------------------------------------


def linked_grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """torch.autograd.grad, with each backward node carrying its forward node's sequence number."""
    from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks

    roots = outputs if isinstance(outputs, list | tuple) else [outputs]
    setup_stacktrace_preservation_hooks([t.grad_fn for t in roots if t.grad_fn is not None])
    return torch.autograd.grad(outputs, inputs, *args, **kwargs)


def is_checkpoint(target: object) -> bool:
    """Whether a node of Dynamo's graph calls a checkpointed stretch."""
    return target is torch.ops.higher_order.tag_activation_checkpoint


# -- AOTAutograd ----------------------------------------------------------------------------------


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Within the block AOTAutograd does not look at what a graph's first call runs.

    It takes every operator through Python, to see whether a custom one gives back its operands.
    """
    analysis = getattr(runtime_wrappers, "_AnalyzeCustomOpInputOutputMode", ())
    if isinstance(_python_dispatch._get_current_dispatch_mode(), analysis):
        with _python_dispatch._pop_mode_temporarily():
            yield
    else:
        yield


def aot(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    forward: Callable[..., Any],
    inference: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    partition: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Run AOTAutograd over a Dynamo graph; the callables get (ATen graph, example inputs)."""
    comparisons.reflect(gm, inputs)
    extra: dict[str, Any] = {}
    if backward is not None:
        extra["bw_compiler"] = backward
    if partition is not None:
        extra["partition_fn"] = partition
    # our own recompute pass takes checkpointed stretches, dropout included; torch's refuses that
    plain = torch._functorch.config.patch(remat_using_tags_for_fwd_loss_bwd_graph=False)
    with torch.fx.traceback.preserve_node_meta(), plain, traced_as_eager():
        return _aot_autograd(
            fw_compiler=forward,
            inference_compiler=inference,
            decompositions=capture_decompositions(),
            keep_inference_input_mutations=True,
            **extra,
        )(gm, inputs)


def outputs_of(gm: fx.GraphModule) -> list[Any]:
    """What a Dynamo graph returns."""
    (values,) = gm.graph.output_node().args
    return list(values) if isinstance(values, list | tuple) else [values]


def storage_key(value: Tensor) -> int:
    """Equal for tensors that share memory, fake ones too."""
    return value.untyped_storage()._cdata


def was_written(value: Tensor) -> bool:
    """Whether something was written in place, into the tensor or what it is a view of."""
    return not value.is_inference() and value._version > 0


def reusable_backwards() -> contextlib.AbstractContextManager[Any]:
    """Compiled backwards within leave what was saved for them as it is.

    Without it AOTAutograd lets them overwrite it, and `retain_graph=True` raises.
    """
    return torch._functorch.config.patch(donated_buffer=False)


def boxed(fn: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark a callable that takes its arguments as one list, which it may empty."""
    fn._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd's own protocol
    return fn


def functionalized_effect(node: fx.Node, op: Any) -> Mapping[str, Any] | None:
    """Arguments of a mutating custom op that AOTAutograd made functional, or None."""
    from torch._higher_order_ops.auto_functionalize import (
        auto_functionalized,
        auto_functionalized_v2,
    )

    if node.target not in (auto_functionalized, auto_functionalized_v2) or node.args[0] is not op:
        return None
    return node.kwargs


def origin(
    node: fx.Node,
    dynamo: fx.GraphModule,
    placeholders: Sequence[fx.Node],
    examples: Sequence[Any],
) -> tuple[Any, fx.Node | None]:
    """The real value behind an ATen placeholder, and Dynamo's placeholder if it was one.

    (None, None) for saved values, tangents and seeds, which no user gave.
    """
    desc = node.meta.get("desc")
    target = getattr(desc, "target", None)
    if target is not None:
        value: Any = dynamo
        for part in target.split("."):
            value = getattr(value, part)
        return value, None
    if type(desc).__name__ != "PlainAOTInput":
        return None, None
    return examples[desc.idx], placeholders[desc.idx]


def plain_positions(output: fx.Node) -> tuple[int | None, ...]:
    """Which of Dynamo's outputs each ATen output is; None for one that AOTAutograd added."""
    descs = output.meta.get("desc") or ()
    return tuple(d.idx if type(d).__name__ == "PlainAOTOutput" else None for d in descs)


def stands_for_overlapping(placeholder: fx.Node) -> bool:
    """Whether AOTAutograd put one tensor in the place of inputs that share memory."""
    kind = type(placeholder.meta.get("desc")).__name__
    return kind in ("SyntheticBaseAOTInput", "ViewBaseAOTInput")


def written_inputs(count: int) -> set[int]:
    """Which of its `count` inputs the graph in hand writes; within AOTAutograd's compilers."""
    context = torch._guards.TracingContext.try_get()
    facts = None if context is None else context.fw_metadata
    if facts is None:
        return set()
    lifted = len(facts.input_info) - count  # a module's own parameters come first
    return {i - lifted for i, info in enumerate(facts.input_info) if info.mutates_data}


def written_after() -> set[int]:
    """Which inputs of the graph in hand are written when it has run, not by it.

    As a value that needs a gradient is. Within AOTAutograd's compilers.
    """
    context = torch._guards.TracingContext.try_get()
    facts = None if context is None else context.fw_metadata
    infos = () if facts is None else facts.input_info
    return {
        i for i, info in enumerate(infos) if info.mutation_type == MutationType.MUTATED_OUT_GRAPH
    }


def results_of_their_own() -> list[int]:
    """Places of the results of the forward in hand that are no views of inputs or intermediates.

    Within AOTAutograd's compilers.
    """
    context = torch._guards.TracingContext.try_get()
    facts = None if context is None else context.fw_metadata
    if facts is None:
        return []
    own = (OutputType.non_alias, OutputType.unsafe_view_alias)
    first = facts.num_mutated_inp_runtime_indices
    return [i for i, info in enumerate(facts.output_info, first) if info.output_type in own]


def no_view(value: Any) -> Any:
    """A tensor that autograd takes for no view, of the same memory and strides."""
    if not isinstance(value, Tensor) or not value._is_view():
        return value
    own = torch.ops.aten._unsafe_view.default(value, value.shape)
    return own if own.stride() == value.stride() else value


def overwritten_with_history(examples: Sequence[Any]) -> bool:
    """Whether the graph in hand writes a value that needs a gradient over an input that needs none.

    AOTAutograd copies such a value into the input after the graph, where autograd then finds what
    its backward was to read written over. Within AOTAutograd's compilers.
    """
    context = torch._guards.TracingContext.try_get()
    facts = None if context is None else context.fw_metadata
    if facts is None or len(facts.input_info) < len(examples):
        return False  # inputs that share memory were merged: refused for that
    infos = facts.input_info[len(facts.input_info) - len(examples) :]
    return any(
        info.mutates_data and info.requires_grad and not value.requires_grad
        for info, value in zip(infos, examples, strict=True)
        if isinstance(value, torch.Tensor)
    )


_PLAIN_REASONS = (
    ("data-dependent", "Python branches on, or reads back, a value computed in the step"),
    (".item()", "Python reads a value back from the device"),
    ("Unsupported Tensor.item", "Python reads a value back from the device"),
    ("Backend compiler", "the captured graph could not be derived"),
    ("under a torch.func transform", "a custom autograd.Function under a torch.func transform"),
)
"""Dynamo's wording, and what it means to the user."""


def refusal_of(error: BaseException) -> Refusal:
    """What Dynamo says of a frame it can't take whole, in one line, with the user's line."""
    text = str(error).strip()
    reason = text.splitlines()[0] if text else type(error).__name__
    for needle, plain in _PLAIN_REASONS:
        if needle in text:
            reason = plain
            break
    return Refusal("capture", reason, where=_where(error))


def fault_of(error: BaseException, code: types.CodeType) -> Refusal:
    """What went wrong while Dynamo traced a frame, in one line, with the user's line."""
    cause = user_cause(error)
    if isinstance(cause, CompilingFailed):
        cause = cause.__cause__ or cause
    text = str(cause)
    explained = _EXPLAINED.search(text)
    lines = [explained[1]] if explained else [line for line in text.splitlines() if line.strip()]
    line = lines[0].strip() if lines else "no message"
    reason = f"{type(cause).__name__}: {line if len(line) <= _LONG else line[:_LONG] + '...'}"
    at = _users_line(code.co_filename, code.co_firstlineno)
    return Refusal("capture", reason, where=_where(error) or at)


_LONG = 300
_EXPLAINED = re.compile(r"^ *Explanation: (?:.*: got )?(.+)$", re.MULTILINE)
"""Where Dynamo's errors of many lines say what went wrong; of an operator, what it raised."""


def _where(error: BaseException) -> str | None:
    """The innermost line outside torch that Dynamo was at, as "file.py:12"."""
    stack = getattr(error, "real_stack", None) or ()
    lines = [_users_line(frame.filename, frame.lineno) for frame in stack]
    return next(filter(None, reversed(lines)), None)


def _users_line(path: str, line: int | None) -> str | None:
    ours = "/torch/" in path or "/trainfuse/capture/" in path
    return None if ours else f"{path.rsplit('/', 1)[-1]}:{line}"


def failed_assumption(error: RuntimeError) -> bool:
    """Whether an assertion that tracing put into the graph does not hold for this call's data."""
    return str(error).startswith("Runtime assertion failed for expression")


# -- modules --------------------------------------------------------------------------------------


def set_compiled_call(module: torch.nn.Module, call: Callable[..., Any] | None) -> None:
    """Route a module's calls, hooks included, through `call`; copies and pickles leave it out."""
    module._compiled_call_impl = call  # type: ignore[assignment]  # what nn.Module.compile sets


def compiled_call(module: torch.nn.Module) -> Any:
    """What `set_compiled_call` set, or None."""
    return getattr(module, "_compiled_call_impl", None)


def over_budget(error: BaseException) -> bool:
    """Whether Dynamo stopped because a frame has as many plans as it may have."""
    return isinstance(error, torch._dynamo.exc.FailOnRecompileLimitHit)


# -- CUDA graphs ----------------------------------------------------------------------------------


@contextlib.contextmanager
def own_blas_workspaces() -> Iterator[None]:
    """Let a capture take its cuBLAS workspaces from the graph's own memory pool.

    A workspace from before the capture belongs to torch, which may free it while the graph still
    writes to it: Lightning clears all workspaces whenever a Trainer sets up its GPU.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()
