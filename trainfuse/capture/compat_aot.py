"""Where AOTAutograd traces other than eager computes, and what replaces that: private to torch."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decompositions
from torch._functorch._aot_autograd import graph_compile
from torch._functorch._aot_autograd.schemas import MemoryFormatMeta
from torch._inductor.decomposition import select_decomp_table
from torch._prims_common import (
    compute_elementwise_output_logical_to_physical_perm,
    suggest_memory_format,
)
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.fx.node import _side_effectful_functions

from autodiff.loss_slopes import binary_cross_entropy_backward, smooth_l1_loss_backward
from autodiff.margins import multi_margin_loss, multilabel_margin_loss
from autodiff.shrinking import softshrink
from autodiff.upsampling import upsample_linear
from trainfuse.capture import counted_dims
from trainfuse.capture.overlap import may_overlap_itself


@contextlib.contextmanager
def traced_as_eager() -> Iterator[None]:
    """What AOTAutograd traces within computes what eager does, laid out as eager's."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_weighted_upsampling())
        stack.enter_context(_cotangents_like_outputs())
        stack.enter_context(_nothing_donated())
        stack.enter_context(_checks_kept())
        for op, formula in _FORMULAS.items():
            stack.enter_context(_decomposed(op, formula))
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within, an attribute of a module or class is another."""
    stock = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, stock)


def _weighted_upsampling() -> contextlib.AbstractContextManager[None]:
    """Linear interpolation within is decomposed by our formula.

    A table wouldn't do: bilinear2d is taken to pieces by its own Autograd kernel in Python.
    """
    stock = decompositions._upsample_linear

    def chosen(x: Tensor, *args: Any) -> Tensor:
        return upsample_linear(x, *args) if x.is_floating_point() else stock(x, *args)

    return _replaced(decompositions, "_upsample_linear", chosen)


@contextlib.contextmanager
def _checks_kept() -> Iterator[None]:
    """Within, the check of LAPACK's result is an effect, as in torch 2.14.

    torch 2.11 drops it from its graphs, as no value depends on it: a singular matrix's inverse
    would be numbers.
    """
    new = {torch.ops.aten._linalg_check_errors.default} - _side_effectful_functions
    _side_effectful_functions.update(new)
    try:
        yield
    finally:
        _side_effectful_functions.difference_update(new)


def _nothing_donated() -> contextlib.AbstractContextManager[None]:
    """Let no backward overwrite what it was saved.

    AOTAutograd refuses retain_graph for one that may, unless its first run was with retain_graph;
    switching the donation off by its flag makes it refuse always.
    """
    return _replaced(graph_compile, "collect_bw_donated_buffer_idxs", lambda *_: [])


def _cotangents_like_outputs() -> contextlib.AbstractContextManager[None]:
    """Cotangents within are expected laid out as their outputs, so that gradients are as eager's.

    Those of an output whose elements may share memory are expected dense: its layout holds no
    cotangent. torch 2.11 expects all of them dense. 2.14 tells expanded outputs only from the rest:
    it lays a cotangent of sliding windows (`unfold`) over itself, and the gradient is wrong.
    """
    stock = MemoryFormatMeta.from_tensor

    def chosen(value: Tensor, *args: Any, **kwargs: Any) -> Any:
        known = all(isinstance(n, int) for n in value.shape)
        if not known or value.layout is not torch.strided:
            return stock(value, *args, **kwargs)
        guess = not may_overlap_itself(value)
        with torch._functorch.config.patch(guess_tangent_strides_as_outputs=guess):
            return stock(value, *args, **kwargs)

    return _replaced(MemoryFormatMeta, "from_tensor", staticmethod(chosen))


@contextlib.contextmanager
def _decomposed(op: Any, formula: Callable[..., Any]) -> Iterator[None]:
    """Within, autograd records a formula where torch has one of its own in Python for the operator.

    That one is a kernel of the operator, which no table overrules.
    """
    stock = dict(op.py_kernels)
    try:
        op.py_kernels.update(dict.fromkeys(stock, formula))
        op._dispatch_cache.clear()
        yield
    finally:
        op.py_kernels.update(stock)
        op._dispatch_cache.clear()


def _dropout(x: Tensor, p: float, train: bool | None) -> Tensor:
    """Dropout that drops nothing gives its input, as in eager; torch 2.11 traces a copy."""
    return torch.ops.aten.native_dropout(x, p, train)[0] if train and p != 0 else x


_FORMULAS = {
    torch.ops.aten.dropout.default: _dropout,
    torch.ops.aten.softshrink.default: softshrink,
    torch.ops.aten.multi_margin_loss.default: multi_margin_loss,
    torch.ops.aten.multilabel_margin_loss_forward.default: multilabel_margin_loss,
    torch.ops.aten.smooth_l1_loss_backward.default: smooth_l1_loss_backward,
    torch.ops.aten.binary_cross_entropy_backward.default: binary_cross_entropy_backward,
}


# -- decompositions

_KEPT_WHOLE = (
    "aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm", "aten.convolution",
    "aten._scaled_dot_product", "aten.scaled_dot_product", "aten._flash", "aten._efficient",
    "aten.embedding", "aten.index_put", "aten.scatter", "aten._foreach", "aten._fused",
    "aten.native_dropout", "aten.nll_loss", "aten._softmax", "aten._log_softmax",
    "aten.logsumexp",
    "aten.native_layer_norm", "aten.native_group_norm", "aten.native_batch_norm",
    "aten._native_batch_norm", "aten.cudnn_batch_norm", "aten.miopen_batch_norm",
    "aten._batch_norm", "aten.batch_norm", "aten._fused_rms_norm", "aten.index_add",
    "aten.gelu", "aten.silu_backward",
    "aten.bernoulli", "aten.rand", "aten.randn", "aten.randint", "aten.uniform", "aten.normal",
    "aten.logit_backward", "aten.hardsigmoid_backward",
    "aten.soft_margin_loss_backward",
    "aten.max_pool2d_with_indices_backward",
)  # fmt: skip
"""Ops that stay one node until recompute has run, or for good; see the op table."""


_LAID_OUT_AS = {
    torch.ops.aten.xlogy.Tensor: 2,
    torch.ops.aten.special_xlog1py.default: 2,
    torch.ops.aten.heaviside.default: 2,
    torch.ops.aten.logaddexp.default: 2,
    torch.ops.aten.logaddexp2.default: 2,
    torch.ops.aten.logical_and.default: 2,
    torch.ops.aten.logical_or.default: 2,
    torch.ops.aten.logical_xor.default: 2,
    torch.ops.aten.copysign.Tensor: 2,
    torch.ops.aten.div.Tensor_mode: 2,
    torch.ops.aten.binary_cross_entropy.default: 1,
}
"""Operators of two tensors that torch's formulas in Python lay out otherwise than eager does.

