"""A program as a standalone test file: what runs, and what is printed when it fails."""

from __future__ import annotations

from collections.abc import Iterable

from tests.gradients.programs.tree import Block, Leaf, Line, Program, Statement

_ALONE = '''\
"""Random training program {seed}: {compile}.

Runs alone: python -m pytest THIS_FILE.{where}
"""
{setting}
'''
_INTERPRETED = """
import os

os.environ["TRITON_INTERPRET"] = "1"
"""

_HEADER = """\
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import trainfuse
from trainfuse.testing import Training, assert_gradients_match, gradient_report, rounded_bf16

DEVICE = "{device}"
COMPILED = []

"""

_COMPILE = """
def compiled({what}):
    torch._dynamo.reset()
{lines}

def test_program():
    with rounded_bf16():
{test}

if __name__ == "__main__":
    test_program()
"""


def leaf_text(leaf: Leaf) -> str:
    """The expression that makes a leaf, in fp32 first, so that every dtype has the same values."""
    shape = list(leaf.shape)
    if leaf.layout == "permuted":
        shape[-1], shape[-2] = shape[-2], shape[-1]
    numbers = ", ".join(map(str, shape))
    text = leaf.init.format(shape=numbers or "()", high=leaf.high)
    if "*" in text or "<" in text:
        text = f"({text})"
    if leaf.layout == "permuted":
        text += ".mT"
    if leaf.is_float and leaf.dtype != "float32":
        text += f".to(torch.{leaf.dtype})"
    return text


def render(program: Program, device: str = "cpu") -> str:
    """The text of the test file. device: "cpu" (the interpreter) or "cuda"."""
    interpreted = device == "cpu"
    alone = _ALONE.format(
        seed=program.seed,
        compile=describe(program),
        where=" Kernels run in Triton's interpreter." if interpreted else "",
        setting=_INTERPRETED if interpreted else "",
    )
    return alone + definitions(program, device)


def definitions(program: Program, device: str = "cpu") -> str:
    """What the file defines, without the choice of the interpreter: that is the whole process's."""
    header = _HEADER.format(device=device)
    if program.compile.capture == "function":
        return header + _function(program) + _compile_text(program)
    return header + _model(program) + _make(program) + _compile_text(program)


def describe(program: Program) -> str:
    """How it is compiled, in words."""
    how = program.compile
    options = "".join(f", {name}={value!r}" for name, value in how.options)
    return f"{how.capture} on {how.backend}{options}"


def _indent(lines: Iterable[str], depth: int) -> str:
    return "".join(f"{'    ' * depth}{line}\n" if line else "\n" for line in lines)


def body_lines(body: Iterable[Line]) -> list[str]:
    """The computation, one line a statement, blocks with their headers."""
    lines: list[str] = []
    for number, line in enumerate(body):
        if isinstance(line, Statement):
            lines.append(line.line)
        else:
            lines += _block_lines(line, number)
    return lines


def _block_lines(block: Block, number: int) -> list[str]:
    inside = [f"    {statement.line}" for statement in block.body]
    match block.kind:
        case "no_grad":
            return ["with torch.no_grad():", *inside]
        case "autocast":
            return ["with torch.autocast(DEVICE, dtype=torch.bfloat16):", *inside]
    results, arguments = ", ".join(block.results), ", ".join(block.arguments)
    return [
        f"def part{number}({arguments}):",
        *inside,
        f"    return {results}",
        f"{results} = checkpoint({', '.join((f'part{number}', *block.arguments))}, "
        f"use_reentrant={block.kind == 'checkpoint_reentrant'})",
    ]


def _returned(names: Iterable[str]) -> str:
    return "".join(f"{name}, " for name in names)


def _loss_lines(program: Program) -> list[str]:
    return [
        f"loss{i} = {' + '.join(terms)}" for i, terms in enumerate(program.losses)
    ]  # fmt: skip


def _losses(program: Program) -> list[str]:
    return [f"loss{i}" for i in range(len(program.losses))]


def _model(program: Program) -> str:
    own = [leaf for leaf in program.leaves if leaf.kind != "input"]
    init = ["super().__init__()"]
    for leaf in own:
        text = leaf_text(leaf)
        if leaf.kind == "buffer":
            init.append(f'self.register_buffer("{leaf.name}", {text})')
        elif leaf.tied:
            init.append(f"self.{leaf.name} = self.{leaf.tied}")
        else:
            frozen = "" if leaf.trainable else ", requires_grad=False"
            init.append(f"self.{leaf.name} = nn.Parameter({text}{frozen})")
    inputs = "".join(f", {leaf.name}" for leaf in program.of_kind("input"))
    used = {name for line in program.body for name in line.uses}
    forward = [f"{leaf.name} = self.{leaf.name}" for leaf in own if leaf.name in used]
    forward += body_lines(program.body) + _loss_lines(program)
    # attached, an output that no backward has freed keeps a step from being whole; in a region,
    # parameters behind it alone have no gradient
    detached = ".detach()" if program.compile.capture == "whole" else ""
    outputs = [f"{name}{detached}" for name in program.outputs]
    forward.append(f"return ({_returned(_losses(program))}), ({_returned(outputs)})")
    return (
        "\nclass Model(nn.Module):\n    def __init__(self):\n"
        + _indent(init, 2)
        + f"\n    def forward(self{inputs}):\n"
        + _indent(forward, 2)
    )


