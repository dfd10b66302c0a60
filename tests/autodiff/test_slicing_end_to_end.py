"""Slicing's checklist from the user's side: captured, derived, and compared with eager.

Counts are of differentiable subgraphs in a whole step with nothing inlined; what autograd does
with flags, lists and missing cotangents is seen on regions, which run under its engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import trainfuse
from autodiff import ops
from trainfuse.testing import Training, assert_gradients_match, gradient_report

# Dynamo looks at `.grad` of what it meets between two graphs, and torch warns of that
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

Fn = Callable[..., Any]


class Bag(nn.Module):
    """Parameters by position."""

    def __init__(self, *shapes: tuple[int, ...], frozen: Sequence[int] = ()) -> None:
        super().__init__()
        self.given = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)
        for index in frozen:
            self.given[index].requires_grad_(False)


def training(fn: Fn, *shapes: tuple[int, ...], frozen: Sequence[int] = ()) -> Training:
    """Three steps of SGD along the gradients of fn's outputs under random cotangents."""
    bag = Bag(*shapes, frozen=frozen)
    params = list(bag.given)
    trained = [p for p in params if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)

    def step(*cotangents: Tensor) -> Any:
        optimizer.zero_grad()
        outputs = fn(*params)
        roots = [o for o in tree_leaves(outputs) if o.requires_grad]
        grads = torch.autograd.grad(roots, trained, cotangents, allow_unused=True)
        for p, grad in zip(trained, grads, strict=True):
            p.grad = grad
        optimizer.step()
        return outputs

    roots = [o for o in tree_leaves(fn(*params)) if o.requires_grad]
    batches = [tuple(torch.randn_like(o) for o in roots) for _ in range(3)]
    return Training(step, bag, batches)


def subgraphs(fn: Fn, *shapes: tuple[int, ...], **facts: Any) -> tuple[Any, Any]:
    """Check three steps against eager and fp64; returns the plan's subgraphs and its graph."""
    steps = []

    def compile_fn(given: Training) -> Any:
        options = {"autodiff_inlining": False, "single_node": True}
        steps.append(trainfuse.compile(given.step, backend="eager", **options))
        return steps[0]

    gradient_report(lambda: training(fn, *shapes, **facts), compile_fn).check()
    (plan,) = steps[0].plans
    assert plan.kind == "whole_step"
    return plan.state.slices.subgraphs, plan.graph


def names(graph: Any, phase: str) -> list[str]:
    return [ops.op_name(node.target) for node in graph.nodes(phase)]


def regions(fn: Fn) -> Any:
    return trainfuse.compile(fn, backend="eager", whole_step=False)


def same_calls(fn: Fn, calls: Sequence[Callable[[], tuple[Any, ...]]], plans: int = 0) -> Any:
    """Each call of the compiled function gives eager's outputs, flags and gradients.

    calls: each makes the arguments afresh from one seed. plans: how many may be made, 0 for any.
    """
    compiled = regions(fn)
    for number, make in enumerate(calls):
        seen = []
        for target in (fn, compiled):
            torch.manual_seed(number)
            args = make()
            outputs = target(*args)
            leaves = [o for o in tree_leaves(outputs) if isinstance(o, Tensor)]
            roots = [o for o in leaves if o.requires_grad]
            inputs = [a for a in tree_leaves(args) if isinstance(a, Tensor) and a.requires_grad]
            cotangents = [torch.linspace(-1, 2, o.numel()).view_as(o) for o in roots]
            grads: Any = ()
            if roots and inputs:
                grads = torch.autograd.grad(roots, inputs, cotangents, allow_unused=True)
            seen.append((leaves, grads))
        (theirs, their_grads), (ours, our_grads) = seen
        assert [o.requires_grad for o in ours] == [o.requires_grad for o in theirs], number
        assert [(o.dtype, o.stride()) for o in ours] == [(o.dtype, o.stride()) for o in theirs]
        torch.testing.assert_close(ours, theirs)
        assert [g is None for g in our_grads] == [g is None for g in their_grads], number
        torch.testing.assert_close(our_grads, their_grads)
    assert not plans or len(compiled.plans) == plans
    return compiled


