"""The fusion checklist: reductions, norms, dropout, products, gathers, autocast, guards."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trainfuse
from tests.gradients.five_calls import assert_no_fallback, five_calls, kernels, t
from trainfuse.testing import assert_gradients_match

# numpy's, of lanes beyond the mask: they compute on what they hold, as on a GPU
pytestmark = pytest.mark.filterwarnings(
    "ignore:(invalid value|divide by zero|overflow) encountered:RuntimeWarning"
)

# ----------------------------------------------------------------------------------- reduction

AXES = [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)]


@pytest.mark.covers("B reduction")
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_axes(axes: tuple[int, ...], keep: bool) -> None:
    """Every set of axes, kept or not, of a value made in the same kernel."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(x) * 2
        return y.sum(axes, keepdim=keep), y.amax(axes, keepdim=keep)

    five_calls(fn, lambda: (t(4, 5, 6),), 1, 1, calls=2)


KINDS: dict[str, Any] = {
    "sum": lambda y: y.sum(),
    "mean": lambda y: y.mean(-1),
    "variance": lambda y: y.var(-1),
    "variance, no correction": lambda y: y.var(-1, correction=0),
    "deviation": lambda y: y.std(0),
    "deviation, no correction": lambda y: y.std(0, correction=0),
    "size one": lambda y: y[:, :1].sum(1),
    "0-dim": lambda y: y.sum().sum(),
    "mean of all": lambda y: y.mean(),
}


@pytest.mark.covers("B reduction")
@pytest.mark.parametrize("name", KINDS)
def test_kinds(name: str) -> None:
    def fn(x: Tensor) -> Tensor:
        return KINDS[name](x.sin() * 2)

    step = trainfuse.compile(fn, backend="triton", whole_step=False)
    for seed in range(5):
        assert_gradients_match(fn, (t(6, 9),), compile_fn=lambda _: step, seed=seed)
    assert_no_fallback(step)
    assert kernels(step)["forward"] <= 1


@pytest.mark.covers("B reduction")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool])
def test_integers(dtype: torch.dtype) -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x | x
        return y.sum(-1), (y != 0).sum(0)

    step = trainfuse.compile(fn, backend="triton", whole_step=False)
    for seed in range(3):
        assert_gradients_match(fn, (t(6, 9, dtype=dtype),), compile_fn=lambda _: step, seed=seed)
    assert_no_fallback(step)


MORE: dict[str, tuple[Any, int, int]] = {
    "before and after": (lambda x: torch.exp(torch.tanh(x).sum(-1, keepdim=True) * 0.1) * x, 1, 1),
    "both returned": (lambda x: (lambda y: (y, y.sum(-1)))(torch.tanh(x) * 2), 1, 1),
    "two of one row": (lambda x: (x.sin().sum(-1), x.cos().amax(-1)), 1, 1),
    "two axes": (lambda x: (lambda y: (y.sum(-1), y.sum(0)))(torch.tanh(x) * 2), 1, 1),
    "a dead one": (lambda x: (x.sum(-1), torch.tanh(x) * 2)[1], 1, 1),
}


@pytest.mark.covers("B reduction, more")
@pytest.mark.parametrize("name", MORE)
def test_reductions_with_their_surroundings(name: str) -> None:
    fn, forward, backward = MORE[name]
    step = five_calls(fn, lambda: (t(6, 9),), forward, backward)
    if name == "a dead one":
        assert "sum" not in step.graph_for().split("# backward")[0]


@pytest.mark.covers("B reduction, more")
def test_a_varying_axis() -> None:
    """Each axis is a plan; coming back to one makes none."""

    def fn(x: Tensor, axis: int) -> Tensor:
        return torch.tanh(x).sum(axis) * 2

    step = trainfuse.compile(fn, backend="triton", whole_step=False)
    for seed, axis in enumerate((0, 1, 2, 0, 1)):
        assert_gradients_match(fn, (t(4, 5, 6), axis), compile_fn=lambda _: step, seed=seed)
    assert len(step.plans) == 6
    assert_no_fallback(step)


# --------------------------------------------------------------------------------------- norms


@pytest.mark.covers("B norms", "G11")
@pytest.mark.parametrize(("gain", "shift"), [*itertools.product([False, True], repeat=2)])
def test_layer_norm(gain: bool, shift: bool) -> None:
    def fn(x: Tensor, *affine: Tensor) -> Tensor:
        given = list(affine)
        weight = given.pop(0) if gain else None
        bias = given.pop(0) if shift else None
        return F.layer_norm(F.gelu(x), x.shape[-1:], weight, bias)

    five_calls(fn, lambda: (t(6, 13), *(t(13) for wanted in (gain, shift) if wanted)), 1, 1)


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(x)) * 2


