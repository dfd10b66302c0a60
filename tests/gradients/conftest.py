"""The `compiler` fixture, and an interpreter that rounds bf16 as a GPU does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.gradients.compilers import Compiler
from trainfuse.testing import rounded_bf16


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
def bf16_as_on_a_gpu() -> Iterator[None]:
    """Kernels that store bf16 round it, in the interpreter too."""
    with rounded_bf16():
        yield
