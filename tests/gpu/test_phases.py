"""Programs that wait for one another in one launch: what only a GPU can show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.runtime.graphs import group_of, trace
from trainfuse.codegen.choices import Choice
from trainfuse.codegen.ir import GroupKernel
from trainfuse.codegen.lower import lower
from trainfuse.codegen.targets import H200
from trainfuse.runtime.cache import KernelCache
from trainfuse.runtime.launch import GroupLauncher


def softmax(x: Tensor) -> Tensor:
    e = (x - x.amax(0)).exp()
    return e / e.sum(0)


def standardised(x: Tensor) -> Tensor:
    """Three levels of reductions."""
    y = x - x.mean(0)
    z = y / y.abs().amax(0)
    return z - z.square().mean(0)


CHOICES = [{}, {"rows": 16, "per_sm": 16}, {"per_sm": 1, "warps": 8}]


@pytest.mark.parametrize("function", [softmax, standardised])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("shape", [(8192, 4096), (5001, 9001)], ids=str)
def test_replays_agree(
    shape: tuple[int, int],
    choice: dict[str, int],
    function: Callable[[Tensor], Tensor],
    tmp_path: Path,
) -> None:
    """Of few programs and of more than run at once; scratch memory holds what the last one left."""
    inputs = [torch.randn(shape, device="cuda").to(torch.bfloat16) * n for n in (1, 3, 9)]
    halves = lambda x: function(x.float()).to(x.dtype)  # noqa: E731  # what is traced, and eager
    tg = trace(halves, inputs[:1])
    group = group_of(tg, "group", tg.nodes())
    kernel = lower(group, H200, None, Choice(held=False, phased=True, **choice))
    assert isinstance(kernel, GroupKernel)
    (_,) = kernel.launches
    tmp_path.chmod(0o700)
    major, minor = torch.cuda.get_device_capability()
    launcher = GroupLauncher(group, kernel, KernelCache(tmp_path), f"sm_{major}{minor}")
    x, out = inputs[0].clone(), torch.empty_like(inputs[0])
    launcher([x], [out])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launcher([x], [out])
    found: dict[int, Tensor] = {}
    for turn in range(60):
        number = turn * 2 % 3
        x.copy_(inputs[number])
        out.fill_(float("nan"))
        graph.replay()
        if number not in found:
            found[number] = out.clone()
            exact, eager = function(inputs[number].double()), halves(inputs[number])
            error, eagers = ((value - exact).square().mean().sqrt() for value in (out, eager))
            assert error <= 2 * eagers
        assert torch.equal(out, found[number])
