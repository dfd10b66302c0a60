"""THE table of elementwise code: one row an ATen op. A new op is one row.

A row is a template over the op's schema names, or a function of the same arguments when options
decide the text. Operands arrive cast to the row's working type:
result: the result's compute type; promote: what torch's promotion of the operands gives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import fx

from autodiff.ops import op_name
from trainfuse.codegen.scalars import TRITON_TYPE, cast, compute_dtype, literal, round_to
from trainfuse.fusion.domains import argument

Read = Callable[[fx.Node], str]


class Unsupported(Exception):
    """A node that has no code; `lower` makes it a Refusal."""

    def __init__(self, node: fx.Node, reason: str) -> None:
        super().__init__(reason)
        self.node = node
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Args:
    """A node's arguments as text, by schema name."""

    node: fx.Node
    read: Read
    work: torch.dtype

    @property
    def result(self) -> torch.dtype:
        """Compute type of the result."""
        return compute_dtype(self.node.meta["val"].dtype)

    @property
    def floating(self) -> bool:
        return self.work.is_floating_point

    def number(self, name: str) -> Any:
        """A Python argument."""
        return argument(self.node, name)

    def __getitem__(self, name: str) -> str:
        if name == "T":
            return TRITON_TYPE[self.work]
        value = argument(self.node, name)
        wanted = torch.bool if name in ("condition", "mask") else self.work
        if isinstance(value, fx.Node):
            return cast(self.read(value), compute_dtype(value.meta["val"].dtype), wanted)
        if isinstance(value, bool | int | float):
            return literal(value, wanted)
        raise Unsupported(self.node, f"its argument {name} is no tensor or number")


Code = str | Callable[[Args], str]


@dataclass(frozen=True, slots=True)
class Row:
    code: Code
    work: Literal["result", "promote"] = "result"


def expression(node: fx.Node, read: Read) -> str:
    """The Triton expression of a pointwise node; `read` gives its operands' names.

    Raises Unsupported when the op has no row or an argument has no code.
    """
    row = OPS.get(op_name(node.target).removesuffix(".default"))
    if row is None:
        raise Unsupported(node, "the op has no row in the code table")
    if node.meta["val"].dtype not in TRITON_TYPE:
        raise Unsupported(node, f"{node.meta['val'].dtype} has no kernels")
    args = Args(node, read, working_dtype(node, row.work))
    return row.code(args) if callable(row.code) else row.code.format_map(args)


def supported(target: object) -> bool:
    """Whether a pointwise op has code."""
    return op_name(target).removesuffix(".default") in OPS


def working_dtype(node: fx.Node, rule: Literal["result", "promote"]) -> torch.dtype:
    """The compute type that a row's operands are cast to."""
    if rule == "result":
        return compute_dtype(node.meta["val"].dtype)
    kinds: list[Any] = []
    for value in (*node.args, *node.kwargs.values()):
        if isinstance(value, fx.Node):
            tensor = value.meta["val"]
            kinds.append((tensor.dtype, tensor.dim() > 0))
        elif isinstance(value, bool | int | float):
            kinds.append(type(value))
    promoted = kinds[0]
    for kind in kinds[1:]:
        promoted = _promote(promoted, kind)
    return compute_dtype(_promote(promoted, promoted)[0])


@cache
def _promote(first: Any, second: Any) -> tuple[torch.dtype, bool]:
    """torch's promotion; a kind is (dtype, has dims) or a Python number's type."""
    made = [
        torch.empty((1,) if kind[1] else (), dtype=kind[0], device="meta")
        if isinstance(kind, tuple)
        else kind(1)
        for kind in (first, second)
    ]
    dims = any(isinstance(kind, tuple) and kind[1] for kind in (first, second))
    return torch.result_type(*made), dims


# Rows whose text depends on types or options.


def _scaled(args: Args, name: str) -> str:
    """other, or alpha * other."""
    alpha = args.number("alpha")
    if alpha in (None, 1):
        return args[name]
    return f"{literal(alpha, args.work)} * {args[name]}"


