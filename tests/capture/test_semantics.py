"""Training semantics, as whole steps and as regions: three steps beside eager, judged by fp64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import trainfuse
from tests.capture.scenarios import assert_like_eager, batch, seen
from trainfuse.testing import Training, gradient_report

# numpy's, of lanes beyond the mask: they compute on what they hold, as on a GPU
LANES = "ignore:(invalid value|divide by zero|overflow) encountered:RuntimeWarning"
pytestmark = [
    pytest.mark.filterwarnings(LANES),
    # Dynamo looks at `.grad` of what it meets between two graphs, and torch warns of that
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]

WIDTH = 40


class Net(nn.Module):
    """Two linears with something of the test's own between them; `extra` is one more parameter."""

    def __init__(self, between: Callable[..., Tensor], *extra: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 24)
        self.extra = nn.Parameter(torch.randn(extra or (WIDTH,)))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(torch.tanh(self.first(x)), self.extra))


def ordinary(model: nn.Module, loss_of: Callable[..., Tensor] | None = None) -> Training:
    """zero_grad, loss, backward, step, on three batches."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    measure = loss_of or (lambda m, x, y: F.mse_loss(m(x), y))

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = measure(model, x, y)
        loss.backward()
        optimizer.step()
        return loss

    return Training(step, model, [(torch.randn(20, 6), torch.randn(20, 24)) for _ in range(3)])


def check(make: Callable[[], Training], capture: str, **options: Any) -> list[Any]:
    """Three steps, whole or with the model compiled in place, against eager and fp64."""
    steps: list[Any] = []

    def compile_fn(training: Training) -> Any:
        if capture == "whole":
            steps.append(trainfuse.compile(training.step, backend="eager", **options))
            return steps[0]
        trainfuse.compile(training.model, backend="eager", **options)
        return training.step

    gradient_report(make, compile_fn, rng=options.get("rng", "fast")).check()
    if capture == "whole":
        assert [plan.kind for plan in steps[0].plans] == ["whole_step"]
    return steps


CAPTURES = pytest.mark.parametrize("capture", ["whole", "regions"])


# -------------------------------------------------------------------------- broadcast, views


def written_through_views(h: Tensor, w: Tensor) -> Tensor:
    h = h * 1.0
    h.t()[0].mul_(3)
    h[:, 1] = w[:20]
    h.view(-1)[5:9] += 1
    return h


def base_written_after_the_view(h: Tensor, w: Tensor) -> Tensor:
    h = h * 1.0
    view = h[1:3]
    h.add_(w)
    return h + view.sum()


def written_into_zeros(h: Tensor, w: Tensor) -> Tensor:
    made = torch.zeros_like(h)
    made[:, :20] = h[:, 20:]
    made[2] = w
    return made + h


BETWEEN: dict[str, tuple[Callable[..., Tensor], tuple[int, ...]]] = {
    "broadcast a row": (lambda h, w: (h + w) * w.exp(), (WIDTH,)),
    "broadcast a column": (lambda h, w: h * w - w, (20, 1)),
    "broadcast a scalar": (lambda h, w: h * w + w.exp(), ()),
    "expand": (lambda h, w: h + w.expand(20, WIDTH) * 2, (WIDTH,)),
    "sum_to_size": (lambda h, w: (h[None] * w).sum_to_size(20, WIDTH), (3, 1, 1)),
    "view": (lambda h, w: (h.view(-1, 8) * w).view(20, WIDTH), (8,)),
    "views": (written_through_views, (WIDTH,)),
    "base after view": (base_written_after_the_view, (WIDTH,)),
    "zeros": (written_into_zeros, (WIDTH,)),
    "masked": (lambda h, w: h.masked_fill(h > 0.3, 0.5) + torch.where(h > w, h, w), (WIDTH,)),
}


@pytest.mark.covers("S broadcast", "S views")
@CAPTURES
@pytest.mark.parametrize("name", BETWEEN)
def test_broadcasts_and_views(name: str, capture: str) -> None:
    between, extra = BETWEEN[name]
    check(lambda: ordinary(Net(between, *extra) if extra else scalar_net(between)), capture)


def scalar_net(between: Callable[..., Tensor]) -> Net:
    net = Net(between)
    net.extra = nn.Parameter(torch.tensor(0.7))
    return net


# ----------------------------------------------------------------- tied, unused, frozen


class Tied(nn.Module):
    """An embedding, and a head with its weight; one more layer that nothing uses."""

    def __init__(self, frozen: str | None = None) -> None:
        super().__init__()
        self.tokens = nn.Embedding(24, WIDTH)
        self.body, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(3, 3)
        self.head = nn.Linear(WIDTH, 24, bias=False)
        self.head.weight = self.tokens.weight
        for name in filter(None, [frozen]):
            getattr(self, name).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x[:, 0] * 7).long().remainder(24)
        return self.head(F.gelu(self.body(self.tokens(tokens))))


@pytest.mark.covers("S tied", "G8")
@CAPTURES
@pytest.mark.parametrize("frozen", [None, "tokens", "body"])
def test_tied_unused_and_frozen_parameters(frozen: str | None, capture: str) -> None:
    """G8: both uses of a tied weight add up; an unused parameter keeps no gradient."""
    check(lambda: ordinary(Tied(frozen)), capture)


@pytest.mark.covers("G8")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_hooks_of_a_tied_weight_see_the_whole_gradient() -> None:
    """G8: one accumulation path: the hook runs once, on the sum."""

    def scenario(compile_):
        torch.manual_seed(0)
        model, sums = Tied(), []
        model.head.weight.register_hook(lambda grad: (sums.append(grad.sum()), grad * 2)[1])
        compile_(model)
        observed = []
        for i in range(3):
            model.zero_grad()
            F.mse_loss(model(batch(i)[0]), torch.zeros(5, 24)).backward()
            observed.append(seen(model.tokens.weight.grad, sums[-1], len(sums)))
        return observed

    assert_like_eager(scenario, "eager")


# --------------------------------------------------------------------- losses, detach


def several_losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    ridge = sum(p.square().sum() for p in model.parameters())
    return F.mse_loss(out, y) + 0.3 * F.smooth_l1_loss(out.exp(), y) + 1e-3 * ridge


def partly_detached(h: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        gate = torch.sigmoid(h * w)
        frozen = h.clone()
        frozen.mul_(2)
    return h * gate + (h * w).detach() * w + w * frozen


@pytest.mark.covers("S losses")
@CAPTURES
def test_several_losses(capture: str) -> None:
    check(lambda: ordinary(Net(lambda h, w: h * w), several_losses), capture)


@pytest.mark.covers("S losses", "S retain")
def test_two_backwards_in_one_step() -> None:
    """The first keeps the graph for the second; one trainable part takes only one of them."""

    def make() -> Training:
        model = Net(lambda h, w: h * w)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            optimizer.zero_grad()
            out = model(x)
            first, second = F.mse_loss(out, y), out.abs().mean()
            first.backward(retain_graph=True)
            second.backward()
            optimizer.step()
            return first, second

        return Training(step, model, ordinary(model).batches)

    check(make, "whole")
    check(make, "regions")


@pytest.mark.covers("S detach", "G12")
@CAPTURES
def test_partial_detach(capture: str) -> None:
    check(lambda: ordinary(Net(partly_detached)), capture)


@pytest.mark.covers("S detach", "G12", "G13", "S lists")
def test_flags_and_cotangents_of_what_is_returned() -> None:
    """G12, G13: a value, its detached twin and a function of it; both cotangents, then one."""

    def scenario(compile_):
        torch.manual_seed(0)
        model = Net(lambda h, w: h * w)

        def values(x):
            h = model(x)
            with torch.no_grad():
                quiet = h * 2
            return [h, h.detach(), quiet, torch.sin(h), h > 0]

        compiled = compile_(values)
        observed = []
        for used in ((0, 3), (0,), (3,), (3, 0)):
            model.zero_grad()
            x, _ = batch(len(observed))
            results = compiled(x)
            sum((results[i] * (i + 1)).sum() for i in used).backward()
            flags = [r.requires_grad for r in results]
            observed.append((seen(results, [p.grad for p in model.parameters()]), flags))
        with torch.no_grad():
            observed.append([r.requires_grad for r in compiled(batch(0)[0])])
        return observed

    for backend in ("triton", "eager"):
        assert_like_eager(scenario, backend)


# -------------------------------------------------------------------------- checkpointing


def keeps_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    must = CheckpointPolicy.MUST_SAVE
    return must if op in products else CheckpointPolicy.PREFER_RECOMPUTE


def keeps_nothing(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


def selective(policy: Any) -> dict[str, Any]:
    contexts = partial(create_selective_checkpoint_contexts, policy)
    return {"use_reentrant": False, "context_fn": contexts}


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "not reentrant": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "products kept": selective(keeps_products),
    "nothing kept": selective(keeps_nothing),
    "a list": selective([torch.ops.aten.addmm.default]),
}


class Checkpointed(nn.Module):
    def __init__(self, how: dict[str, Any], nested: bool = False, rate: float = 0.3) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 24)
        self.body = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(rate), nn.Linear(WIDTH, WIDTH)
        )
        self.around = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.how, self.nested = how, nested

    def inner(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, **self.how) + x

    def outer(self, x: Tensor) -> Tensor:
        return self.around(self.inner(x)) * 2

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = checkpoint(self.outer, h, **self.how) if self.nested else self.outer(h)
        return self.last(h)


@pytest.mark.covers("S checkpoint", "G15", "G17")
@pytest.mark.filterwarnings("ignore:.*context_fn.*")
@CAPTURES
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints_with_dropout(name: str, capture: str) -> None:
    """G15, G17: what is made again has the mask that was drawn, inside or outside."""
    for rng in ("eager", "fast") if "reentrant" in name else ("fast",):
        check(lambda: ordinary(Checkpointed(CHECKPOINTS[name])), capture, rng=rng)


@pytest.mark.covers("S checkpoint")
@CAPTURES
@pytest.mark.parametrize("reentrant", [False, True])
def test_nested_checkpoints(reentrant: bool, capture: str) -> None:
    how = {"use_reentrant": reentrant}
    check(lambda: ordinary(Checkpointed(how, nested=True)), capture, rng="eager")


@pytest.mark.covers("G17")
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_a_compiled_function(reentrant: bool) -> None:
    """G17: torch runs the compiled body twice, from one random state: the masks agree."""
    body = trainfuse.compile(lambda x: F.dropout(x, 0.5).exp(), backend="triton")
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(40, 30, requires_grad=True)
        out = checkpoint(body, x, use_reentrant=reentrant)
        (grad,) = torch.autograd.grad(out.sum(), x) if not reentrant else (_through(out, x),)
        kept = out != 1.0
        torch.testing.assert_close(grad, torch.where(kept, 2 * out, torch.zeros(())))


def _through(out: Tensor, x: Tensor) -> Tensor:
    x.grad = None
    out.sum().backward()
    assert x.grad is not None
    return x.grad


# --------------------------------------------------------------------------- modes, flips


@pytest.mark.covers("S modes", "C3")
def test_train_and_eval_in_turn() -> None:
    """C3: dropout of 0.9, batch norm: eval() drops nothing and moves no statistic."""

    def scenario(compile_):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.9), nn.BatchNorm1d(8))
        compiled = compile_(lambda x: model(x))
        observed = []
        for i, train in enumerate((True, False, True, False)):
            model.train(train)
            torch.manual_seed(i)
            out = compiled(batch(i)[0])
            observed.append(seen(out, list(model.buffers())))
        return observed

    assert_like_eager(scenario, "eager", rng="eager")
    drop = nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.9))
    compiled = trainfuse.compile(lambda x: drop(x), backend="triton")
    x = torch.randn(20, 6)
    rates = []
    for train in (True, False, True):
        drop.train(train)
        rates.append(float((compiled(x) == 0).float().mean()))
    assert rates[0] > 0.8
    assert rates[1] == 0
    assert rates[2] > 0.8


@pytest.mark.covers("S modes")
def test_no_grad_and_inference_mode_in_turn() -> None:
    def scenario(compile_):
        torch.manual_seed(0)
        model = Net(lambda h, w: h * w)
        compiled = compile_(lambda x: model(x))
        observed: list[Any] = []
        modes = (torch.inference_mode, torch.enable_grad, torch.no_grad)
        for i, mode in enumerate(modes * 2):
            with mode():
                out = compiled(batch(i)[0])
            observed.append((seen(out), out.requires_grad, out.is_inference()))
            if out.requires_grad:
                model.zero_grad()
                out.square().sum().backward()
                observed.append(seen([p.grad for p in model.parameters()]))
        return observed

    assert_like_eager(scenario, "eager")


@pytest.mark.covers("S flips", "C2")
@pytest.mark.parametrize("whole", [True, False])
def test_frozen_then_trained_again(whole: bool) -> None:
    """C2: freeze, step, un-freeze, step: the layer stands still, then moves; one plan each."""

    def scenario(compile_):
        torch.manual_seed(0)
        model = Net(lambda h, w: h * w)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss_of(x):
            return model(x).square().mean()

        compiled = compile_(loss_of) if not whole else loss_of

        def step(x):
            optimizer.zero_grad()
            loss = compiled(x)
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = compile_(step) if whole else step
        observed = []
        for i, trained in enumerate((True, False, True, False, True)):
            model.first.requires_grad_(trained)
            observed.append(seen(run(batch(i)[0]), list(model.parameters())))
        return observed

    (step,) = assert_like_eager(scenario, "eager")
    # torch 2.11 runs one region for both, whose gradients of frozen parameters go nowhere
    assert len(step.plans) in ((2,) if whole else (2, 4))


# ------------------------------------------------------------------------------ GradScaler


@pytest.mark.covers("S scaler", "G19")
@pytest.mark.parametrize("backend", ["triton", pytest.param("eager", marks=pytest.mark.nightly)])
def test_grad_scaler_with_one_overflow(backend: str) -> None:
    """G19: scale, unscale, clip, step, update; the step with an infinity is skipped."""

    def play(compile_: Callable[[Any], Any], half: bool) -> Iterator[tuple[float, list[Tensor]]]:
        torch.manual_seed(0)
        model = Net(lambda h, w: F.layer_norm(h * w, (WIDTH,)))
        if not half:
            model.double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=4)

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16, enabled=half):
                out = model(x)
            loss = F.mse_loss(out.to(y.dtype), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            return loss.detach()

        compiled = compile_(step)
        for i in range(20):
            generator = torch.Generator().manual_seed(i)
            x = torch.randn(20, 6, generator=generator)
            if i == 7:
                x[0, 0] = float("inf")
            target = torch.zeros(20, 24)
            compiled(x, target) if half else compiled(x.double(), target.double())
            yield scaler.get_scale(), [p.detach().double().clone() for p in model.parameters()]

    options = {"backend": backend, "keep_gradients": True}
    ours = list(play(lambda f: trainfuse.compile(f, **options), True))
    theirs = list(play(lambda f: f, True))
    exact = list(play(lambda f: f, False))
    assert [scale for scale, _ in ours] == [scale for scale, _ in theirs]
    assert ours[7][0] == ours[6][0] / 2
    for before, after in zip(ours[6][1], ours[7][1], strict=True):
        assert torch.equal(before, after), "the step with an infinity was taken"
    for mine, eager, fp64 in zip(ours[-1][1], theirs[-1][1], exact[-1][1], strict=True):
        error, own = (float((p - fp64).square().mean().sqrt()) for p in (mine, eager))
        assert error <= 3 * own + 1e-6
