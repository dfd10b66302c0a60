"""The `compiler` fixture: makes compile_fns, and closes what they compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

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