With the number of operands that decide. The formulas meet the operands in another order.
"""


def _laid_out(op: Any, count: int, rule: Callable[..., Any] | None) -> Callable[..., Any]:
    """A decomposition of `op` that first lays the operands out as the result is to be.

    Eager's order is `TensorIterator`'s: as the first operand, then as the next.
    """

    @functools.wraps(rule or op)
    def decomposed(*args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in args[:2] if isinstance(value, Tensor)]
        shape = torch.broadcast_shapes(*(value.shape for value in tensors))
        whole = [value.expand(shape) for value in tensors]
        order, _ = compute_elementwise_output_logical_to_physical_perm(*whole[:count])
        if len(tensors) < 2 or all(_is_ordered(value, order) for value in whole):
            return NotImplemented if rule is None else rule(*args, **kwargs)
        back = [order.index(dim) for dim in range(len(order))]
        alike = [value.permute(order).contiguous().permute(back) for value in whole]
        return (rule or op)(*alike, *args[2:], **kwargs)

    return decomposed


def _is_ordered(value: Tensor, order: Sequence[int]) -> bool:
    """Whether the dims, in this order, have ever smaller strides.

    Repeated elements leave the order open, which formulas close in their own way: only a plain
    order is sure then.
    """
    if 0 in value.stride() and list(order) != sorted(order):
        return False
    steps = [value.stride(dim) for dim in order if value.size(dim) > 1 and value.stride(dim)]
    return all(one >= other for one, other in itertools.pairwise(steps))


def _in_rows(rule: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A formula whose result is contiguous, as the operator's kernels lay it out."""
    return functools.wraps(rule)(lambda *args, **kwargs: rule(*args, **kwargs).contiguous())


