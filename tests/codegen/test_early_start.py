"""Kernels that may start before their predecessor has ended: all of them wait, and wait first."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
import torch
from codegen_support import lowered, printed, trace
from test_foreach import momentum
from test_foreach import trace as traced_update
from test_golden import CASES, NORMS, fakes

from trainfuse.codegen.compiling import WAIT, early_start
from trainfuse.codegen.ir import GroupKernel
from trainfuse.codegen.schedules.foreach import ForeachKernel, lower_foreach
from trainfuse.codegen.targets import A100, B200, H200, SIMULATED, Target
from trainfuse.runtime.cache import KernelCache, Variant

EARLY = {"launch_pdl": True}


def made(name: str, target: Target) -> GroupKernel:
    fn, shapes = CASES[name]
    return lowered(trace(fn, fakes(shapes), NORMS), target)


def update(target: Target) -> ForeachKernel:
    kernel = lower_foreach(*traced_update(torch.optim.AdamW), target=target)
    assert isinstance(kernel, ForeachKernel)
    assert kernel.advances
    return kernel


def functions(source: str) -> dict[str, ast.FunctionDef]:
    found = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    return {node.name: node for node in found}


def first_statement(function: ast.FunctionDef) -> str:
    assert ast.get_docstring(function)
    return ast.unparse(function.body[1])


# -- texts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [H200, B200], ids=lambda target: target.arch)
@pytest.mark.parametrize("name", CASES)
def test_every_kernel_of_a_group_waits_first(name: str, target: Target) -> None:
    kernel = made(name, target)
    texts = functions(kernel.source)
    assert {step.function for step in kernel.launches} == set(texts)
    for text in texts.values():
        assert first_statement(text) == WAIT
        assert early_start(kernel.source, text.name) == EARLY


@pytest.mark.parametrize("target", [A100, SIMULATED], ids=lambda target: target.arch)
@pytest.mark.parametrize("name", CASES)
def test_older_targets_know_nothing_of_it(name: str, target: Target) -> None:
    kernel = made(name, target)
    assert "wait_for_previous" not in kernel.source
    for step in kernel.launches:
        assert early_start(kernel.source, step.function) == {}


def test_both_launches_of_an_update_wait_first() -> None:
    """What they call runs behind them and doesn't: that would be a second wait an element block."""
    source = update(H200).source
    for name in ("update", "advance"):
        assert first_statement(functions(source)[name]) == WAIT
        assert early_start(source, name) == EARLY
    assert early_start(source, "update_block") == {}
    assert source.count(WAIT) == 2
    for older in (A100, SIMULATED):
        assert "wait_for_previous" not in update(older).source


KERNEL = """
from trainfuse.codegen import triton_lib as lib


@triton.jit
def other(in0, out0):
    lib.wait_for_previous()
    tl.store(out0, tl.load(in0))


@triton.jit
def kernel(in0, out0):
    {body}
"""
ACCESS = "tl.store(out0, tl.load(in0))"
BODIES = {
    "no wait": ACCESS,
    "after the access": f"{ACCESS}; {WAIT}",
    "on some programs only": f"if tl.program_id(0) == 0: {WAIT}\n    {ACCESS}",
    "in a loop": f"for _ in range(in0): {WAIT}\n    {ACCESS}",
    "commented out": f"# {WAIT}\n    {ACCESS}",
    "named in its docstring": f"'''{WAIT}'''\n    {ACCESS}",
    "another function": f"lib.wait_for_next()\n    {ACCESS}",
    "documented only": f"'''{WAIT}'''",
}


@pytest.mark.parametrize("name", BODIES)
def test_a_kernel_that_does_not_wait_first_starts_behind_its_predecessor(name: str) -> None:
    assert early_start(KERNEL.format(body=BODIES[name]), "kernel") == {}


def test_one_that_does_starts_early() -> None:
    for doc in ("", "'''What it does.'''\n    "):
        assert early_start(KERNEL.format(body=f"{doc}{WAIT}\n    {ACCESS}"), "kernel") == EARLY


# -- machine code ---------------------------------------------------------------------------------

# In a process of its own: with TRITON_INTERPRET set, triton compiles nothing.
SCRIPT = """
import json, sys
from codegen_support import trace
from test_early_start import made
from test_golden import CASES, NORMS, fakes
from trainfuse.codegen.check import compile_only
from trainfuse.codegen.targets import H200

for name in sys.argv[1:]:
    fn, shapes = CASES[name]
    case = trace(fn, fakes(shapes), NORMS)
    types = [[n.meta["val"].dtype for n in nodes] for nodes in (case.externals, case.outputs)]
    for use in compile_only(made(name, H200), *types, H200):
        print(json.dumps([name, use.function, use.ptx]))
"""
COMPILED = ["bias_gelu", "norm_backward_768", "embedding_backward_few", "softmax_columns_long"]
MEMORY = re.compile(r"^\s*(@!?%\w+ )?(ld|st|atom|red|cp|prefetch)\S*\.global", re.M)
BRANCH = re.compile(r"^\s*(@!?%\w+ )?bra|^\$\w+:", re.M)


def test_nothing_is_read_or_written_before_the_wait() -> None:
    """Nor may a program branch around it."""
    found = [json.loads(line) for line in printed(SCRIPT, *COMPILED) if line[0] == "["]
    assert len(found) == sum(len(made(name, H200).launches) for name in COMPILED)
    for name, function, ptx in found:
        (waits,) = re.finditer(r"griddepcontrol\.wait", ptx)
        assert "griddepcontrol.launch_dependents" not in ptx, (name, function)
        accesses = list(MEMORY.finditer(ptx))
        assert len(accesses) > 1, (name, function)
        body = ptx.index("{", ptx.index(".entry"))
        branch = BRANCH.search(ptx, body)
        assert waits.start() < accesses[0].start(), (name, function)
        assert (
            branch is None
            or branch.group().startswith("$L__func_begin")
            or (waits.start() < branch.start())
        ), (name, function)


def test_the_launcher_is_told(tmp_path: Path) -> None:
    """What Triton's launcher reads is in the metadata on disk, of waiting kernels alone."""
    tmp_path.chmod(0o700)
    cache = KernelCache(tmp_path)
    kernel = lower_foreach(*momentum(torch.float32), target=H200)
    assert isinstance(kernel, ForeachKernel)
    types = ("*i64", "*i64", "*i32", *["*fp64"] * len(kernel.shared_roles))
    variant = Variant("update", types, True, kernel.num_warps)
    for source, early in ((kernel.source, True), (kernel.source.replace(WAIT, "pass"), False)):
        folder = cache.entry(kernel.key, source, "sm_90")
        assert cache.compile([(folder, variant)], "sm_90") == {}
        metadata = json.loads((folder / f"{variant.stem}.json").read_text())
        assert metadata["launch_pdl"] is early
