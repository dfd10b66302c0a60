"""Lookups and sums by index at real sizes: right, equal every time, stopped when out of range."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional

import trainfuse
from trainfuse.testing import Training, assert_gradients_match, gradient_report

VOCABULARY, WIDTH = 50304, 768


def words(rows: int, *shape: int) -> torch.Tensor:
    """Indices as frequent as words are: the n-th most frequent one 1/n of the time."""
    generator = torch.Generator().manual_seed(0)
    weights = 1.0 / torch.arange(1, rows + 1)
    count = torch.Size(shape).numel()
    drawn = torch.multinomial(weights, count, replacement=True, generator=generator)
    return drawn.view(shape).cuda()


def table(rows: int, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(rows, width, device="cuda", requires_grad=True)


def embedded(weight, ids):
    return functional.embedding(ids, weight) * 2


def with_positions(weight, positions, ids, gain):
    where = torch.arange(ids.shape[-1], device=ids.device)
    x = functional.embedding(ids, weight) + functional.embedding(where, positions)
    return functional.layer_norm(x, (x.shape[-1],), gain)


def compile_fn(fn):
    return trainfuse.compile(fn, backend="triton")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["words", "uniform", "one", "int32"])
def test_embedding(dtype, kind):
    ids = {
        "words": lambda: words(VOCABULARY, 16, 1024),
        "uniform": lambda: torch.randint(VOCABULARY, (16, 1024), device="cuda"),
        "one": lambda: torch.full((16, 1024), 7, device="cuda"),
        "int32": lambda: words(VOCABULARY, 16, 1024).int(),
    }[kind]()
    assert_gradients_match(embedded, (table(VOCABULARY), ids), dtype=dtype, compile_fn=compile_fn)


def test_keys_of_four_bytes():
    arguments = (table(128256, 1024), words(128256, 4, 2048))
    assert_gradients_match(embedded, arguments, dtype=torch.bfloat16, compile_fn=compile_fn)


def test_small_table_many_rows():
    arguments = (table(129, 256), words(129, 64, 2048))
    assert_gradients_match(embedded, arguments, dtype=torch.float32, compile_fn=compile_fn)


def test_positions_and_norm():
    gain = torch.randn(WIDTH, device="cuda", requires_grad=True)
    arguments = (table(VOCABULARY), table(1024), words(VOCABULARY, 16, 1024), gain)
    assert_gradients_match(with_positions, arguments, dtype=torch.bfloat16, compile_fn=compile_fn)


def test_messages_of_a_graph():
    def messages(x, source, target):
        sent = x[source].relu()
        return x.scatter_add(0, target.unsqueeze(-1).expand_as(sent), sent)

    edges = torch.randint(20000, (2, 100_000), device="cuda")
    arguments = (table(20000, 128), edges[0], edges[1])
    assert_gradients_match(messages, arguments, dtype=torch.float32, compile_fn=compile_fn)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_runs_are_bit_equal(dtype):
    """Hot rows and all: the order of each sum follows from the indices, whatever runs beside it."""
    weight = table(VOCABULARY).detach().to(dtype).requires_grad_()
    ids = words(VOCABULARY, 16, 1024)
    cotangent = torch.randn(16, 1024, WIDTH, device="cuda", dtype=dtype)
    compiled = compile_fn(embedded)
    noise = torch.randn(4096, 4096, device="cuda")
    runs = []
    for _ in range(4):
        other = torch.cuda.Stream()
        with torch.cuda.stream(other):
            noise @ noise
        runs.append(torch.autograd.grad(compiled(weight, ids), weight, cotangent)[0])
    assert all(torch.equal(runs[0], run) for run in runs[1:])


class Language(nn.Module):
    """Tied embeddings and positions around a block."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8192, 256)
        self.places = nn.Embedding(256, 256)
        self.norm = nn.LayerNorm(256)
        self.network = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        where = torch.arange(ids.shape[1], device=ids.device)
        x = self.words(ids) + self.places(where)
        x = x + self.network(self.norm(x))
        return functional.linear(self.norm(x), self.words.weight)


def language() -> Training:
    torch.manual_seed(0)
    model = Language().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        logits = model(ids[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss

    batches = [(torch.randint(8192, (8, 257), device="cuda"),) for _ in range(6)]
    return Training(step, model, batches)


def test_whole_step_is_one_graph():
    """The sort of the indices is captured with the rest: six steps, of which four are replays."""
    made = []

    def whole(training: Training):
        made.append(trainfuse.compile(training.step, backend="triton"))
        return made[-1]

    gradient_report(language, whole, steps=6).check()
    (compiled,) = made
    assert compiled.stats()["cuda_graphs"] == 1, compiled.explain().cuda_graph
    assert compiled.stats()["gate"] == "pass"
    kinds = [g.domain.kind for plan in compiled.plans for g in plan.state.fusion.groups]
    assert kinds.count("segment") == 1
    compiled.close()


SCRIPT = """
import torch, trainfuse
from torch.nn import functional
step = trainfuse.compile(lambda w, i: functional.embedding(i, w) * 2, backend="triton")
w = torch.randn(50, 256, device="cuda")
i = torch.randint(50, (4096,), device="cuda")
step(w, i), step(w, i)
torch.cuda.synchronize()
print("right so far", flush=True)
i[77] = 50
step(w, i)
torch.cuda.synchronize()
print("went on", flush=True)
"""


def test_an_index_out_of_range_stops_the_program():
    """As ATen's kernel does, also where ours was trusted before; in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=300
    )
    assert "right so far" in done.stdout, done.stderr
    assert "went on" not in done.stdout
    assert "assert" in done.stderr.lower()
