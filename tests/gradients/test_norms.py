"""Norms over channels and reductions along outer axes: values, gradients, statistics, kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import trainfuse
from trainfuse.capture import compat
from trainfuse.fusion import classify
from trainfuse.testing import assert_gradients_match

LAYOUTS = {"first": torch.contiguous_format, "last": torch.channels_last}


class Compiled:
    """A compile_fn that keeps what it made, to be asked what runs how."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.steps: list[Any] = []

    def __call__(self, fn: Any) -> Any:
        made = trainfuse.compile(fn, backend="triton", **self.options)
        self.steps.append(compat.compiled_call(made) if isinstance(made, nn.Module) else made)
        return made

    def kinds(self) -> dict[str, list[str]]:
        """Kinds of the groups, by the kind of plan; every kernel must have passed the gate."""
        found: dict[str, list[str]] = {}
        for step in self.steps:
            for plan in step.plans:
                assert plan.stats()["gate"] == "pass"
                assert not any("norm" in str(node.target) for node in plan.state.fusion.aten)
                groups = plan.state.fusion.groups
                assert {group.name for group in groups} == set(plan.state.kernels)
                found[plan.kind] = [group.domain.kind for group in groups]
        return found


@pytest.fixture(params=[False, True], ids=["one kernel", "in slabs"])
def slabs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether few long rows are summed in slabs: limits are lowered to what a test can hold."""
    if request.param:
        monkeypatch.setattr(classify, "LONG_PROGRAM", 64)
        monkeypatch.setattr(classify, "LONG_NESTED", 64)
        monkeypatch.setattr(classify, "LONG_ROW", 64)
    return request.param


def image(*shape: int, layout: str = "first", dtype: torch.dtype = torch.float32) -> Tensor:
    x = (torch.randn(shape) * 2 + 1).to(dtype)
    return x.contiguous(memory_format=LAYOUTS[layout]).requires_grad_()


class Residual(nn.Module):
    """relu(norm(x) + skip), as a residual block ends."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return functional.relu(self.norm(x) + skip)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batch_norm_relu(layout: str, slabs: bool) -> None:
    module = nn.Sequential(nn.BatchNorm2d(6), nn.ReLU())
    nn.init.uniform_(module[0].weight, 0.5, 1.5)
    nn.init.normal_(module[0].bias)
    compiled = Compiled()
    report = assert_gradients_match(
        module, (image(5, 6, 7, 3, layout=layout),), compile_fn=compiled
    )
    names = {error.name for error in report.errors}
    assert {"d_0.weight", "buffer_0.running_mean", "buffer_0.running_var"} <= names
    parts = ["column", "pointwise"] if slabs else ["row"]
    assert compiled.kinds() == {"forward": parts, "backward": parts}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_batch_norm_of_half_activations(dtype: torch.dtype, layout: str, slabs: bool) -> None:
    """As under autocast: half activations, parameters and statistics in fp32."""
    module = nn.Sequential(nn.BatchNorm2d(6), nn.ReLU())
    x = image(4, 6, 9, 8, layout=layout)

    def fn(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        low = x.to(dtype)
        return functional.batch_norm(low, None, None, weight, bias, True).relu()

    weight = torch.rand(6, requires_grad=True)
    bias = torch.randn(6, requires_grad=True)
    assert_gradients_match(fn, (x, weight, bias), compile_fn=Compiled(), k=3.0)
    assert_gradients_match(module, (image(4, 6, 9, 8, layout=layout, dtype=dtype),), dtype=dtype)


FORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.BatchNorm1d(6), (9, 6)),
    "1d, positions": (lambda: nn.BatchNorm1d(6), (5, 6, 7)),
    "3d": (lambda: nn.BatchNorm3d(6), (2, 6, 3, 2, 5)),
    "no affine": (lambda: nn.BatchNorm2d(6, affine=False), (5, 6, 4, 3)),
    "no statistics": (lambda: nn.BatchNorm2d(6, track_running_stats=False), (5, 6, 4, 3)),
    "cumulative": (lambda: nn.BatchNorm2d(6, momentum=None), (5, 6, 4, 3)),
    "evaluation": (lambda: nn.BatchNorm2d(6).eval(), (5, 6, 4, 3)),
    "evaluation, no statistics": (
        lambda: nn.BatchNorm2d(6, track_running_stats=False).eval(),
        (5, 6, 4, 3),
    ),
    "instance": (lambda: nn.InstanceNorm2d(6, affine=True), (5, 6, 4, 3)),
    "instance, no affine": (lambda: nn.InstanceNorm2d(6), (5, 6, 4, 3)),
    "instance, statistics": (
        lambda: nn.InstanceNorm2d(6, affine=True, track_running_stats=True),
        (5, 6, 4, 3),
    ),
    "group": (lambda: nn.GroupNorm(3, 6), (5, 6, 4, 3)),
    "group, no affine": (lambda: nn.GroupNorm(2, 6, affine=False), (5, 6, 7)),
}


