"""The `compiler` fixture, and an interpreter that rounds bf16 as a GPU does."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.gradients.compilers import Compiler


@pytest.fixture
def compiler() -> Iterator[Callable[..., Compiler]]:
    """Makes Compilers, and closes what they compiled."""
    made: list[Compiler] = []

    def make(capture: str, backend: str, **options: Any) -> Compiler:
        made.append(Compiler(capture, backend, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(autouse=True)
def rounded_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round fp32 to bf16 to nearest even in Triton's interpreter, which truncates.

    Truncation has twice the error of rounding, so that no kernel that stores bf16 could pass
    there; a GPU rounds (`cvt.rn.bf16.f32`).
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import triton.language as tl
    from triton.runtime import interpreter

    stock = interpreter._convert_float

    def convert(value: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return stock(value, source, target, rounding)
        value = np.ascontiguousarray(value)
        bits = value.view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        # a NaN's low bits must not carry into its exponent
        quiet = (bits >> 16) | 0x40
        return np.where(np.isnan(value), quiet, rounded).astype(np.uint16)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
