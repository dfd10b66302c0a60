"""A fault in what kernels store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from trainfuse import pipeline


def plant(
    monkeypatch: pytest.MonkeyPatch, value: str, within: Callable[[Any], bool], into: str = ""
) -> None:
    """Have the kernels of groups store another value.

    value: Triton's text of it, made of the right one's name, `value`. within: which groups. into:
    how the stores begin that are meant, such as "out0, ".
    """
    lower = pipeline.lower
    text = (
        "\n\n@triton.jit\ndef _planted(at, value, mask=None):\n"
        f"    tl.store(at, {value}, mask=mask)\n"
    )

    def planted(group: Any, *rest: Any) -> Any:
        kernel = lower(group, *rest)
        if not within(group) or not hasattr(kernel, "source"):
            return kernel
        source = kernel.source.replace(f"tl.store({into}", f"_planted({into}") + text
        return replace(kernel, source=source, key=f"{kernel.key}-{value}")

    monkeypatch.setattr(pipeline, "lower", planted)


def of_phase(phase: str) -> Callable[[Any], bool]:
    """Groups of one phase."""
    return lambda group: group.phase == phase
