"""Every row of the code table against ATen, in each kind of element type it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from codegen_support import check
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from autodiff.ops import TABLE, op_name
from trainfuse.codegen.triton_ops import OPS, expression

aten = torch.ops.aten
SIZE = 300  # not a power of two: the last lanes are masked

# Arguments that a row's schema does not suggest, by schema name.
NUMBERS: dict[str, Any] = {
    "alpha": 2,
    "min": -0.6,
    "max": 0.7,
    "min_val": -0.6,
    "max_val": 0.7,
    "threshold": 0.3,
    "value": 1.4,
    "negative_slope": 0.1,
    "weight": 0.3,
    "scale": 1.2,
    "input_scale": 0.9,
    "beta": 1.3,
    "exponent": 2.4,
    "self": 1.3,
    "other": 0.7,
    "nan": 0.6,
    "is_result": False,
    "self_is_result": False,
    "rounding_mode": "floor",
    "eps": 0.01,
    "approximate": "tanh",
    "rows": 1000,
    "total": 1000,
    "wrap": True,
    "dtype": torch.float32,
    "memory_format": None,
    "posinf": None,
    "neginf": None,
}
POSITIVE = {"rsqrt", "sqrt", "log", "log2", "log10", "log1p", "pow", "xlogy"}
UNIT = {"asin", "acos", "atanh", "logit", "logit_backward", "sigmoid_backward", "tanh_backward"}
ABOVE_ONE = {"acosh"}
INTEGER = {"bitwise_left_shift", "bitwise_right_shift"}
BITWISE = {"bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"}
MASKS = {"condition", "mask"}
SPECIAL = [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1.0, -1.0]


def overload(name: str) -> Any:
    namespace, base, kind = f"{name}.default".split(".")[:3]
    return getattr(getattr(getattr(torch.ops, namespace), base), kind)


def known(name: str) -> bool:
    """Overloads that this version of torch has; prims.fma is Inductor's, for newer ones."""
    try:
        overload(name)
    except AttributeError:
        return False
    return True


# aten.positive is its operand: tracing leaves nothing of it.
ROWS = sorted(name for name in OPS if known(name) and name != "aten.positive")