def _add(args: Args) -> str:
    if args.work == torch.bool:
        return f"{args['self']} | {args['other']}"
    return f"{args['self']} + {_scaled(args, 'other')}"


def _mul(args: Args) -> str:
    operator = "&" if args.work == torch.bool else "*"
    return f"{args['self']} {operator} {args['other']}"


def _div_mode(args: Args) -> str:
    mode = args.number("rounding_mode")
    if mode is None:
        return "{self} / {other}".format_map(args)
    if mode == "floor":
        kind = "float" if args.floating else "int"
        return f"lib.floor_divide_{kind}({args['self']}, {args['other']})"
    if args.floating:
        return "libdevice.trunc({self} / {other})".format_map(args)
    return "{self} // {other}".format_map(args)


def _by_kind(floating: str, integer: str) -> Callable[[Args], str]:
    """One text for floating operands, another for integers."""
    return lambda args: (floating if args.floating else integer).format_map(args)


def _clamp(args: Args) -> str:
    text = args["self"]
    for name, function in (("min", "lib.maximum"), ("max", "lib.minimum")):
        if args.number(name) is not None:
            text = f"{function}({text}, {args[name]})"
    return text


def _pow_scalar(args: Args) -> str:
    """ATen's special exponents, then libdevice; integers by multiplication."""
    base, exponent = args["self"], args.number("exponent")
    if exponent == 0:
        return f"{base} * 0 + 1" if not args.floating else f"tl.where({base} == {base}, 1.0, 1.0)"
    if exponent == 1:
        return base
    if exponent in (2, 3):
        return " * ".join([base] * int(exponent))
    if not args.floating:
        if not isinstance(exponent, int) or not 0 < exponent <= 16:
            raise Unsupported(args.node, "integers raised to this power have no code")
        return " * ".join([base] * exponent)
    special = {0.5: "libdevice.sqrt({0})", -0.5: "libdevice.rsqrt({0})", -1.0: "1.0 / {0}"}
    if exponent in special:
        return special[exponent].format(base)
    if exponent == -2:
        return f"1.0 / ({base} * {base})"
    return f"libdevice.pow({base}, {base} * 0 + {literal(exponent, args.work)})"


def _pow(args: Args) -> str:
    if not args.floating:
        raise Unsupported(args.node, "integers raised to a tensor's power have no code")
    base, exponent = args["self"], args["exponent"]
    like = exponent if isinstance(argument(args.node, "exponent"), fx.Node) else base
    return f"libdevice.pow({base} + {like} * 0, {exponent})"


def _convert(source: str) -> Callable[[Args], str]:
    """A copy with the result's dtype; half types round here, and only here."""

    def code(args: Args) -> str:
        value = argument(args.node, source)
        if not isinstance(value, fx.Node):
            return literal(value, args.result)
        device = value.meta["val"].device
        if device != args.node.meta["val"].device:
            raise Unsupported(args.node, "it copies between devices")
        return round_to(args.read(value), value.meta["val"].dtype, args.node.meta["val"].dtype)

    return code


def _fill(args: Args) -> str:
    return f"tl.full([], {_bare(args['value'])}, {args['T']})"


def _bare(text: str) -> str:
    return text.strip("()") if text.replace("(", "").startswith("-") else text


def _nan_to_num(args: Args) -> str:
    if not args.floating:
        return args["self"]
    info = torch.finfo(args.node.meta["val"].dtype)
    given = (args.number("nan"), args.number("posinf"), args.number("neginf"))
    nan, top, bottom = (
        literal(default if value is None else value, args.work)
        for value, default in zip(given, (0.0, info.max, info.min), strict=True)
    )
    x = args["self"]
    inner = f'tl.where({x} == float("inf"), {top}, tl.where({x} == float("-inf"), {bottom}, {x}))'
    return f"tl.where({x} != {x}, {nan}, {inner})"


_GELU_TANH = "0.7978845608028654 * ({self} + 0.044715 * {self} * {self} * {self})"


def _gelu(args: Args) -> str:
    if args.number("approximate") == "tanh":
        return f"0.5 * {{self}} * (1.0 + libdevice.tanh({_GELU_TANH}))".format_map(args)
    return "0.5 * {self} * (1.0 + libdevice.erf({self} * 0.7071067811865476))".format_map(args)