def _channels_kept(rule: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A formula whose result keeps channels last on a CPU, as the operator's kernel for it does."""

    @functools.wraps(rule)
    def decomposed(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        made = rule(x, *args, **kwargs)
        if x.device.type != "cpu" or x.dim() != 4:
            return made
        return made.contiguous(memory_format=suggest_memory_format(x))

    return decomposed


def _rows_on_a_cpu(rule: Callable[..., Any]) -> Callable[..., Any]:
    """A formula of one operand, of which the kernel for a CPU makes a contiguous one first."""

    @functools.wraps(rule)
    def decomposed(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return rule(x.contiguous() if x.device.type == "cpu" else x, *args, **kwargs)

    return decomposed


def _power_of_a_number(base: Any, x: Tensor) -> Any:
    """`base ** x` lies in rows, however x does."""
    return NotImplemented if x.is_contiguous() else torch.pow(base, x.contiguous())


def _filled_as_it_lies(rule: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`index_fill`, which keeps its operand's layout.

    torch 2.11's formula copies into a new tensor to that end, which AOTAutograd refuses as a write.
    """

    @functools.wraps(rule)
    def decomposed(x: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
        if x.is_contiguous():
            return rule(x, dim, index, value)
        number = value if isinstance(value, Tensor) else x.new_full((), value)
        return torch.ops.aten.index_put(x, [*(None,) * (dim % x.dim()), index], number.to(x.dtype))

    return decomposed


_RELAID = {
    torch.ops.aten.index_fill.int_Scalar: _filled_as_it_lies,
    torch.ops.aten.index_fill.int_Tensor: _filled_as_it_lies,
    torch.ops.aten.log_sigmoid_forward.default: _rows_on_a_cpu,
    torch.ops.aten.mse_loss_backward.default: _in_rows,
    torch.ops.aten.huber_loss_backward.default: _in_rows,
    torch.ops.aten.max_unpool2d.default: _channels_kept,  # torch 2.14 does it itself
}
"""What becomes of torch's formulas whose result is laid out otherwise than the operators'."""


def _sized_by_data(op: Any) -> Callable[..., Any]:
    """What a trace of an operator meets whose result's size is data: nothing can be planned."""

    def raises(*_: Any, **__: Any) -> Any:
        raise DynamicOutputShapeException(op)

    return raises


_SIZED_BY_DATA = (torch.ops.aten._unique.default,)
"""Operators with such a size of which torch doesn't say so: the gradient of index_fill has one.

torch 2.11 runs them on zeros to see a size, which is then taken for every call's; 2.14 raises.
"""


def capture_decompositions() -> dict[Any, Callable[..., Any]]:
    """The decompositions AOTAutograd applies while it traces a step."""
    rules = _stock_rules()
    unsized = {op: _sized_by_data(op) for op in _SIZED_BY_DATA}
    plain = counted_dims.rules(rules)
    return rules | layout_rules() | unsized | plain | _FORMULAS


def _stock_rules() -> dict[Any, Callable[..., Any]]:
    return {
        op: rule
        for op, rule in select_decomp_table().items()
        if not str(op).startswith(_KEPT_WHOLE)
        # Inductor's own rules lower to ops that only Inductor knows
        and not rule.__module__.startswith("torch._inductor")
    }


@functools.cache
def layout_rules() -> dict[Any, Callable[..., Any]]:
    """Decompositions that lay their results out as eager does, of operators where torch's don't.

    One that returns NotImplemented leaves its call as it is.
    """
    rules = _stock_rules()
    laid_out = {op: _laid_out(op, count, rules.get(op)) for op, count in _LAID_OUT_AS.items()}
    relaid = {op: lay(rules[op]) for op, lay in _RELAID.items()}
    return laid_out | relaid | {torch.ops.aten.pow.Scalar: _power_of_a_number}
