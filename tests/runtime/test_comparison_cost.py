"""What a comparison asks of the host: calls of torch, counted: its cost must not creep back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch._aot_autograd import runtime_wrappers
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import trainfuse
from trainfuse.runtime import foreach, plan, program

pytestmark = [  # triton 3.6 and torch 2.11 warn about themselves
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]
WIDTH = 8


class Calls(TorchDispatchMode):
    """Counts what reaches torch's dispatcher: launches and views.

    Within an operator of ours they are not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.views = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func._schema.returns
        shows = any(r.alias_info is not None and not r.alias_info.is_write for r in results)
        self.views += shows
        self.launches += not shows
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


def make(blocks: int) -> Callable[[], Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(blocks)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(64, WIDTH)

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        loss = y.float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def compared(blocks: int) -> tuple[int, int, int]:
    """Launches and views of a comparison, beside those of the plan, and the graph's nodes."""
    found: list[Calls] = []
    nodes = 0
    for verify in (1, "off"):
        compiled = trainfuse.compile(make(blocks), backend="eager", verify=verify)
        for _ in range(2):
            compiled()
        with pytest.MonkeyPatch.context() as patch:
            own = plan.Plan.__call__

            def counted(self: Any, args: Any, own: Any = own) -> Any:
                with Calls() as calls:
                    found.append(calls)
                    return own(self, args)

            patch.setattr(plan.Plan, "__call__", counted)
            compiled()
        (record,) = compiled.plans
        assert record.plan is not None
        nodes = len(record.plan.tg.nodes())
    whole, alone = found
    return whole.launches - alone.launches, whole.views - alone.views, nodes


def test_a_comparison_is_a_few_calls_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates by their templates, as with kernels: each is compared with torch's own step."""
    monkeypatch.setattr(program.RuntimeOptions, "updates_by_torch", False)
    monkeypatch.setattr(
        foreach.BucketCall, "lower", lambda self, _, options: setattr(self, "_options", options)
    )
    few, many = compared(2), compared(10)
    launches, views, nodes = (a - b for a, b in zip(many, few, strict=True))
    # eager's own step is 0.8 of the launches a node, the reference 0.6
    assert launches <= 1.8 * nodes, f"{launches / nodes:.2f} launches a node"
    assert views <= 1.65 * nodes, f"{views / nodes:.2f} views a node"
    # what does not depend on the model's size: figures read, random states, an optimizer made, and
    # all dropout masks, drawn at once in 60
    fixed = few[0] - launches * few[2] / nodes
    assert fixed <= 180, f"{fixed:.0f} launches of any comparison"


@torch.library.custom_op("trainfuse_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return 2 * x


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda _, grad: 2 * grad)


@pytest.mark.parametrize("custom", [False, True])
def test_a_first_call_is_not_taken_through_python(
    custom: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AOTAutograd watches first calls for what custom operators give back: only theirs."""
    seen: list[Any] = []
    own = runtime_wrappers._AnalyzeCustomOpInputOutputMode.__torch_dispatch__
    monkeypatch.setattr(
        runtime_wrappers._AnalyzeCustomOpInputOutputMode,
        "__torch_dispatch__",
        lambda self, func, *args: (seen.append(func), own(self, func, *args))[1],
    )
    weight = torch.ones(4, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = ((doubled(x * weight) if custom else x * weight) - 1).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = trainfuse.compile(step, verify="step")
    compiled(torch.randn(4))
    assert (doubled._opoverload in seen) is custom
    assert custom or not seen
    assert compiled.stats()["gate"] == "pass"
