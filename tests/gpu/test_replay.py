"""Launches and CUDA graph replay: what only a GPU can show."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainfuse
from autodiff.graph import InputKind, TrainingGraph
from tests.runtime.graphs import cloned, flat_kernel, group_of, plan_of, trace
from trainfuse.capture.optimizers import handle_for
from trainfuse.runtime.cache import KernelCache
from trainfuse.runtime.gate import Gate
from trainfuse.runtime.plan import Plan
from trainfuse.runtime.program import RuntimeOptions

SHAPES = ((), (3, 5), (1500,), (70, 90))


def triton(cache: KernelCache) -> RuntimeOptions:
    major, minor = torch.cuda.get_device_capability()
    return RuntimeOptions("triton", arch=f"sm_{major}{minor}", cache=cache, gate=Gate())


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda")


def fused(mutates: tuple[int, ...] = (), size: int = 5000):
    """exp(x) + y as one hand-written kernel."""
    args = [rand(size), rand(size)]
    tg = trace(lambda x, y: torch.exp(x) + y, args, mutates=mutates)
    group = group_of(tg, "forward_0", tg.nodes())
    kernel = flat_kernel(group, ["t0 = tl.exp(in0) + in1"])
    return args, (tg, plan_of(tg, group), {"forward_0": kernel}, {})


def test_a_kernel_launches_and_passes_the_gate(cache: KernelCache) -> None:
    args, parts = fused()
    plan = Plan(*parts, triton(cache), cuda_graph="off")
    for _ in range(2):
        torch.testing.assert_close(plan(cloned(args)), [torch.exp(args[0]) + args[1]])
    assert not plan.failures


def test_unaligned_inputs_take_the_unaligned_variant(cache: KernelCache) -> None:
    args, parts = fused()
    plan = Plan(*parts, triton(cache), cuda_graph="off")
    plan(cloned(args))
    before = cache.stats.compiled
    shifted = [torch.cat([a[:1], a])[1:] for a in args]
    assert all(a.data_ptr() % 16 == 4 for a in shifted)
    torch.testing.assert_close(plan(shifted), [torch.exp(args[0]) + args[1]])
    assert cache.stats.compiled == before + 1


def test_replay_follows_its_inputs_and_kept_outputs_stay(cache: KernelCache) -> None:
    _, parts = fused()
    plan = Plan(*parts, triton(cache), cuda_graph="require")
    kept, expected = [], []
    for _ in range(5):
        fresh = [rand(5000), rand(5000)]
        kept += plan(list(fresh))
        expected.append(torch.exp(fresh[0]) + fresh[1])
    torch.testing.assert_close(kept, expected)
    assert plan.cuda_graph.used
    assert (plan.stats.captures, plan.stats.replays) == (1, 4)


def test_replayed_outputs_keep_the_programs_strides_and_sharing() -> None:
    """Expanded, with gaps, transposed, and two views of one value, which share a write."""

    def step(x: Tensor) -> tuple[Tensor, ...]:
        y = x.sin()
        return y[:, :2], y[1], y.sum().expand(3), x.cos().t(), x.exp()[:, 0], y.view(torch.int32)

    x = rand(4, 6)
    plan = Plan(trace(step, [x]), None, {}, {}, RuntimeOptions("eager"), cuda_graph="require")
    kept = []
    for _ in range(4):
        x = rand(4, 6)
        made = plan([x])
        torch.testing.assert_close(made, list(step(x)), rtol=0, atol=0, check_stride=True)
        assert made[0].data_ptr() + 24 == made[1].data_ptr()
        kept.append((made, [m.clone() for m in made]))
    assert plan.cuda_graph.used
    for made, then in kept:
        torch.testing.assert_close(made, then, rtol=0, atol=0)
        made[0][1, 1] = 7.0
        assert made[1][1] == 7.0


def test_a_mutated_input_of_the_user_is_written_back(cache: KernelCache) -> None:
    _, parts = fused(mutates=(1,))
    plan = Plan(*parts, triton(cache), cuda_graph="require")
    for _ in range(4):
        x, y = rand(5000), rand(5000)
        expected = torch.exp(x) + y
        plan([x, y])
        torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("pinned", [False, True])
def test_inputs_from_the_host_are_moved_before_the_replay(pinned: bool) -> None:
    def step(x: Tensor, y: Tensor) -> Tensor:
        x = torch.ops.aten._to_copy.default(x, device="cuda", non_blocking=pinned)
        return x.double() + y

    def host() -> Tensor:
        value = torch.randn(64, 3)
        return (value.pin_memory() if pinned else value).expand(2, 64, 3)

    tg = trace(step, [host(), rand(3)])
    plan = Plan(tg, None, {}, {}, RuntimeOptions("eager"), cuda_graph="require")
    for _ in range(4):
        x, y = host(), rand(3)
        torch.testing.assert_close(plan([x, y]), [x.cuda().double() + y])
    assert plan.cuda_graph.used


class Training:
    """The same step twice: ours with a CUDA graph, and eager."""

    def __init__(self, options: RuntimeOptions) -> None:
        self.params = [nn.Parameter(rand(*shape)) for shape in SHAPES]
        self.eager = copy.deepcopy(self.params)
        self.optimizer = torch.optim.AdamW(self.params, lr=0.01)
        self.reference = torch.optim.AdamW(self.eager, lr=0.01)
        self.handle = handle_for(self.optimizer)
        tg = self._graph()
        handles = {self.handle.id: self.handle}
        self.plan = Plan(tg, plan_of(tg), {}, handles, options, cuda_graph="require")

    def _graph(self) -> TrainingGraph:
        def step(*args: Tensor) -> Tensor:
            *ps, x = args
            grads = [torch.cos(p) * x for p in ps]
            torch.ops.trainfuse.update.default(ps, grads, self.handle.id)
            return x * 2.0

        kinds: list[InputKind] = ["parameter"] * len(SHAPES) + ["input"]
        args = [p.detach().clone() for p in self.params] + [rand()]
        return trace(step, args, kinds=kinds)

    def step(self) -> None:
        x = rand()
        self.handle.before_step()
        self.plan([*self.params, x])
        for p in self.eager:
            p.grad = torch.cos(p.detach()) * x
        self.reference.step()

    def check(self) -> None:
        torch.testing.assert_close(list(self.params), list(self.eager), rtol=1e-4, atol=1e-5)
        for p, q in zip(self.params, self.eager, strict=True):
            assert self.optimizer.state[p]["step"] == self.reference.state[q]["step"]


def test_updates_are_replayed_and_the_first_call_trains_once(cache: KernelCache) -> None:
    training = Training(triton(cache))
    for calls in range(1, 6):
        training.step()
        training.check()
        assert training.plan.stats.replays == calls - 1
    assert not training.plan.failures


def test_lr_changes_without_a_new_graph(cache: KernelCache) -> None:
    training = Training(triton(cache))
    for lr in (0.1, 0.05, 0.01, 0.02):
        for optimizer in (training.optimizer, training.reference):
            optimizer.param_groups[0]["lr"] = lr
        training.step()
    training.check()
    assert training.plan.stats.captures == 1


def test_moved_parameters_and_replaced_state_are_captured_again(cache: KernelCache) -> None:
    training = Training(triton(cache))
    for _ in range(3):
        training.step()
    for optimizer in (training.optimizer, training.reference):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    training.step()
    training.check()
    training.params[1].data = training.params[1].data.clone()
    for _ in range(2):
        training.step()
    training.check()
    assert training.plan.stats.captures == 3


def draw(x: Tensor) -> Tensor:
    return x + torch.ops.aten.rand_like.default(x)


def test_replays_draw_what_eager_draws() -> None:
    x = rand(1000)
    tg = trace(draw, [x])
    results = []
    for mode in ("off", "require"):
        plan = Plan(tg, None, {}, {}, RuntimeOptions("eager"), cuda_graph=mode)  # type: ignore[arg-type]  # literals
        torch.manual_seed(3)
        results.append([plan([x])[0] for _ in range(5)])
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    assert len({value.sum().item() for value in results[1]}) == 5


def test_a_capture_that_fails_leaves_the_step_running(monkeypatch: pytest.MonkeyPatch) -> None:
    x = rand(1000)
    plan = Plan(trace(draw, [x]), None, {}, {}, RuntimeOptions("eager"))
    run = type(plan.program).__call__

    def syncs(self: Any, args: list[Any]) -> list[Any]:
        outputs = run(self, args)
        outputs[0].sum().item()
        return outputs

    monkeypatch.setattr(type(plan.program), "__call__", syncs)
    torch.manual_seed(3)
    drawn = [plan([x])[0] for _ in range(3)]
    torch.manual_seed(3)
    expected = [draw(x) for _ in range(3)]
    torch.testing.assert_close(drawn, expected, rtol=0, atol=0)
    assert not plan.cuda_graph.used
    assert "capture failed" in plan.cuda_graph.reason
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    monkeypatch.undo()
    other = Plan(trace(draw, [x]), None, {}, {}, RuntimeOptions("eager"), cuda_graph="require")
    for _ in range(3):
        other([x])
    assert other.cuda_graph.used


@pytest.mark.parametrize("view", [torch.conj, lambda z: z.conj().imag], ids=["conj", "negative"])
def test_views_of_conjugates_cross_streams(view: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """To record a stream of such a view, torch records a copy's, and corrupts the host's heap."""
    z = torch.randn(1000, device="cuda", dtype=torch.complex64)
    plan = Plan(trace(lambda z: view(z * 2), [z]), None, {}, {}, RuntimeOptions("eager"))
    stock, recorded = Tensor.record_stream, []

    def noted(self: Tensor, stream: torch.cuda.Stream) -> None:
        recorded.append(self)
        stock(self, stream)

    monkeypatch.setattr(Tensor, "record_stream", noted)
    results = [plan([z])[0] for _ in range(3)]
    torch.testing.assert_close(results, [view(z * 2)] * 3)
    assert results[0].is_conj() or results[0].is_neg()
    assert plan.cuda_graph.used
    assert recorded
    assert not any(value.is_conj() or value.is_neg() for value in recorded)


def graph_bytes() -> int:
    """What the memory pools of CUDA graphs hold."""
    segments = torch.cuda.memory_snapshot()
    return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) != (0, 0))


@pytest.mark.covers("U1")
def test_plans_of_many_sizes_share_one_pool() -> None:
    """Temporaries of all plans live in those of the largest: two at a time."""

    def deep(x: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.sin(x) * 2.0
        return x.sum()

    start = graph_bytes()
    plans = []
    mib = 1 << 18  # fp32 elements
    for size in range(64, 8, -8):
        x = rand(size * mib)
        plan = Plan(trace(deep, [x]), None, {}, {}, RuntimeOptions("eager"), cuda_graph="require")
        for _ in range(3):
            torch.testing.assert_close(plan([x])[0], deep(x))
        plans.append(plan)
    assert graph_bytes() - start < 2.5 * (64 << 20)


def test_a_graph_outlives_torchs_blas_workspaces(cache: KernelCache) -> None:
    """Lightning clears every workspace, and empties the cache, whenever a Trainer sets up a GPU.

    A graph that had captured a workspace of torch's would write to memory that is gone.
    """

    def step(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).sin() @ w.t()

    x, w = rand(256, 4096), rand(4096, 512)
    plan = Plan(trace(step, [x, w]), None, {}, {}, RuntimeOptions("eager"), cuda_graph="require")
    for _ in range(3):
        plan([x, w])
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    other = [rand(1 << 20) for _ in range(64)]
    for _ in range(3):
        torch.testing.assert_close(plan([x, w])[0], step(x, w))
    assert all(torch.isfinite(o).all() for o in other)
    assert plan.stats.captures == 1


def test_the_users_own_graph_of_a_region_takes_any_number_of_calls():
    """Every 32nd call looks at its loss, which a capture doesn't allow."""
    x = torch.randn(128, 1000, device="cuda", requires_grad=True)
    y = torch.randint(1000, (128,), device="cuda")
    compiled = trainfuse.compile(torch.nn.functional.cross_entropy, whole_step=False)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            compiled(x, y)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            losses = [compiled(x, y) for _ in range(80)]
        graph.replay()
    torch.cuda.synchronize()
    expected = torch.nn.functional.cross_entropy(x, y)
    torch.testing.assert_close(torch.stack(losses), expected.expand(80))
