"""Random steps that overwrite their inputs: the program equals the functional graph."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from autodiff.graph import TrainingGraph
from autodiff.reference import run_graph
from tests.runtime.graphs import cloned, group_of, plan_of, randn, trace
from trainfuse.codegen.ir import GroupKernel, Launch
from trainfuse.fusion.plan import FusionGroup
from trainfuse.runtime.cache import KernelCache
from trainfuse.runtime.program import RuntimeOptions, build_program

SIDE = 8
CACHE = KernelCache(None)
EXPRESSIONS = {"add": "{} + {}", "mul": "{} * {}", "sin": "tl.sin({})", "neg": "-{}"}


def random_step(rng: random.Random, length: int, num_results: int) -> Any:
    """A function of square matrices: arithmetic, views, and results picked anywhere."""
    kinds = ["add", "mul", "sin", "neg"] * 3 + ["t", "view", "sum"]
    plan = [(rng.choice(kinds), rng.random(), rng.random()) for _ in range(length)]
    picks = [rng.random() for _ in range(num_results)]

    def step(*args: Tensor) -> tuple[Tensor, ...]:
        values = list(args)
        for kind, left, right in plan:
            a, b = values[int(left * len(values))], values[int(right * len(values))]
            match kind:
                case "add":
                    values.append(a + b)
                case "mul":
                    values.append(a * b * 0.5)
                case "sin" | "neg":
                    values.append(getattr(torch, kind)(a))
                case "t":
                    values.append(a.t())
                case "view":
                    values.append(torch.ops.aten.alias.default(a))
                case "sum":
                    values.append(a + a.sum(dim=0, keepdim=True))
        made = values[len(args) :]
        return tuple(made[int(p * len(made))] for p in picks)

    return step


def fusible(node: fx.Node) -> bool:
    tensors = [node, *node.all_input_nodes]
    return node.target._opname in EXPRESSIONS and all(  # type: ignore[union-attr]  # an overload
        n.meta["val"].shape == (SIDE, SIDE) for n in tensors
    )


def groups_of(tg: TrainingGraph) -> list[FusionGroup]:
    """Every maximal run of neighbouring arithmetic nodes."""
    runs: list[list[fx.Node]] = [[]]
    for node in tg.nodes():
        if fusible(node):
            runs[-1].append(node)
        else:
            runs.append([])
    groups = [group_of(tg, f"forward_{i}", run) for i, run in enumerate(runs) if run]
    return [g for g in groups if g.outputs]


def eager_stores(group: FusionGroup) -> GroupKernel:
    """A kernel that loads as late and stores as early as it can."""
    names: dict[fx.Node, str] = {n: f"in{i}" for i, n in enumerate(group.inputs)}
    loaded: set[fx.Node] = set()
    body = []

    def index(node: fx.Node) -> str:
        row, column = node.meta["val"].stride()
        return f"(i // {SIDE}) * {row} + (i % {SIDE}) * {column}"

    for count, node in enumerate(group.nodes):
        for read in node.all_input_nodes:
            if read in group.inputs and read not in loaded:
                loaded.add(read)
                body.append(f"{names[read]} = tl.load({names[read]}_ptr + {index(read)})")
        names[node] = f"t{count}"
        operands = [names[a] if isinstance(a, fx.Node) else repr(a) for a in node.args]
        body.append(f"t{count} = {EXPRESSIONS[node.target._opname].format(*operands)}")  # type: ignore[union-attr]  # an overload
        if node in group.outputs:
            out = group.outputs.index(node)
            body.append(f"tl.store(out{out}_ptr + {index(node)}, t{count})")
    pointers = [f"in{i}_ptr" for i in range(len(group.inputs))]
    pointers += [f"out{i}_ptr" for i in range(len(group.outputs))]
    head = "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"
    lines = [f"def kernel({', '.join(pointers)}):", f"    i = tl.arange(0, {SIDE * SIDE})"]
    source = head + "\n".join([*lines, *(f"    {line}" for line in body)]) + "\n"
    arguments = [("input", i) for i in range(len(group.inputs))]
    arguments += [("output", i) for i in range(len(group.outputs))]
    key = hashlib.sha256(source.encode()).hexdigest()
    launch = Launch("kernel", (1, 1, 1), tuple(arguments), 1, 1)  # type: ignore[arg-type]  # pairs
    return GroupKernel(key, group.name, source, (launch,))


@pytest.mark.parametrize("seed", range(50))
def test_random_mutations(seed: int) -> None:
    rng = random.Random(seed)
    num_inputs = 3
    mutates = rng.sample(range(num_inputs), rng.randint(1, 3))
    step = random_step(rng, rng.randint(2, 9), rng.randint(1, 2) + len(mutates))
    args = [randn(SIDE, SIDE) for _ in range(num_inputs)]
    tg = trace(step, args, mutates=mutates)
    groups = groups_of(tg)
    kernels = {group.name: eager_stores(group) for group in groups}
    expected = run_graph(tg, args)
    news = dict(zip(mutates, expected[tg.num_outputs :], strict=True))
    for backend in ("eager", "triton"):
        options = RuntimeOptions(backend, cache=CACHE)  # type: ignore[arg-type]  # literals
        program = build_program(tg, plan_of(tg, *groups), kernels, {}, options)
        given = cloned(args)
        inputs = list(given)
        torch.testing.assert_close(program(given), expected[: tg.num_outputs])
        assert not options.boundary.failures
        for i, (before, after) in enumerate(zip(args, inputs, strict=True)):
            torch.testing.assert_close(after, news.get(i, before), msg=program.source)
