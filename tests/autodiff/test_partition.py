"""Our partition function inside AOTAutograd: eager's gradients, no more saved than torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn
from torch._decomp import core_aten_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

from autodiff.split import joint_graph, partition
from autodiff.verify import verify

# core_aten_decompositions takes the CPU attention apart in the forward only, and its gradient is
# then wrong, whoever partitions: attention stays whole here, as in the capture.
KEPT = ("native_dropout", "addmm", "native_layer_norm", "_softmax", "nll_loss", "scaled_dot")


class Block(nn.Module):
    """A pre-norm transformer block of the smallest kind."""

    def __init__(self, width: int = 32, heads: int = 4, p: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.p = heads, p

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        parts = self.qkv(self.first(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        x = x + F.dropout(mixed, self.p)
        return x + F.dropout(self.down(F.gelu(self.up(self.second(x)))), self.p)


Pair = tuple[fx.GraphModule, fx.GraphModule]


def backend(split: Callable[..., Pair], seen: list[Pair]) -> Callable[..., Any]:
    table = {
        op: rule
        for op, rule in core_aten_decompositions().items()
        if not any(name in str(op) for name in KEPT)
    }

    def partition_fn(*args: Any, **kwargs: Any) -> Pair:
        seen.append(split(*args, **kwargs))
        return seen[-1]

    def compile_(gm: fx.GraphModule, inputs: list[Any], **_: Any) -> Any:
        run = aot_autograd(
            fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
            partition_fn=partition_fn,
            decompositions=table,
        )
        return run(gm, inputs)

    return compile_


def saved_bytes(pair: Pair) -> int:
    """Bytes of what crosses into the backward, parameters and inputs aside."""
    total = 0
    for node in pair[1].graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        if isinstance(value, Tensor) and not node.name.startswith(("primals", "tangents")):
            total += value.numel() * value.element_size()
    return total


def gradients(model: Callable[[Tensor], Tensor], x: Tensor, wrt: list[Tensor]) -> list[Tensor]:
    output = model(x)
    torch.manual_seed(5)
    return [output.detach(), *torch.autograd.grad(output, [x, *wrt], torch.randn_like(output))]


@pytest.mark.covers("D2")
def test_transformer_gradients_and_saved_bytes() -> None:
    model = nn.Sequential(Block(), Block())
    x = torch.randn(2, 8, 32, requires_grad=True)
    wrt = list(model.parameters())
    eager = gradients(model, x, wrt)
    torch.manual_seed(5)
    cotangent = torch.randn_like(eager[0]).double()
    exact_model = nn.Sequential(Block(), Block()).double()
    exact_model.load_state_dict(model.state_dict())
    exact_x = x.detach().double().requires_grad_()
    output = exact_model(exact_x)
    exact = torch.autograd.grad(output, [exact_x, *exact_model.parameters()], cotangent)
    ours_seen: list[Pair] = []
    ours = gradients(torch.compile(model, backend=backend(partition, ours_seen)), x, wrt)
    for mine, theirs, truth in zip(ours[1:], eager[1:], exact, strict=True):
        error = (mine.double() - truth).abs().max()
        assert error <= 2 * (theirs.double() - truth).abs().max() + 1e-6 * truth.abs().max()
    torch._dynamo.reset()
    torch_seen: list[Pair] = []
    gradients(
        torch.compile(model, backend=backend(min_cut_rematerialization_partition, torch_seen)),
        x,
        wrt,
    )
    assert saved_bytes(ours_seen[0]) <= saved_bytes(torch_seen[0])


def test_dropout_saves_one_seed_and_no_mask() -> None:
    model = nn.Sequential(Block(p=0.3), Block(p=0.3))
    x = torch.randn(2, 8, 32, requires_grad=True)
    seen: list[Pair] = []
    compiled = torch.compile(model, backend=backend(partition, seen))
    gradients(compiled, x, list(model.parameters()))
    backward = seen[0][1].graph
    crossing = backward.find_nodes(op="placeholder")
    assert not any(n.meta["val"].dtype == torch.bool for n in crossing)
    assert sum("seed" in node.name for node in crossing) == 1
    masks = backward.find_nodes(op="call_function", target=torch.ops.trainfuse.keep_mask.default)
    forward = seen[0][0].graph.find_nodes(
        op="call_function", target=torch.ops.trainfuse.keep_mask.default
    )
    assert {n.args[1] for n in masks} == {n.args[1] for n in forward} == {0, 1, 2, 3}


@pytest.mark.parametrize("dynamic", [False, True])
def test_dropout_gradient_is_that_of_the_mask_drawn(dynamic: bool) -> None:
    linear = nn.Linear(16, 64)
    seen: list[Pair] = []
    compiled = torch.compile(
        lambda x: F.dropout(linear(x), 0.5), backend=backend(partition, seen), dynamic=dynamic
    )
    for rows in (2, 3, 7) if dynamic else (8, 8, 8):
        x = torch.randn(rows, 16, requires_grad=True)
        output = compiled(x)
        cotangent = torch.randn_like(output)
        (gradient,) = torch.autograd.grad(output, x, cotangent)
        kept = (output != 0) * 2.0
        torch.testing.assert_close(gradient, (cotangent * kept) @ linear.weight)
    assert len(seen) == 1


def test_new_sizes_add_no_guard() -> None:
    model = Block()
    seen: list[Pair] = []
    compiled = torch.compile(model, backend=backend(partition, seen), dynamic=True)
    wrt = list(model.parameters())
    for batch in (2, 3, 7):
        x = torch.randn(batch, 8, 32, requires_grad=True)
        ours, theirs = gradients(compiled, x, wrt), gradients(model, x, wrt)
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    assert len(seen) == 1


@pytest.mark.parametrize("budget", [None, 0.5])
def test_budget_reaches_the_cut(budget: float | None) -> None:
    model = nn.Sequential(Block(), Block())
    x = torch.randn(2, 8, 32, requires_grad=True)
    seen: list[Pair] = []

    def split(*args: Any, **kwargs: Any) -> Pair:
        return partition(*args, memory_budget=budget, **kwargs)

    ours = gradients(torch.compile(model, backend=backend(split, seen)), x, [])
    theirs = gradients(model, x, [])
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-4, atol=1e-5)
    default_bytes = 50_000
    assert (saved_bytes(seen[0]) < default_bytes) == (budget is not None)


@pytest.mark.parametrize("autocast", [False, True])
def test_loss_saves_row_statistics_not_log_probabilities(autocast: bool) -> None:
    linear = nn.Linear(16, 512)
    target = torch.randint(0, 512, (32,))
    x = torch.randn(32, 16, requires_grad=True)

    def fn(x: Tensor) -> Tensor:
        return F.cross_entropy(linear(x).float(), target)

    seen: list[Pair] = []
    compiled = torch.compile(fn, backend=backend(partition, seen))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ours = compiled(x)
        theirs = fn(x)
    wrt = [x, linear.weight, linear.bias]
    for mine, other in zip(
        torch.autograd.grad(ours, wrt), torch.autograd.grad(theirs, wrt), strict=True
    ):
        tolerance = 2e-2 if autocast else 1e-5
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance * other.abs().max())
    wide = [
        node.name
        for node in seen[0][1].graph.find_nodes(op="placeholder")
        if node.meta["val"].shape == (32, 512)
    ]
    assert wide == ["addmm"]


class ReturnsSaved(torch.autograd.Function):
    """Its backward returns what its forward saved, whatever the cotangent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        kept = torch.cumsum(x, 0)
        ctx.save_for_backward(kept)
        return kept.sum()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        return ctx.saved_tensors[0]


