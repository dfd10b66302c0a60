"""Plans: updates, all-or-nothing first calls, and why there is no CUDA graph."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional

import trainfuse
from autodiff.graph import InputKind, TrainingGraph
from autodiff.norms import rmse
from tests.runtime.graphs import plan_of, randn, trace
from trainfuse.capture.optimizers import UpdateHandle, handle_for
from trainfuse.codegen.schedules import foreach as schedule
from trainfuse.errors import CudaGraphUnavailable
from trainfuse.runtime import foreach, inductor
from trainfuse.runtime.cache import KernelCache
from trainfuse.runtime.cuda_graph import uploaded, why_not
from trainfuse.runtime.fallback import Boundary
from trainfuse.runtime.gate import Gate
from trainfuse.runtime.inductor import cut
from trainfuse.runtime.plan import Plan
from trainfuse.runtime.program import RuntimeOptions
from trainfuse.runtime.snapshot import Snapshot

pytestmark = [  # triton 3.6 and torch 2.11 warn about themselves
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]
# a scalar parameter, one block and a tail, several chunks
SHAPES = ((), (3, 5), (1500,), (70, 90))
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
}


def update_graph(handle: UpdateHandle, params: list[Tensor]) -> TrainingGraph:
    """A step whose gradients are cos(param) * x: forward, backward and one update node."""
    count = len(params)

    def step(*args: Tensor) -> Tensor:
        *ps, x = args
        grads = [torch.cos(p) * x for p in ps]
        torch.ops.trainfuse.update.default(ps, grads, handle.id)
        return x * 2.0

    kinds: list[InputKind] = ["parameter"] * count + ["input"]
    args = [p.detach().clone() for p in params] + [randn()]
    return trace(step, args, kinds=kinds)


class Setup:
    """Two copies of some parameters and their optimizers: ours, and eager's."""

    def __init__(self, name: str, backend: Any, **kwargs: Any) -> None:
        self.params = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
        self.eager = copy.deepcopy(self.params)
        self.optimizer = OPTIMIZERS[name](self.params)
        self.reference = OPTIMIZERS[name](self.eager)
        self.handle = handle_for(self.optimizer)
        tg = update_graph(self.handle, self.params)
        cache = KernelCache(None) if backend == "triton" else None
        self.options = RuntimeOptions(backend, cache=cache, gate=Gate(), **kwargs)
        self.plan = Plan(tg, plan_of(tg), {}, {self.handle.id: self.handle}, self.options)

    def step(self) -> None:
        x = randn()
        self.handle.before_step()
        self.plan([*self.params, x])
        for p in self.eager:
            p.grad = torch.cos(p.detach()) * x
        self.reference.step()

    def check(self) -> None:
        torch.testing.assert_close(list(self.params), list(self.eager), rtol=1e-5, atol=1e-6)
        for p, q in zip(self.params, self.eager, strict=True):
            ours, theirs = self.optimizer.state[p], self.reference.state[q]
            assert ours.keys() >= theirs.keys()
            for name in theirs:
                torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["triton", "eager", "inductor"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_equal_the_optimizers_own(name: str, backend: str) -> None:
    setup = Setup(name, backend)
    for _ in range(3):
        setup.step()
    setup.check()
    assert f"update_{setup.handle.id}(" in setup.plan.source
    assert bool(setup.options.gate.passed) is (backend == "triton")  # type: ignore[union-attr]  # set
    assert not setup.plan.failures


def test_an_update_kernel_that_does_not_load_is_replaced_without_a_gate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no such file")

    monkeypatch.setattr(foreach.ForeachLauncher, "load", broken)
    setup = Setup("adamw", "triton")
    for _ in range(2):
        setup.step()
    setup.check()
    (failure,) = setup.plan.failures.values()
    assert failure.stage == "compile"
    assert "no such file" in failure.line


def test_a_wrong_update_kernel_is_replaced_before_it_touches_a_parameter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lower = schedule.lower_foreach

    def planted(*args: Any, **kwargs: Any) -> Any:
        kernel = lower(*args, **kwargs)
        store = "tl.store(param_ptr + start + offsets, "
        source = kernel.source.replace(store, f"{store}1.001 * ")
        assert source != kernel.source
        return type(kernel)(
            **{f: getattr(kernel, f) for f in kernel.__slots__ if f != "source"}, source=source
        )

    monkeypatch.setattr(foreach, "lower_foreach", planted)
    setup = Setup("adamw", "triton")
    for _ in range(2):
        setup.step()
    setup.check()
    (failure,) = setup.plan.failures.values()
    assert failure.stage == "gate"
    assert failure.operators == "AdamW"


def test_replaced_state_is_found_again() -> None:
    setup = Setup("adamw", "triton")
    setup.step()
    for optimizer in (setup.optimizer, setup.reference):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    setup.step()
    setup.check()


def test_a_gradient_in_another_layout_is_brought_into_the_parameters() -> None:
    param = nn.Parameter(torch.randn(6, 4))
    expected = param.detach().clone()
    optimizer = torch.optim.SGD([param], lr=0.5)
    handle = handle_for(optimizer)

    def step(p: Tensor, x: Tensor) -> Tensor:
        grad = (p.t() * x.t()).t()
        torch.ops.trainfuse.update.default([p], [grad], handle.id)
        return x + 0.0

    x = randn(6, 4)
    tg = trace(step, [param.detach(), x], kinds=["parameter", "input"])
    options = RuntimeOptions("triton", cache=KernelCache(None), gate=Gate())
    plan = Plan(tg, plan_of(tg), {}, {handle.id: handle}, options)
    handle.before_step()
    plan([param, x])
    torch.testing.assert_close(param.detach(), expected - 0.5 * expected * x)
    assert options.gate.passed  # type: ignore[union-attr]  # set above


class Stop(KeyboardInterrupt):
    """The user's Ctrl-C."""


@pytest.mark.parametrize("error", [Stop, RuntimeError])
def test_a_first_call_that_fails_changes_nothing(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup("adamw", "triton")
    before = [p.detach().clone() for p in setup.params]
    setup.params[0].grad = torch.ones(())
    kept = setup.params[0].grad
    seeds: list[Tensor] = []
    own = foreach.UpdateCall.__call__

    def fails(self: Any, params: Any, grads: Any) -> None:
        seeds.append(torch.get_rng_state())
        own(self, params, grads)
        torch.randn(3)
        setup.params[0].grad = None
        raise error("planted")

    monkeypatch.setattr(foreach.UpdateCall, "__call__", fails)
    with pytest.raises(error, match="planted"):
        setup.step()
    torch.testing.assert_close([p.detach() for p in setup.params], before, rtol=0, atol=0)
    assert setup.params[0].grad is kept
    assert torch.equal(torch.get_rng_state(), seeds[0])
    assert not setup.optimizer.state, "eager has no state before its first step either"
    monkeypatch.undo()
    setup.params[0].grad = None
    setup.step()
    setup.check()


def test_the_snapshot_restores_random_state_and_shared_tensors() -> None:
    values = torch.ones(3)
    state = torch.get_rng_state()

    def interrupted() -> None:
        with Snapshot([values, values]).restored_on_failure():
            values.add_(torch.rand(3))
            raise Stop

    with pytest.raises(Stop):
        interrupted()
    assert torch.equal(values, torch.ones(3))
    assert torch.equal(torch.get_rng_state(), state)
    with Snapshot([values]).restored_on_failure():
        values.zero_()
    assert not values.any()


def fake_graph(function: Any, *shapes: tuple[int, ...], device: str = "cuda") -> TrainingGraph:
    with FakeTensorMode(shape_env=ShapeEnv()):
        return trace(function, [torch.empty(shape, device=device) for shape in shapes])


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: torch.ops.aten.nonzero.default(x), "waits for the GPU"),
        (lambda x: torch.linalg.inv(x), "waits for the GPU"),
        (lambda x: torch.linalg.eigvalsh(x), "waits for the GPU"),
        (lambda x: torch.linalg.svdvals(x), "waits for the GPU"),
        (lambda x: torch.linalg.pinv(x, hermitian=True), "waits for the GPU"),
        (lambda x: torch.linalg.matrix_exp(x), "waits for the GPU"),
        (lambda x: torch.linalg.lu_factor_ex(x)[0], "waits for the GPU"),
        (lambda x: torch.linalg.cholesky_ex(x)[0], None),
        (lambda x: torch.ops.aten._to_copy.default(x, device="cpu"), "computes on the cpu"),
        (lambda x: x + torch.ops.aten.full.default([2], 1.0).to("cuda").sum(), "on the cpu"),
        (lambda x: x + torch.ops.aten.full.default([], 1.0).to("cuda"), "copies from the host"),
        (lambda x: x + torch.ops.aten.full.default([], 1.0), None),
        (lambda x: torch.ops.aten.index.Tensor(x, [x > 0]), "indexes with a mask"),
        (lambda x: torch.ops.aten.index.Tensor(x, [torch.arange(2, device="cuda")]), None),
        (lambda x: torch.sin(x), None),
    ],
)
def test_what_forbids_a_cuda_graph_is_named(function: Any, reason: str | None) -> None:
    found = why_not(fake_graph(function, (4, 4)))
    if reason is None:
        assert found is None
    else:
        assert reason in str(found)
        assert "model.py:" in str(found)


