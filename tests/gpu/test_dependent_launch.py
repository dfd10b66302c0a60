"""Kernels that start before their predecessor ends: every order of work still gives its result.

Hand-written kernels whose last program is late, so that what follows is there long before it ends,
between ATen kernels, copies, memsets and another stream; and whole training steps.
"""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import trainfuse
from trainfuse.codegen.targets import Target
from trainfuse.runtime.cache import KernelCache
from trainfuse.runtime.launch import BoundFunction

pytestmark = pytest.mark.skipif(
    torch.cuda.get_device_capability() < (9, 0), reason="kernels don't start early there"
)

BLOCK, PROGRAMS = 1024, 64  # fewer than multiprocessors: what follows finds room at once
SIZE = BLOCK * PROGRAMS
SPIN = 5_000  # turns of a loop: tens of microseconds
TURNS = 40

_TEXT = """
import triton
import triton.language as tl

from trainfuse.codegen import triton_lib as lib


@triton.jit
def late(in0, out0):
    lib.wait_for_previous()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = i.to(tl.float32)
    if tl.program_id(0) == PROGRAMS - 1:
        for _ in range(SPIN):
            value = value * 2.0 * 0.5 + 0.0
    tl.store(out0 + i, tl.load(in0 + i) + value)


@triton.jit
def reversed_sum(in0, in1, out0):
    lib.wait_for_previous()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out0 + i, tl.load(in0 + SIZE - 1 - i) + tl.load(in1 + i))


@triton.jit
def doubled(in0, out0):
    lib.wait_for_previous()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out0 + i, tl.load(in0 + i) * 2.0)
"""
SOURCE = re.sub("BLOCK|PROGRAMS|SPIN|SIZE", lambda name: str(globals()[name.group()]), _TEXT)

OTHER_LIBRARY = """
from types import ModuleType

from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin():
    gdc_launch_dependents()
    {wait}


lib = ModuleType("lib")
lib.wait_for_previous = begin
"""


def hasty(wait: str) -> str:
    """The text, but every program lets the next kernel start at once, as others' kernels may."""
    library = OTHER_LIBRARY.format(wait=wait)
    return SOURCE.replace("from trainfuse.codegen import triton_lib as lib", library)


TEXTS = {"ours": SOURCE, "hasty": hasty("gdc_wait()")}


class Kernels:
    """The functions of a text, launched as every generated kernel is."""

    def __init__(self, cache: KernelCache, source: str) -> None:
        major, minor = torch.cuda.get_device_capability()
        arch = f"sm_{major}{minor}"
        folder = cache.entry("late", source, arch)

        def bound(name: str, pointers: int) -> Callable[..., None]:
            types = ["*fp32"] * pointers
            function = BoundFunction(
                cache, folder, arch, name, types, (PROGRAMS, 1, 1), 4, None, True
            )
            function.load()
            return lambda *tensors: function(tensors)

        self.late, self.doubled = bound("late", 2), bound("doubled", 2)
        self.reversed_sum = bound("reversed_sum", 3)


def memset(tensor: Tensor) -> None:
    """A memset, not a kernel, in either mode."""
    driver, stream = ctypes.CDLL("libcuda.so.1"), torch.cuda.current_stream().cuda_stream
    address, count = ctypes.c_uint64(tensor.data_ptr()), ctypes.c_size_t(tensor.numel())
    failed = driver.cuMemsetD32Async(address, ctypes.c_uint(0), count, ctypes.c_void_p(stream))
    assert failed == 0


def empty(number: int) -> list[Tensor]:
    return [torch.zeros(SIZE, device="cuda") for _ in range(number)]


def whole(*shape: int) -> Tensor:
    """Whole numbers, so that sums are exact in any order."""
    return torch.randint(-1000, 1000, shape, device="cuda").float()


