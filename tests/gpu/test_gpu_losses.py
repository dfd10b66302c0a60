"""Losses over logits on the GPU, at real sizes: whole steps and regions, against fp64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import trainfuse
from tests.gradients.compilers import Compiler
from tests.gradients.loss_cases import LOSSES, Loss, targets
from trainfuse.testing import Training, gradient_report

# The last two: one column more than a power of two, and an odd width in chunks.
SIZES = [(8192, 32000), (4096, 128256), (8192, 4096), (515, 4097), (1030, 50257)]


class Logits(nn.Module):
    """A loss of logits that are the parameter, so that their gradient is what is compared."""

    def __init__(self, loss: Loss, rows: int, classes: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.randn(rows, classes, device="cuda") * 2).to(dtype))
        self.loss = loss

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        """The loss in fp32; fp64 in the reference."""
        wide = self.weight if self.weight.dtype is torch.float64 else self.weight.float()
        return self.loss.value(wide, *batch)


def lively_rate(model: Logits, batch: tuple[torch.Tensor, ...]) -> float:
    """The learning rate whose first step moves the logits by 1%.

    A mean's gradient falls with the rows, soft targets' with the classes: no one rate serves all.
    """
    (gradient,) = torch.autograd.grad(model(*batch), [model.weight])
    return 0.01 * float(model.weight.detach().norm() / gradient.norm())


def training(name: str, rows: int, classes: int, dtype: torch.dtype) -> Training:
    loss = LOSSES[name]
    model = Logits(loss, rows, classes, dtype)
    batch = (targets(rows, classes).cuda(), *(t.cuda() for t in loss.extra(rows, classes)))
    optimizer = torch.optim.SGD(model.parameters(), lr=lively_rate(model, batch))

    def step(*batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        value = model(*batch)
        value.backward()
        optimizer.step()
        return value

    return Training(step, model, [batch])


def check(capture: str, name: str, rows: int, classes: int, dtype: torch.dtype) -> None:
    compile_fn = Compiler(capture, "triton")
    gradient_report(lambda: training(name, rows, classes, dtype), compile_fn).check()
    compile_fn.check()
    compile_fn.close()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("rows", "classes"), SIZES)
@pytest.mark.parametrize("name", ["mean", "label smoothing", "z-loss"])
def test_real_sizes(name, rows, classes, dtype):
    check("whole", name, rows, classes, dtype)


@pytest.mark.parametrize("capture", ["whole", "regions"])
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss(name, capture):
    check(capture, name, 1031, 11003, torch.bfloat16)


def test_offsets_past_32_bits():
    """65536 rows of 50257 are 3.3e9 elements: the last rows' gradients are their own."""
    rows, classes = 65536, 50257
    logits = nn.Parameter(torch.randn(rows, classes, device="cuda", dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([logits], lr=0.0)
    y = torch.randint(classes, (rows,), device="cuda")

    def step(y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(logits.float(), y, reduction="sum")
        loss.backward()
        optimizer.step()
        return loss

    compiled = trainfuse.compile(step, backend="triton", keep_gradients=True, verify="off")
    compiled(y)
    for part in (slice(0, 4), slice(rows - 4, rows)):
        own = logits.detach()[part].double().requires_grad_()
        nn.functional.cross_entropy(own, y[part], reduction="sum").backward()
        torch.testing.assert_close(logits.grad[part].double(), own.grad, rtol=1e-2, atol=1e-6)
    compiled.close()


@pytest.mark.parametrize("classes", [4096, 32000])
def test_a_target_that_is_no_class(classes):
    """The loss is NaN; eager would stop the process with a device assertion."""
    made = training("mean", 64, classes, torch.float32)
    compiled = trainfuse.compile(made.step, backend="triton")
    (y,) = made.batches[0]
    assert math.isfinite(float(compiled(y)))
    y[5] = classes
    assert math.isnan(float(compiled(y)))
    y[5] = 2**33 + 1
    assert math.isnan(float(compiled(y)))
    compiled.close()
