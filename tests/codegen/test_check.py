"""Kernels compiled for GPUs that are not here: no spills, 16-byte loads, few registers."""

from __future__ import annotations

import json

import pytest
from codegen_support import printed

from trainfuse.codegen.targets import A100, B200, H200, Target

# In a process of its own: with TRITON_INTERPRET set, triton compiles nothing.
SCRIPT = """
import json, sys
from codegen_support import lowered, trace
from test_golden import CASES, NORMS, fakes
from trainfuse.codegen.check import compile_only
from trainfuse.codegen.targets import Target

target = Target(sys.argv[1], int(sys.argv[2]))
for name in sys.argv[3:]:
    fn, shapes = CASES[name]
    case = trace(fn, fakes(shapes), NORMS)
    types = [[n.meta["val"].dtype for n in nodes] for nodes in (case.externals, case.outputs)]
    for use in compile_only(lowered(case, target), *types, target):
        numbers = [use.registers, use.stack, use.vector_bytes, use.shared, use.ptx.count("mul.hi")]
        print(json.dumps([name, use.function, *numbers]))
"""


def compiled(target: Target, *names: str) -> list[tuple[str, str, int, int, int, int, int]]:
    lines = printed(SCRIPT, target.arch, str(target.num_sms), *names)
    return [tuple(json.loads(line)) for line in lines if line[0] == "["]


CEILING = 168  # registers a thread: counts move by tens between versions of triton


NORMS = [
    "batch_norm_statistics",
    "batch_norm_sums",
    "batch_norm_gradient",
    "group_norm_backward",
    "group_norm_backward_kept",
    "group_norm_gradient",
    "softmax_columns",
    "softmax_columns_long",
    "channels_norm_backward",
]


def test_norms_over_channels_do_not_spill() -> None:
    for name, function, registers, stack, vector, *_ in compiled(H200, *NORMS):
        assert stack == 0, (name, function)
        assert registers <= CEILING, (name, function)
        if function != "tail_kernel":
            four = name == "group_norm_backward_kept"  # elements a thread, of a tile
            assert vector == (8 if four else 16), (name, function)


@pytest.mark.parametrize("target", [H200, A100, B200], ids=lambda target: target.arch)
def test_no_spills(target: Target) -> None:
    names = ["dropout_add_norm", "bias_gelu", "softmax", "norm_backward", "gelu_backward_bias"]
    uses = compiled(target, *(names if target is H200 else names[:1]))
    assert len(uses) >= (7 if target is H200 else 1)
    for name, function, registers, stack, vector, *_ in uses:
        assert stack == 0, (name, function)
        assert registers <= CEILING, (name, function)
        if function not in ("tail_kernel",):
            assert vector == 16, (name, function)


def test_rows_at_odd_addresses_are_moved_in_vectors() -> None:
    """Partial sums, too, but for what changes threads on its way there, after the loop."""
    for name, function, _, stack, vector, *_ in compiled(H200, "norm_backward_odd"):
        assert stack == 0, (name, function)
        if function != "tail_kernel":
            assert vector == 16, (name, function)


def test_a_product_of_words_is_one_instruction() -> None:
    """Two multiplications for its halves would be a third of a mask's arithmetic."""
    for name, function, _, stack, _, _, high in compiled(H200, "dropout_odd", "dropout_add_norm"):
        assert stack == 0, (name, function)
        assert high <= 16, (name, function)  # of seven rounds' two products; a division's
