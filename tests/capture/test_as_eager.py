"""Where AOTAutograd, on one version of torch or another, traces what eager doesn't compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import guards, side_effects
from torch.nn import functional

import trainfuse

OPTIONS = {"backend": "triton", "verify": "off", "fallback": False, "whole_step": False}

# outputs that AOTAutograd expects a cotangent of: none is a view of the input
LAID_OUT = {
    "windows": lambda x: x.sin().unfold(0, 3, 1),
    "windows of two dims": lambda x: x.sin().unfold(0, 3, 1).unfold(1, 2, 1),
    "windows, and another output": lambda x: (x.sin().unfold(0, 3, 1), x.cos().sum()),
    "windows apart": lambda x: x.sin().unfold(0, 2, 2),
    "expanded": lambda x: x.sin().expand(4, *x.shape),
    "gaps": lambda x: x.sin()[..., ::2],
    "transposed": lambda x: x.sin().transpose(0, 1),
    "rotated": lambda x: torch.rot90(x, 1, (0, 1)),
    "diagonal": lambda x: x.sin().diagonal(),
    "channels last": lambda x: x.sin()[None].to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("name", LAID_OUT)
def test_cotangents_of_outputs_of_any_layout(name: str, alike: bool, dynamic: bool) -> None:
    """Gradients are eager's, strides and all; with a cotangent laid out as the output, or dense."""
    function = LAID_OUT[name]
    x = torch.randn(6, 5, 4, requires_grad=True)
    gradients, cotangent = [], None
    for run in (function, trainfuse.compile(function, **OPTIONS, dynamic=dynamic)):
        output = run(x)
        output = output[0] if isinstance(output, tuple) else output
        if cotangent is None:
            like = output.detach() if alike else output.detach().contiguous()
            cotangent = torch.randn(output.shape)
            cotangent = torch.empty_like(like).copy_(cotangent)
        gradients += torch.autograd.grad(output, x, cotangent)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)
    if alike and not dynamic:
        assert gradients[0].stride() == gradients[1].stride()


