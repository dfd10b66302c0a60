"""The operator table: one row an ATen overload, read by every pass."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from .philox import KEEP_MASK

Kind = Literal[
    "pointwise",
    "reduction",
    "view",
    "contraction",
    "gather",
    "scatter",
    "norm",
    "softmax",
    "rng",
    "effect",
    "opaque",
    "creation",
]
Cost = Literal["free", "cheap", "moderate", "expensive", "never"]
Dtypes = Literal["any", "float", "integer", "bool"]


@dataclass(frozen=True, slots=True)
class OpRow:
    """What the passes know of one operator.

    name: the overload as printed by torch, "aten.add.Tensor".
    cost: what computing it again costs; "never" when a second execution could differ.
    dtypes: element types of its tensor operands that the row vouches for.
    aliases: the result shares storage with the first operand.
    """

    name: str
    kind: Kind
    cost: Cost
    dtypes: Dtypes = "any"
    aliases: bool = False


_POINTWISE = """
add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Tensor rsub.Scalar mul.Tensor mul.Scalar
div.Tensor div.Scalar div.Tensor_mode div.Scalar_mode neg abs sign sgn square
floor ceil round trunc frac fmod.Tensor fmod.Scalar remainder.Tensor remainder.Scalar
remainder.Scalar_Tensor relu clamp clamp.Tensor clamp_min clamp_min.Tensor clamp_max
clamp_max.Tensor minimum maximum fmin fmax where.self where.ScalarSelf where.ScalarOther
where.Scalar masked_fill.Scalar masked_fill.Tensor threshold threshold_backward addcmul addcdiv
lerp.Scalar lerp.Tensor _to_copy clone copy copysign.Tensor copysign.Scalar
eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar gt.Tensor
gt.Scalar ge.Tensor ge.Scalar logical_and logical_or logical_xor logical_not bitwise_and.Tensor
bitwise_and.Scalar bitwise_or.Tensor bitwise_or.Scalar bitwise_xor.Tensor bitwise_xor.Scalar
bitwise_not bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar
bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar isnan isinf signbit fill.Scalar
fill.Tensor hardtanh hardtanh_backward hardswish hardswish_backward hardsigmoid
hardsigmoid_backward leaky_relu leaky_relu_backward nan_to_num
"""
_POINTWISE_FLOAT = """
reciprocal rsqrt sqrt exp exp2 expm1 log log1p log2 log10 tanh sigmoid erf erfc sin cos tan
sinh cosh asin acos atan asinh acosh atanh atan2 hypot pow.Tensor_Scalar pow.Tensor_Tensor
pow.Scalar xlogy.Tensor gelu gelu_backward silu silu_backward mish softplus softplus_backward
elu elu_backward sigmoid_backward tanh_backward log_sigmoid_backward logit
logit_backward
"""
_PRIMS_POINTWISE = "convert_element_type fma"
_VIEWS = """
view _unsafe_view reshape permute transpose.int t expand unsqueeze squeeze squeeze.dim
squeeze.dims alias detach slice.Tensor select.int as_strided diagonal unfold view_as_real
view_as_complex view.dtype split.Tensor split_with_sizes unbind.int
"""
_CREATION = """
full full_like zeros zeros_like ones ones_like empty.memory_format empty_strided empty_like
empty_permuted new_full new_zeros new_ones new_empty new_empty_strided scalar_tensor arange
arange.start arange.start_step eye lift_fresh_copy sym_size.int sym_stride.int sym_numel
sym_storage_offset
"""
_REDUCTIONS = """
sum sum.dim_IntList mean mean.dim amax amin var_mean.correction var.correction
"""
_CONTRACTIONS = """
mm bmm addmm baddbmm addmv mv dot convolution convolution_backward linear linear_backward
matmul _scaled_mm _grouped_mm
_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
_scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
_scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
"""
_GATHERS = """
embedding gather index.Tensor index_select take cat stack flip roll constant_pad_nd repeat
"""
_SCATTERS = """
embedding_dense_backward scatter.src scatter.value scatter_add index_put index_add
slice_scatter select_scatter slice_backward select_backward
"""
_NORMS = """
native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward
_fused_rms_norm _fused_rms_norm_backward _native_batch_norm_legit_functional
_native_batch_norm_legit.no_stats _native_batch_norm_legit_no_training native_batch_norm_backward
"""
_SOFTMAXES = """
_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data nll_loss_forward
nll_loss_backward logsumexp
"""
_RANDOM = """
native_dropout bernoulli bernoulli.p rand rand_like randn randn_like randint randint.low
randint_like randperm normal_functional multinomial rrelu_with_noise_functional
"""
_HEAVY = """
max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward
_adaptive_avg_pool2d _adaptive_avg_pool2d_backward upsample_nearest2d
upsample_nearest2d_backward upsample_bilinear2d upsample_bilinear2d_backward cumsum any any.dim all
all.dim linalg_vector_norm prod
"""
# a second execution, of operands with another last bit, could choose another element
_CHOICES = """
max_pool2d_with_indices sort sort.stable topk argmax argmin max.dim min.dim
"""


def _overloads(text: str, namespace: str = "aten") -> Iterator[str]:
    for name in text.split():
        yield f"{namespace}.{name}" if "." in name else f"{namespace}.{name}.default"


def _build() -> dict[str, OpRow]:
    rows: dict[str, OpRow] = {}

    def put(
        text: str,
        kind: Kind,
        cost: Cost,
        dtypes: Dtypes = "any",
        *,
        aliases: bool = False,
        namespace: str = "aten",
    ) -> None:
        for name in _overloads(text, namespace):
            assert name not in rows, name
            rows[name] = OpRow(name, kind, cost, dtypes, aliases)

    put(_POINTWISE, "pointwise", "cheap")
    put(_POINTWISE_FLOAT, "pointwise", "cheap", "float")
    put(_PRIMS_POINTWISE, "pointwise", "cheap", namespace="prims")
    put(_VIEWS, "view", "free", aliases=True)
    put(_CREATION, "creation", "free")
    put("iota", "creation", "free", namespace="prims")
    put(_REDUCTIONS, "reduction", "moderate")
    put(_CONTRACTIONS, "contraction", "expensive", "float")
    put("accumulate accumulate_sum", "contraction", "expensive", "float", namespace="trainfuse")
    put(_GATHERS, "gather", "moderate")
    put("rev", "gather", "moderate", namespace="prims")
    put(_SCATTERS, "scatter", "moderate")
    put(_NORMS, "norm", "moderate", "float")
    put(_SOFTMAXES, "softmax", "moderate", "float")
    put("native_dropout_backward", "pointwise", "cheap", "float")
    put(_RANDOM, "rng", "never")
    put(_HEAVY, "opaque", "expensive")
    put(_CHOICES, "opaque", "never")
    # The mask is a pure function of the saved seed, so drawing it again is a cheap recompute;
    # the seed itself comes from the generator and may be drawn once only.
    put("seed", "rng", "never", namespace="trainfuse")
    put("keep_mask", "rng", "cheap", namespace="trainfuse")
    put("update", "effect", "never", namespace="trainfuse")
    put("row_keys", "pointwise", "cheap", "integer", namespace="trainfuse")
    put("segment_sum", "scatter", "moderate", "float", namespace="trainfuse")
    rows["getitem"] = OpRow("getitem", "view", "free", "any", True)
    rows["symbolic"] = OpRow("symbolic", "creation", "free", "integer")
    return rows


TABLE: dict[str, OpRow] = _build()
_ASSERTIONS = frozenset(
    {
        "aten._assert_scalar.default",
        "aten._assert_async.default",
        "aten._assert_async.msg",
        "aten._linalg_check_errors.default",
    }
)
_SYMBOLIC: frozenset[Callable[..., Any]] = frozenset(
    {
        operator.add,
        operator.sub,
        operator.mul,
        operator.floordiv,
        operator.truediv,
        operator.mod,
        operator.pow,
        operator.neg,
        operator.eq,
        operator.ne,
        operator.lt,
        operator.le,
        operator.gt,
        operator.ge,
    }
)


_NAMES: dict[int, tuple[object, str]] = {}
"""Overloads' names by id, with the overload, which lives as long as torch.ops: planning asks for
every node many times, and an overload's own hash is a call into Python."""


