"""What is around a program's computation: element types, blocks, optimizer, switches."""

from __future__ import annotations

import dataclasses
import random

from tests.gradients.programs.drawer import Taste
from tests.gradients.programs.tree import (
    NAME,
    Block,
    BlockKind,
    Compile,
    Leaf,
    Program,
    Statement,
    Update,
)


def taste_of(rng: random.Random) -> Taste:
    half = rng.random() < 0.25
    dtypes = ["float32"] * 8
    if rng.random() < 0.15:
        dtypes += ["float64"] * 2
    if half:
        dtypes += rng.choice((["bfloat16"] * 3, ["float16"] * 2, ["bfloat16"] * 20))
    return Taste(tuple(dtypes), half, rng.random() < 0.2, rng.random() < 0.2)


def block_places(rng: random.Random, wanted: int, taste: Taste) -> dict[int, BlockKind]:
    """Blocks by the number of the statement before which they stand."""
    blocks: dict[int, BlockKind] = {}
    kinds: list[tuple[BlockKind, float]] = [
        ("checkpoint", 0.1),
        ("checkpoint_reentrant", 0.08),
        ("no_grad", 0.12),
        ("autocast", 0.35 if taste.half else 0.0),
    ]
    for kind, likely in kinds:
        if rng.random() < likely:
            blocks[rng.randrange(wanted)] = kind
    return blocks


_OPTIMIZERS = (
    ("torch.optim.SGD({params}, lr={lr})", 0.1),
    ("torch.optim.SGD({params}, lr={lr}, momentum=0.9)", 0.1),
    ("torch.optim.SGD({params}, lr={lr}, momentum=0.8, nesterov=True, weight_decay=0.02)", 0.1),
    ("torch.optim.Adam({params}, lr={lr}, eps=0.01)", 0.02),
    ("torch.optim.AdamW({params}, lr={lr}, eps=0.01, weight_decay=0.1)", 0.02),
    ("torch.optim.Adam({params}, lr={lr}, eps=0.01, amsgrad=True)", 0.02),
)


def update_of(rng: random.Random, losses: int) -> Update:
    # state that the first step makes is a second capture: plain SGD stands for most
    ((optimizer, lr),) = rng.choices(_OPTIMIZERS, (4, 1, 1, 1, 1, 1))
    clips = (
        "nn.utils.clip_grad_norm_(model.parameters(), 0.5)",
        "nn.utils.clip_grad_value_(model.parameters(), 0.3)",
    )
    return Update(
        optimizer,
        lr,
        groups=2 if rng.random() < 0.1 else 1,
        zero=rng.choice(("none", "none", "none", "zeros", "never")),
        clip=rng.choice(clips) if rng.random() < 0.15 else "",
        micro=2 if rng.random() < 0.08 else 1,
        backward="each" if losses > 1 and rng.random() < 0.5 else "sum",
    )


_SWITCHES: tuple[tuple[tuple[str, object], ...], ...] = (
    (("horizontal", False),),
    (("single_node", True),),
    (("recompute", False),),
    (("autodiff_inlining", False),),
    (("min_subgraph_nodes", 5),),
    (("memory_budget", 0.3),),
    (("fuse_first", 2),),
    (("fma", False),),
    (("skip_ops", "aten.mul,aten.sum"),),
    (("check", True),),
    (("check", True), ("single_node", True)),
)


def compile_options(rng: random.Random) -> Compile:
    (capture,) = rng.choices(("whole", "model", "step", "function"), (72, 12, 5, 11))
    (backend,) = rng.choices(("triton", "eager", "inductor"), (88, 10, 2))
    options: list[tuple[str, object]] = [("fallback", False)]
    if rng.random() < 0.6:
        options.append(("verify", "off"))
    if rng.random() < 0.2:
        options += rng.choice(_SWITCHES)
    return Compile(capture, backend, tuple(options))


def with_masks(program: Program) -> Program:
    """The program with masks that the reference can draw alike.

    It numbers the masks of one compiled program, in the order of its calls: not so where a
    checkpoint calls dropout again, nor where two calls of a region draw a seed each.
    """
    if not program.draws:
        return program
    again = any(
        isinstance(line, Block)
        and line.kind.startswith("checkpoint")
        and any("dropout" in statement.text for statement in line.body)
        for line in program.body
    )
    how = program.compile
    if again or (how.capture in ("model", "step") and program.update.micro > 1):
        how = dataclasses.replace(how, options=(*how.options, ("rng", "eager")))
    return dataclasses.replace(program, compile=how)


def with_odd_parameters(rng: random.Random, program: Program) -> Program:
    """Some are frozen, some unused, some have two names."""
    leaves = list(program.leaves)
    names = [leaf.name for leaf in leaves if leaf.kind == "parameter"]
    if len(names) > 1 and rng.random() < 0.12:
        frozen = rng.choice(names)
        leaves = [
            dataclasses.replace(leaf, trainable=False) if leaf.name == frozen else leaf
            for leaf in leaves
        ]
    if rng.random() < 0.08:
        leaves.append(Leaf("p90", "parameter", (3,), keep=True))
    program = dataclasses.replace(program, leaves=tuple(leaves))
    if rng.random() < 0.08 and names:
        program = _tied(rng, program, rng.choice(names))
    return program


def _tied(rng: random.Random, program: Program, name: str) -> Program:
    """One use of a parameter goes by another name of it."""
    places = [
        i
        for i, line in enumerate(program.body)
        if isinstance(line, Statement) and name in line.uses
    ]
    if not places:
        return program
    at = rng.choice(places)
    body = list(program.body)
    line = body[at]
    assert isinstance(line, Statement)
    body[at] = renamed(line, {name: "p91"})
    (leaf,) = [leaf for leaf in program.leaves if leaf.name == name]
    alias = dataclasses.replace(leaf, name="p91", tied=name)
    return dataclasses.replace(program, leaves=(*program.leaves, alias), body=tuple(body))


def renamed(statement: Statement, names: dict[str, str]) -> Statement:
    """The statement with other operands."""
    text = NAME.sub(lambda match: names.get(match[0], match[0]), statement.text)
    return Statement(statement.targets, text)
