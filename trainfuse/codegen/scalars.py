"""Element types and literals of the generated text."""

from __future__ import annotations

import math

import torch

TRITON_TYPE: dict[torch.dtype, str] = {
    torch.bool: "tl.int1",
    torch.uint8: "tl.uint8",
    torch.int8: "tl.int8",
    torch.int16: "tl.int16",
    torch.int32: "tl.int32",
    torch.int64: "tl.int64",
    torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16",
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
}
HALF = frozenset({torch.float16, torch.bfloat16})


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that values of `dtype` are held in: half types compute in fp32."""
    return torch.float32 if dtype in HALF else dtype


def cast(text: str, source: torch.dtype, wanted: torch.dtype) -> str:
    """`text` of compute type `source`, as compute type `wanted`."""
    if source == wanted:
        return text
    if wanted == torch.bool:
        return f"({text} != 0)"
    return f"{text}.to({TRITON_TYPE[wanted]})"


def round_to(text: str, source: torch.dtype, wanted: torch.dtype) -> str:
    """An explicit conversion to `wanted`, kept in its compute type: half types round here."""
    held = cast(text, compute_dtype(source), compute_dtype(wanted))
    if wanted in HALF and source != wanted:
        return f"{held}.to({TRITON_TYPE[wanted]}).to(tl.float32)"
    return held


def literal(value: float | int | bool, dtype: torch.dtype) -> str:
    """A number as text; beside a tensor, Triton gives it the tensor's type, never fp64."""
    if dtype == torch.bool:
        return f"tl.full([], {int(bool(value))}, tl.int1)"
    if not dtype.is_floating_point:
        text = repr(int(value))
        return f"({text})" if value < 0 else text
    number = float(value)
    if math.isinf(number) or math.isnan(number):
        text = f'float("{number}")'
    else:
        text = repr(number)
    return f"({text})" if text.startswith("-") else text


def typed(value: float | int | bool, dtype: torch.dtype) -> str:
    """The same as a tensor of its type."""
    text = literal(value, dtype)
    if dtype == torch.bool:
        return text
    text = text[1:-1] if text.startswith("(") else text
    return f"tl.full([], {text}, {TRITON_TYPE[dtype]})"


def unrounded(value: float | int | bool, dtype: torch.dtype) -> str:
    """The same for functions that make fp32 of a number, before they look at their tensors."""
    return typed(value, dtype) if dtype == torch.float64 else literal(value, dtype)


def lowest(dtype: torch.dtype) -> float | int:
    """Identity of a maximum."""
    return -math.inf if dtype.is_floating_point else _limits(dtype)[0]


def highest(dtype: torch.dtype) -> float | int:
    """Identity of a minimum."""
    return math.inf if dtype.is_floating_point else _limits(dtype)[1]


def _limits(dtype: torch.dtype) -> tuple[int, int]:
    if dtype == torch.bool:
        return 0, 1
    info = torch.iinfo(dtype)
    return info.min, info.max
