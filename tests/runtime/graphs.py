"""Training graphs, groups and kernels written by hand, for the runtime's tests."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from autodiff.graph import InputFact, InputKind, NodeFacts, TrainingGraph
from trainfuse.codegen.ir import GroupKernel, Launch
from trainfuse.fusion.domains import Domain, infer
from trainfuse.fusion.plan import FusionGroup, FusionPlan

BLOCK = 1024


def trace(
    function: Callable[..., Any],
    args: Sequence[Tensor],
    *,
    mutates: Sequence[int] = (),
    kinds: Sequence[InputKind] = (),
    backward_from: int | None = None,
) -> TrainingGraph:
    """Trace a functional step; its trailing results are the new values of `mutates`.

    backward_from: index of the first call_function node that counts as backward.
    """
    gm = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*args)
    placeholders = gm.graph.find_nodes(op="placeholder")
    kinds = kinds or ["input"] * len(args)
    inputs = tuple(
        InputFact(node.name, kind, node.name)
        for node, kind in zip(placeholders, kinds, strict=True)
    )
    output = gm.graph.output_node()
    results = output.args[0] if isinstance(output.args[0], (list, tuple)) else [output.args[0]]
    output.args = (tuple(results),)
    gm.recompile()
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    start = len(nodes) if backward_from is None else backward_from
    facts = {
        node: NodeFacts("forward" if i < start else "backward", where=f"model.py:{i + 1}")
        for i, node in enumerate(nodes)
    }
    names = tuple(placeholders[i].name for i in mutates)
    return TrainingGraph(gm, facts, inputs, len(results) - len(names), names)


def group_of(tg: TrainingGraph, name: str, nodes: Sequence[fx.Node]) -> FusionGroup:
    """A group of these nodes."""
    inside = set(nodes)
    reads = dict.fromkeys(n for node in nodes for n in node.all_input_nodes)
    domain = infer(nodes)
    assert isinstance(domain, Domain)
    return FusionGroup(
        name,
        tg.phase(nodes[0]),
        tuple(nodes),
        tuple(n for n in reads if n not in inside),
        tuple(n for n in nodes if any(user not in inside for user in n.users)),
        domain,
    )


def plan_of(tg: TrainingGraph, *groups: FusionGroup) -> FusionPlan:
    """A plan with these groups, each standing where its last node stands."""
    last = {group.nodes[-1]: group for group in groups}
    owned = {node for group in groups for node in group.nodes}
    order: list[FusionGroup | fx.Node] = []
    for node in tg.nodes():
        if node in last:
            order.append(last[node])
        elif node not in owned:
            order.append(node)
    aten = tuple(item for item in order if isinstance(item, fx.Node))
    return FusionPlan(groups, aten, tuple(order))


def flat_kernel(group: FusionGroup, statements: Sequence[str]) -> GroupKernel:
    """A flat pointwise kernel: `statements` compute t<i> for output i from in0, in1, ..."""
    numel = group.outputs[0].meta["val"].numel()
    pointers = [f"in{i}_ptr" for i in range(len(group.inputs))]
    pointers += [f"out{i}_ptr" for i in range(len(group.outputs))]
    lines = ["import triton", "import triton.language as tl", "", "", "@triton.jit"]
    lines += [f"def kernel({', '.join(pointers)}):"]
    lines += [f"    i = tl.program_id(0) * {BLOCK} + tl.arange(0, {BLOCK})"]
    lines += [f"    mask = i < {numel}"]
    for i in range(len(group.inputs)):
        lines.append(f"    in{i} = tl.load(in{i}_ptr + i, mask=mask)")
    lines += [f"    {statement}" for statement in statements]
    for i in range(len(group.outputs)):
        lines.append(f"    tl.store(out{i}_ptr + i, t{i}, mask=mask)")
    source = "\n".join(lines) + "\n"
    arguments = [("input", i) for i in range(len(group.inputs))]
    arguments += [("output", i) for i in range(len(group.outputs))]
    launch = Launch("kernel", (-(-numel // BLOCK), 1, 1), tuple(arguments), 4, 2)
    key = hashlib.sha256(source.encode()).hexdigest()
    return GroupKernel(key, group.name, source, (launch,))


def cloned(args: Sequence[Tensor]) -> list[Any]:
    """Fresh copies: a program may write its inputs, and empties its list."""
    return [a.clone() for a in args]


def randn(*shape: int) -> Tensor:
    """Normal numbers."""
    return torch.randn(shape)


def run_alone(script: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a repro as whoever receives it would: without this checkout, from somewhere else."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    environment.pop("PYTHONPATH", None)
    command = [sys.executable, "-I", script]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd)
    assert not any(
        re.search(r"^\s*(from|import) (trainfuse|autodiff)\b", path.read_text(), re.M)
        for path in Path(script).parent.glob("*.py")
    )
    return done
