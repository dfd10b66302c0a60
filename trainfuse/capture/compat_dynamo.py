"""What of Dynamo traces otherwise than eager runs, in a form that doesn't."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo import config, guards
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.utils import get_static_address_type
from torch._dynamo.variables import builder, constant, higher_order_ops, misc
from torch._dynamo.variables import optimizer as dynamo_optimizer
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._functorch.autograd_function import AutogradFunctionApply
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import (
    FunctionalTensor,
    FunctionalTensorMode,
    disable_functional_mode,
)
from torch.fx.experimental.proxy_tensor import _get_proxies
from torch.utils._pytree import tree_map

from trainfuse.capture import counted_dims, functions, reentrant
from trainfuse.capture.compat_aot import layout_rules

_STOCK_LOAD_ATTR = SideEffects.load_attr


def _load_attr(self: SideEffects, *args: Any, **kwargs: Any) -> Any:
    """Dynamo's reading of an attribute that the trace wrote, with a None of its own.

    From torch 2.14 on every None that Dynamo meets is one shared object. `p.grad = None`, read back
    by `backward`, gets p's gradient as its source: later traces would see it in every None.
    """
    found = _STOCK_LOAD_ATTR(self, *args, **kwargs)
    shared = getattr(constant, "CONSTANT_VARIABLE_NONE", None)
    return constant.ConstantVariable(None) if shared is not None and found is shared else found


_STOCK_DUPE_GUARD = builder.make_dupe_guard
_STOCK_OPTIMIZER_SOURCE = guards.is_from_optimizer_source


def _same_object_guard(source: Any, other: Any) -> Any:
    """A guard that two names still mean one object, where Dynamo found them to.

    Dynamo leaves it out between a local and a global, and for whatever an optimizer holds: a
    module's parameter that is replaced would go on being read, and trained, through the optimizer.
    """
    if not other or other == source:
        return None
    return functools.partial(guards.GuardBuilder.DUPLICATE_INPUT, source_b=other)


def _nowhere(source: Any) -> bool:
    return False


def _untimed(*_: Any) -> float:
    """How long new guards take, which nobody asks: Dynamo empties the caches to measure it."""
    return 0.0


def apply_function(
    forward: fx.GraphModule, backward: fx.GraphModule, *args: Any, **facts: Any
) -> Any:
    """`autograd_function_apply` as eager's engine would run the Function: see `functions`."""
    return functions.apply_function(forward, backward, args, facts, unchecked=_mark_unchecked)


def _apply_method(self: Any, *args: Any, **facts: Any) -> Any:
    return apply_function(*args, **facts)


def _mark_unchecked(value: Any) -> None:
    """As Dynamo's own call: AOTAutograd then saves the value without a check of its version."""
    if isinstance(value, Tensor):
        for proxy in _get_proxies(value):
            proxy.node.meta["saved_tensor_with_no_vc_check"] = True


_STOCK_CALL_APPLY = misc.AutogradFunctionVariable.call_apply