def test_a_cpu_step_says_why_it_has_no_cuda_graph() -> None:
    tg = trace(torch.sin, [randn(3)])
    plan = Plan(tg, None, {}, {}, RuntimeOptions("eager"))
    assert not plan.cuda_graph.used
    assert "is on the cpu" in plan.cuda_graph.reason
    with pytest.raises(CudaGraphUnavailable, match="is on the cpu"):
        Plan(tg, None, {}, {}, RuntimeOptions("eager"), cuda_graph="require")
    off = Plan(tg, None, {}, {}, RuntimeOptions("eager"), no_graph_because="regions run ungraphed")
    assert off.cuda_graph.reason == "regions run ungraphed"


def test_an_input_that_the_step_only_moves_to_the_gpu_allows_a_cuda_graph() -> None:
    def moves(x: Tensor) -> Tensor:
        return torch.ops.aten._to_copy.default(x, device="cuda", non_blocking=True) + 1.0

    def reads(x: Tensor) -> Tensor:
        return moves(x) + torch.ops.aten._to_copy.default(x + 1.0, device="cuda")

    tg = fake_graph(moves, (4,), device="cpu")
    assert why_not(tg) is None
    assert list(uploaded(tg).values()) == [True]
    assert "x_1 is on the cpu" in str(why_not(fake_graph(reads, (4,), device="cpu")))


