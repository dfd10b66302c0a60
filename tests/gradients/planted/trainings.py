"""Small trainings that faults are planted into; between them they hold every schedule once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainfuse.testing import Training

ROWS = 600  # more than one block of 512 rows in the interpreter, and not a multiple of it
MODEL_WIDTH, INNER_WIDTH = 12, 30  # the latter: no multiple of four, so its masks are padded
WIDE = 2100  # more than one tile of 2048 columns in the interpreter, and not a multiple of it
LONG = 150  # more than two chunks of 64 columns, and not a multiple of them


def _training(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    batches: Sequence[tuple[Tensor, Tensor]],
) -> Training:
    """The plain step: clear gradients, forward, backward, update."""

    def step(x: Tensor, target: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(x), target)
        loss.backward()
        optimizer.step()
        return loss

    return Training(step, model, batches)


def _pairs(rows: int, width: int, made: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(rows, width), torch.randn(rows, made)) for _ in range(3)]


class Residual(nn.Module):
    """Norm, linear, GELU, two dropouts, linear around a residual: each kind of kernel once."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, MODEL_WIDTH)
        # an eps that matters beside a variance of about one
        self.norm = nn.LayerNorm(MODEL_WIDTH, eps=1e-2)
        self.up, self.down = (
            nn.Linear(MODEL_WIDTH, INNER_WIDTH),
            nn.Linear(INNER_WIDTH, MODEL_WIDTH),
        )
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, 5]."""
        h = torch.tanh(self.first(x))
        return h + self.dropout(self.down(self.dropout(F.gelu(self.up(self.norm(h))))))


def residual() -> Training:
    """Plain SGD over more rows than a block has."""
    model = Residual()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    return _training(model, optimizer, F.mse_loss, _pairs(ROWS, 5, MODEL_WIDTH))


class Scheduled(list[tuple[Tensor, Tensor]]):
    """Batches that come with a learning rate, as a scheduler would set it between steps."""

    def __init__(
        self, batches: Sequence[tuple[Tensor, Tensor]], optimizer: torch.optim.Optimizer
    ) -> None:
        super().__init__(batches)
        self.optimizer = optimizer

    def __getitem__(self, i: Any) -> Any:
        self.optimizer.param_groups[0]["lr"] = (0.05, 0.02, 0.08)[i]
        return super().__getitem__(i)


def scheduled() -> Training:
    """AdamW with a scheduled rate, and betas and weight decay that show at once."""
    model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, betas=(0.7, 0.9), weight_decay=0.5)
    return _training(model, optimizer, F.mse_loss, Scheduled(_pairs(16, 5, 3), optimizer))


def momentum() -> Training:
    """SGD with Nesterov momentum."""
    model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.8, nesterov=True)
    return _training(model, optimizer, F.mse_loss, _pairs(16, 5, 3))


class Stateful(nn.Module):
    """A buffer that is read, then overwritten, while the backward still needs what it held."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gain = nn.Linear(5, 8), nn.Parameter(torch.randn(8))
        self.register_buffer("scale", torch.full((8,), 0.7))

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, 5]."""
        h, scale = self.first(x), self.scale.clone()
        y = torch.sin(h * scale)
        with torch.no_grad():
            self.scale.mul_(1.5).add_(0.01 * h.mean(0))
        return y * self.gain


def stateful() -> Training:
    """Two backwards that add up, and an output that is made after the update."""
    model = Stateful()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        for half, wanted in zip(x.chunk(2), target.chunk(2), strict=True):
            out = model(half)
            loss = F.mse_loss(out, wanted)
            seen = out.detach() * model.gain.detach()
            loss.backward()
        optimizer.step()
        return loss.detach(), seen.tanh()

    return Training(step, model, _pairs(14, 5, 8))


class Viewed(nn.Module):
    """Buffers that the backward reads, one in what it computes again, one transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 8)
        self.register_buffer("scale", torch.full((8,), 0.7))
        self.register_buffer("mix", torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, 5]."""
        h = self.first(x)
        y = torch.sin(h * self.scale.clone()) @ self.mix.clone()
        with torch.no_grad():
            self.scale.mul_(1.2).add_(0.01 * h.mean(0))
            self.mix.mul_(0.5).add_(0.1)
        return self.last(y).sin()


def viewed() -> Training:
    """State that changes at every step."""
    model = Viewed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return _training(model, optimizer, F.mse_loss, _pairs(7, 5, 8))


def zeroing() -> Training:
    """Gradients that are set to zero in place, so that the next backward adds to them."""
    model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step(x: Tensor, target: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = F.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(step, model, _pairs(16, 5, 3))


def long_rows() -> Training:
    """Rows too long for registers (see `chunks`): a norm and a cross entropy, chunk by chunk."""
    model = nn.Sequential(nn.Linear(5, LONG), nn.LayerNorm(LONG), nn.Tanh(), nn.Linear(LONG, LONG))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    def loss_of(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits, target, label_smoothing=0.2)

    batches = [(torch.randn(9, 5), torch.randint(LONG, (9,))) for _ in range(3)]
    return _training(model, optimizer, loss_of, batches)


class Wide(nn.Module):
    """A gain and a bias over more columns than one program takes."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.bias = (nn.Parameter(torch.randn(WIDE)) for _ in range(2))
        self.out = nn.Linear(WIDE, 2)

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, WIDE]."""
        return self.out(torch.tanh(x * self.gain + self.bias))


def wide() -> Training:
    """Sums over few rows of many columns."""
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    return _training(model, optimizer, F.mse_loss, _pairs(70, WIDE, 2))


class Square(nn.Module):
    """Everything N by N, so that a wrong axis or a transposed operand keeps its shape."""

    SIZE = 12

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(self.SIZE, self.SIZE), nn.Linear(self.SIZE, self.SIZE)
        self.offset = nn.Parameter(torch.randn(self.SIZE))

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, N]."""
        h = torch.tanh(self.first(x)) + self.offset
        return self.second(h.softmax(-1) * h.sin()) + h.t().contiguous().exp()


def square() -> Training:
    """As many rows as columns."""
    model = Square()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return _training(model, optimizer, F.mse_loss, _pairs(Square.SIZE, Square.SIZE, Square.SIZE))


TRAININGS: dict[str, Callable[[], Training]] = {
    make.__name__: make
    for make in (
        residual,
        scheduled,
        momentum,
        stateful,
        viewed,
        zeroing,
        long_rows,
        wide,
        square,
    )
}
