"""Cross-entropy and its relatives: gradients in whole steps and regions, rows short and long."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import trainfuse
from tests.gradients.loss_cases import LOSSES, targets
from trainfuse.testing import Training, gradient_report

# One width is held in registers and fills no block; the other is walked in chunks.
SHORT, LONG = 301, 16501


class Head(nn.Module):
    """A layer and a head, whose logits may be half and cast, as in mixed precision."""

    def __init__(self, classes: int, logits: torch.dtype) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 6), nn.Linear(6, classes, bias=False)
        self.logits = logits

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [R, 5]; logits: [R, C], fp32 (fp64 in the reference)."""
        hidden = torch.tanh(self.body(x))
        if hidden.dtype is torch.float64:
            return self.head(hidden) * 4
        with torch.autocast("cpu", self.logits, enabled=self.logits is not torch.float32):
            return self.head(hidden).float() * 4


def training(name: str, rows: int, classes: int, logits: torch.dtype = torch.float32) -> Training:
    loss = LOSSES[name]
    model = Head(classes, logits)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(x: torch.Tensor, y: torch.Tensor, *extra: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        value = loss.value(model(x), y, *extra)
        value.backward()
        optimizer.step()
        return value

    batches = [
        (torch.randn(rows, 5), targets(rows, classes), *loss.extra(rows, classes)) for _ in range(3)
    ]
    return Training(step, model, batches)


@pytest.mark.parametrize("capture", ["whole", "regions"])
@pytest.mark.parametrize("name", LOSSES)
def test_gradients(name, capture, compiler):
    compile_fn = compiler(capture, "triton")
    gradient_report(lambda: training(name, 14, SHORT), compile_fn).check()
    compile_fn.check()
    if capture == "whole":
        made_by_one_kernel(compile_fn, 14 * SHORT)


def made_by_one_kernel(compiled, size):
    """The logits are read by one kernel, which writes nothing of their size but the gradient."""
    (record,) = compiled.steps[0].plans
    groups = record.state.fusion.groups
    wide = [g for g in groups if any(n.meta["val"].numel() == size for n in g.nodes)]
    assert [(g.phase, g.domain.kind) for g in wide] == [("forward", "row")]
    assert sum(node.meta["val"].numel() == size for node in wide[0].outputs) == 1


@pytest.mark.parametrize("name", ["mean", "label smoothing", "class weights", "z-loss"])
def test_rows_in_chunks(name, compiler):
    compile_fn = compiler("whole", "triton")
    gradient_report(lambda: training(name, 6, LONG), compile_fn).check()
    compile_fn.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["mean", "softcap", "soft targets"])
def test_half_logits(name, dtype, compiler):
    compile_fn = compiler("whole", "triton")
    make = lambda: training(name, 14, SHORT, dtype)  # noqa: E731
    gradient_report(make, compile_fn, k=3.0).check()
    compile_fn.check()


@pytest.mark.parametrize("classes", [SHORT, LONG])
@pytest.mark.parametrize("wrong", [-1, 10**6, 2**33])
def test_a_target_that_is_no_class(wrong, classes):
    """ATen raises, as the first step does when it is traced; later the loss is NaN, no number."""
    made = training("mean", 6, classes)
    step = trainfuse.compile(made.step, backend="triton")
    x, y = made.batches[0]
    bad = y.clone()
    bad[2] = wrong
    with pytest.raises(IndexError, match="out of bounds"):
        step(x, bad)
    assert math.isfinite(float(step(x, y)))
    assert math.isnan(float(step(x, bad)))
    step.close()


@pytest.mark.parametrize("classes", [SHORT, LONG])
def test_an_index_that_is_no_column(classes):
    """The same of a gather: out of range is NaN, not another row's element or 0."""
    made = training("log_softmax and gather", 6, classes)
    step = trainfuse.compile(made.step, backend="triton")
    x, y = made.batches[0]
    assert math.isfinite(float(step(x, y)))
    y[2] = classes
    assert math.isnan(float(step(x, y)))
    step.close()


@pytest.mark.parametrize(("shape", "dim"), [((7, 30), 1), ((300, 7), 0), ((3, 40000), 1)])
def test_an_index_that_is_no_place_of_an_axis(shape, dim):
    """However a kernel walks the axis: NaN, in the gradient too, and the other rows are right."""
    step = trainfuse.compile(
        lambda x, i: (torch.tanh(x) * 2).gather(dim, i) + 0.25,
        backend="triton",
        whole_step=False,
        verify="off",
    )
    rows = torch.Size([1 if axis == dim else size for axis, size in enumerate(shape)])
    index = torch.randint(shape[dim], rows)
    index.view(-1)[0], index.view(-1)[1] = shape[dim], -1
    bad = torch.arange(rows.numel()).view(rows) < 2
    x = torch.randn(shape, requires_grad=True)
    out = step(x, index)
    assert torch.equal(out.isnan(), bad)
    (gradient,) = torch.autograd.grad(out, x, torch.ones(rows))
    assert torch.equal(gradient.isnan().any(dim, keepdim=True), bad)
    valid = torch.where(bad, 0, index)
    wanted = (torch.tanh(x) * 2).gather(dim, valid) + 0.25
    torch.testing.assert_close(out[~bad], wanted[~bad])
    (exact,) = torch.autograd.grad(wanted, x, torch.where(bad, 0.0, 1.0))
    torch.testing.assert_close(torch.where(bad, 0.0, gradient), torch.where(bad, 0.0, exact))
    assert all(plan.plan.program.groups for plan in step.plans)


@pytest.mark.covers("G4")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of 1 / 0 in the interpreter
def test_ignored_rows_have_no_gradient():
    """Exactly 0 in every column, and a batch that is ignored whole is NaN, as in ATen."""
    logits = nn.Parameter(torch.randn(7, SHORT))
    optimizer = torch.optim.SGD([logits], lr=0.5)
    before = logits.detach().clone()

    def step(y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        return loss

    compiled = trainfuse.compile(step, backend="triton")
    y = targets(7, SHORT)
    assert math.isfinite(float(compiled(y)))
    assert torch.equal(logits[3], before[3])
    assert not torch.equal(logits[2], before[2])
    assert math.isnan(float(compiled(torch.full((7,), -100))))
    compiled.close()
