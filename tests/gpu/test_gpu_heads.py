"""Linear layers and their losses in chunks, at real sizes: gradients against fp64, and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import trainfuse
from tests.gradients.compilers import Compiler
from tests.gradients.loss_cases import LOSSES, Loss, targets
from trainfuse.testing import Training, gradient_report

# A row held in registers, one in chunks, and one whose rows don't begin at even addresses.
SIZES = [(4096, 8192), (2048, 32000), (2060, 50257)]
WIDTH = 512
MIB = 1 << 20
accumulate: Any = torch.ops.trainfuse


class Headed(nn.Module):
    """A layer, a head and its loss; the head's weight and bias are of one type."""

    def __init__(self, loss: Loss, classes: int, dtype: torch.dtype) -> None:
        super().__init__()
        made: Any = {"device": "cuda", "dtype": dtype}
        self.body, self.head = nn.Linear(WIDTH, WIDTH, **made), nn.Linear(WIDTH, classes, **made)
        self.loss = loss

    def forward(self, x: Tensor, *batch: Tensor) -> Tensor:
        """x: [R, H]; the loss in fp32, in fp64 in the reference."""
        logits = self.head(torch.tanh(self.body(x.to(self.body.weight.dtype)))) * 4
        wide = logits if logits.dtype is torch.float64 else logits.float()
        return self.loss.value(wide, *batch)


def training(name: str, rows: int, classes: int, dtype: torch.dtype) -> Training:
    loss = LOSSES[name]
    model = Headed(loss, classes, dtype)
    extra = (t.cuda() for t in loss.extra(rows, classes))
    batch = (torch.randn(rows, WIDTH, device="cuda"), targets(rows, classes).cuda(), *extra)
    found = torch.autograd.grad(model(*batch), list(model.parameters()))
    lengths = [float(g.norm()) for g in found]
    rate = 0.01 * float(model.head.weight.detach().norm()) / max(lengths)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)

    def step(*batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        value = model(*batch)
        value.backward()
        optimizer.step()
        return value

    return Training(step, model, [batch])


def check(name: str, rows: int, classes: int, dtype: torch.dtype) -> None:
    """Chunked into at least four, and right."""
    budget = rows * classes * dtype.itemsize // 4
    compile_fn = Compiler("whole", "triton", options={"chunk_memory": budget})
    gradient_report(lambda: training(name, rows, classes, dtype), compile_fn).check()
    compile_fn.check()
    (step,) = compile_fn.steps
    (record,) = step.plans
    assert [r.reason for r in record.state.refusals if "no chunks" in r.reason] == []
    assert record.plan.source.count("accumulate_.default(") >= 3
    compile_fn.close()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "classes"), SIZES)
def test_sizes(rows: int, classes: int, dtype: torch.dtype) -> None:
    check("mean", rows, classes, dtype)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "mean"])
def test_every_loss(name: str) -> None:
    check(name, 2062, 11003, torch.bfloat16)


@pytest.mark.parametrize("shape", [(128, 4096, 512), (77, 50257, 129), (1, 11003, 8)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_in_place(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """A GEMM that writes over what it adds to, of a transposed operand: exact to fp32."""
    rows, classes, width = shape
    total: Tensor | None = None
    exact = torch.zeros(classes, width, device="cuda", dtype=torch.float64)
    for number in range(5):
        a = torch.randn(rows, classes, device="cuda", dtype=dtype)
        b = torch.randn(rows, width, device="cuda", dtype=dtype)
        exact += a.double().t() @ b.double()
        if total is None:
            total = accumulate.accumulate.default(None, a.t(), b)
        elif number % 2:
            total = accumulate.accumulate.default(total, a.t(), b)
        else:
            before = total.data_ptr()
            total = accumulate.accumulate_.default(total, a.t(), b)
            assert total.data_ptr() == before
    assert total is not None
    assert total.dtype is torch.float32
    torch.testing.assert_close(total.double(), exact, rtol=1e-4, atol=1e-3)


def test_memory() -> None:
    """8192 x 2048 x 128256: beside the sum in fp32 and one chunk there is next to nothing."""
    rows, width, classes = 8192, 2048, 128256
    made: Any = {"device": "cuda", "dtype": torch.bfloat16}
    hidden = nn.Parameter(torch.randn(rows, width, **made))
    weight = nn.Parameter(torch.randn(classes, width, **made) / 64)
    y = torch.randint(classes, (rows,), device="cuda")
    optimizer = torch.optim.SGD([hidden, weight], lr=1e-2)

    def step(y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(functional.linear(hidden, weight).float(), y)
        loss.backward()
        optimizer.step()
        return loss

    torch.cuda.empty_cache()
    base = torch.cuda.memory_reserved()
    compiled = trainfuse.compile(step, backend="triton")
    first = compiled(y)
    for _ in range(3):
        compiled(y)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    last = compiled(y)
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_reserved() - base
    assert float(last) < float(first)
    assert taken <= 4 * classes * width + 512 * MIB + 4 * (2 * rows * width) + 128 * MIB
    compiled.close()
