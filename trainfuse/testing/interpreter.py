"""Triton's interpreter, mended where a GPU computes otherwise."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np


def _convert(stock: Any, wide: Any, narrow: Any) -> Any:
    def convert(value: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) != (wide, narrow):
            return stock(value, source, target, rounding)
        value = np.ascontiguousarray(value)
        bits = value.view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        # a NaN's low bits must not carry into its exponent
        quiet = (bits >> 16) | 0x40
        return np.where(np.isnan(value), quiet, rounded).astype(np.uint16)

    return convert


@contextlib.contextmanager
def rounded_bf16() -> Iterator[None]:
    """Round fp32 to bf16 to nearest even in Triton's interpreter, which truncates.

    Truncation has twice the error of rounding, so that no kernel that stores bf16 could pass the
    rule there; a GPU rounds (`cvt.rn.bf16.f32`), and compiled kernels are left alone.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    convert = _convert(interpreter._convert_float, tl.float32, tl.bfloat16)
    with mock.patch.object(interpreter, "_convert_float", convert):
        yield