@pytest.mark.covers("B norms")
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("train", [False, True])
def test_batch_norm(train: bool, tracked: bool, affine: bool) -> None:
    """Running statistics and the counter move as eager's; sizes fill no block."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(5, affine=affine, track_running_stats=tracked)
    module = Normed(norm).train(train)
    for shape in ((3, 5, 7, 3), (4, 5, 1, 1)):
        assert_gradients_match(
            module,
            (t(*shape),),
            compile_fn=lambda m: trainfuse.compile(m, backend="triton"),
        )


@pytest.mark.covers("G11")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_of_a_large_mean(dtype: torch.dtype) -> None:
    """G11: rows of mean 1000 and deviation 1; fp32 statistics, shifted, for half rows too."""

    def fn(x: Tensor, gain: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], gain, None) * 2

    def make() -> tuple[Tensor, Tensor]:
        x = (torch.randn(24, 65) + 1000).to(dtype).requires_grad_()
        return x, torch.rand(65).add(0.5).to(dtype).requires_grad_()

    five_calls(fn, make, 1, 1)


# ------------------------------------------------------------------------------------- softmax

SOFTMAX: dict[str, Any] = {
    "log": lambda x: F.log_softmax(x * 2, -1) + 1,
    "dtype": lambda x: F.softmax(x * 2, -1, dtype=torch.float64) * 2,
    "first axis": lambda x: F.softmax(x * 2, 0) * 3,
    "with a norm": lambda x: F.softmax(F.layer_norm(x, x.shape[-1:]), -1) * x,
    "two in a row": lambda x: F.log_softmax(F.softmax(x, -1), -1),
}


@pytest.mark.covers("B softmax")
@pytest.mark.parametrize("name", SOFTMAX)
def test_softmax(name: str) -> None:
    five_calls(SOFTMAX[name], lambda: (t(7, 12),), 1, 1)


@pytest.mark.covers("B softmax")
def test_chunk_between() -> None:
    def fn(x: Tensor) -> Tensor:
        a, b = F.softmax(x, -1).chunk(2, -1)
        return F.softmax(a * 2, -1) + b

    step = trainfuse.compile(fn, backend="triton", whole_step=False)
    for seed in range(3):
        assert_gradients_match(fn, (t(7, 12),), compile_fn=lambda _: step, seed=seed)
    assert_no_fallback(step)


# --------------------------------------------------------------------------- scalars, devices


@pytest.mark.covers("B scalars, devices")
def test_scalars_of_no_dimension() -> None:
    def fn(x: Tensor, s: Tensor, k: Tensor) -> Tensor:
        return torch.tanh(x.t() * s) + k

    five_calls(fn, lambda: (t(5, 7), t(), t(grad=False)), 1, 1)


@pytest.mark.covers("B scalars, devices")
def test_no_tensor_input() -> None:
    def fn(n: int) -> Tensor:
        return torch.ones(n, 3) * 2 + torch.arange(3)

    step = trainfuse.compile(fn, backend="triton", whole_step=False)
    for _ in range(3):
        torch.testing.assert_close(step(4), fn(4))


@pytest.mark.covers("B scalars, devices")
def test_a_second_device() -> None:
    """A result of mixed devices is eager's error; each device alone is served or refused."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(x * y) + 1

    step = trainfuse.compile(fn, backend="triton", whole_step=False)
    with pytest.raises(Exception, match=r"device|meta"):
        step(t(4, 5), torch.empty(4, 5, device="meta"))
    assert_gradients_match(fn, (t(4, 5), t(4, 5)), compile_fn=lambda _: step)


# ------------------------------------------------------------------------------------- dropout


@pytest.mark.covers("B dropout", "G14")
@pytest.mark.parametrize("p", [0.0, 0.15, 0.5, 0.85, 1.0])
def test_dropout(p: float) -> None:
    """G14: one mask in both phases, at its rate, independent of its neighbours."""

    def fn(x: Tensor) -> Tensor:
        return F.dropout(x.transpose(1, 2) * 1.0, p) * 1.0

    step = trainfuse.compile(fn, backend="triton", whole_step=False)
    x = torch.ones(8, 40, 80, requires_grad=True)
    masks = []
    for _ in range(3):
        out = step(x)
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert torch.isfinite(out).all()
        assert torch.equal(out == 0, grad.transpose(1, 2) == 0)
        rate = float((out == 0).float().mean())
        assert abs(rate - p) <= 4 * (p * (1 - p) / out.numel()) ** 0.5 + 1e-9
        masks.append(out == 0)
    if 0 < p < 1:
        assert not torch.equal(masks[0], masks[1])
        for neighbour in ((0, 1), (1, 1), (2, 1)):
            mask = masks[2].float() - rate
            moved = mask.roll(neighbour[1], neighbour[0])
            correlation = float((mask * moved).mean() / (rate * (1 - rate)))
            assert abs(correlation) < 5 / mask.numel() ** 0.5
    assert_no_fallback(step)


