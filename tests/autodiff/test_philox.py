"""Dropout masks: bit-identical with triton's Philox, pure functions of the seed, never saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode
from training_graphs import training_graph

from autodiff import masks, philox
from autodiff.recompute import plan_recompute
from autodiff.reference import run_graph
from autodiff.rng import functionalize_dropout
from autodiff.verify import verify

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
keep_mask: Any = torch.ops.trainfuse.keep_mask


@triton.jit
def words_kernel(seed_ptr, out_ptr, offset, count, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    block = (index // 4).to(tl.uint32)
    zero = block * 0
    w0, w1, w2, w3 = tl.philox(tl.load(seed_ptr), block, zero + offset, zero, zero, n_rounds=7)
    lane = index % 4
    word = tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3)))
    tl.store(out_ptr + index, word.to(tl.int64), mask=index < count)


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, -5, 123456789012345678])
@pytest.mark.parametrize("offset", [0, 7])
def test_same_bits_as_triton(seed: int, offset: int) -> None:
    count = 1001  # not a multiple of 4: the last counter is used in part
    seeds = torch.tensor([seed], device=DEVICE)
    theirs = torch.empty(count, device=DEVICE, dtype=torch.int64)
    words_kernel[(1,)](seeds, theirs, offset, count, BLOCK=1024)
    block = torch.arange((count + 3) // 4, device=DEVICE)
    zero = torch.zeros_like(block)
    words = philox.philox(seeds, (block, zero + offset, zero, zero))
    assert torch.equal(torch.stack(words, -1).reshape(-1)[:count], theirs)
    for p in (0.1, 0.5):
        assert torch.equal(keep_mask(seeds, offset, p, [count]), theirs >= round(p * 2**32))


@pytest.mark.parametrize("width", [1, 3, 7, 15, 16, 17, 18, 20, 255])
@pytest.mark.parametrize("rows", [(), (6,), (2, 3)])
def test_rows_of_16_elements_begin_blocks(width: int, rows: tuple[int, ...]) -> None:
    """Shorter ones follow one another, without a gap."""
    seed = torch.tensor([-1234567890123456789])
    mask = keep_mask(seed, 3, 0.5, [*rows, width])
    pitch = width if width < 16 else -(-width // 4) * 4
    stream = keep_mask(seed, 3, 0.5, [mask.numel() // width * pitch])
    assert mask.is_contiguous()
    assert torch.equal(mask, stream.view(*rows, pitch)[..., :width])


def plain_philox(seed: int, counter: tuple[int, int, int, int]) -> list[int]:
    """Philox4x32-7 on Python's numbers."""
    word, (c0, c1, c2, c3) = (1 << 32) - 1, counter
    low, high = seed & word, seed >> 32 & word
    for _ in range(7):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = b >> 32 ^ c1 ^ low, b & word, a >> 32 ^ c3 ^ high, a & word
        low, high = (low + 0x9E3779B9) & word, (high + 0xBB67AE85) & word
    return [c0, c1, c2, c3]


@pytest.mark.parametrize("seed", [-5, 123456789012345678])
def test_every_word_of_any_counter(seed: int) -> None:
    """All four words of the counter, each of any size, and counters that broadcast together."""
    torch.manual_seed(0)
    counter = [torch.randint(1 << 32, (50,)) for _ in range(4)]
    counter[1], counter[2][:2] = counter[1][:1], torch.tensor([0, 0xFFFFFFFF])
    words = philox.philox(torch.tensor([seed]), (*counter,))
    rows = zip(*(c.expand(50).tolist() for c in counter), strict=True)
    expected = torch.tensor([plain_philox(seed, row) for row in rows])
    assert torch.equal(torch.stack(words, -1), expected)
    before = [c.clone() for c in counter]
    philox.philox(torch.tensor([seed]), (*counter,))
    assert all(map(torch.equal, counter, before)), "the counter was written"


def test_a_mask_is_few_launches() -> None:
    """On a GPU they and not the elements are what a small mask costs."""
    launches = []

    class Launches(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if not any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns):
                launches.append(func)
            return func(*args, **(kwargs or {}))

    with Launches():
        philox.keep_mask(torch.tensor([7]), 3, 0.5, [64, 48])
    assert len(launches) <= 4 * 7 + 25


