"""What is planned of a reduction has the shape of eager's: over dims of size 1, or over none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import trainfuse
from trainfuse.testing import assert_gradients_match

SEVERAL: dict[str, Callable[..., Any]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "nansum": torch.nansum,
    "nanmean": torch.nanmean,
    "amax": torch.amax,
    "std": partial(torch.std, correction=0),
    "logsumexp": torch.logsumexp,
    "norm": torch.norm,
    "vector_norm": torch.linalg.vector_norm,
    "vector_norm of 1": lambda x, **at: torch.linalg.vector_norm(x, 1, **at),
    "vector_norm of 3": lambda x, **at: torch.linalg.vector_norm(x, 3.0, **at),
    "vector_norm of inf": lambda x, **at: torch.linalg.vector_norm(x, torch.inf, **at),
}
ONE: dict[str, Callable[..., Any]] = {
    "prod": torch.prod,
    "median": lambda x, **at: torch.median(x, **at).values,
    "max": lambda x, **at: torch.max(x, **at).values,
}


def places(shape: tuple[int, ...], name: str) -> Iterator[dict[str, Any]]:
    """Every dim from either end, and where several may be reduced all, and none."""
    for dim in range(-len(shape), len(shape)):
        yield {"dim": dim, "keepdim": dim == 0}
    if name in SEVERAL:
        yield {"dim": (0, -1) if len(shape) > 1 else (-1,)}
        if name not in ("amax", "std", "logsumexp"):
            yield {"dim": ()}


@pytest.mark.parametrize("name", [*SEVERAL, *ONE])
def test_a_reduction_over_few_elements(name: str) -> None:
    op = {**SEVERAL, **ONE}[name]

    def reduced(*values: Tensor) -> list[Tensor]:
        results = [op(x * 1.5, **at) for x in values for at in places(tuple(x.shape), name)]
        return [result.sin() * result.new_full(result.shape, 1.5) for result in results]

    args = [torch.randn(shape, requires_grad=True) for shape in ((7, 1), (3, 1, 4), (1,))]
    assert_gradients_match(
        reduced, args, compile_fn=lambda fn: trainfuse.compile(fn, backend="triton"), k=3.0
    )