def _gelu_backward(args: Args) -> str:
    if args.number("approximate") == "tanh":
        return "{grad_output} * lib.gelu_tanh_slope({self})".format_map(args)
    return "{grad_output} * lib.gelu_slope({self})".format_map(args)


def _leaky(args: Args) -> str:
    return "tl.where({self} > 0, {self}, {self} * {negative_slope})".format_map(args)


def _elu(args: Args) -> str:
    return (
        "tl.where({self} > 0, {self} * {scale}, "
        "libdevice.expm1({self} * {input_scale}) * ({alpha} * {scale}))"
    ).format_map(args)


def _elu_backward(args: Args) -> str:
    if args.number("is_result"):
        negative = "{input_scale} * ({self_or_result} + {alpha} * {scale})"
    else:
        negative = (
            "{input_scale} * {alpha} * {scale} * libdevice.exp({self_or_result} * {input_scale})"
        )
    text = f"{{grad_output}} * tl.where({{self_or_result}} <= 0, {negative}, {{scale}})"
    return text.format_map(args)


def _logit(args: Args) -> str:
    x, eps = args["self"], args.number("eps")
    if eps is not None:
        low, high = literal(eps, args.work), literal(1 - eps, args.work)
        x = f"lib.minimum(lib.maximum({x}, {low}), {high})"
    return f"lib.logit({x})"


def _lerp(args: Args) -> str:
    """ATen's form: exact at both ends."""
    return (
        "tl.where(tl.abs({weight} + {self} * 0) < 0.5, {self} + {weight} * ({end} - {self}), "
        "{end} - ({end} - {self}) * (1.0 - {weight}))"
    ).format_map(args)


