"""What hurts people who train with compilers, as cases: gradients, stale graphs, runtime."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import trainfuse
from tests.capture.scenarios import (
    assert_like_eager,
    batch,
    ordinary,
    reasons,
    seen,
    small_model,
    state_of,
)
from trainfuse.testing import Training, gradient_report

# numpy's, of lanes beyond the mask: they compute on what they hold, as on a GPU
LANES = "ignore:(invalid value|divide by zero|overflow) encountered:RuntimeWarning"
pytestmark = [
    # Dynamo looks at `.grad` of what it meets between two graphs, and torch warns of that
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings(LANES),
]


def whole(training: Training, backend: str = "triton", **options: Any) -> Any:
    return trainfuse.compile(training.step, backend=backend, **options)


# ------------------------------------------------------------------------------- gradients


class Head(nn.Module):
    """A network and its head over a vocabulary."""

    def __init__(self, classes: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 16), nn.Linear(16, classes, bias=False)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


@pytest.mark.covers("G4")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ignored_rows(reduction: str) -> None:
    """G4: 4096 classes, a quarter of the targets ignored, weights by token."""

    def make() -> Training:
        model = Head(4096)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

        def step(x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y, reduction=reduction, ignore_index=-100)
            loss = (loss * weights).sum() / weights.sum() if reduction == "none" else loss
            loss.backward()
            optimizer.step()
            return loss

        batches = []
        for _ in range(3):
            target = torch.randint(4096, (16,))
            target[::4] = -100
            batches.append((torch.randn(16, 6), target, torch.rand(16)))
        return Training(step, model, batches)

    gradient_report(make, whole).check()


@pytest.mark.covers("G5")
@pytest.mark.parametrize("parts", [1, 2, pytest.param(4, marks=pytest.mark.nightly)])
def test_a_batch_in_micro_batches(parts: int) -> None:
    """G5: 8, 2 x 4, 4 x 2 rows, of unequal token counts: sums that we never scale."""

    def make() -> Training:
        model = Head(11)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            tokens = (y != -100).sum()
            total = torch.zeros(())
            for inputs, targets in zip(x.chunk(parts), y.chunk(parts), strict=True):
                logits = model(inputs).flatten(0, 1)
                loss = F.cross_entropy(logits, targets.flatten(), reduction="sum") / tokens
                loss.backward()
                total = total + loss.detach()
            optimizer.step()
            return total

        batches = []
        for _ in range(3):
            target = torch.randint(11, (8, 5))
            target[torch.arange(5)[None] >= torch.randint(1, 6, (8, 1))] = -100
            batches.append((torch.randn(8, 5, 6), target))
        return Training(step, model, batches)

    gradient_report(make, whole).check()


@pytest.mark.covers("G6")
@pytest.mark.parametrize("chunks", [1, 8, pytest.param(32, marks=pytest.mark.nightly)])
def test_a_half_head_in_chunks(chunks: int) -> None:
    """G6: the step chunks its own loss; the weight's gradient is as near to fp64 as eager's."""

    def make() -> Training:
        model = Head(64, torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            parts = zip(x.chunk(chunks), y.chunk(chunks), strict=True)
            losses = [F.cross_entropy(model(a).float(), b, reduction="sum") for a, b in parts]
            loss = torch.stack(losses).sum() / len(x)
            loss.backward()
            optimizer.step()
            return loss

        batches = [(torch.randn(64, 6).bfloat16(), torch.randint(64, (64,))) for _ in range(3)]
        return Training(step, model, batches)

    gradient_report(make, lambda t: whole(t, "eager"), k=3.0).check()


@pytest.mark.covers("G7")
@pytest.mark.parametrize("captured", ["whole", "regions"])
def test_buffers_that_are_needed_again(captured: str) -> None:
    """G7: norm and residual; logits used by the loss and returned; cotangents kept by a caller."""

    def scenario(compile_):
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 4)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kept: list[Tensor] = []

        def forward(x):
            h = model[0](x)
            h = h + model[1](h)
            logits = model[2](h)
            return logits, h

        compiled = compile_(forward) if captured == "regions" else forward

        def step(x, y):
            optimizer.zero_grad()
            logits, h = compiled(x)
            loss = F.cross_entropy(logits, y) + logits.logsumexp(-1).square().mean() * 1e-2
            loss.backward()
            optimizer.step()
            return loss.detach(), logits.detach(), h.detach(), logits.detach().exp()

        run = compile_(step) if captured == "whole" else step
        observed = []
        for i in range(3):
            results = run(*batch(i))
            kept += results
            observed.append(seen(results, state_of(model)))
        return observed, seen(kept)

    for backend in ("triton", "eager"):
        assert_like_eager(scenario, backend)


@pytest.mark.covers("G7")
def test_a_cotangent_that_the_caller_keeps_is_not_written() -> None:
    """G7: a region's backward reads its cotangents, and leaves them."""
    compiled = trainfuse.compile(lambda x: (torch.tanh(x) * 2, x.exp()), backend="triton")
    x = torch.randn(7, 9, requires_grad=True)
    cotangents = [torch.randn(7, 9) for _ in range(2)]
    before = [c.clone() for c in cotangents]
    for _ in range(2):
        torch.autograd.grad(compiled(x), x, cotangents)
    assert all(map(torch.equal, cotangents, before))