def written(x: Tensor, drop: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """What is written to a dropout's result is written to its input, if it drops nothing."""
    inner = x.sin()
    drop(inner).add_(1.0)
    return inner * 2, drop(x)


@pytest.mark.parametrize("options", [{"p": 0.5, "training": False}, {"p": 0.0}])
@pytest.mark.parametrize("gaps", [False, True])
def test_dropout_of_nothing_is_its_input(options: dict[str, float], gaps: bool) -> None:
    def drop(x: Tensor) -> Tensor:
        return functional.dropout(x, **options)

    x = torch.randn(6, 8)[:, :: 1 + gaps].requires_grad_()
    expected, same = written(x, drop)
    result, ours = trainfuse.compile(written, **OPTIONS)(x, drop)
    torch.testing.assert_close(result, expected)
    assert same is x
    assert ours.data_ptr() == x.data_ptr()
    assert ours.stride() == x.stride()

    def write(x: Tensor) -> Tensor:
        return drop(x).add_(1.0)

    y = torch.randn(6, 8)
    expected = y + 1.0
    trainfuse.compile(write, **OPTIONS)(y)
    torch.testing.assert_close(y, expected)


def test_torchs_own_compiler_is_left_as_it_is() -> None:
    """Nothing of torch stays replaced once our graphs are traced."""
    op = torch.ops.aten.dropout.default
    before = dict(op.py_kernels)
    trainfuse.compile(lambda x: functional.dropout(x.sin(), training=False), **OPTIONS)(
        torch.randn(3, requires_grad=True)
    )
    assert op.py_kernels == before


def _reads_before(h: Tensor, x: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
    before = h.clone()
    h.add_(1)
    return x * weight * before * h


def _multiplies(h: Tensor, x: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
    h.mul_(x * weight)
    return h * 2


def _returns_what_it_was(h: Tensor, x: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
    before = h.clone()
    h.add_(x * weight)
    return before


def _writes_two(h: Tensor, x: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
    before = h.clone()
    h.mul_(x * weight)
    buffer.copy_(before.detach())
    return before * weight


def _writes_a_part(h: Tensor, x: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
    before = h.t().clone().sin()
    h[1:].mul_((x * weight)[1:])
    return before * 2 + h.exp().t() @ buffer


@pytest.mark.parametrize(
    "write", [_reads_before, _multiplies, _returns_what_it_was, _writes_two, _writes_a_part]
)
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_an_input_written_after_the_backward_reads_it(write: Any, backend: str) -> None:
    """AOTAutograd saves the input itself, writes over it, and raises in the backward."""
    found = []
    for compiled in (False, True):
        torch.manual_seed(2)
        values = [torch.randn(4, 4).requires_grad_(i < 3) for i in range(4)]
        run = trainfuse.compile(write, **{**OPTIONS, "backend": backend}) if compiled else write
        h = values[0] * 1
        out = run(h, *values[1:])
        cotangents = [torch.randn_like(v) for v in (out, h)]
        torch.autograd.backward([out, h], cotangents)
        found.append([out.detach(), h.detach(), values[3], *(v.grad for v in values[:3])])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("whole", [True, False])
def test_nothing_is_measured_or_told_of_a_capture(whole: bool, monkeypatch) -> None:
    """Dynamo empties the processor's caches to time guards, and walks the stack for each gradient.

    Of a small step's capture that is a tenth. Its own compiler goes on to do it.
    """
    stock, told = guards.profile_guard_manager, []
    for owner, name in (
        (guards, "profile_guard_manager"),
        (side_effects, "get_stack_above_dynamo"),
    ):
        function = getattr(owner, name)

        def counted(*args: Any, name: str = name, function: Any = function) -> Any:
            told.append(name)
            return function(*args)

        monkeypatch.setattr(owner, name, counted)
    model = torch.nn.Linear(3, 3)

    def step(x: Tensor) -> None:
        model(x).sum().backward()

    trainfuse.compile(step, **{**OPTIONS, "whole_step": whole})(torch.randn(2, 3))
    assert not told
    assert guards.profile_guard_manager is stock


@pytest.mark.parametrize("used", [True, False])
def test_a_value_with_history_over_an_input_without(used: bool) -> None:
    """Stock AOTAutograd raises in the backward; ours runs such a region eagerly, and says so."""
    weight = torch.nn.Parameter(torch.randn(4, 3))

    def loss_of(x: Tensor) -> Tensor:
        scaled = x.exp() * weight
        x.mul_(scaled)  # from here on x has a history
        return (x.square() + scaled if used else scaled).sum()

    found = []
    compiled = trainfuse.compile(loss_of, **OPTIONS)
    for run in (loss_of, compiled):
        x = torch.ones(4, 3)
        loss = run(x)
        (gradient,) = torch.autograd.grad(loss, weight)
        found.append((loss.detach(), gradient, x.detach(), x.requires_grad))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert any("needs no" in refusal.reason for refusal in compiled.explain().refusals)


MARGINS = {
    "rows": lambda x: functional.multi_margin_loss(x, torch.tensor([1, 0, 4]), reduction="none"),
    "squares, weighted": lambda x: functional.multi_margin_loss(
        x, torch.tensor([1, 0, 4]), p=2, margin=0.7, weight=torch.arange(1.0, 6.0)
    ),
    "one row": lambda x: functional.multi_margin_loss(x[0], torch.tensor(3), reduction="none"),
    "labels": lambda x: functional.multilabel_margin_loss(
        x, torch.tensor([[1, 3, -1, 0, 2], [0, 1, 2, 3, 4], [-1, 1, 1, 1, 1]]), reduction="none"
    ),
    "labels of one row": lambda x: functional.multilabel_margin_loss(
        x[1], torch.tensor([2, 2, 0, -1, 1])
    ),
}


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("odd", [0.0, float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", MARGINS)
def test_margin_losses_leave_out_what_is_no_number(name: str, odd: float, learns: bool) -> None:
    """ATen's kernels ask `z > 0`, torch's decompositions clamp."""
    function, generator = MARGINS[name], torch.Generator().manual_seed(4)
    x = torch.randn(3, 5, generator=generator)
    x[0, 2] = x[1, 4] = odd
    found = []
    for run in (function, trainfuse.compile(function, **{**OPTIONS, "backend": "eager"})):
        leaf = x.clone().requires_grad_(learns)
        with torch.set_grad_enabled(learns):
            loss = run(leaf)
        if learns:
            loss.sum().backward()
        found.append((loss.detach(), leaf.grad))
    (ours, our_gradient), (eager, gradient) = reversed(found)
    torch.testing.assert_close(ours, eager, equal_nan=True)
    if learns:
        torch.testing.assert_close(our_gradient, gradient, equal_nan=True)