def _addc(operator: str) -> Callable[[Args], str]:
    def code(args: Args) -> str:
        value = args.number("value")
        product = f"{args['tensor1']} {operator} {args['tensor2']}"
        if value in (None, 1):
            return f"{args['self']} + {product}"
        return f"{args['self']} + {literal(value, args.work)} * ({product})"

    return code


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
    **_libdevice(*"exp exp2 expm1 log log2 log10 log1p sin cos tan sinh cosh tanh".split()),
    **_libdevice(*"asin acos atan asinh acosh atanh erf erfc sqrt rsqrt".split()),
    "prims.convert_element_type": Row(_convert("a")),
    "prims.fma": Row("{a} * {b} + {c}"),
    **_overloads(
        {
            "add.Tensor|Scalar": Row(_add),
            "sub.Tensor|Scalar": Row(lambda args: f"{args['self']} - {_scaled(args, 'other')}"),
            "rsub.Tensor|Scalar": Row(
                lambda args: (
                    f"{args['other']} - {args['self']}"
                    if args.number("alpha") in (None, 1)
                    else f"{args['other']} - {_scaled(args, 'self')}"
                )
            ),
            "mul.Tensor|Scalar": Row(_mul),
            "div.Tensor|Scalar": Row("{self} / {other}"),
            "div.Tensor_mode|Scalar_mode": Row(_div_mode),
            "neg": Row("-{self}"),
            "positive": Row("{self}"),
            "abs": Row("tl.abs({self})"),
            "sign": Row("({self} > 0).to({T}) - ({self} < 0).to({T})"),
            "sgn": Row("({self} > 0).to({T}) - ({self} < 0).to({T})"),
            "square": Row("{self} * {self}"),
            "reciprocal": Row("1.0 / {self}"),
            "sigmoid": Row("1.0 / (1.0 + libdevice.exp(-{self}))"),
            "floor": Row(_by_kind("tl.floor({self})", "{self}")),
            "ceil": Row(_by_kind("tl.ceil({self})", "{self}")),
            "round": Row(_by_kind("libdevice.rint({self})", "{self}")),
            "trunc": Row(_by_kind("libdevice.trunc({self})", "{self}")),
            "frac": Row("{self} - libdevice.trunc({self})"),
            "fmod.Tensor|Scalar": Row(
                _by_kind("libdevice.fmod({self}, {other} + {self} * 0)", "{self} % {other}")
            ),
            "remainder.Tensor|Scalar|Scalar_Tensor": Row(
                _by_kind(
                    "lib.remainder_float({self}, {other})", "lib.remainder_int({self}, {other})"
                )
            ),
            "relu": Row("lib.maximum({self}, 0)"),
            "clamp.|Tensor": Row(_clamp),
            "clamp_min.|Tensor": Row("lib.maximum({self}, {min})"),
            "clamp_max.|Tensor": Row("lib.minimum({self}, {max})"),
            "maximum": Row("lib.maximum({self}, {other})"),
            "minimum": Row("lib.minimum({self}, {other})"),
            "fmax": Row("tl.maximum({self}, {other})"),
            "fmin": Row("tl.minimum({self}, {other})"),
            "where.self|ScalarSelf|ScalarOther|Scalar": Row(
                "tl.where({condition}, {self}, {other})"
            ),
            "masked_fill.Scalar|Tensor": Row("tl.where({mask}, {value}, {self})"),
            "threshold": Row("tl.where({self} <= {threshold}, {value}, {self})"),
            "threshold_backward": Row("tl.where({self} <= {threshold}, 0, {grad_output})"),
            "native_dropout_backward": Row("{grad_output} * {mask}.to({T}) * {scale}"),
            "addcmul": Row(_addc("*")),
            "addcdiv": Row(_addc("/")),
            "lerp.Scalar|Tensor": Row(_lerp),
            "clone": Row("{self}"),
            "_to_copy": Row(_convert("self")),
            "copy": Row(_convert("src")),
            "fill.Scalar": Row(_fill),
            "fill.Tensor": Row(_convert("value")),
            "copysign.Tensor|Scalar": Row("libdevice.copysign({self}, {other} + {self} * 0)"),
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
            "isinf": Row(_by_kind('tl.abs({self}) == float("inf")', "{self} != {self}"), "promote"),
            "signbit": Row(_by_kind("libdevice.signbit({self}) != 0", "{self} < 0"), "promote"),
            "nan_to_num": Row(_nan_to_num),
            "pow.Tensor_Scalar": Row(_pow_scalar),
            "pow.Tensor_Tensor|Scalar": Row(_pow),
            "atan2": Row("libdevice.atan2({self}, {other})"),
            "hypot": Row("libdevice.hypot({self}, {other})"),
            "xlogy.Tensor": Row("lib.xlogy({self}, {other})"),
            "gelu": Row(_gelu),
            "gelu_backward": Row(_gelu_backward),
            "silu": Row("{self} / (1.0 + libdevice.exp(-{self}))"),
            "silu_backward": Row("{grad_output} * lib.silu_slope({self})"),
            "mish": Row("{self} * libdevice.tanh(libdevice.log1p(libdevice.exp({self})))"),
            "softplus": Row(
                "tl.where({self} * {beta} > {threshold}, {self}, "
                "libdevice.log1p(libdevice.exp({self} * {beta})) / {beta})"
            ),
            "softplus_backward": Row(
                "lib.softplus_backward({grad_output}, {self}, {beta}, {threshold})"
            ),
            "elu": Row(_elu),
            "elu_backward": Row(_elu_backward),
            "sigmoid_backward": Row("{grad_output} * (1.0 - {output}) * {output}"),
            "tanh_backward": Row("{grad_output} * (1.0 - {output} * {output})"),
            "log_sigmoid_backward": Row("{grad_output} * lib.log_sigmoid_slope({self})"),
            "logit": Row(_logit),
            "hardtanh": Row("lib.minimum(lib.maximum({self}, {min_val}), {max_val})"),
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
                "tl.where(({self} > -3.0) & ({self} < 3.0), {grad_output} * 0.16666666666666666, 0)"
            ),
            "leaky_relu": Row(_leaky),
            "leaky_relu_backward": Row(
                "tl.where({self} > 0, {grad_output}, {grad_output} * {negative_slope})"
            ),
        }
    ),
}
