"""Two processes with their own data each: parameters stay equal, and eager's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import trainfuse

WORLD = 2
Step = Callable[[Tensor, Tensor], Tensor]


def model_of(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)
    return nn.Sequential(*layers).to(device)


def ordinary(model: nn.Module, parameters: list[nn.Parameter], averaged: bool = False) -> Step:
    """averaged: the step itself averages its gradients over the ranks."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        if averaged:
            for p in parameters:
                assert p.grad is not None
                distributed.all_reduce(p.grad)
                p.grad /= WORLD
        optimizer.step()
        return loss.detach()

    return step


def whole_step(inner: nn.Module, backend: str) -> Step:
    """The whole step around a model that is in DDP: refused, or it would skip the reducer."""
    step = ordinary(DistributedDataParallel(inner), [*inner.parameters()])
    return trainfuse.compile(step, backend=backend)


def model_in_place(inner: nn.Module, backend: str) -> Step:
    trainfuse.compile(inner, backend=backend)
    return ordinary(DistributedDataParallel(inner), [*inner.parameters()])


def wrapper_in_place(inner: nn.Module, backend: str) -> Step:
    wrapped = DistributedDataParallel(inner)
    trainfuse.compile(wrapped, backend=backend)
    return ordinary(wrapped, [*inner.parameters()])


def by_hand(inner: nn.Module, backend: str) -> Step:
    return trainfuse.compile(ordinary(inner, [*inner.parameters()], averaged=True), backend=backend)


WAYS = (whole_step, model_in_place, wrapper_in_place, by_hand)
REASONS = {whole_step: "DistributedDataParallel", by_hand: "communicates with other processes"}


def batches(rank: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        x = torch.randn(5 + rank, 6, generator=generator)
        yield x.to(device), torch.randint(4, (5 + rank,), generator=generator).to(device)


def train(rank: int, folder: Path, use_gpus: bool) -> None:
    """One rank's work: every way from the same parameters, compared after each step."""
    device = torch.device("cuda", rank) if use_gpus else torch.device("cpu")
    if use_gpus:
        torch.cuda.set_device(device)
    store = distributed.FileStore(str(folder / "store"), WORLD)
    kind = "nccl" if use_gpus else "gloo"
    distributed.init_process_group(kind, store=store, rank=rank, world_size=WORLD)
    try:
        first = model_of(device)
        reference = copy.deepcopy(first)
        step = ordinary(DistributedDataParallel(reference), [*reference.parameters()])
        wanted = []
        for x, y in batches(rank, device):
            loss = step(x, y)
            wanted.append((loss, [p.detach().clone() for p in reference.parameters()]))
        for way in WAYS:
            torch._dynamo.reset()
            model = copy.deepcopy(first)
            step = way(model, "triton" if use_gpus else "eager")
            for (x, y), expected in zip(batches(rank, device), wanted, strict=True):
                got = step(x, y), [p.detach().clone() for p in model.parameters()]
                torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5, msg=way.__name__)
            check_equal(model)
            if way in REASONS:
                said = step.explain().refusals[0]  # type: ignore[attr-defined]
                assert (said.stage, REASONS[way] in said.reason) == ("capture", True), said
    finally:
        distributed.destroy_process_group()


def check_equal(model: nn.Module) -> None:
    """Parameters are the same bits on every rank."""
    for p in model.parameters():
        least, most = p.detach().clone(), p.detach().clone()
        distributed.all_reduce(least, distributed.ReduceOp.MIN)
        distributed.all_reduce(most, distributed.ReduceOp.MAX)
        assert torch.equal(least, most)


@pytest.mark.covers("C9")
def test_ranks_train_as_in_eager(tmp_path: Path) -> None:
    """C9: in DDP, whole or in place, and with gradients averaged by the step itself."""
    if not distributed.is_available():
        pytest.skip("no torch.distributed here")
    use_gpus = torch.cuda.device_count() >= WORLD
    multiprocessing.spawn(train, (tmp_path, use_gpus), nprocs=WORLD)