def test_a_step_on_the_host_keeps_the_cuda_graph_away() -> None:
    plan = Setup("adamw", "eager").plan
    assert plan.cuda_graph.reason == "the optimizer's own step runs on the host"


def block(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    h = torch.relu(x @ w)
    loss = (h * v).sum()
    g = v * (h > 0)
    return loss, x.t() @ g, g @ w.t()


def test_inductor_compiles_each_phase_as_one_graph() -> None:
    args = [randn(8, 6), randn(6, 5), randn(8, 5)]
    tg = trace(block, args, backward_from=4)
    parts = cut(tg)
    assert [part.phase for part in parts] == ["forward", "backward"]  # type: ignore[union-attr]  # no effect
    plan = Plan(tg, None, {}, {}, RuntimeOptions("inductor"))
    assert "forward_graph_0(" in plan.source
    assert "backward_graph_1(" in plan.source
    assert "aten." not in plan.source
    for _ in range(2):
        torch.testing.assert_close(plan(list(args)), list(block(*args)))


@pytest.mark.parametrize("rows", [768, 769, 8])  # 769 is prime, 8 is short
@pytest.mark.parametrize("keepdim", [False, True])
def test_a_long_column_sum_is_as_exact_as_atens(rows: int, keepdim: bool) -> None:
    """A bias gradient: Inductor's C++ would add the rows one after the other."""

    def total(x: Tensor) -> Tensor:
        return torch.sin(x).sum([0], keepdim)

    x = randn(rows, 512)
    plan = Plan(trace(total, [x], backward_from=0), None, {}, {}, RuntimeOptions("inductor"))
    (ours,) = plan([x])
    eager, exact = total(x), total(x.double())
    assert ours.shape == eager.shape
    assert rmse(ours, exact) <= 2 * rmse(eager, exact)


@pytest.mark.parametrize("dims", [[0, 2], [0, 1], [1, 2], [0, 1, 2], [-3, -1]], ids=str)
@pytest.mark.parametrize("keepdim", [False, True])
def test_a_sum_over_several_dims_is_as_exact_as_atens(dims: list[int], keepdim: bool) -> None:
    """Of equal terms, too: the gradient of a broadcast parameter, whose errors all add up."""

    def total(x: Tensor) -> Tensor:
        return (x * 0.3).expand(65, 9, 9).sum(dims, keepdim)

    for x in (torch.full((65, 9, 9), 0.2), torch.full((1, 1, 1), 0.2), randn(65, 9, 9)):
        plan = Plan(trace(total, [x], backward_from=0), None, {}, {}, RuntimeOptions("inductor"))
        (ours,) = plan([x])
        eager, exact = total(x), total(x.double())
        assert (ours.shape, ours.stride()) == (eager.shape, eager.stride())
        assert rmse(ours, exact) <= 2 * rmse(eager, exact) + 1e-7 * float(exact.abs().mean())


@pytest.mark.parametrize("product_first", [False, True])
def test_a_product_is_added_to_another_gradient_once(product_first: bool) -> None:
    """As `addmm`, Inductor's own choice, each row would be added to the large gradient."""

    def gradient(x: Tensor, g: Tensor, other: Tensor) -> Tensor:
        product, rest = x.t() @ g, other.cos()
        return product + rest if product_first else rest + product

    shapes = (294, 3), (294, 4), (3, 4)
    args = [scale * randn(*shape) for scale, shape in zip((1, 1e-3, 1), shapes, strict=True)]
    plan = Plan(trace(gradient, args, backward_from=0), None, {}, {}, RuntimeOptions("inductor"))
    ours = eager = 0.0
    for _ in range(20):  # a few elements: what the rounding of one run gives is luck
        args = [scale * randn(*shape) for scale, shape in zip((1, 1e-3, 1), shapes, strict=True)]
        exact = gradient(*(a.double() for a in args))
        ours += rmse(plan(list(args))[0], exact) ** 2
        eager += rmse(gradient(*args), exact) ** 2
    assert ours <= 2 * eager


def test_what_inductor_lays_out_otherwise_is_laid_out_as_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU a product whose rows are no whole sectors comes as a slice of wider rows."""
    stock = inductor._compile

    def padded(module: Any, segment: Any) -> Any:
        code = stock(module, segment)

        def run(*inputs: Any) -> list[Any]:
            values = code(*inputs)
            return [functional.pad(v, (0, 3))[..., : v.shape[-1]] if v.dim() else v for v in values]

        return run

    monkeypatch.setattr(inductor, "_compile", padded)
    model = nn.Linear(5, 17)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        y = model(x)
        y.square().sum().backward()
        optimizer.step()
        return y.detach()

    x = randn(4, 5)
    twin = copy.deepcopy(model)
    compiled = trainfuse.compile(
        step, backend="inductor", fallback=False, keep_gradients=True, verify="off"
    )
    for _ in range(3):
        made = compiled(x)
        wanted = twin(x)
        twin.zero_grad()
        wanted.square().sum().backward()
        torch.testing.assert_close(made, wanted.detach())
        assert made.stride() == wanted.stride()
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
            assert mine.grad.stride() == theirs.grad.stride()
            with torch.no_grad():
                theirs -= 0.1 * theirs.grad


def test_inductor_takes_graphs_with_constants() -> None:
    def step(x: Tensor) -> Tensor:
        x = x.clone()
        x[..., 0] = 0.7
        return x.sin() * torch.tensor([1.0, 2.0])

    x = randn(3, 2)
    compiled = trainfuse.compile(step, backend="inductor", fallback=False)
    torch.testing.assert_close(compiled(x), step(x))


def test_a_step_that_returns_a_number_is_compiled_without_a_complaint(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> float:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    compiled = trainfuse.compile(step, backend="inductor", fallback=False)
    losses = [compiled(torch.ones(3, 4)) for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]
    assert compiled.explain().capture == "whole_step"
    assert not [r for r in caplog.records if "Inductor can't" in r.getMessage()]


def test_without_a_compiler_inductor_becomes_aten_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torch._inductor.exc import InvalidCxxCompiler

    def missing(*_: Any, **__: Any) -> Any:
        raise InvalidCxxCompiler

    monkeypatch.setattr("torch._inductor.standalone_compile", missing)
    args = [randn(8, 6), randn(6, 5), randn(8, 5)]
    tg = trace(block, args, backward_from=4)
    plan = Plan(tg, None, {}, {}, RuntimeOptions("inductor", boundary=Boundary()))
    torch.testing.assert_close(plan(list(args)), list(block(*args)))
    assert "aten.mm.default" in plan.source
    lines = [r.getMessage() for r in caplog.records if "Inductor can't compile" in r.getMessage()]
    assert len(lines) == 1
    assert "install g++" in lines[0]


def test_inductor_code_that_fails_when_it_runs_becomes_aten(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[int] = []

    def broken(*_: Any, **__: Any) -> Any:
        def code(*_: Any) -> Any:
            tries.append(1)
            raise AssertionError("expected stride 1")

        return code

    monkeypatch.setattr("torch._inductor.standalone_compile", broken)
    args = [randn(8, 6), randn(6, 5), randn(8, 5)]
    tg = trace(block, args, backward_from=4)
    plan = Plan(tg, None, {}, {}, RuntimeOptions("inductor"))
    for _ in range(3):
        torch.testing.assert_close(plan(list(args)), list(block(*args)))
    assert len(tries) == 2, "one try for each phase"
    assert "_graph_" not in plan.source
    lines = [r.getMessage() for r in caplog.records if "runs as ATen" in r.getMessage()]
    assert len(lines) == 2
    assert "expected stride 1" in lines[0]