def tensor(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(shape, requires_grad=grad)


@pytest.mark.covers("A10")
def test_10_write_through_one_of_two_views() -> None:
    """The write is a node of its own, so that nothing is left to keep in order by other means.

    TorchScript makes two subgraphs with the views outside; functionalization makes one right.
    """

    def fn(p: Tensor) -> tuple[Tensor, Tensor]:
        base = torch.sin(p)
        low, high = base[:3], base[1:]
        low.mul_(2)
        return torch.tanh(high), base

    found, graph = subgraphs(fn, (4, 6))
    assert len(found) == 1
    assert "aten.slice_scatter.default" in names(graph, "forward")


ALIASES: dict[str, tuple[Fn, int]] = {
    "internal": (lambda p: torch.sigmoid(p).t() * 2, 1),
    "one": (lambda p: (lambda y: (y, y.t()))(torch.sigmoid(p)), 1),
    "two": (lambda p: (lambda y: (y.t(), y.view(-1), y))(torch.sigmoid(p)), 1),
    "with descendant": (lambda p: (lambda y: (y, y.t(), y.t() * 2))(torch.sigmoid(p)), 1),
    "several groups": (
        lambda p, q: (lambda y, z: (y, y.t(), z, z[1:]))(torch.sigmoid(p), torch.sigmoid(q)),
        2,
    ),
    "an input": (lambda p: (p.t(), torch.sigmoid(p)), 1),
}


def _sharing(tensors: Sequence[Tensor]) -> list[int]:
    """For each tensor, the first one of the same memory."""
    places = [t.untyped_storage().data_ptr() for t in tensors]
    return [places.index(place) for place in places]


@pytest.mark.covers("A11")
@pytest.mark.parametrize("name", ALIASES)
def test_11_aliased_outputs(name: str) -> None:
    fn, count = ALIASES[name]
    shapes = [(3, 4)] * fn.__code__.co_argcount
    compiled = same_calls(fn, [lambda: tuple(tensor(*shape) for shape in shapes)] * 3)
    args = [tensor(*shape) for shape in shapes]
    ours, theirs = tree_leaves(compiled(*args)), tree_leaves(fn(*args))
    assert _sharing([*args, *ours]) == _sharing([*args, *theirs])
    if name != "an input":  # a step that returns its parameter's view is no whole step
        found, _ = subgraphs(fn, *shapes)
        assert len(found) == count


LINEARS: dict[str, tuple[Fn, list[tuple[int, ...]]]] = {
    "bias": (F.linear, [(5, 6), (4, 6), (4,)]),
    "none": (F.linear, [(5, 6), (4, 6)]),
    "computed": (lambda x, w, b: F.linear(x, w, b * 2 + 1), [(5, 6), (4, 6), (4,)]),
}


@pytest.mark.covers("A14", "A15")
@pytest.mark.parametrize("name", LINEARS)
def test_14_15_linear(name: str) -> None:
    fn, shapes = LINEARS[name]
    found, graph = subgraphs(fn, *shapes)
    assert len(found) == 1
    assert set(names(graph, "forward")) & {"aten.mm.default", "aten.addmm.default"}


@pytest.mark.covers("A16")
def test_16_bias_none_then_tensor() -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return F.linear(x, w, b).sigmoid()

    def without() -> tuple[Any, ...]:
        return tensor(5, 6), tensor(4, 6), None

    def with_bias() -> tuple[Any, ...]:
        return tensor(5, 6), tensor(4, 6), tensor(4)

    same_calls(fn, [without, with_bias, without, with_bias], plans=4)


@pytest.mark.covers("A17", "S lists")
def test_17_tensor_lists_in_and_out() -> None:
    def fn(values: list[Tensor]) -> list[Tensor]:
        return [torch.tanh(v) * 2 for v in values] + [values[0] + values[1]]

    def flags(*wanted: bool) -> Callable[[], tuple[Any, ...]]:
        return lambda: ([tensor(3, 4, grad=grad) for grad in wanted],)

    same_calls(fn, [flags(True, False, True), flags(False, False, True), flags(True, True, False)])


@pytest.mark.covers("A18")
def test_18_grad_and_no_grad_chains_across_a_flag() -> None:
    def fn(x: Tensor, w: Tensor, grad: bool) -> tuple[Tensor, ...]:
        first = torch.sigmoid(x) * w
        with torch.set_grad_enabled(grad):
            second = torch.tanh(first) + w
        return first, second, second.double() * 2

    same_calls(fn, [lambda g=g: (tensor(4, 5), tensor(5), g) for g in (True, False, True)])


@pytest.mark.covers("A19")
def test_19_frozen_bias() -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.linear(x, w, b)

    def make() -> tuple[Any, ...]:
        return tensor(5, 6, grad=False), tensor(4, 6), tensor(4, grad=False)

    compiled = same_calls(fn, [make] * 3)
    (backward,) = [plan for plan in compiled.plans if plan.kind == "backward"]
    assert sum(output is not None for output in backward.graph.output_nodes) == 1


@pytest.mark.covers("A20")
def test_20_no_grad_value_beyond_a_barrier() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.sigmoid(x) * w
        with torch.no_grad():
            constant = h.tanh() * 2
        torch._dynamo.graph_break()
        return h.exp(), constant.exp() + 1

    same_calls(fn, [lambda: (tensor(4, 5), tensor(5))] * 3)


@pytest.mark.covers("A21", "S lists")
def test_21_no_cotangent_into_cat_of_a_list() -> None:
    """A gradient is None or zeros where nothing arrives, and never an error."""

    def fn(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([torch.tanh(a), b * 2]), a.exp()

    compiled = regions(fn)
    for used in ((1,), (0,), (0, 1), (1,)):
        a, b = tensor(3, 4), tensor(2, 4)
        for target in (compiled, fn):
            outputs = target(a, b)
            grads = torch.autograd.grad([outputs[i].sum() for i in used], [a, b], allow_unused=True)
            dense = [
                torch.zeros_like(x) if g is None else g for x, g in zip((a, b), grads, strict=True)
            ]
            if target is compiled:
                ours = dense
        torch.testing.assert_close(ours, dense)


def three(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return torch.sigmoid(a * b) + torch.tanh(c)


def used_by_two(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    h = torch.sigmoid(a) * b
    return h.cumsum(0) + h.cumsum(1) * c


def between(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return torch.tanh((torch.sigmoid(a) * b).cumsum(0)) * c


def inner_no_grad(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        frozen = torch.sigmoid(a) * b
    return frozen * c + a, frozen + 1


@pytest.mark.covers("A22", "A23", "A24", "A25", "S flips")
@pytest.mark.parametrize("fn", [three, used_by_two, between, inner_no_grad])
def test_22_to_25_flags_in_four_runs(fn: Fn) -> None:
    """One trainable of three, then another, then all, then none."""
    patterns = [(True, False, False), (False, False, True), (True, True, True), (False,) * 3]
    same_calls(fn, [lambda p=p: tuple(tensor(4, 4, grad=g) for g in p) for p in patterns])


@pytest.mark.covers("A28")
def test_28_captures_and_accumulations() -> None:
    """Both uses of a, and of b, add up; what is saved is an input or made by the subgraph."""
    found, graph = subgraphs(lambda a, b: a * b * a + b, (4, 5), (4, 5))
    (subgraph,) = found
    inputs = {node.name for node in graph.graph.find_nodes(op="placeholder")}
    own = {node.name for node in subgraph.nodes}
    reads = {n.name for node in subgraph.backward for n in node.all_input_nodes}
    assert reads - {node.name for node in graph.nodes("backward")} <= inputs | own
    assert names(graph, "backward").count("aten.add.Tensor") == 2


@pytest.mark.covers("A29")
def test_29_one_trainable_input_and_an_output_that_is_also_used_inside() -> None:
    def fn(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.sigmoid(a) * b
        return h, torch.tanh(h) + a

    found, graph = subgraphs(fn, (4, 5), (4, 5), frozen=[1])
    assert len(found) == 1
    shapes = [n.meta["val"].shape for n in graph.nodes("update") for n in n.args[1]]
    assert len(shapes) == 1, "one gradient"
    arguments = (tensor(4, 5), tensor(4, 5, grad=False))
    assert_gradients_match(fn, arguments, compile_fn=regions)


@pytest.mark.covers("A30")
def test_30_linear_of_a_frozen_input() -> None:
    """The gradient by the input is never computed."""
    _, graph = subgraphs(lambda x, w: F.linear(x, w).sigmoid(), (5, 6), (4, 6), frozen=[0])
    assert names(graph, "backward").count("aten.mm.default") == 1
    _, graph = subgraphs(lambda x, w: F.linear(x, w).sigmoid(), (5, 6), (4, 6))
    assert names(graph, "backward").count("aten.mm.default") == 2