def test_philox_known_answer() -> None:
    # Random123's kat_vectors, philox4x32 7 rounds: zero counter and key, then all ones.
    zero = torch.zeros(1, dtype=torch.int64)
    words = [int(word) for word in philox.philox(zero, (zero, zero, zero, zero))]
    assert words == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    ones = torch.full((1,), 0xFFFFFFFF)
    words = [int(word) for word in philox.philox(torch.full((1,), -1), (ones, ones, ones, ones))]
    assert words == [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]


@pytest.mark.parametrize("p", [0.0, 0.15, 0.5, 0.85, 1.0])
def test_drop_rate(p: float) -> None:
    mask = keep_mask(torch.tensor([42]), 3, p, [500, 200])
    rate = 1 - mask.float().mean().item()
    assert abs(rate - p) < 0.01
    assert p not in (0.0, 1.0) or rate == p


def test_mask_depends_on_seed_and_draw_not_on_shape() -> None:
    one, two = torch.tensor([1]), torch.tensor([2])
    mask = keep_mask(one, 0, 0.5, [64, 8])
    assert torch.equal(mask, keep_mask(one, 0, 0.5, [64, 8]))
    assert torch.equal(mask.flatten(), keep_mask(one, 0, 0.5, [512]))
    assert keep_mask(one, 0, 0.5, [3, 0]).shape == (3, 0)
    assert not torch.equal(mask, keep_mask(one, 1, 0.5, [64, 8]))
    assert not torch.equal(mask, keep_mask(two, 0, 0.5, [64, 8]))
    assert keep_mask(one, 0, 0.5, [0, 3]).shape == (0, 3)
    assert keep_mask(one, 0, 0.5, []).shape == ()


def test_seed_follows_the_default_generator() -> None:
    like = torch.empty(1)
    torch.manual_seed(7)
    first, second = torch.ops.trainfuse.seed(like), torch.ops.trainfuse.seed(like)
    torch.manual_seed(7)
    assert torch.equal(first, torch.ops.trainfuse.seed(like))
    assert not torch.equal(first, second)


def test_operators_pass_torchs_own_checks() -> None:
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(keep_mask.default, (torch.tensor([3]), 1, 0.5, [4, 5]), test_utils=checks)


