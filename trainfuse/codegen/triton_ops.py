"""THE table of elementwise code: one row an ATen op. A new op is one row.

A row is a template over the op's schema names, or a function of the same arguments when options
decide the text (op_forms). Operands arrive cast to the row's working type:
result: the result's compute type; promote: what torch's promotion of the operands gives.
"""

from __future__ import annotations

import torch
from torch import fx

from autodiff.ops import op_name
from trainfuse.codegen import op_forms as forms
from trainfuse.codegen.op_text import Args, Read, Row, Unsupported, working_dtype
from trainfuse.codegen.scalars import TRITON_TYPE
from trainfuse.codegen.sources import CREATIONS

__all__ = ["OPS", "Unsupported", "expression", "supported"]


def expression(node: fx.Node, read: Read, *, coarse: bool = False) -> str:
    """The Triton expression of a pointwise node; `read` gives its operands' names.

    coarse: whether exponentials may take the hardware's short way (codegen/coarse.py says when).

    Raises Unsupported when the op has no row or an argument has no code.
    """
    row = OPS.get(op_name(node.target).removesuffix(".default"))
    if row is None:
        raise Unsupported(node, "the op has no row in the code table")
    if node.meta["val"].dtype not in TRITON_TYPE:
        raise Unsupported(node, f"{node.meta['val'].dtype} has no kernels")
    args = Args(node, read, working_dtype(node, row.work), coarse)
    return row.code(args) if callable(row.code) else row.code.format_map(args)


def supported(target: object) -> bool:
    """Whether a pointwise op or a creation has code."""
    name = op_name(target).removesuffix(".default")
    return name in OPS or name.partition(".")[2].partition(".")[0] in CREATIONS


def _compare(operator: str) -> Row:
    return Row(f"{{self}} {operator} {{other}}", "promote")


def _logical(operator: str) -> Row:
    return Row(f"({{self}} != 0) {operator} ({{other}} != 0)", "promote")


def _libdevice(*names: str) -> dict[str, Row]:
    return {f"aten.{name}": Row(f"libdevice.{name}({{self}})") for name in names}


def _overloads(rows: dict[str, Row]) -> dict[str, Row]:
    """Rows for names with alternatives: "add.Tensor|Scalar"."""
    table: dict[str, Row] = {}
    for names, row in rows.items():
        base, _, overloads = names.partition(".")
        for overload in overloads.split("|"):
            table[f"aten.{base}.{overload}" if overload else f"aten.{base}"] = row
    return table


