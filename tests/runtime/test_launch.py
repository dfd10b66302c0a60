"""What a group's launches are called with, and their scratch memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.runtime.graphs import flat_kernel, group_of, trace
from trainfuse.codegen.choices import Choice
from trainfuse.codegen.ir import GroupKernel
from trainfuse.codegen.lower import lower
from trainfuse.codegen.targets import INTERPRETER, SIMULATED
from trainfuse.fusion.plan import FusionGroup
from trainfuse.runtime import launch
from trainfuse.runtime.cache import KernelCache
from trainfuse.runtime.repro import launch_text

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


@pytest.fixture
def memory_that_is_never_zero() -> Iterator[None]:
    """What torch.empty gives holds NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def counting(x: Tensor) -> tuple[FusionGroup, GroupKernel]:
    """A kernel whose programs count what they have done."""
    tg = trace(lambda x: x - x.sum(0, keepdim=True), [x])
    group = group_of(tg, "group", tg.nodes())
    kernel = lower(group, SIMULATED, None, Choice(held=False, phased=True))
    assert isinstance(kernel, GroupKernel)
    return group, kernel


@pytest.mark.usefixtures("memory_that_is_never_zero")
def test_counters_are_zero_at_each_launch() -> None:
    x = torch.randn(3000, 40)
    group, kernel = counting(x)
    launcher = launch.GroupLauncher(group, kernel, KernelCache(None), INTERPRETER)
    for _ in range(2):
        out = torch.empty_like(x)
        launcher([x], [out])
        torch.testing.assert_close(out, x - x.sum(0, keepdim=True), rtol=1e-4, atol=1e-4)


def test_a_script_makes_them_zero() -> None:
    _, kernel = counting(torch.randn(3000, 40))
    (counters,) = (space for space in kernel.workspaces if space.zeroed)
    text = launch_text(kernel)
    assert text.count("torch.zeros(") == 1
    assert f"torch.zeros({counters.shape}, dtype=torch.int32, device=DEVICE)" in text
    assert text.count("torch.empty(") == len(kernel.workspaces) - 1
