"""op_db on a GPU: every differentiable operator through compiled kernels, in fp32 and bf16.

Operators are packed into plans, whose kernels compile side by side; a pack that fails is halved
until the operators at fault are known, each with the command that runs it by itself. Best run as
`python -m pytest tests/gpu/test_gpu_op_db.py -n 4`. Two variables:

OP_DB_SECONDS: what hasn't begun after so many seconds is skipped (220).
OP_DB_SAMPLES: samples of each operator (1); `-m nightly` runs four, on gaps and extremal values.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch

from tests.gradients.op_db import suite
from tests.gradients.op_db.calls import Call
from tests.gradients.op_db.samples import OPERATORS, choose

SAMPLES = int(os.environ.get("OP_DB_SAMPLES", "1"))
SECONDS = float(os.environ.get("OP_DB_SECONDS", "220"))
PACK = 12
REPLAYS = 3  # the first call is ungraphed, the second captures
DTYPES = (torch.float32, torch.bfloat16)
# whose CUDA kernels hold 1/6 as an fp32 number in fp64 too, so that eager's is no oracle
SINGLE_SIXTH = ("nn.functional.hardsigmoid", "nn.functional.hardswish")
BEGAN = time.monotonic()

# op_db's samples make torch warn of everything that it has to warn of
pytestmark = pytest.mark.filterwarnings("ignore")


def packs(dtype: torch.dtype) -> list[list[str]]:
    """Operators that are differentiable in a type on a GPU, a few at a time."""
    names = [name for name, op in OPERATORS.items() if op.takes(dtype, "cuda")]
    return [names[i : i + PACK] for i in range(0, len(names), PACK)]


def _label(value: object) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return f"{value[0]}..{value[-1]}" if isinstance(value, list) else str(value)


CASES = [(pack, dtype) for dtype in DTYPES for pack in packs(dtype)]


@pytest.fixture(autouse=True, scope="module")
def few_workers() -> Iterator[None]:
    """Each of several test processes would start as many compilers as there are cores."""
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    share = max((os.cpu_count() or 1) // processes, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "cpu_count", lambda: share)
        yield


@pytest.fixture(autouse=True)
def in_time() -> None:
    """Nothing begins late, or after an error that leaves CUDA unusable."""
    if time.monotonic() - BEGAN > SECONDS:
        pytest.skip(f"OP_DB_SECONDS={SECONDS:.0f} have passed")
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        pytest.fail(f"an earlier test of this process lost the GPU: {error}", pytrace=False)


@pytest.fixture(autouse=True)
def plain_convolutions() -> Iterator[None]:
    """TF32 and algorithms that differ from call to call would be eager's error, and ours."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False, deterministic=True):
        yield


def calls_of(pack: list[str], dtype: torch.dtype, samples: int) -> list[Call]:
    """The samples of a pack's operators that torch itself can differentiate."""
    found: list[Call] = []
    for name in pack:
        try:
            chosen = choose(OPERATORS[name].samples(dtype, "cuda"), samples)
        except Exception as error:
            error.add_note(f"torch fails to make the samples of {name}")
            raise
        found += [call for call in chosen if suite.eager_error(call) is None]
    return found


@pytest.mark.parametrize(("pack", "dtype"), CASES, ids=_label)
def test_alone(pack, dtype):
    suite.check_all(calls_of(pack, dtype, SAMPLES), suite.check_alone)


@pytest.mark.parametrize("pack", packs(torch.float32), ids=_label)
def test_steps(pack):
    """Amid training steps, the last of which is a replay where a CUDA graph is possible."""
    calls = calls_of(pack, torch.float32, SAMPLES)
    suite.check_all(calls, lambda call: suite.check_step(call, runs=REPLAYS))


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16, torch.float64], ids=_label)
@pytest.mark.parametrize("name", OPERATORS)
def test_more_samples(name, dtype):
    operator = OPERATORS[name]
    if not operator.takes(dtype, "cuda"):
        pytest.skip("torch doesn't differentiate it in this type on a GPU")
    if dtype is torch.float64 and name in SINGLE_SIXTH:
        pytest.skip("ATen's result is right to fp32 alone")
    calls = [
        *suite.calls_of(operator, dtype, "cuda"),
        *(c for c in choose(operator.samples(dtype, "cuda"), 4) if suite.eager_error(c) is None),
    ]
    if not calls:
        pytest.skip("torch itself can differentiate none of the samples")
    suite.check_all(calls, suite.check_alone)
    suite.check_all(calls, lambda call: suite.check_step(call, runs=REPLAYS))