def _call_apply(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Dynamo's call of a custom Function, but not within torch.func's transforms.

    There it takes the inputs for such that require no gradient, and differentiates the forward.
    """
    if torch._C._functorch.peek_interpreter_stack() is None:
        return _STOCK_CALL_APPLY(self, *args, **kwargs)
    torch._dynamo.exc.unimplemented(
        gb_type="autograd.Function under torch.func",
        context=str(self),
        explanation="a custom autograd.Function under a torch.func transform",
        hints=[],
    )


_STOCK_CALL_METHOD = TensorVariable.call_method


def _call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Dynamo's call of a tensor's method; one that scales by a number stays one operator.

    Dynamo writes `x.add_(y, alpha=0.1)`, `addcmul_` and `addcdiv_` as products of their other
    operands, in those operands' type, where eager computes everything in the wider one: an average
    in fp32 of values in bf16 would be rounded to bf16.
    """
    kept = name in _SCALED and _by_a_number(kwargs)
    with _undecomposed() if kept else contextlib.nullcontext():
        return _STOCK_CALL_METHOD(self, tx, name, args, kwargs)


_SCALED = frozenset({"add_", "addcmul_", "addcdiv_"})
_STOCK_CALL_FUNCTION = TorchInGraphFunctionVariable.call_function


def _call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """The same for `torch.addcdiv`, which Dynamo takes to pieces in any case."""
    if self.value is torch.addcdiv and _by_a_number(kwargs):
        self = TorchInGraphFunctionVariable(torch.ops.aten.addcdiv.default)
    return _STOCK_CALL_FUNCTION(self, tx, args, kwargs)


def _by_a_number(kwargs: Mapping[str, Any]) -> bool:
    """Not by a tensor, whose number eager would have to ask for."""
    factors = (kwargs[key] for key in ("alpha", "value") if key in kwargs)
    return any(not isinstance(factor, TensorVariable) for factor in factors)


@contextlib.contextmanager
def _undecomposed() -> Iterator[None]:
    revert = _DECOMPOSE_NOTHING()
    try:
        yield
    finally:
        revert()


_DECOMPOSE_NOTHING = config._make_closure_patcher(enable_dynamo_decompositions=False)
_STOCK_CHECKPOINT = higher_order_ops.CheckpointHigherOrderVariable._call_function


def _checkpoint(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """Dynamo's call of a checkpoint, one that is reentrant as eager runs it: see `reentrant`."""
    chosen = kwargs["use_reentrant"].as_python_constant() if "use_reentrant" in kwargs else None
    if chosen is not None and not chosen:
        return _STOCK_CHECKPOINT(self, tx, args, kwargs)
    return UserFunctionVariable(reentrant.checkpoint).call_function(tx, args, kwargs)


_STOCK_FUNCTIONALIZE = FunctionalTensorMode.__torch_dispatch__


def _functionalize(
    self: Any, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
) -> Any:
    """Functionalization of an operator; what it writes keeps its strides, as memory does.

    The operator that takes its place may lay its result out afresh: `x.t().scatter_(...)` would
    leave x, and whatever is computed from it, transposed; and what x is a view of may then not be
    made of it. So the operator writes a value of its own, which is laid out before x is told.
    """
    written = args[0] if args and func._schema.is_mutable else None
    if (
        not isinstance(written, FunctionalTensor)
        or written.elem.is_contiguous()
        or torch.Tag.inplace_view in func.tags
    ):
        return _STOCK_FUNCTIONALIZE(self, func, types, args, kwargs)
    torch._functionalize_sync(written.elem)
    before = torch._from_functional_tensor(written.elem)
    with self:
        apart = FunctionalTensor.to_functional(before)
    result = _STOCK_FUNCTIONALIZE(self, func, types, (apart, *args[1:]), kwargs)
    torch._functionalize_sync(apart.elem)
    after = torch._from_functional_tensor(apart.elem)
    if after is not before:
        _replace(written, before, after)
    return tree_map(lambda value: written if value is apart else value, result)


def _replace(written: FunctionalTensor, before: Tensor, after: Tensor) -> None:
    """Write a value, its dims in the order in memory of what it replaces."""
    if _order(after) != _order(before):
        with disable_functional_mode():
            after = torch.ops.aten.copy.default(before, after)
    torch._functionalize_replace(written.elem, after)
    torch._functionalize_commit_update(written.elem)
    torch._functionalize_sync(written.elem)


def _order(value: Tensor) -> list[int]:
    """The dims of more than one element, from the largest stride on; gaps say nothing."""
    dims = [dim for dim in range(value.dim()) if value.size(dim) != 1]
    return sorted(dims, key=lambda dim: -value.stride(dim))


_STOCK_FAKE = FakeTensorMode.dispatch


def _fake(self: Any, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
    """What torch plans an operator's result to be; of some, with dims that it doesn't misread.

    Of others, laid out as eager's: an output that is written in place stays as it is planned here.
    """
    if (rule := layout_rules().get(func)) is not None:
        with self:
            planned = rule(*args, **kwargs or {})
        if planned is not NotImplemented:
            return planned
    call = counted_dims.counted(func, args, kwargs or {})
    args, kwargs = (args, kwargs or {}) if call is None else call
    return _STOCK_FAKE(self, func, types, args, kwargs)


_GRAPH_TREES = "torch._inductor.cudagraph_trees"
_STOCK_STATIC = dynamo_optimizer._is_static_for_cudagraphs


def _is_static(x: Tensor) -> bool:
    """Whether a parameter keeps its address, as Dynamo asks when it traces an optimizer's step.

    It imports Inductor's module of CUDA graphs to that end, whether or not anything uses them. Of
    what the module leaves in its thread's state torch 2.11 counts one reference too few: imported
    in a hook, within a backward, it is freed, and the next garbage collection ends the process.
    """
    if _GRAPH_TREES in sys.modules:
        return _STOCK_STATIC(x)
    return not x.is_cuda or get_static_address_type(x) is not None


MENDED: tuple[tuple[Any, str, Any, Any], ...] = (
    (SideEffects, "load_attr", _load_attr, _STOCK_LOAD_ATTR),
    (builder, "make_dupe_guard", _same_object_guard, _STOCK_DUPE_GUARD),
    (guards, "is_from_optimizer_source", _nowhere, _STOCK_OPTIMIZER_SOURCE),
    (guards, "profile_guard_manager", _untimed, guards.profile_guard_manager),
    (AutogradFunctionApply, "__call__", _apply_method, AutogradFunctionApply.__call__),
    (misc.AutogradFunctionVariable, "call_apply", _call_apply, _STOCK_CALL_APPLY),
    (
        higher_order_ops.CheckpointHigherOrderVariable,
        "_call_function",
        _checkpoint,
        _STOCK_CHECKPOINT,
    ),
    (FunctionalTensorMode, "__torch_dispatch__", _functionalize, _STOCK_FUNCTIONALIZE),
    (FakeTensorMode, "dispatch", _fake, _STOCK_FAKE),
    (dynamo_optimizer, "_is_static_for_cudagraphs", _is_static, _STOCK_STATIC),
    (TensorVariable, "call_method", _call_method, _STOCK_CALL_METHOD),
    (TorchInGraphFunctionVariable, "call_function", _call_function, _STOCK_CALL_FUNCTION),
)
"""What of torch is another function while a compiled call may trace: owner, name, ours, stock."""
