"""Models that look things up: mixtures of experts, a recommender with embedding bags."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from tests.gradients.cases import sgd, training
from trainfuse.testing import Training


class Experts(nn.Module):
    """Four gated networks, their weights stacked; top-2 routing.

    capacity: tokens that one expert may take; later ones are dropped, as in GShard. None: every
    expert gets exactly the tokens that chose it, which are as many as the data says.
    """

    def __init__(self, width: int, hidden: int, capacity: int | None) -> None:
        super().__init__()
        self.count, self.capacity = 4, capacity
        self.router = nn.Linear(width, self.count, bias=False)
        self.up = nn.Parameter(torch.randn(self.count, width, hidden) * width**-0.5)
        self.down = nn.Parameter(torch.randn(self.count, hidden, width) * hidden**-0.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x: [tokens, width]; returns the same shape, and the load-balancing loss."""
        chances = self.router(x).softmax(-1)
        gates, chosen = chances.topk(2, dim=-1)
        gates = gates / gates.sum(-1, keepdim=True)
        picks = functional.one_hot(chosen, self.count)
        load = picks.sum(1).to(x.dtype).mean(0)
        balance = self.count * (load * chances.mean(0)).sum()
        mixed = self._routed(x, gates, chosen) if self.capacity is None else None
        if mixed is None:
            mixed = self._dispatched(x, gates, picks)
        return x + mixed, balance

    def _dispatched(
        self, x: torch.Tensor, gates: torch.Tensor, picks: torch.Tensor
    ) -> torch.Tensor:
        """All experts at once over [experts, capacity, width]; full experts drop tokens."""
        assert self.capacity is not None
        order = picks.transpose(0, 1).flatten(0, 1).cumsum(0).view(2, -1, self.count)
        place = ((order.transpose(0, 1) - 1) * picks).sum(-1)
        fits = place < self.capacity
        slots = functional.one_hot(place.clamp(max=self.capacity - 1), self.capacity)
        weights = gates * fits
        combine = torch.einsum("tk,tke,tkc->tec", weights, picks.to(x.dtype), slots.to(x.dtype))
        inputs = torch.einsum("tec,td->ecd", (combine > 0).to(x.dtype), x)
        outputs = functional.silu(inputs @ self.up) @ self.down
        return torch.einsum("tec,ecd->td", combine, outputs)

    def _routed(self, x: torch.Tensor, gates: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """One expert after the other, over the rows that chose it."""
        mixed = torch.zeros_like(x)
        for expert in range(self.count):
            rows, rank = torch.where(chosen == expert)
            h = functional.silu(x[rows] @ self.up[expert]) @ self.down[expert]
            mixed = mixed.index_add(0, rows, h * gates[rows, rank, None])
        return mixed


class Mixture(nn.Module):
    """Two expert layers between linear ones."""

    def __init__(self, width: int, capacity: int | None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(9, width), nn.Linear(width, 4)
        self.experts = nn.ModuleList(Experts(width, 18, capacity) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x: [tokens, 9]; logits [tokens, 4] and the balance loss."""
        x, total = self.first(x), torch.zeros((), device=x.device, dtype=x.dtype)
        for norm, experts in zip(self.norms, self.experts, strict=True):
            x, balance = experts(norm(x))
            total = total + balance
        return self.last(x), total


def _mixture(device: str, capacity: int | None) -> Training:
    model = Mixture(12, capacity).to(device)

    def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits, balance = model(x)
        return functional.cross_entropy(logits, y) + 0.05 * balance

    batches = [(torch.randn(11, 9), torch.randint(4, (11,))) for _ in range(3)]
    return training(model, sgd(model, 0.1, momentum=0.9), loss_of, batches, device)


def experts(device: str) -> Training:
    """Fixed capacity: the shapes don't depend on the data, and one expert overflows."""
    return _mixture(device, capacity=5)


def experts_routed(device: str) -> Training:
    """Routing by torch.where: how many rows an expert gets, only the data says."""
    return _mixture(device, capacity=None)


class Recommender(nn.Module):
    """DLRM: a dense network, three embedding bags, their dot products, a network on top.

    One bag sums, one averages, one weighs its members; bags differ in length, one is empty.
    """

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.dense = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, width), nn.ReLU())
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(size, width, mode=mode)
            for size, mode in ((17, "sum"), (9, "mean"), (5, "sum"))
        )
        self.top = nn.Sequential(nn.Linear(width + 6, 9), nn.ReLU(), nn.Linear(9, 1))
        self.register_buffer("pairs", torch.tril_indices(4, 4, offset=-1))

    def forward(
        self, x: torch.Tensor, ids: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """x: [N, 5]; ids, weights: [3, members]; offsets: [3, N]; logits: [N]."""
        dense = self.dense(x)
        parts = [dense]
        for i, bag in enumerate(self.bags):
            parts.append(bag(ids[i], offsets[i], weights[i] if i == 2 else None))
        stacked = torch.stack(parts, dim=1)
        products = stacked @ stacked.transpose(1, 2)
        crossed = products[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat((dense, crossed), dim=1)).squeeze(1)


def recommender(device: str) -> Training:
    """DLRM with plain SGD, as its authors train it."""
    model = Recommender().to(device)

    def loss_of(model: nn.Module, *batch: torch.Tensor) -> torch.Tensor:
        *features, clicked = batch
        return functional.binary_cross_entropy_with_logits(model(*features), clicked)

    offsets = torch.tensor(
        [[0, 2, 2, 5, 6, 8, 9, 12], [0, 1, 4, 6, 8, 9, 11, 13], [0, 3, 4, 5, 7, 10, 11, 12]]
    )
    batches = [
        (
            torch.randn(8, 5),
            torch.randint(5, (3, 15)) * torch.tensor([[4], [2], [1]]),
            offsets,
            torch.rand(3, 15),
            torch.randint(2, (8,)).float(),
        )
        for _ in range(3)
    ]
    return training(model, sgd(model, 0.5), loss_of, batches, device)