def two_dropouts(x: torch.Tensor, p: float) -> torch.Tensor:
    y = torch.native_dropout(torch.sin(x), p, True)[0]
    return torch.native_dropout(torch.exp(y), p, True)[0] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_backward_mask_is_the_forward_mask(p: float, dtype: torch.dtype) -> None:
    x = torch.randn(40, 50, dtype=dtype)
    traced = training_graph(lambda x: two_dropouts(x, p), [x], [0])
    tg, report = plan_recompute(functionalize_dropout(traced))
    verify(tg)
    assert not any("keep_mask" in name for name in report.saved)
    torch.manual_seed(0)
    cotangent = torch.randn(40, 50, dtype=dtype)
    output, gradient = run_graph(tg, [x, cotangent])
    names = [node.name for node in tg.nodes() if "keep_mask" in node.name]
    assert p in (0.0, 1.0) or len(names) == 4  # two forward, the same two again in the backward
    torch.manual_seed(0)
    torch.randn(40, 50, dtype=dtype)
    seed = torch.ops.trainfuse.seed(x)
    scale = 0.0 if p == 1 else 1 / (1 - p)
    leaf = x.double().requires_grad_()
    inner = torch.sin(leaf) * keep_mask(seed, 0, p, [40, 50]) * scale
    wanted = torch.exp(inner) * keep_mask(seed, 1, p, [40, 50]) * scale * 3
    (wanted_gradient,) = torch.autograd.grad(wanted, leaf, cotangent.double())
    # Values only pass through six roundings; the masks are compared exactly, below.
    tolerance = {"rtol": 32 * torch.finfo(dtype).eps, "atol": 8 * torch.finfo(dtype).eps}
    torch.testing.assert_close(output.double(), wanted.detach(), **tolerance)
    torch.testing.assert_close(gradient.double(), wanted_gradient, **tolerance)
    # Zeros come from the mask alone, so equal zeros prove equal masks whatever the rounding.
    assert torch.equal(output == 0, wanted == 0)
    assert torch.equal(gradient == 0, wanted_gradient == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_halves_are_dropped_as_if_in_fp32_and_rounded_once(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward to the bit, in two launches each and without a cast."""
    launches: list[Any] = []

    class Launches(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            launches.append(func)
            return func(*args, **(kwargs or {}))

    values = torch.randn(4096) * torch.randn(4096).exp()
    grad, drawn = torch.randn(4096).to(dtype), masks.Masks()
    ours, leaf = (values.to(dtype).requires_grad_() for _ in range(2))
    keep = drawn.keep(ours, 0.3)
    monkeypatch.setattr(masks.Masks, "keep", lambda *_: keep)
    with Launches():
        made, _ = drawn.scaled(ours, 0.3)
        (found,) = torch.autograd.grad(made, ours, grad)
    assert [f.overloadpacket for f in launches].count(torch.ops.aten.mul) == 4
    assert torch.ops.aten._to_copy.default not in launches
    expected = (leaf.float() * keep * (1.0 / (1.0 - 0.3))).to(dtype)
    (wanted,) = torch.autograd.grad(expected, leaf, grad)
    assert torch.equal(made, expected)
    assert torch.equal(found, wanted)


def test_dropped_infinity_is_nan_as_in_eager() -> None:
    x = torch.full((64,), float("inf"))
    tg = functionalize_dropout(
        training_graph(lambda x: torch.native_dropout(x, 0.5, True)[0], [x], [0])
    )
    output, _ = run_graph(tg, [x, torch.ones(64)])
    eager = torch.native_dropout(x, 0.5, True)[0]
    assert output.isnan().any()
    assert eager.isnan().any()


@pytest.mark.parametrize("shape", [[0], [1], [19], [20, 3], [3, 19]])
def test_a_mask_in_pieces_is_the_mask(shape: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    seed = torch.tensor([1234567890123456789])
    whole = philox.keep_mask(seed, 5, 0.5, shape)
    monkeypatch.setattr(philox, "_PIECE", 2)
    assert torch.equal(philox.keep_mask(seed, 5, 0.5, shape), whole)


@pytest.mark.parametrize("piece", [8, 100, 1 << 20])
@pytest.mark.parametrize("shape", [[], [3], [5, 18], [2, 3, 7], [0, 4]], ids=str)
def test_masks_drawn_together_are_those_drawn_alone(
    piece: int, shape: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seed, offsets = torch.tensor([-42]), [3, 5, 6, (1 << 32) - 1, 11]
    alone = [philox.keep_mask(seed, offset, 0.3, shape) for offset in offsets]
    monkeypatch.setattr(philox, "_PIECE", piece)
    together = philox.keep_masks(seed, offsets, 0.3, shape)
    for mask, expected in zip(together, alone, strict=True):
        assert mask.is_contiguous()
        assert torch.equal(mask, expected)


def test_dropouts_that_are_alike_are_drawn_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where masks are kept; one that is not as expected draws for itself."""
    drawn_alone, expected = (
        masks.Masks(),
        [(0.5, (4, 6)), (0.1, (3,)), (0.5, (4, 6)), (0.5, (4, 6))],
    )
    calls: list[int] = []
    own = philox.philox
    monkeypatch.setattr(philox, "philox", lambda *a: (calls.append(1), own(*a))[1])
    kept: masks.Drawn = {}
    runs = [masks.Masks(drawn=kept, expected=expected) for _ in range(2)]
    asked = [(0.5, (4, 6)), (0.1, (3,)), (0.2, (4, 6)), (0.5, (4, 6))]
    for one in (drawn_alone, *runs):
        one.seeds[torch.device("cpu")] = torch.tensor([7])
    for (p, shape), draws in zip(asked, (1, 1, 1, 0), strict=True):
        x = torch.zeros(shape)
        want = drawn_alone.keep(x, p)
        calls.clear()
        assert torch.equal(runs[0].keep(x, p), want)
        assert len(calls) == draws
    calls.clear()
    for offset, (p, shape) in enumerate(expected):
        mask = runs[1].keep(torch.zeros(shape), p)
        assert torch.equal(mask, philox.keep_mask(torch.tensor([7]), offset, p, [*shape]))
    assert len(calls) == len(expected), "only the test has drawn"