def _make(program: Program) -> str:
    update = program.update
    lines = [
        "model = Model().to(DEVICE)",
        f"optimizer = {_optimizer(program)}",
        "",
        *_step(program),
    ]
    inputs = program.of_kind("input")
    batch = [f"    {leaf_text(leaf)}.to(DEVICE)," for leaf in inputs] * update.micro
    lines += ["", "batches = [(", *batch, f") for _ in range({program.steps})]"]
    lines.append("return Training(step, model, batches)")
    return "\n\ndef make():\n" + _indent(lines, 1)


def _optimizer(program: Program) -> str:
    update = program.update
    names = [f"model.{p.name}" for p in program.of_kind("parameter") if not p.tied]
    if update.groups == 1:
        params = "model.parameters()"
    else:
        first, second = ", ".join(names[::2]), ", ".join(names[1::2])
        params = f'[{{"params": [{first}]}}, {{"params": [{second}], "lr": {update.lr / 2}}}]'
    return update.optimizer.format(params=params, lr=update.lr)


def _step(program: Program) -> list[str]:
    update = program.update
    inputs = [leaf.name for leaf in program.of_kind("input")]
    micro = [[f"{name}_{i}" for name in inputs] for i in range(update.micro)]
    names = micro if update.micro > 1 else [inputs]
    arguments = ", ".join(name for one in names for name in one)
    lines = [f"def step({arguments}):"]
    if update.zero != "never":
        lines.append(f"    optimizer.zero_grad(set_to_none={update.zero == 'none'})")
    lines.append("    results = []")
    for one in names:
        lines.append(f"    losses, outputs = model({', '.join(one)})")
        count = len(program.losses)
        if update.backward == "sum" or count == 1:
            terms = " + ".join(f"losses[{i}]" for i in range(count))
            lines.append(f"    ({terms}).backward()")
        else:
            for i in range(count):
                retain = "retain_graph=True" if i < count - 1 else ""
                lines.append(f"    losses[{i}].backward({retain})")
        shown = "(losses, outputs)" if program.shown else "outputs"
        lines.append(f"    results.append({shown})")
    if update.clip:
        lines.append(f"    {update.clip}")
    lines += ["    optimizer.step()", "    return results"]
    return lines


def _function(program: Program) -> str:
    leaves = [leaf for leaf in program.leaves if not leaf.tied]
    names = ", ".join(leaf.name for leaf in leaves)
    lines = [f"{leaf.name} = {leaf.tied}" for leaf in program.leaves if leaf.tied]
    lines += body_lines(program.body) + _loss_lines(program)
    lines.append(f"return {_returned([*_losses(program), *program.outputs])}")
    made = []
    for leaf in leaves:
        learns = leaf.kind == "parameter" and leaf.trainable
        made.append(f"    {leaf_text(leaf)}.to(DEVICE){'.requires_grad_()' if learns else ''},")
    return (
        f"\ndef function({names}):\n"
        + _indent(lines, 1)
        + "\n\ndef arguments():\n"
        + _indent(["return (", *made, ")"], 1)
    )


def _compile_text(program: Program) -> str:
    how = program.compile
    options = "".join(f", {name}={value!r}" for name, value in how.options)
    options = f'backend="{how.backend}"{options}'
    k = 3.0 if program.has_half else 2.0
    rng = ', rng="eager"' if draws_eagerly(program) else ""
    match how.capture:
        case "whole" | "step":
            what, whole = "training", "" if how.capture == "whole" else ", whole_step=False"
            lines = [f"COMPILED.append(trainfuse.compile(training.step, {options}{whole}))"]
            lines.append("return COMPILED[-1]")
        case "model":
            what = "training"
            lines = [f"COMPILED.append(trainfuse.compile(training.model, {options}))"]
            lines.append("return training.step")
        case "function":
            what = "fn"
            lines = [f"COMPILED.append(trainfuse.compile(fn, {options}))", "return COMPILED[-1]"]
    if how.capture == "function":
        test = [
            f"torch.manual_seed({program.seed})",
            f"assert_gradients_match(function, arguments(), compile_fn=compiled, k={k}{rng})",
        ]
    else:
        test = [
            f"gradient_report(make, compiled, steps={program.steps}, k={k}, "
            f"seed={program.seed}{rng}).check()"
        ]
    return "\n" + _COMPILE.format(what=what, lines=_indent(lines, 1), test=_indent(test, 2))


def draws_eagerly(program: Program) -> bool:
    """Whether its masks are torch's own: Inductor's are, and those asked for."""
    how = program.compile
    return how.backend == "inductor" or ("rng", "eager") in how.options
