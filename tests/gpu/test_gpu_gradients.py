"""Gradient equivalence on the GPU: eight models, whole step and regions, graphed and not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

import trainfuse
from autodiff.compare import pooled
from tests.gradients import cases
from tests.gradients.compilers import Compiler
from tests.gradients.test_functions import FUNCTIONS
from trainfuse.testing import Training, assert_gradients_match, gradient_report

# Attention dropout on a GPU is drawn inside ATen's kernel, with masks that no reference can match.
CASES = {**cases.CASES, "block": cases.block_gpu}
BACKENDS = {"triton": "fast", "eager": "fast", "inductor": "eager"}


@pytest.fixture
def compile_fn(request: pytest.FixtureRequest) -> Iterator[Compiler]:
    """A Compiler, closed at the end."""
    made = Compiler(*request.param)
    yield made
    made.close()


def _case(name: str) -> Training:
    return CASES[name]("cuda")


@pytest.mark.parametrize("compile_fn", [("whole", "triton")], indirect=True, ids=["whole"])
@pytest.mark.parametrize("case", CASES)
def test_whole_step_replayed(case, compile_fn):
    """Six steps: the first is checked, the second captures, the rest are replays.

    A tensor is judged by all of them: of three elements one step says little.
    """
    pooled([gradient_report(lambda: _case(case), compile_fn, steps=6)]).check()
    compile_fn.check()
    (step,) = compile_fn.steps
    assert step.stats()["cuda_graphs"] == 1, step.explain().cuda_graph


@pytest.mark.parametrize("compile_fn", [("regions", "triton")], indirect=True, ids=["regions"])
@pytest.mark.parametrize("case", CASES)
def test_regions(case, compile_fn):
    gradient_report(lambda: _case(case), compile_fn).check()
    compile_fn.check()


@pytest.mark.parametrize(
    "compile_fn", [("whole", "inductor"), ("whole", "eager")], indirect=True, ids=lambda p: p[1]
)
@pytest.mark.parametrize("case", ["mlp", "gpt", "convnet", "autocast"])
def test_other_backends(case, compile_fn):
    rng = BACKENDS[compile_fn.backend]
    if rng == "eager" and case == "convnet":
        # eager's CUDA dropout draws other masks for fp64: compare without
        def make() -> Training:
            training = _case(case)
            training.model[5].p = 0.0
            return training
    else:

        def make() -> Training:
            return _case(case)

    gradient_report(make, compile_fn, rng=rng).check()
    compile_fn.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name, dtype):
    fn, arguments = FUNCTIONS[name]
    torch.manual_seed(1)
    moved = tuple(a.detach().cuda().requires_grad_(a.requires_grad) for a in arguments())
    assert_gradients_match(
        fn, moved, dtype=dtype, compile_fn=lambda f: trainfuse.compile(f, backend="triton")
    )


# 4097: one column more than a power of two; 8193 rows more than one wave of programs.
@pytest.mark.parametrize(("rows", "columns"), [(8193, 768), (515, 4097), (33, 16384)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_kernels_at_real_sizes(rows, columns, dtype):
    def fn(x, gain, shift, residual):
        y = functional.layer_norm(x + residual, (columns,), gain, shift)
        return functional.gelu(y), y.softmax(-1)

    arguments = (
        torch.randn(rows, columns, device="cuda", requires_grad=True),
        torch.randn(columns, device="cuda", requires_grad=True),
        torch.randn(columns, device="cuda", requires_grad=True),
        torch.randn(rows, columns, device="cuda", requires_grad=True),
    )
    assert_gradients_match(
        fn, arguments, dtype=dtype, compile_fn=lambda f: trainfuse.compile(f, backend="triton")
    )


def test_tf32_stays_the_user_s_choice():
    """With TF32 on, our error is still within twice eager's; with it off, within fp32's."""
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("high", "highest"):
            torch.set_float32_matmul_precision(precision)
            compile_fn = Compiler("whole", "triton")
            gradient_report(lambda: cases.mlp("cuda"), compile_fn).check()
            compile_fn.close()
    finally:
        torch.set_float32_matmul_precision(before)