@pytest.mark.covers("B dropout")
def test_a_flag_that_flips() -> None:
    def fn(x: Tensor, training: bool) -> Tensor:
        return F.dropout(torch.tanh(x), 0.5, training) * 2

    step = trainfuse.compile(fn, backend="triton", whole_step=False)
    for seed, training in enumerate((True, False, True, False)):
        assert_gradients_match(fn, (t(20, 30), training), compile_fn=lambda _: step, seed=seed)
    assert len(step.plans) == 4


# ----------------------------------------------------------------------------------- autocast


@pytest.mark.covers("B autocast")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    """Both phases fused; each gradient has its input's type; the two uses of w add up in fp32."""

    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype):
            h = F.gelu(F.linear(x, w, b))
            return F.layer_norm((h @ w).float(), w.shape[-1:])

    step = trainfuse.compile(fn, backend="triton", whole_step=False)
    for seed in range(5):
        torch.manual_seed(seed)
        args = (t(40, 30), t(50, 30), t(50))
        assert_gradients_match(fn, args, compile_fn=lambda _: step, seed=seed, k=3.0)
    assert_no_fallback(step)
    assert kernels(step)["forward"] >= 1
    assert kernels(step)["backward"] >= 1


@pytest.mark.covers("B autocast")
def test_casts_that_nobody_reads_are_gone() -> None:
    def fn(x: Tensor) -> Tensor:
        half = x.to(torch.bfloat16)
        return torch.tanh(x) * half.shape[0]

    step = five_calls(fn, lambda: (t(6, 9),), 1, 1)
    assert "bfloat16" not in step.graph_for()


# ---------------------------------------------------------------------------------- GEMM, conv


@pytest.mark.covers("B GEMM, conv")
@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("computed", [False, True])
def test_linear_with_its_bias(rank: int, computed: bool) -> None:
    """The product stays ATen's, its bias too; what surrounds it is a kernel each way."""

    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.gelu(F.linear(x, w, torch.tanh(b * 2) if computed else b)) * 2

    shape = (2, 3, 4)[: rank - 1]
    step = trainfuse.compile(fn, backend="triton", whole_step=False)
    for seed in range(2):
        args = (t(*shape, 6), t(9, 6), t(9))
        assert_gradients_match(fn, args, compile_fn=lambda _: step, seed=seed)
    assert_no_fallback(step)
    found = kernels(step)
    assert found["forward"] == 1 + computed
    assert found["backward"] >= 1


