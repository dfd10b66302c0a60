"""What a group's launches are called with."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.runtime.graphs import flat_kernel, group_of, trace
from trainfuse.runtime import launch

LAYOUTS = {
    "begins amid 16 bytes": lambda: torch.randn(7 * 33 + 1)[1:].view(7, 33),
    "aligned": lambda: torch.randn(7, 33),
    # no row of it is moved in vectors, and a copy would have other strides
    "begins amid 16 bytes, with gaps": lambda: torch.randn(7, 40)[:, 1:34],
}


@pytest.mark.parametrize("whole_vectors", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_read_in_whole_vectors_is_aligned(
    layout: str, whole_vectors: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the 16 bytes that hold its last element could reach past its memory."""
    called: list[list[Tensor]] = []
    monkeypatch.setattr(launch, "BoundFunction", lambda *_: called.append)
    tg = trace(lambda x: x.exp(), [LAYOUTS[layout]()])
    group = group_of(tg, "group", list(tg.nodes()))
    kernel = flat_kernel(group, ["t0 = tl.exp(in0)"])
    kernel = dataclasses.replace(kernel, whole_vectors=whole_vectors)
    cache: Any = SimpleNamespace(entry=lambda *_: Path())
    x, out = LAYOUTS[layout](), torch.empty(7, 33)
    launch.GroupLauncher(group, kernel, cache, "sm_90")([x], [out])
    ((given, written),) = called
    assert written is out
    assert torch.equal(given, x)
    assert given.stride() == x.stride()
    copied = whole_vectors and layout == "begins amid 16 bytes"
    assert (given is x) == (not copied)
    assert not copied or given.data_ptr() % 16 == 0
