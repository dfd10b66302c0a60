"""Random masks in kernels are the operator's, bit for bit, and drawn by fours at every width."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from codegen_support import check, lowered, trace
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._decomp import get_decompositions
from torch._subclasses import FakeTensorMode

import autodiff.rng  # noqa: F401 -- registers trainfuse.keep_mask
from autodiff.graph import Refusal
from trainfuse.codegen.choices import Choice
from trainfuse.codegen.lower import lower_nodes
from trainfuse.codegen.targets import H200, SIMULATED, CodegenOptions, Target
from trainfuse.fusion.domains import infer

aten = torch.ops.aten
randn = torch.randn
NORMS = get_decompositions(
    [aten.native_layer_norm, aten.native_layer_norm_backward, aten._softmax, aten._log_softmax]
)
TARGETS = {"interpreter": SIMULATED, "gpu": Target("sm_90", 2)}
SEED = torch.tensor([-1234567890123456789])
Body = Callable[[Tensor, Tensor], Any]


def masked(body: Body, p: float = 0.25) -> Callable[[Tensor, Tensor], Any]:
    """A function of a seed and x that gives its body a mask of x's shape."""

    def fn(seed: Tensor, x: Tensor) -> Any:
        return body(torch.ops.trainfuse.keep_mask(seed, 3, p, list(x.shape)), x)

    return fn


def norm_gradient(m: Tensor, x: Tensor) -> Any:
    """Sums along rows and over them: a mask in the second use of what a row was read for."""
    scaled = x * (x * m).sum(-1, keepdim=True)
    return scaled, scaled.flatten(0, -2).sum(0), (m * scaled).flatten(0, -2).sum(0)


DRAWN: dict[str, tuple[str, Body, tuple[int, ...]]] = {
    "flat": ("keep_vector", lambda m, x: m * x, (6, 64)),
    # 396 divides by 4, but not by the block
    "flat, odd": ("keep_vector", lambda m, x: m * x, (6 * 66,)),
    "odd rows": ("keep_vector", lambda m, x: m * x, (6, 67)),
    # rows too short to be padded are numbered on and on
    "rows of 7": ("keep_vector", lambda m, x: m * x, (60, 7)),
    "images of 7": ("keep_vector", lambda m, x: m * x, (3, 5, 7, 7)),
    "odd rows, a number each": ("keep_vector", lambda m, x: m * x + x[:, :1] + x[0], (6, 67)),
    "odd heads": ("keep_vector", lambda m, x: m.view(6, 67) * x.view(6, 67), (2, 3, 67)),
    "softmax of 96": ("keep_", lambda m, x: F.softmax(m * x, -1), (6, 3, 96)),
    "softmax of 23": ("keep_rows", lambda m, x: F.softmax(m * x, -1), (60, 23)),
    "softmax of 768": ("keep_", lambda m, x: F.softmax(m * x, -1), (5, 768)),
    "softmax of 1027": ("keep_run", lambda m, x: F.softmax(m * x, -1), (5, 1027)),
    "softmax of 20000": ("keep_vector", lambda m, x: F.softmax(m * x, -1), (2, 20000)),
    "softmax of 20001": ("keep_vector", lambda m, x: F.softmax(m * x, -1), (2, 20001)),
    "rows and columns": ("keep_", norm_gradient, (9, 37)),
    "long rows and columns": ("keep_run", norm_gradient, (9, 1027)),
    "columns": ("keep_rows", lambda m, x: (m * x).sum(0), (60, 24)),
    "odd columns": ("keep_rows", lambda m, x: (m * x).sum(0), (60, 27)),
    "everything": ("keep_vector", lambda m, x: (m * x).sum(), (60, 24)),
    "everything, odd": ("keep_vector", lambda m, x: (m * x).sum(), (60, 27)),
    "moments of everything, odd": ("keep_vector", lambda m, x: (m * x).var(), (60, 27)),
    "transposed": ("keep_vector", lambda m, x: m.t() * x.t(), (60, 24)),
    "odd, transposed": ("keep_vector", lambda m, x: m.t() * x.t(), (60, 27)),
    # walked across its rows: neighbours in the tile are far apart in the mask
    "permuted": ("keep(", lambda m, x: m.t().contiguous() * x.t().contiguous(), (60, 24)),
    # a row of the mask is no row of the kernel
    "rows split": ("keep(", lambda m, x: F.softmax((m * x).view(60, 3, 9), -1), (60, 27)),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", DRAWN)
def test_masks_are_the_operators_bits(name: str, target: str) -> None:
    """One element dropped or kept differently is an error of the size of the element."""
    function, body, shape = DRAWN[name]
    kernel = check(masked(body), [SEED, randn(shape)], table=NORMS, target=TARGETS[target])
    assert f"lib.{function}" in kernel.source
    # the few elements at the ends of rows that begin anywhere are drawn one by one
    assert ("lib.keep(" in kernel.source) == (function in ("keep(", "keep_run"))


CHOICES = {
    "held": Choice(held=True, warps=4),
    "chunks": Choice(held=False, block=256),
    "not ahead": Choice(held=False, block=256, ahead=False),
    "two rows": Choice(held=True, rows=2, warps=4),
}


@pytest.mark.parametrize("width", [513, 1030, 1027])
@pytest.mark.parametrize("choice", CHOICES)
def test_every_way_to_hold_a_row_draws_the_same(choice: str, width: int) -> None:
    kernel = check(
        masked(lambda m, x: (F.softmax(m * x, -1), m)),
        [SEED, randn(7, width)],
        table=NORMS,
        target=TARGETS["gpu"],
        choice=CHOICES[choice],
    )
    assert "lib.keep_" in kernel.source


def test_a_mask_that_is_a_row_kept_as_read() -> None:
    """Beside rows of halves, segment by segment, at the last segment's own block."""
    kernel = check(
        masked(lambda m, x: F.softmax(m * x, -1)),
        [SEED, randn(2, 8200).bfloat16()],
        table=NORMS,
        target=TARGETS["gpu"],
        choice=Choice(held=True, block=4096),
    )
    assert "lib.widen(" in kernel.source
    assert "lib.keep_vector(" in kernel.source


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda t: t,
    "flattened": lambda t: t.flatten(),
    "of rows": lambda t: t.flatten(0, -2),
    "unsqueezed": lambda t: t.unsqueeze(-1),
    "transposed": lambda t: t.transpose(-1, -2),
    "contiguous": lambda t: t.transpose(0, -1).contiguous(),
    "split": lambda t: t.unflatten(-1, (-1, 3)) if t.shape[-1] % 3 == 0 else t,
    "merged": lambda t: t.flatten(1),
}
USES: dict[str, Body] = {
    "product": lambda m, x: m * x,
    "rows": lambda m, x: (x - (m * x).amax(-1, keepdim=True)) * m,
    "columns": lambda m, x: (m * x).sum(0),
    "both": lambda m, x: ((m * x).sum(0), x * (m * x).sum(-1, keepdim=True)),
    "all": lambda m, x: (m * x).sum(),
    "moments": lambda m, x: torch.var_mean(torch.where(m, x, 0.5)),
    "twice": lambda m, x: (m * x, torch.where(m, x.sin(), x.cos())),
}