# torch 2.11's own Dynamo instantiates the function
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_gradient_that_is_a_forward_value() -> None:
    seen: list[Pair] = []
    compiled = torch.compile(lambda x: ReturnsSaved.apply(x * 2), backend=backend(partition, seen))
    x = torch.randn(6, requires_grad=True)
    (gradient,) = torch.autograd.grad(compiled(x), x)
    torch.testing.assert_close(gradient, torch.cumsum(x * 2, 0).detach() * 2)

    def direct(x: Tensor) -> Tensor:
        return ReturnsSaved.apply(x)

    torch._dynamo.reset()
    compiled = torch.compile(direct, backend=backend(partition, seen))
    (gradient,) = torch.autograd.grad(compiled(x), x)
    torch.testing.assert_close(gradient, torch.cumsum(x, 0).detach())
    # the value itself crosses: nothing in the backward could make it
    assert not seen[-1][1].graph.find_nodes(
        op="call_function", target=torch.ops.aten.cumsum.default
    )


def test_unusual_boundaries() -> None:
    """An output that is a view of an input, a frozen operand, two uses of one input."""
    weight = torch.randn(8, requires_grad=True)
    frozen = torch.randn(8)

    def fn(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (x * weight).sum(), torch.sin(x) * frozen, x.t()

    seen: list[Pair] = []
    compiled = torch.compile(fn, backend=backend(partition, seen))
    results = []
    for run in (compiled, fn):
        x = torch.linspace(-1, 1, 64).reshape(8, 8).requires_grad_()
        total, other, view = run(x)
        loss = total + (other * torch.arange(8.0)).sum() + view[0].sum()
        results.append((other, *torch.autograd.grad(loss, [x, weight])))
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other)


def test_joint_is_a_sound_training_graph_with_links() -> None:
    graphs = []

    def split(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> Pair:
        graphs.append(joint_graph(joint, kwargs["num_fwd_outputs"]))
        return partition(joint, inputs, **kwargs)

    model = Block()
    x = torch.randn(2, 8, 32, requires_grad=True)
    gradients(torch.compile(model, backend=backend(split, [])), x, [])
    tg = verify(graphs[0])
    assert tg.nodes("forward")
    linked = [node for node in tg.nodes("backward") if tg.facts[node].forward_of is not None]
    assert len(linked) > 0.8 * len(tg.nodes("backward"))
    names = {fact.name for fact in tg.inputs if fact.kind == "tangent"}
    assert names == {"tangents_1"}