@pytest.mark.covers("G9")
def test_a_loss_scale_that_comes_last() -> None:
    """G9: half logits over 4096 classes: the gradient of most underflows unless it is scaled."""
    scale = 2.0**14

    def make() -> Training:
        model = Head(4096)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5 / scale)

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                logits = model(x)
            loss = F.cross_entropy(logits.float(), y)
            (loss * scale).backward()
            optimizer.step()
            return loss

        batches = [(torch.randn(16, 6), torch.randint(4096, (16,))) for _ in range(3)]
        return Training(step, model, batches)

    gradient_report(make, lambda t: whole(t, "eager"), k=3.0).check()


@pytest.mark.covers("G16")
def test_a_mode_with_eagers_masks() -> None:
    """G16: `rng="eager"` draws, from one seed, the masks that eager draws."""
    compiled = trainfuse.compile(
        lambda x: F.dropout(x * 1.0, 0.5) * 2, backend="triton", rng="eager"
    )
    x = torch.ones(64, 64, requires_grad=True)
    for seed in (1, 2):
        torch.manual_seed(seed)
        ours = compiled(x)
        torch.manual_seed(seed)
        theirs = F.dropout(x * 1.0, 0.5) * 2
        assert torch.equal(ours, theirs)
        (grad,) = torch.autograd.grad(ours.sum(), x)
        assert torch.equal(grad, theirs.detach())


@pytest.mark.covers("G18")
@pytest.mark.parametrize("backend", ["triton", "eager"])
def test_two_random_calls_differ(backend: str) -> None:
    """G18: equal calls are two draws, in the order and with the values of eager."""

    def draws(x: Tensor) -> tuple[Tensor, ...]:
        normal = torch.randn(3), torch.randn(3)
        uniform = torch.rand(4), torch.rand(4)
        coins = torch.bernoulli(x), torch.bernoulli(x)
        return (*normal, *uniform, torch.randint(9, (6,)), torch.randint(9, (6,)), *coins)

    compiled = trainfuse.compile(draws, backend=backend)
    x = torch.full((30,), 0.5)
    for seed in range(3):
        torch.manual_seed(seed)
        ours = compiled(x)
        torch.manual_seed(seed)
        torch.testing.assert_close(ours, draws(x), rtol=0, atol=0)
        assert all(not torch.equal(ours[i], ours[i + 1]) for i in (0, 2, 6))


# ---------------------------------------------------------------------------- stale graphs


