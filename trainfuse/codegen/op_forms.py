"""Elementwise code whose text depends on types or options: what rows of the table name."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from autodiff.ops import ends_formula
from trainfuse.codegen.op_text import Args, Unsupported
from trainfuse.codegen.scalars import TRITON_TYPE, compute_dtype, literal, round_to
from trainfuse.fusion.arguments import argument
from trainfuse.fusion.segment_ops import key_bias


def scaled(args: Args, name: str) -> str:
    """other, or alpha * other."""
    alpha = args.number("alpha")
    if alpha in (None, 1):
        return args[name]
    return f"{literal(alpha, args.work)} * {args[name]}"


def add(args: Args) -> str:
    if args.work == torch.bool:
        return f"{args['self']} | {args['other']}"
    return f"{args['self']} + {scaled(args, 'other')}"


def sub(args: Args) -> str:
    """self - alpha * other."""
    return f"{args['self']} - {scaled(args, 'other')}"


def rsub(args: Args) -> str:
    """other - alpha * self."""
    return f"{args['other']} - {scaled(args, 'self')}"


def mul(args: Args) -> str:
    operator = "&" if args.work == torch.bool else "*"
    return f"{args['self']} {operator} {args['other']}"


def div(args: Args) -> str:
    """A quotient, or a product with the divisor's reciprocal where `coarse` found one of a row."""
    if args.coarse:
        return "{self} * (1.0 / {other})".format_map(args)
    return "{self} / {other}".format_map(args)


def div_mode(args: Args) -> str:
    mode = args.number("rounding_mode")
    if mode is None:
        return "{self} / {other}".format_map(args)
    if mode == "floor":
        kind = "float" if args.floating else "int"
        return f"lib.floor_divide_{kind}({args['self']}, {args['other_tensor']})"
    if args.floating:
        return "libdevice.trunc({self} / {other})".format_map(args)
    return "{self} // {other}".format_map(args)


def by_kind(floating: str, integer: str) -> Callable[[Args], str]:
    """One text for floating operands, another for integers."""
    return lambda args: (floating if args.floating else integer).format_map(args)


def clamp(args: Args) -> str:
    text = args["self"]
    for name, function in (("min", "lib.maximum"), ("max", "lib.minimum")):
        if args.number(name) is not None:
            text = f"{function}({text}, {args.bound(name)})"
    return text


def pow_scalar(args: Args) -> str:
    """ATen's special exponents, then libdevice; integers by multiplication."""
    base, exponent = args["self"], args.number("exponent")
    if exponent == 0:
        return f"tl.full([], 1, {args['T']})"
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
    return f"libdevice.pow({base}, {args['exponent_tensor']})"


def pow_tensor(args: Args) -> str:
    if not args.floating:
        raise Unsupported(args.node, "integers raised to a tensor's power have no code")
    return "libdevice.pow({self_tensor}, {exponent_tensor})".format_map(args)


def convert(source: str) -> Callable[[Args], str]:
    """A copy with the result's dtype; half types round here, and only here.

    Not where it is the end of a formula: what an operator of half types gives stays as wide in
    registers as its arithmetic, be it written in one node or in several.
    """

    def code(args: Args) -> str:
        value = argument(args.node, source)
        if not isinstance(value, fx.Node):
            return literal(value, args.result)
        device = value.meta["val"].device
        if device != args.node.meta["val"].device:
            raise Unsupported(args.node, "it copies between devices")
        given, wanted = value.meta["val"].dtype, args.node.meta["val"].dtype
        text = args.read(value)
        wide = compute_dtype(given) == compute_dtype(wanted)
        return text if wide and ends_formula(args.node) else round_to(text, given, wanted)

    return code


def nan_to_num(args: Args) -> str:
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


def row_keys(args: Args) -> str:
    """trainfuse.row_keys: narrow keys, biased so that two signed bytes hold 65535 rows."""
    base = 0 if args.number("base") is None else args["base"]
    numbers = (args.number("rows"), args.number("total"), args.number("wrap"))
    key = f"lib.row_key({args['index']}, {base}, {', '.join(map(repr, numbers))})"
    dtype = args.node.meta["val"].dtype
    bias = key_bias(dtype)
    return f"({key}{f' - {bias}' if bias else ''}).to({TRITON_TYPE[dtype]})"


def gelu(args: Args) -> str:
    if args.number("approximate") == "tanh":
        return "lib.gelu_tanh({self}, {coarse})".format_map(args)
    return "0.5 * {self} * (1.0 + libdevice.erf({self} * 0.7071067811865476))".format_map(args)


def gelu_backward(args: Args) -> str:
    if args.number("approximate") == "tanh":
        return "{grad_output} * lib.gelu_tanh_slope({self}, {coarse})".format_map(args)
    return "{grad_output} * lib.gelu_slope({self}, {coarse})".format_map(args)


def leaky(args: Args) -> str:
    return "tl.where({self} > 0, {self}, {self} * {negative_slope})".format_map(args)


def elu(args: Args) -> str:
    return (
        "tl.where({self} > 0, {self} * {scale}, "
        "libdevice.expm1({self} * {input_scale}) * ({alpha} * {scale}))"
    ).format_map(args)


def elu_backward(args: Args) -> str:
    if args.number("is_result"):
        negative = "{input_scale} * ({self_or_result} + {alpha} * {scale})"
    else:
        negative = (
            "{input_scale} * {alpha} * {scale} * libdevice.exp({self_or_result} * {input_scale})"
        )
    text = f"{{grad_output}} * tl.where({{self_or_result}} <= 0, {negative}, {{scale}})"
    return text.format_map(args)


def logit(args: Args) -> str:
    x, eps = args["self"], args.number("eps")
    if eps is not None:
        low, high = args.bound_of(eps), args.bound_of(1 - eps)
        x = f"lib.minimum(lib.maximum({x}, {low}), {high})"
    return f"lib.logit({x})"


def logit_backward(args: Args) -> str:
    """ATen's form: beyond the ends 0 with eps, else NaN; at -0 its code for CPUs alone has +inf."""
    x, eps = args["self"], args.number("eps")
    if eps is None:
        low, high, outside = "0.0", "1.0", 'float("nan")'
    else:
        low, high, outside = literal(eps, args.work), literal(1 - eps, args.work), "0.0"
    on_cpu = args.node.meta["val"].device.type == "cpu"
    base = f"tl.where({x} == 0, 0.0, {x})" if on_cpu else x
    slope = f"{args['grad_output']} / ({base} * (1.0 - {x}))"
    return f"tl.where(({x} < {low}) | ({x} > {high}), {outside}, {slope})"


def lerp(args: Args) -> str:
    """ATen's form: exact at both ends."""
    return (
        "tl.where(tl.abs({weight_tensor}) < 0.5, {self} + {weight} * ({end} - {self}), "
        "{end} - ({end} - {self}) * (1.0 - {weight}))"
    ).format_map(args)


def addc(operator: str) -> Callable[[Args], str]:
    def code(args: Args) -> str:
        value = args.number("value")
        product = f"{args['tensor1']} {operator} {args['tensor2']}"
        if value in (None, 1):
            return f"{args['self']} + {product}"
        return f"{args['self']} + {literal(value, args.work)} * ({product})"

    return code