class Chain:
    """Turns of a chain of our kernels and others, all on the same few buffers."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.given, self.results = whole(TURNS, SIZE), torch.zeros(TURNS, SIZE, device="cuda")
        self.x, self.y, self.z, self.a, self.b = empty(5)
        self.side = torch.cuda.Stream()

    def turn(self, given: Tensor, result: Tensor) -> None:
        k, x, y, z, a, b = self.kernels, self.x, self.y, self.z, self.a, self.b
        x.copy_(given)  # a copy before ours
        memset(y)  # what a reader that is early would find
        k.late(x, y)
        k.doubled(given, x)  # written while `late` has yet to read it
        k.reversed_sum(y, x, z)  # of a kernel's result, and of the one's before that
        torch.add(z, 1, out=a)  # ATen's, behind ours
        k.late(a, z)  # over what ATen still reads
        k.late(z, a)
        memset(y)  # a memset behind ours
        k.reversed_sum(a, y, b)
        y.copy_(b)  # a copy behind ours
        here, there = torch.cuda.current_stream(), self.side
        k.late(y, x)
        there.wait_stream(here)
        with torch.cuda.stream(there):
            k.late(x, z)  # the first on its stream
        k.doubled(y, b)  # at the same time
        here.wait_stream(there)
        k.reversed_sum(z, b, result)  # of a kernel on either stream

    def run(self) -> None:
        for given, result in zip(self.given, self.results, strict=True):
            self.turn(given, result)

    def expected(self) -> Tensor:
        i = torch.arange(SIZE, device="cuda").float()
        x = self.given
        z = (x + i).flip(1) + 2 * x
        y = ((z + 1 + i) + i).flip(1)
        return (y + i + i).flip(1) + 2 * y


@pytest.mark.parametrize("name", TEXTS)
def test_eager_launches_keep_their_order(name: str, cache: KernelCache) -> None:
    chain = Chain(Kernels(cache, TEXTS[name]))
    for _ in range(5):
        chain.given.copy_(whole(TURNS, SIZE))
        chain.run()
        torch.cuda.synchronize()
        assert torch.equal(chain.results, chain.expected())


@pytest.mark.parametrize("name", TEXTS)
def test_a_replayed_graph_keeps_their_order(name: str, cache: KernelCache) -> None:
    chain = Chain(Kernels(cache, TEXTS[name]))
    chain.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain.run()
    for _ in range(10):
        chain.given.copy_(whole(TURNS, SIZE))
        graph.replay()
        graph.replay()  # its first kernel behind its last
        torch.cuda.synchronize()
        assert torch.equal(chain.results, chain.expected())


def test_the_order_depends_on_the_wait(cache: KernelCache) -> None:
    """Or this chain shows nothing: without the wait, kernels read what isn't there yet."""
    kernels = Kernels(cache, hasty("pass"))
    x, y, z = empty(3)
    wrong = 0
    for _ in range(TURNS):
        x.copy_(whole(SIZE))
        y.fill_(-1)
        torch.cuda.synchronize()
        kernels.late(x, y)
        kernels.doubled(y, z)
        torch.cuda.synchronize()
        wrong += not torch.equal(z, 2 * (x + torch.arange(SIZE, device="cuda")))
    assert wrong


def trained(early: bool, graph: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Parameters, and every loss, after some steps of a small model with many small kernels."""
    folder.mkdir(mode=0o700)
    with monkeypatch.context() as patch:
        if not early:
            patch.setattr(Target, "starts_early", property(lambda _: False))
        torch._dynamo.reset()
        torch.manual_seed(0)
        layers = [m for _ in range(4) for m in (nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU())]
        model = nn.Sequential(*layers, nn.Linear(64, 10)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        compiled = trainfuse.compile(step, cuda_graph=graph, options={"cache_dir": folder})
        losses = []
        for _ in range(20):
            x, y = torch.randn(48, 64, device="cuda"), torch.randint(10, (48,), device="cuda")
            losses.append(compiled(x, y).detach().clone())
        notes = [json.loads(path.read_text()) for path in folder.rglob("*.json")]
        started = [note["launch_pdl"] for note in notes if "launch_pdl" in note]
        assert len(started) > 5
        assert set(started) == {early}
        return [*losses, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize("graph", ["off", "require"])
def test_training_is_the_same_to_the_last_bit(
    graph: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, plain = (
        trained(early, graph, tmp_path / str(early), monkeypatch) for early in (True, False)
    )
    for mine, theirs in zip(ours, plain, strict=True):
        assert torch.equal(mine, theirs)
