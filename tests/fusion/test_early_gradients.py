"""A row loss's gradient is forward where one kernel can make both, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autodiff.graph import TrainingGraph
from autodiff.reference import run_graph
from autodiff.verify import verify
from tests.autodiff.training_graphs import step_graph, training_graph
from tests.fusion.helpers import supports
from tests.gradients.loss_cases import LOSSES
from trainfuse.capture.compat import capture_decompositions
from trainfuse.codegen.support import unsupported
from trainfuse.fusion.rewrites.early_gradients import gradients_in_forward
from trainfuse.pipeline import tidy

ROWS, WIDTH, CLASSES = 8, 6, 40


def graph_of(loss: Callable[..., Tensor], *extra: tuple[int, ...]) -> TrainingGraph:
    """A step of loss(x @ w, target, *extra)."""
    shapes = [
        ((ROWS, WIDTH), torch.float32),
        ((WIDTH, CLASSES), torch.float32),
        ((ROWS,), torch.int64),
        *((shape, torch.float32) for shape in extra),
    ]
    step = lambda x, w, y, *more: loss(x @ w, y, *more)  # noqa: E731
    return tidy(step_graph(step, shapes, [0, 1], capture_decompositions()))


def wide(tg: TrainingGraph, phase: str) -> int:
    return sum(node.meta["val"].numel() == ROWS * CLASSES for node in tg.nodes(phase))


@pytest.mark.parametrize("name", LOSSES)
def test_losses_move(name: str) -> None:
    loss = LOSSES[name]
    extra = loss.extra(ROWS, CLASSES)
    tg = graph_of(loss.value, *(tuple(t.shape) for t in extra))
    assert wide(tg, "backward") > 0
    new = verify(gradients_in_forward(tg, unsupported), "early gradients")
    views = {node for node in new.nodes("backward") if node.target is torch.ops.aten.t.default}
    assert wide(new, "backward") == sum(n.meta["val"].numel() == ROWS * CLASSES for n in views)
    y = torch.randint(CLASSES, (ROWS,))
    given = [torch.randn(ROWS, WIDTH), torch.randn(WIDTH, CLASSES), y, *extra]
    for want, got in zip(run_graph(tg, given), run_graph(new, given), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(lambda x, y: F.cross_entropy(x, y).exp(), id="scaled by the loss"),
        pytest.param(
            lambda x, y: (
                F.cross_entropy(x, y, reduction="none")
                * F.log_softmax(x, -1).detach().cumsum(1)[:, -1]
            ).mean(),
            id="through an operator without a kernel",
        ),
        pytest.param(lambda x, y: F.softmax(x, 0).square().mean(), id="along columns"),
        pytest.param(lambda x, y: (x - x.detach()).square().mean(), id="without rows"),
    ],
)
def test_what_is_no_row_kernel_stays(loss: Callable[..., Tensor]) -> None:
    tg = graph_of(loss)
    assert gradients_in_forward(tg, unsupported) is tg


def test_an_unknown_cotangent_stays() -> None:
    """A region's forward can't know it."""
    args = [torch.randn(ROWS, CLASSES), torch.randint(CLASSES, (ROWS,))]
    tg = training_graph(lambda x, y: F.cross_entropy(x, y), args, [0])
    assert gradients_in_forward(tg, supports) is tg