class Counting(nn.Module):
    """Uses its own step counter in the maths."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.net = 0, small_model()

    def forward(self, x: Tensor) -> Tensor:
        self.c += 1
        return self.net(x) * (1 + 0.01 * self.c)


@pytest.mark.covers("C4")
def test_a_python_counter_is_right_and_has_its_limit(caplog: pytest.LogCaptureFixture) -> None:
    """C4: each value is a plan, up to the budget; then eager, with one line."""

    def scenario(compile_):
        model = Counting()
        step = compile_(ordinary(model, torch.optim.SGD(model.parameters(), lr=0.1)))
        return [(seen(step(*batch(i))), state_of(model), model.c) for i in range(6)]

    (step,) = assert_like_eager(scenario, "eager", max_plans=2)
    assert len(step.plans) <= 2
    lines = [r for r in caplog.records if "max_plans=2" in r.getMessage()]
    assert len(lines) == 1


@pytest.mark.covers("C6", "C7")
def test_lengths_and_resolutions_within_a_budget(caplog: pytest.LogCaptureFixture) -> None:
    """C6, C7: six sizes, in turn: a plan for each until the budget is spent, then eager."""
    rows = (8, 8, 5, 8, 3, 8, 1, 2, 4, 5, 4)

    def scenario(compile_):
        model = small_model()
        step = compile_(ordinary(model, torch.optim.SGD(model.parameters(), lr=0.1)))
        return [(seen(step(*batch(i, n))), state_of(model)) for i, n in enumerate(rows)]

    (step,) = assert_like_eager(scenario, "eager", max_plans=3)
    assert len(step.plans) == 3
    lines = [r for r in caplog.records if "max_plans=3" in r.getMessage()]
    assert len(lines) == 1


@pytest.mark.covers("C6")
def test_lengths_in_one_plan_where_sizes_may_vary() -> None:
    """C6: with dynamic=True a region has one plan for all lengths, on ATen."""

    def scenario(compile_):
        model = small_model()
        compiled = compile_(lambda x: model(x))
        observed = []
        for i, n in enumerate((8, 5, 3, 8, 2)):
            model.zero_grad()
            out = compiled(batch(i, n)[0])
            out.square().mean().backward()
            observed.append(seen(out, [p.grad for p in model.parameters()]))
        return observed

    (step,) = assert_like_eager(scenario, "eager", dynamic=True)
    assert len(step.plans) == 2


class Around(nn.Module):
    """An LSTM with something to fuse on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(6, 8), nn.Linear(8, 4)
        self.rnn = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        h = torch.tanh(self.before(x)) * 2
        if lengths is None:
            h, _ = self.rnn(h)
        else:
            packed = pack_padded_sequence(h, lengths, batch_first=True, enforce_sorted=False)
            h, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return torch.sigmoid(self.after(h)) * 3


@pytest.mark.covers("C8")
def test_an_rnn_stays_aten_and_its_surroundings_fuse() -> None:
    """C8: lengths come and go; what is around the LSTM is kernels of ours."""
    torch.manual_seed(0)
    model = Around()
    compiled = trainfuse.compile(lambda x: model(x), backend="triton")
    for length in (3, 5, 3):
        x = torch.randn(2, length, 6)
        results = []
        for target in (compiled, model):
            model.zero_grad()
            out = target(x)
            out.square().sum().backward()
            results.append(seen(out, [p.grad for p in model.parameters()]))
        torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)
    forward = [plan for plan in compiled.plans if plan.kind == "forward"]
    assert all(len(plan.plan.program.groups) >= 1 for plan in forward)


@pytest.mark.covers("C8")
def test_an_rnn_over_packed_sequences_is_right() -> None:
    """C8: sequences packed by their lengths."""

    def scenario(compile_):
        torch.manual_seed(0)
        model = Around()
        compiled = compile_(lambda x, lengths: model(x, lengths))
        observed = []
        for i in range(3):
            model.zero_grad()
            generator = torch.Generator().manual_seed(i)
            x = torch.randn(3, 5, 6, generator=generator)
            out = compiled(x, torch.tensor([5, 3, 2]))
            out.square().sum().backward()
            observed.append(seen(out, [p.grad for p in model.parameters()]))
        return observed

    assert_like_eager(scenario, "eager")


