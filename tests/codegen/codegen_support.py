"""Trace a function, lower it as one group, run its kernels, compare with ATen in fp64."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from autodiff.graph import Refusal
from autodiff.ops import lookup
from autodiff.reference import run_nodes
from trainfuse.codegen.choices import MODEL, Choice
from trainfuse.codegen.ir import GroupKernel
from trainfuse.codegen.lower import lower_nodes
from trainfuse.codegen.targets import SIMULATED, CodegenOptions, Target

Tensors = list[torch.Tensor]
HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@dataclass(frozen=True)
class Case:
    """A traced function: its nodes, outputs and external values, in FusionGroup order."""

    nodes: list[fx.Node]
    outputs: list[fx.Node]
    placeholders: list[fx.Node]

    @property
    def externals(self) -> list[fx.Node]:
        members = set(self.nodes)
        found = dict.fromkeys(operand for node in self.nodes for operand in node.all_input_nodes)
        return [node for node in found if node not in members]


def trace(fn: Callable[..., Any], args: Sequence[torch.Tensor], table: Any = None) -> Case:
    """The ATen nodes of fn on args; composite ops are written out by `table`."""
    mode = FakeTensorMode()
    with mode:
        fakes = [
            torch.empty_strided(a.shape, a.stride(), dtype=a.dtype)
            if a.dim()
            else torch.empty((), dtype=a.dtype)
            for a in args
        ]
        gm = make_fx(fn, decomposition_table=table or {})(*fakes)
    gm.graph.eliminate_dead_code()
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    outputs = list(dict.fromkeys(tree_leaves(gm.graph.output_node().args[0])))
    # Views of outside values are inputs of a group, with strides of their own.
    outside = set(placeholders)
    for node in nodes:
        if lookup(node.target).kind == "view" and set(node.all_input_nodes) <= outside:
            outside.add(node)
    return Case([n for n in nodes if n not in outside], outputs, placeholders)


def lowered(
    case: Case,
    target: Target = SIMULATED,
    options: CodegenOptions | None = None,
    choice: Choice = MODEL,
) -> GroupKernel:
    kernel = lower_nodes(case.nodes, case.outputs, target, options, choice=choice)
    assert not isinstance(kernel, Refusal), kernel
    return kernel


def load_module(source: str) -> ModuleType:
    """Import generated text; triton reads functions back from their file."""
    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as file:
        file.write(source)
    spec = importlib.util.spec_from_file_location(Path(file.name).stem, file.name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def launch(kernel: GroupKernel, inputs: Tensors, outputs: Tensors) -> None:
    """Run a group's launches through triton's ordinary call."""
    module = load_module(kernel.source)
    device = outputs[0].device
    spaces = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in kernel.workspaces]
    pools = {"input": inputs, "output": outputs, "workspace": spaces}
    for step in kernel.launches:
        arguments = [pools[kind][index] for kind, index in step.args]
        with np.errstate(all="ignore"):
            getattr(module, step.function)[step.grid](*arguments, num_warps=step.num_warps)


def run_case(case: Case, args: Sequence[torch.Tensor], kernel: GroupKernel) -> Tensors:
    """Outputs of the kernels on real inputs; outputs start as NaN so that a hole shows."""
    env = dict(zip(case.placeholders, args, strict=True))
    views = [n for n in _before(case) if n not in env]
    values = run_nodes(views, env)
    inputs = [values[node] for node in case.externals]
    outputs: Tensors = []
    for node in case.outputs:
        meta = node.meta["val"]
        out = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype)
        outputs.append(out.fill_(float("nan") if meta.dtype.is_floating_point else 77))
    launch(kernel, inputs, outputs)
    return outputs


def _before(case: Case) -> list[fx.Node]:
    """Views that feed the group, in order."""
    graph = case.placeholders[0].graph
    members = set(case.nodes)
    return [n for n in graph.nodes if n.op == "call_function" and n not in members]


def reference(case: Case, args: Sequence[torch.Tensor], dtype: torch.dtype | None) -> Tensors:
    """The same nodes by ATen."""
    env = dict(zip(case.placeholders, args, strict=True))
    nodes = [n for n in case.placeholders[0].graph.nodes if n.op == "call_function"]
    values = run_nodes(nodes, env, dtype=dtype)
    return [values[node] for node in case.outputs]


def partial_sums(case: Case, args: Sequence[torch.Tensor]) -> float:
    """Size that partial sums reach on the way: elements walk randomly, sqrt(n) of them."""
    env = dict(zip(case.placeholders, args, strict=True))
    values = run_nodes([*_before(case), *case.nodes], env, dtype=torch.float64)
    sizes = [
        float(v.square().mean().sqrt()) * max(1, v.numel()) ** 0.5
        for v in values.values()
        if isinstance(v, torch.Tensor) and v.is_floating_point()
    ]
    return max(sizes)


def error(value: torch.Tensor, exact: torch.Tensor) -> float:
    """Root mean square distance where both are finite; infinite when NaN or inf differ."""
    value, exact = value.double(), exact.double()
    odd = ~torch.isfinite(exact)
    if not torch.equal(value[odd].nan_to_num(7e307), exact[odd].nan_to_num(7e307)):
        return float("inf")
    if not torch.isfinite(value[~odd]).all():
        return float("inf")
    return float((value[~odd] - exact[~odd]).square().mean().sqrt()) if (~odd).any() else 0.0


def check(
    fn: Callable[..., Any],
    args: Sequence[torch.Tensor],
    *,
    table: Any = None,
    options: CodegenOptions | None = None,
    target: Target = SIMULATED,
    walk: bool = False,
    choice: Choice = MODEL,
) -> GroupKernel:
    """Assert that the kernels' error against fp64 is at most twice eager's.

    walk: allow a few roundings of the partial sums too, for graphs whose results may cancel: on one
    element, twice eager's error is a matter of luck.
    """
    case = trace(fn, args, table)
    kernel = lowered(case, target, options, choice)
    ours = run_case(case, args, kernel)
    eager = reference(case, args, None)
    exact = reference(case, args, torch.float64)
    floor = 4 * partial_sums(case, args) if walk else 0.25
    for index, (mine, theirs, truth) in enumerate(zip(ours, eager, exact, strict=True)):
        assert mine.dtype == theirs.dtype
        assert mine.shape == theirs.shape
        if not mine.dtype.is_floating_point:
            assert torch.equal(mine, theirs), (index, kernel.source)
            continue
        scale = float(truth.double().nan_to_num(0, 0, 0).square().mean().sqrt())
        # half types: the interpreter truncates where a GPU rounds, at most one unit
        units = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float64: 2**-46}
        unit = units.get(mine.dtype, 2**-24)
        limit = 2 * error(theirs, truth) + unit * max(scale, floor)
        assert error(mine, truth) <= limit, (index, error(mine, truth), limit, kernel.source)
    return kernel


def printed(script: str, *arguments: str) -> list[str]:
    """Lines that a script prints in a process of its own, where Triton compiles kernels.

    In this one it interprets them: with TRITON_INTERPRET set it compiles nothing.
    """
    path = os.pathsep.join([str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def check_row_of_nan(case: Case, args: Sequence[torch.Tensor], kernel: GroupKernel) -> None:
    """Assert that NaN in row 3 stays in it, and that what lies around a result stays as it is.

    args: the first has the row; the case has one result, of its shape and type.
    """
    (rows, width), dtype = args[0].shape, args[0].dtype
    around = torch.full((rows + 2, width), 77.0, dtype=dtype)
    values = dict(zip(case.placeholders, args, strict=True))
    launch(kernel, [values[node] for node in case.externals], [around[1:-1]])
    assert (around[0] == 77).all()
    assert (around[-1] == 77).all()
    (exact,) = reference(case, args, torch.float64)
    others = torch.arange(rows) != 3
    assert around[1:-1][3].isnan().all()
    assert error(around[1:-1][others], exact[others]) < 0.01 * float(exact[others].abs().max())