def tensor(base: str, name: str, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if name in MASKS:
        return torch.rand(SIZE, generator=generator) > 0.5
    if dtype == torch.bool:
        return torch.rand(SIZE, generator=generator) > 0.5
    if not dtype.is_floating_point:
        low = 1 if name in ("other", "tensor2") or base in INTEGER else -9
        return torch.randint(low, 10, (SIZE,), generator=generator, dtype=dtype)
    value = torch.randn(SIZE, generator=generator, dtype=torch.float32)
    if name == "buffer":
        # what log_sigmoid_forward leaves on the CPU: exp(-|x|) of the same x
        value = (-tensor(base, "self", torch.float32, 1).abs()).to(dtype).exp()
    elif base in POSITIVE:
        value = value.abs() + 0.1
    elif base in UNIT:
        value = value.sigmoid() * 0.98 + 0.01
    elif base in ABOVE_ONE:
        value = value.abs() + 1
    return value.to(dtype)


def arguments(name: str, dtype: torch.dtype) -> tuple[Any, list[torch.Tensor], list[Any]]:
    """The overload, its tensors, and the call's arguments with None where a tensor goes."""
    op = overload(name)
    base = op_name(op).split(".")[1]
    tensors: list[torch.Tensor] = []
    call: list[Any] = []
    for index, arg in enumerate(op._schema.arguments):
        kind = str(arg.type)
        if kind == "Tensor" or (kind == "Optional[Tensor]" and arg.name in ("min", "max")):
            value = tensor(base, arg.name, dtype, index)
            # fill and masked_fill take what they fill with as a 0-d tensor only
            tensors.append(value[0] if arg.name == "value" else value)
            call.append(Ellipsis)
        elif arg.name in NUMBERS and not (arg.name == "dtype" and "to_copy" in name):
            number = NUMBERS[arg.name]
            if not dtype.is_floating_point and isinstance(number, float):
                number = int(number * 4)
            call.append(number)
        else:
            call.append(arg.default_value if arg.has_default_value() else None)
    return op, tensors, call


def call_of(name: str, dtype: torch.dtype) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """A function of tensors only that calls the op, and tensors for it."""
    op, tensors, call = arguments(name, dtype)
    schema = op._schema.arguments

    def fn(*values: torch.Tensor) -> torch.Tensor:
        given = iter(values)
        filled = [next(given) if value is Ellipsis else value for value in call]
        args = [v for v, a in zip(filled, schema, strict=True) if not a.kwarg_only]
        kwargs = {a.name: v for v, a in zip(filled, schema, strict=True) if a.kwarg_only}
        return op(*args, **kwargs)

    return fn, tensors


def run(name: str, dtype: torch.dtype) -> None:
    fn, tensors = call_of(name, dtype)
    check(fn, tensors)


def taken(dtype: torch.dtype) -> list[str]:
    """Rows that ATen itself computes in this type."""
    found: list[str] = []
    for name in ROWS:
        fn, tensors = call_of(name, dtype)
        try:
            fn(*tensors)
        except (RuntimeError, NotImplementedError):
            continue
        found.append(name)
    return found


@pytest.mark.covers("A27")
def test_the_table_covers_every_pointwise_row() -> None:
    pointwise = {
        name.removesuffix(".default") for name, row in TABLE.items() if row.kind == "pointwise"
    }
    assert pointwise - set(OPS) == set()


def test_every_row_is_run_in_some_type() -> None:
    """`taken` leaves out what ATen can't compute: what it leaves out of every type is untested."""
    types = (torch.float32, torch.int64, torch.bool)
    assert set(ROWS) - {name for dtype in types for name in taken(dtype)} == set()


@pytest.mark.parametrize("name", taken(torch.float32))
def test_float(name: str) -> None:
    run(name, torch.float32)


# hardsigmoid's sixth is rounded to fp32 in ATen's own backward, whatever the type.
@pytest.mark.parametrize("name", sorted({*taken(torch.float64)} - {"aten.hardsigmoid_backward"}))
def test_double(name: str) -> None:
    run(name, torch.float64)


# Powers of integer tensors have no code, and are refused.
@pytest.mark.parametrize("name", [n for n in taken(torch.int64) if ".pow." not in n])
def test_integer(name: str) -> None:
    run(name, torch.int64)


BOOLEAN = """add.Tensor mul.Tensor bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor
bitwise_not logical_and logical_or logical_xor logical_not eq.Tensor ne.Tensor where.self clone"""


@pytest.mark.parametrize("name", [f"aten.{name}" for name in BOOLEAN.split()])
def test_boolean(name: str) -> None:
    run(name, torch.bool)


NAN_KEEPING = """relu clamp clamp_min clamp_max maximum minimum fmax fmin where.self
threshold_backward abs neg isnan isinf eq.Tensor ne.Tensor lt.Tensor gt.Tensor hardtanh
nan_to_num sigmoid tanh
exp log pow.Tensor_Scalar mul.Tensor gelu"""


@pytest.mark.parametrize("name", [f"aten.{name}" for name in NAN_KEEPING.split()])
def test_special_values(name: str) -> None:
    """Infinities and NaN in every pair of operands come out as ATen's do."""
    fn, tensors = call_of(name, torch.float32)
    special = torch.tensor(SPECIAL)
    pairs = [special.repeat(len(SPECIAL)), special.repeat_interleave(len(SPECIAL))]
    floats = iter(pairs)
    check(fn, [t[:49] if t.dtype == torch.bool else next(floats) for t in tensors])


@pytest.mark.parametrize("exponent", [0, 0.5, -0.5, 1, 2, 3, -1, -2, 2.5, -3])
def test_power_by_a_number(exponent: float) -> None:
    """Each of ATen's special exponents, and two that have none."""
    check(lambda x: x.pow(exponent), [torch.rand(SIZE) + 0.1])


@pytest.mark.parametrize("exponent", [0, 1, 2, 5])
def test_integer_power_by_a_number(exponent: int) -> None:
    check(lambda x: x.pow(exponent), [torch.randint(-5, 6, (SIZE,))])


@pytest.mark.parametrize("mode", [None, "floor", "trunc"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_division_modes(mode: str | None, dtype: torch.dtype) -> None:
    dividends = torch.arange(-20, 21).to(dtype).repeat(4)
    divisors = torch.tensor([3, -3, 7, -2]).to(dtype).repeat_interleave(41)
    check(lambda a, b: torch.div(a, b, rounding_mode=mode), [dividends, divisors])
    check(lambda a, b: (a % b, torch.fmod(a, b)), [dividends, divisors])


TYPES = [torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool]


@pytest.mark.parametrize("wanted", TYPES)
@pytest.mark.parametrize("given", TYPES)
def test_conversions(given: torch.dtype, wanted: torch.dtype) -> None:
    x = (torch.rand(SIZE) * 5).to(given)
    check(lambda x: x.to(wanted).clone() if given == wanted else x.to(wanted), [x])


def test_mixed_operands_promote_as_torch_says() -> None:
    x, i, b = torch.randn(SIZE), torch.randint(0, 5, (SIZE,)), torch.rand(SIZE) > 0.5
    check(lambda x, i, b: (x + i, i + b, x * b, i / 2, i > 2.5, b + 1, x > i), [x, i, b])
    scalar = torch.tensor(2.0, dtype=torch.float64)  # 0-d: does not widen x
    check(lambda x, s: x * s, [x, scalar])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_logit_at_minus_zero_is_the_device_s(device):
    """ATen's slope there is +inf on a CPU, and on a GPU the quotient's -inf."""
    with FakeTensorMode():
        x = torch.empty(4, device=device)
        gm = make_fx(lambda g, x: torch.ops.aten.logit_backward(g, x))(x, torch.empty_like(x))
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.logit_backward.default)
    text = expression(node, lambda operand: operand.name)
    assert ("== 0" in text) is (device == "cpu")