@pytest.mark.covers("C9")
def test_forward_and_backward_inside_ddp(tmp_path) -> None:
    """C9: a whole step would skip the reducer's hooks: it is refused, and they run."""
    if not torch.distributed.is_available():
        pytest.skip("no torch.distributed here")
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        inner, twin = small_model(), small_model()
        model = nn.parallel.DistributedDataParallel(inner)
        reduced: list[int] = []

        def count(state, bucket):  # torch wants the true classes, or no annotations
            reduced.append(1)
            future = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        model.register_comm_hook(None, count)
        steps = [ordinary(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in (model, twin)]
        compiled = trainfuse.compile(steps[0], backend="eager")
        for i in range(3):
            torch.testing.assert_close(compiled(*batch(i)), steps[1](*batch(i)))
            torch.testing.assert_close(state_of(inner), state_of(twin), rtol=1e-5, atol=1e-6)
        assert "DistributedDataParallel" in reasons(compiled)
        assert len(reduced) >= 3
    finally:
        torch.distributed.destroy_process_group()


# --------------------------------------------------------------------------------- autodiff


@pytest.mark.covers("D1")
def test_unknown_operators_stay_inside_one_graph() -> None:
    """D1: six layers with an operator that no kernel has: one plan, and it is ATen within."""

    def make() -> Training:
        model = nn.ModuleList(nn.Linear(12, 12) for _ in range(6))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            for layer in model:
                x = F.gelu(layer(x))
                x = torch.cumsum(x * 0.1, -1) * 2 + 1
            loss = x.square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return Training(step, model, [(torch.randn(20, 12),) for _ in range(3)])

    steps: list[Any] = []
    gradient_report(make, lambda t: (steps.append(whole(t)), steps[0])[1]).check()
    (plan,) = steps[0].plans
    assert plan.kind == "whole_step"
    with trainfuse.settings.patch(keep_gradients=True):
        left = {node.op for node in steps[0].explain().aten_nodes}
    assert "aten.cumsum.default" in left
    assert len(plan.plan.program.groups) >= 12


# ---------------------------------------------------------------------------------- runtime


@pytest.mark.covers("T1")
def test_two_hundred_steps_beside_eager() -> None:
    """T1: every parameter's gradient points where eager's does; the losses meet.

    In fp64: in fp32 two hundred steps make more of the last bit than a test can allow.
    """

    def play(compile_):
        torch.manual_seed(0)
        model = small_model().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
        step = compile_(ordinary(model, optimizer))
        trace = []
        for i in range(200):
            x, y = batch(i % 7)
            loss = step(x.double(), y)
            trace.append((float(loss), [p.grad.clone() for p in model.parameters()]))
        return trace

    ours = play(lambda f: trainfuse.compile(f, backend="eager", keep_gradients=True))
    theirs = play(lambda f: f)
    for i, ((loss, grads), (expected, eager)) in enumerate(zip(ours, theirs, strict=True)):
        assert loss == pytest.approx(expected, rel=1e-3, abs=1e-4), f"step {i}"
        for place, (g, e) in enumerate(zip(grads, eager, strict=True)):
            cosine = F.cosine_similarity(g.flatten(), e.flatten(), dim=0)
            assert cosine > 0.999, f"step {i}, parameter {place}"


@pytest.mark.covers("T6")
def test_a_kernel_that_fails_is_tried_once(monkeypatch, caplog) -> None:
    """T6: ten calls, one attempt, one warning."""
    from trainfuse.runtime import launch

    tried: list[int] = []

    def broken(self: Any, inputs: Any, out: Any) -> None:
        tried.append(1)
        raise RuntimeError("planted")

    monkeypatch.setattr(launch.GroupLauncher, "__call__", broken)
    compiled = trainfuse.compile(lambda x: torch.tanh(x * 1.37) * 2 + 1, backend="triton")
    x = torch.randn(11, 13)
    with caplog.at_level(logging.WARNING, "trainfuse"):
        for _ in range(10):
            torch.testing.assert_close(compiled(x), torch.tanh(x * 1.37) * 2 + 1)
    assert len(tried) == 1
    assert len([r for r in caplog.records if "planted" in r.getMessage()]) == 1


# ------------------------------------------------------------------------------ accumulation


@pytest.mark.covers("U2")
@pytest.mark.parametrize("micro", [1, 2, pytest.param(4, marks=pytest.mark.nightly)])
def test_micro_steps_inside_one_step(micro: int) -> None:
    """U2: in-graph sums, one update; eager's within rounding."""

    def scenario(compile_):
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(xs, ys):
            optimizer.zero_grad()
            total = 0.0
            for x, y in zip(xs, ys, strict=True):
                loss = F.cross_entropy(model(x), y) / micro
                loss.backward()
                total = total + loss.detach()
            optimizer.step()
            return total

        compiled = compile_(step)
        observed = []
        for i in range(3):
            parts = [batch(micro * i + j) for j in range(micro)]
            xs, ys = [x for x, _ in parts], [y for _, y in parts]
            observed.append((seen(compiled(xs, ys)), state_of(model, grads=True)))
        return observed

    (step,) = assert_like_eager(scenario, "triton", keep_gradients=True)
    assert [plan.kind for plan in step.plans] == ["whole_step"]


@pytest.mark.covers("U3")
def test_a_second_backward_adds_to_the_first() -> None:
    """U3: two micro-steps of different inputs without zero_grad between: the sum, in its own
    memory."""

    def scenario(compile_):
        model = small_model()

        def micro(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss.detach()

        compiled = compile_(micro)
        observed = []
        for i in range(2):
            model.zero_grad()
            compiled(*batch(2 * i))
            first = [p.grad for p in model.parameters()]
            copies = [g.clone() for g in first]
            compiled(*batch(2 * i + 1))
            observed.append((seen([p.grad for p in model.parameters()]), seen(copies)))
        return observed

    for backend in ("triton", "eager"):
        assert_like_eager(scenario, backend)


# ------------------------------------------------------------------------------ integrations


@pytest.mark.covers("L2")
def test_an_average_by_name_and_a_swap() -> None:
    """L2: a shadow made before compiling finds every name; swapped weights are seen at once."""

    def scenario(compile_):
        model = small_model()
        shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compile_(model)
        x, _ = batch(0)
        for i in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(batch(i)[0]), batch(i)[1]).backward()
            optimizer.step()
            for name, p in model.named_parameters():
                shadow[name].lerp_(p.detach(), 0.5)
        assert shadow.keys() == dict(model.named_parameters()).keys()
        trained = {name: p.detach().clone() for name, p in model.named_parameters()}
        observed = [seen(model(x))]
        for weights in (shadow, trained):
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.copy_(weights[name])
                observed.append(seen(model(x)))
        for name, p in model.named_parameters():
            p.data = shadow[name]
        with torch.no_grad():
            observed.append(seen(model(x)))
        return observed

    for backend in ("triton", "eager"):
        assert_like_eager(scenario, backend)


@pytest.mark.covers("L8")
def test_checkpoint_keys_are_the_plain_ones() -> None:
    """L8: compile a submodule, save, load into a plain model, strictly, and back."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"net": small_model(), "head": nn.Linear(4, 2)})
    plain = nn.ModuleDict({"net": small_model(3), "head": nn.Linear(4, 2)})
    keys = list(model.state_dict())
    trainfuse.compile(model["net"], backend="eager")
    model["net"](batch(0)[0]).sum().backward()
    assert list(model.state_dict()) == keys == list(plain.state_dict())
    plain.load_state_dict(model.state_dict(), strict=True)
    model.load_state_dict(plain.state_dict(), strict=True)
    torch.testing.assert_close(model["net"](batch(1)[0]), plain["net"](batch(1)[0]))