@pytest.mark.parametrize("name", FORMS)
def test_form(name: str) -> None:
    make, shape = FORMS[name]
    module = Residual(make())
    compiled = Compiled()
    assert_gradients_match(module, (image(*shape), image(*shape)), compile_fn=compiled)
    assert compiled.kinds()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_statistics_move_as_in_eager(layout: str, slabs: bool) -> None:
    """Three steps, a count of them, and evaluation after that."""
    torch.manual_seed(0)
    ours, eager = nn.BatchNorm2d(6), nn.BatchNorm2d(6)
    compiled = trainfuse.compile(ours, backend="triton")
    for _ in range(3):
        x = image(5, 6, 4, 3, layout=layout)
        torch.testing.assert_close(compiled(x), eager(x))
    for (name, mine), theirs in zip(ours.named_buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=name)
    assert ours.num_batches_tracked == 3
    x = image(5, 6, 4, 3, layout=layout)
    torch.testing.assert_close(compiled.eval()(x), eager.eval()(x))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_large_mean_costs_no_digits(layout: str, slabs: bool) -> None:
    def fn(x: Tensor) -> Tensor:
        return functional.batch_norm(x + 1000.0, None, None, training=True)

    assert_gradients_match(fn, (image(5, 6, 7, 3, layout=layout),), compile_fn=Compiled())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_group_norm_silu(dtype: torch.dtype, slabs: bool) -> None:
    module = nn.Sequential(nn.GroupNorm(2, 6), nn.SiLU()).to(dtype)
    nn.init.uniform_(module[0].weight, 0.5, 1.5)
    compiled = Compiled()
    x = image(4, 6, 5, 8, dtype=dtype)
    assert_gradients_match(module, (x,), dtype=dtype, compile_fn=compiled)
    # sums over each channel's positions, means of groups, and the gradient; sums over samples
    parts = ["pointwise", "row", "row"] if slabs else ["nested"]
    assert set(compiled.kinds()["backward"]) == {"column", *parts}
    if dtype == torch.bfloat16 and not slabs:
        plans = compiled.steps[0].plans
        for kernel in (k for plan in plans for k in plan.state.kernels.values()):
            # what the norm gave is made again as it was, not rounded before the silu
            assert ".to(tl.bfloat16).to(tl.float32)" not in kernel.source
        for group in (g for plan in plans for g in plan.state.fusion.groups):
            if group.domain.kind == "nested":  # its statistics are read once, as they were saved
                wide = [n for n in group.inputs if n.meta["val"].dtype == torch.float32]
                assert len(wide) == 2


@pytest.mark.parametrize("shape", [(37, 40), (5, 11, 33), (300, 3)], ids=str)
def test_softmax_along_an_outer_axis(shape: tuple[int, ...], slabs: bool) -> None:
    def fn(x: Tensor) -> Tensor:
        return functional.softmax(x, -2)

    x = torch.randn(shape, requires_grad=True)
    assert_gradients_match(fn, (x,), compile_fn=Compiled())


def test_a_causal_mask_is_made_where_it_is_read() -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.ones(9, 9, dtype=torch.bool).tril().logical_not()
        low = float("-inf")
        return (
            functional.softmax(x.masked_fill(hidden, low), -1),
            functional.softmax(y.masked_fill(hidden, low), -1) * 2,
        )

    x, y = (torch.randn(2, 3, 9, 9, requires_grad=True) for _ in range(2))
    compiled = Compiled(horizontal=False)
    assert_gradients_match(fn, (x, y), compile_fn=compiled)
    assert compiled.kinds() == {"forward": ["row", "row"], "backward": ["row", "row"]}
    for plan in compiled.steps[0].plans:
        read = [v.meta["val"] for group in plan.state.fusion.groups for v in group.inputs]
        assert read
        assert all(value.is_floating_point() and value.shape != (9, 9) for value in read)
        assert not plan.state.fusion.aten