OPS: dict[str, Row] = {
    **_libdevice(*"exp2 expm1 log log2 log10 log1p sin cos tan sinh cosh tanh".split()),
    **_libdevice(*"asin acos atan asinh acosh atanh erf erfc sqrt rsqrt".split()),
    "aten.exp": Row("{exp}({self})"),
    "prims.convert_element_type": Row(forms.convert("a")),
    "prims.fma": Row("{a} * {b} + {c}"),
    "trainfuse.row_keys": Row(forms.row_keys, "promote"),
    **_overloads(
        {
            "add.Tensor|Scalar": Row(forms.add),
            "sub.Tensor|Scalar": Row(forms.sub),
            "rsub.Tensor|Scalar": Row(forms.rsub),
            "mul.Tensor|Scalar": Row(forms.mul),
            "div.Tensor|Scalar": Row(forms.div),
            "div.Tensor_mode|Scalar_mode": Row(forms.div_mode),
            "neg": Row("-{self}"),
            "positive": Row("{self}"),
            "abs": Row("tl.abs({self})"),
            "sign": Row("({self} > 0).to({T}) - ({self} < 0).to({T})"),
            "sgn": Row("({self} > 0).to({T}) - ({self} < 0).to({T})"),
            "square": Row("{self} * {self}"),
            "reciprocal": Row("1.0 / {self}"),
            "sigmoid": Row("lib.sigmoid({self}, {coarse})"),
            "floor": Row(forms.by_kind("tl.floor({self})", "{self}")),
            "ceil": Row(forms.by_kind("tl.ceil({self})", "{self}")),
            "round": Row(forms.by_kind("libdevice.rint({self})", "{self}")),
            "trunc": Row(forms.by_kind("libdevice.trunc({self})", "{self}")),
            "frac": Row("{self} - libdevice.trunc({self})"),
            "fmod.Tensor|Scalar": Row(
                forms.by_kind("libdevice.fmod({self}, {other_tensor})", "{self} % {other}")
            ),
            "remainder.Tensor|Scalar|Scalar_Tensor": Row(
                forms.by_kind(
                    "lib.remainder_float({self_tensor}, {other_tensor})",
                    "lib.remainder_int({self_tensor}, {other_tensor})",
                )
            ),
            "relu": Row("lib.maximum({self}, 0)"),
            "clamp.|Tensor": Row(forms.clamp),
            "clamp_min.|Tensor": Row("lib.maximum({self}, {min_bound})"),
            "clamp_max.|Tensor": Row("lib.minimum({self}, {max_bound})"),
            "maximum": Row("lib.maximum({self}, {other})"),
            "minimum": Row("lib.minimum({self}, {other})"),
            "fmax": Row("lib.fmax({self}, {other})"),
            "fmin": Row("lib.fmin({self}, {other})"),
            "where.self|ScalarSelf|ScalarOther|Scalar": Row(
                "tl.where({condition}, {self}, {other})"
            ),
            "masked_fill.Scalar|Tensor": Row("tl.where({mask}, {value}, {self})"),
            "threshold": Row("tl.where({self} <= {threshold}, {value}, {self})"),
            "threshold_backward": Row("tl.where({self} <= {threshold}, 0, {grad_output})"),
            "native_dropout_backward": Row("{grad_output} * {mask}.to({T}) * {scale}"),
            "addcmul": Row(forms.addc("*")),
            "addcdiv": Row(forms.addc("/")),
            "lerp.Scalar|Tensor": Row(forms.lerp),
            "clone": Row("{self}"),
            "_to_copy": Row(forms.convert("self")),
            "copy": Row(forms.convert("src")),
            "fill.Scalar": Row("{value_tensor}"),
            "fill.Tensor": Row(forms.convert("value")),
            "copysign.Tensor|Scalar": Row("libdevice.copysign({self}, {other_tensor})"),
            "eq.Tensor|Scalar": _compare("=="),
            "ne.Tensor|Scalar": _compare("!="),
            "lt.Tensor|Scalar": _compare("<"),
            "le.Tensor|Scalar": _compare("<="),
            "gt.Tensor|Scalar": _compare(">"),
            "ge.Tensor|Scalar": _compare(">="),
            "logical_and": _logical("&"),
            "logical_or": _logical("|"),
            "logical_xor": _logical("^"),
            "logical_not": Row("{self} == 0", "promote"),
            "bitwise_and.Tensor|Scalar": Row("{self} & {other}"),
            "bitwise_or.Tensor|Scalar": Row("{self} | {other}"),
            "bitwise_xor.Tensor|Scalar": Row("{self} ^ {other}"),
            "bitwise_not": Row(
                lambda a: f"{a['self']} == 0" if a.work == torch.bool else f"~{a['self']}"
            ),
            "bitwise_left_shift.Tensor|Tensor_Scalar": Row("{self} << {other}"),
            "bitwise_right_shift.Tensor|Tensor_Scalar": Row("{self} >> {other}"),
            "isnan": Row("{self} != {self}", "promote"),
            "isinf": Row(
                forms.by_kind('tl.abs({self}) == float("inf")', "{self} != {self}"), "promote"
            ),
            "signbit": Row(
                forms.by_kind("libdevice.signbit({self}) != 0", "{self} < 0"), "promote"
            ),
            "nan_to_num": Row(forms.nan_to_num),
            "pow.Tensor_Scalar": Row(forms.pow_scalar),
            "pow.Tensor_Tensor|Scalar": Row(forms.pow_tensor),
            "atan2": Row("libdevice.atan2({self}, {other})"),
            "hypot": Row("libdevice.hypot({self}, {other})"),
            "xlogy.Tensor": Row("lib.xlogy({self}, {other})"),
            "gelu": Row(forms.gelu),
            "gelu_backward": Row(forms.gelu_backward),
            "silu": Row("lib.silu({self}, {coarse})"),
            "silu_backward": Row("{grad_output} * lib.silu_slope({self}, {coarse})"),
            "mish": Row("{self} * libdevice.tanh(libdevice.log1p(libdevice.exp({self})))"),
            "softplus": Row(
                "tl.where({self} * {beta} > {threshold}, {self}, "
                "libdevice.log1p(libdevice.exp({self} * {beta})) / {beta})"
            ),
            "softplus_backward": Row(
                "lib.softplus_backward({grad_output}, {self}, {beta}, {threshold})"
            ),
            "elu": Row(forms.elu),
            "elu_backward": Row(forms.elu_backward),
            "sigmoid_backward": Row("{grad_output} * (1.0 - {output}) * {output}"),
            "tanh_backward": Row("{grad_output} * (1.0 - {output} * {output})"),
            "log_sigmoid_backward": Row("{grad_output} * lib.log_sigmoid_slope({self})"),
            "logit": Row(forms.logit),
            "logit_backward": Row(forms.logit_backward),
            "hardtanh": Row("lib.minimum(lib.maximum({self}, {min_val_bound}), {max_val_bound})"),
            "hardtanh_backward": Row(
                "tl.where(({self} <= {min_val}) | ({self} >= {max_val}), 0, {grad_output})"
            ),
            "hardswish": Row(
                "{self} * lib.minimum(lib.maximum({self} + 3.0, 0.0), 6.0) * 0.16666666666666666"
            ),
            "hardswish_backward": Row(
                "tl.where({self} <= -3.0, 0, tl.where({self} < 3.0, "
                "{grad_output} * ({self} / 3.0 + 0.5), {grad_output}))"
            ),
            "hardsigmoid": Row(
                "lib.minimum(lib.maximum({self} + 3.0, 0.0), 6.0) * 0.16666666666666666"
            ),
            "hardsigmoid_backward": Row(
                # ATen's sixth, in fp64 too: 1.0f / 6.0f
                "tl.where(({self} > -3.0) & ({self} < 3.0), {grad_output} * 0.1666666716337204, 0)"
            ),
            "leaky_relu": Row(forms.leaky),
            "leaky_relu_backward": Row(
                "tl.where({self} > 0, {grad_output}, {grad_output} * {negative_slope})"
            ),
        }
    ),
}