@given(
    shape=st.tuples(
        st.sampled_from((1, 2, 5)),
        st.sampled_from((1, 3, 8)),
        st.sampled_from((1, 2, 3, 4, 7, 15, 16, 17, 18, 19, 21, 64, 66, 75, 130, 255)),
    ),
    view=st.sampled_from(sorted(VIEWS)),
    use=st.sampled_from(sorted(USES)),
    target=st.sampled_from(sorted(TARGETS)),
    wide=st.booleans(),
    short=st.booleans(),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_use_of_a_mask_draws_the_same(
    shape: tuple[int, ...], view: str, use: str, target: str, wide: bool, short: bool
) -> None:
    """wide: offsets of 64 bits. short: rows are walked in chunks."""
    options = CodegenOptions(16, 64) if short else CodegenOptions()

    def body(m: Tensor, x: Tensor) -> Any:
        return m, USES[use](VIEWS[view](m), VIEWS[view](x))

    args = [SEED, randn(shape)]
    with pytest.MonkeyPatch.context() as patch:
        if wide:
            patch.setattr("trainfuse.codegen.tile.INT32_LIMIT", 1)
        case = trace(masked(body), args)
        if isinstance(infer(case.nodes), Refusal):
            return
        if isinstance(lower_nodes(case.nodes, case.outputs, TARGETS[target], options), Refusal):
            return
        check(masked(body), args, target=TARGETS[target], options=options, walk=True)


@pytest.mark.parametrize("p", [0.0, 1.0, 0.1, 0.9])
def test_mask_itself(p: float) -> None:
    def fn(seed: Tensor) -> Tensor:
        return torch.ops.trainfuse.keep_mask(seed, 2**31 + 5, p, [7, 33])

    check(fn, [torch.tensor([99])])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("over", [(), (1,), (5, 7)])
def test_mask_of_one_element(over: tuple[int, ...], shape: tuple[int, ...], target: str) -> None:
    """It has no index to run along, whatever the kernel's tile."""

    def fn(seed: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        kept = torch.ops.trainfuse.keep_mask(seed, 3, 0.25, list(shape))
        return kept * x.sin(), kept.float() * 0.5

    check(fn, [SEED, torch.randn(over)], target=TARGETS[target])


def test_words_beyond_2_31_are_numbered_in_64_bits() -> None:
    """Padding can take a mask there whose elements have 32-bit offsets."""
    with FakeTensorMode():
        rows = torch.empty(126_000_000, 17, dtype=torch.bool)
        short = torch.empty(126_000_000, 15, dtype=torch.bool)
    assert rows.numel() < 2**31 < 126_000_000 * 20
    for x, wide in ((rows, True), (short, False)):
        case = trace(masked(lambda m, x: m & x), [SEED, x])
        assert ("tl.int64" in lowered(case, TARGETS["gpu"]).source) == wide


@pytest.mark.parametrize("width", [255, 512])
def test_a_program_that_draws_has_half_as_many_rows(width: int) -> None:
    """Words take registers: with as many rows as without them, too few programs run at once."""
    args = [SEED, randn(8192, width).bfloat16()]
    drawn = lowered(trace(masked(lambda m, x: F.softmax(x, -1) * m), args, NORMS), H200)
    plain = lowered(trace(lambda seed, x: F.softmax(x, -1) * 2, args, NORMS), H200)
    (many, *_), (few, *_) = (kernel.launches[0].grid for kernel in (drawn, plain))
    assert many == 2 * few