def op_name(target: object) -> str:
    """Name under which a call target stands in the table."""
    found = _NAMES.get(id(target))
    if found is not None and found[0] is target:
        return found[1]
    if target is operator.getitem:
        return "getitem"
    if isinstance(target, torch._ops.OpOverload):
        name = str(target)
        _NAMES[id(target)] = (target, name)
        return name
    return "symbolic" if target in _SYMBOLIC else str(target)


def lookup(target: object) -> OpRow:
    """Row of a call target; an unknown operator is opaque and never computed twice."""
    name = op_name(target)
    row = TABLE.get(name)
    return OpRow(name, "opaque", "never") if row is None else row


def is_random(target: object) -> bool:
    """Whether the operator draws from a generator, so that its order must be kept."""
    if lookup(target).name == KEEP_MASK:
        return False
    if lookup(target).kind == "rng":
        return True
    return (
        isinstance(target, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded in target.tags
    )


def draws_randomness(node: fx.Node) -> bool:
    """Whether this call draws: attention without dropout is tagged random, but draws nothing."""
    if not is_random(node.target):
        return False
    if "_scaled_dot_product" not in op_name(node.target):
        return True
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    if "dropout_p" not in names:
        return True
    position = names.index("dropout_p")
    given = node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return not (isinstance(given, float) and given == 0.0)


def is_collective(node: fx.Node) -> bool:
    """Whether a node communicates with other processes, or waits for them."""
    return node.op == "call_function" and op_name(node.target).startswith(
        ("_c10d_functional", "c10d")
    )


def is_effect(node: fx.Node) -> bool:
    """Whether a node is kept for what it does: the update, and operators that write or wait."""
    if node.op != "call_function":
        return False
    target = node.target
    if lookup(target).kind == "effect":
        return True
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def is_assertion(node: fx.Node) -> bool:
    """Whether a node raises where the trace's assumption about a number does not hold.

    Nothing reads it, and it must run: the graph is right only where its assumptions hold. It
    changes nothing, so that other nodes may be moved across it.
    """
    return node.op == "call_function" and op_name(node.target) in _ASSERTIONS


def is_kept(node: fx.Node) -> bool:
    """Whether a node runs though nothing reads it; draws move the generator for those after."""
    return is_effect(node) or is_assertion(node) or draws_randomness(node)


def is_simple_map(node: fx.Node) -> bool:
    """Whether a node makes one dense output of its tensor inputs' shape, dtype and device.

    Tensor inputs must be dense too. Source: TorchScript's isSimpleMap, on metadata.
    """
    if node.op != "call_function" or lookup(node.target).kind != "pointwise":
        return False
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not _is_dense(value):
        return False
    return all(
        isinstance(other, torch.Tensor)
        and _is_dense(other)
        and (other.shape, other.dtype, other.device) == (value.shape, value.dtype, value.device)
        for other in (parent.meta.get("val") for parent in node.all_input_nodes)
    )


def _is_dense(value: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return value.layout == torch.strided


def differentiable_ops() -> frozenset[str]:
    """Names of the operators that a differentiable subgraph may hold."""
    return frozenset(
        name for name, row in TABLE.items() if row.kind not in ("opaque", "effect", "creation")
    )


def ends_formula(cast: fx.Node) -> bool:
    """Whether a node is a cast to a half type of a norm, softmax or loss in pieces.

    Not of the program: what an operator of half types gives stays as wide in registers as its
    arithmetic, be it written in one node or in several.
    """
    origin, value = cast.meta.get("original_aten"), cast.meta.get("val")
    if origin is None or op_name(cast.target) not in _CASTS:
        return False
    halves = (torch.float16, torch.bfloat16)
    return lookup(origin).kind in ("norm", "softmax") and value.dtype in halves


_CASTS = frozenset({"aten._to_copy.default", "prims.convert_element_type.default"})