@pytest.mark.covers("B GEMM, conv", "G1")
def test_convolution_of_a_resampled_crop() -> None:
    """G1: bilinear by 1.5, crop, conv, max-pool, where: gradients to within twice eager's error."""

    def fn(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> Tensor:
        x = F.interpolate(x, scale_factor=1.5, mode="bilinear", align_corners=False)
        x = F.conv2d(x[:, :, 1:-1, 2:], w, b, padding=1)
        h = F.max_pool2d(F.relu(x), 2)
        pooled = F.max_pool2d(h, 3, 1, 1)
        return torch.where(h > 0.2, F.conv2d(h, v), pooled)

    step = trainfuse.compile(fn, backend="triton", whole_step=False)
    for seed in range(3):
        torch.manual_seed(seed)
        args = (t(2, 3, 8, 8), t(4, 3, 3, 3), t(4, 4, 1, 1), t(4))
        assert_gradients_match(fn, args, compile_fn=lambda _: step, seed=seed)
    assert_no_fallback(step)


@pytest.mark.covers("B GEMM, conv")
def test_products_of_changing_shapes() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return torch.sigmoid(x @ w) * 2 + 1

    step = trainfuse.compile(fn, backend="triton", whole_step=False)
    for seed, rows in enumerate((3, 5, 3, 8)):
        assert_gradients_match(fn, (t(rows, 6), t(6, 4)), compile_fn=lambda _: step, seed=seed)
    assert len(step.plans) == 6
    assert_no_fallback(step)


# ------------------------------------------------------------------------------------- gather


def indices(*shape: int, high: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(high, shape).to(dtype)


GATHERS: dict[str, tuple[Any, Any]] = {
    "index_select": (
        lambda x, i: torch.tanh(x).index_select(0, i) * 2,
        lambda: (t(6, 5), indices(4, high=6)),
    ),
    "int32": (
        lambda x, i: torch.tanh(x).index_select(1, i) * 2,
        lambda: (t(6, 5), indices(7, high=5, dtype=torch.int32)),
    ),
    "gather": (
        lambda x, i: torch.tanh(x).gather(1, i) * 2,
        lambda: (t(6, 5), indices(6, 3, high=5)),
    ),
    "0-dim": (lambda x, i: torch.tanh(x).gather(0, i) * 2, lambda: (t(), indices(high=1))),
    "repeated": (lambda x, i: torch.tanh(x)[i].exp() + 1, lambda: (t(6, 5), indices(30, high=6))),
    "embedding": (lambda x, i: F.embedding(i, x).tanh(), lambda: (t(6, 5), indices(4, 3, high=6))),
}


@pytest.mark.covers("B gather")
@pytest.mark.parametrize("name", GATHERS)
def test_gathers(name: str) -> None:
    """Equal indices add up in the backward."""
    fn, make = GATHERS[name]
    step = trainfuse.compile(fn, backend="triton", whole_step=False)
    for seed in range(3):
        torch.manual_seed(seed)
        assert_gradients_match(fn, make(), compile_fn=lambda _: step, seed=seed)
    assert_no_fallback(step)


@pytest.mark.covers("B gather")
def test_a_dim_known_at_run_time() -> None:
    def fn(x: Tensor, i: Tensor, dim: int) -> Tensor:
        return torch.tanh(x).gather(dim, i) + 1

    step = trainfuse.compile(fn, backend="triton", whole_step=False)
    for seed, dim in enumerate((0, 1, 0)):
        args = (t(5, 5), indices(3, 3, high=5), dim)
        assert_gradients_match(fn, args, compile_fn=lambda _: step, seed=seed)


@pytest.mark.covers("B gather")
def test_sparse_gradients_stay_sparse() -> None:
    def fn(x: Tensor, i: Tensor) -> Tensor:
        return F.embedding(i, x, sparse=True).tanh() * 2

    step = trainfuse.compile(fn, backend="triton", whole_step=False)
    x, i = t(6, 5), indices(4, high=6)
    for _ in range(2):
        results = []
        for target in (step, fn):
            x.grad = None
            target(x, i).sum().backward()
            results.append(x.grad)
        assert results[0].layout == results[1].layout
        torch.testing.assert_close(results[0].to_dense(), results[1].to_dense())


# ------------------------------------------------------------------------------------- guards


@pytest.mark.covers("B guards")
def test_shapes_ranks_and_branches() -> None:
    """Three shapes, two ranks, both branches: one plan each, none made twice, none falls back."""

    def fn(x: Tensor, flag: bool) -> Tensor:
        if flag:
            return torch.tanh(x) * 2
        return torch.sigmoid(x) + 1

    step = trainfuse.compile(fn, backend="triton", whole_step=False, max_plans=16)
    shapes = [(4, 5), (3, 5), (7, 2), (2, 3, 4)]
    for seed, (shape, flag) in enumerate(itertools.product(shapes, (True, False))):
        assert_gradients_match(fn, (t(*shape), flag), compile_fn=lambda _: step, seed=seed)
    made = len(step.plans)
    assert made == 16
    for seed, (shape, flag) in enumerate(itertools.product(shapes, (True, False))):
        assert_gradients_match(fn, (t(*shape), flag), compile_fn=lambda _: step, seed=seed)
    assert len(step.plans) == made
    assert_no_fallback(step)


@pytest.mark.covers("B guards", "S modes")
def test_a_call_without_gradients_then_one_with() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.tanh(x) * 2 + x

    step = trainfuse.compile(fn, backend="triton", whole_step=False)
    x = t(4, 6)
    for mode in (torch.no_grad, torch.enable_grad, torch.no_grad, torch.enable_grad):
        with mode():
            ours, theirs = step(x), fn(x)
        assert ours.requires_grad == theirs.requires_grad
        torch.testing.assert_close(ours, theirs)
        if ours.requires_grad:
            (own,), (expected,) = (torch.autograd.grad(o.sum(), x) for o in (ours, theirs))
            torch.testing.assert_close(own, expected)
    assert {plan.kind for plan in step.plans} == {"inference", "forward", "backward"}
    assert_no_fallback(step)


@pytest.mark.covers("B guards")
def test_the_graph_is_asked_for_before_the_first_call() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.tanh(x) * 2

    step = trainfuse.compile(fn, backend="triton", whole_step=False)
    x = t(4, 6)
    assert "aten.tanh" in step.graph_for(x)
    torch.testing.assert_close(step(x), fn(x))
