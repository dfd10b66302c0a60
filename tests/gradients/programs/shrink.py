"""A failing program made small: what can go goes, while it fails in the same way.

Greedy, in passes from the coarse to the fine: surroundings, whole stretches of the computation (a
value that is needed becomes a leaf of its shape), single statements, blocks, leaves, sizes.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.gradients.programs.generate import reference
from tests.gradients.programs.tree import (
    NAME,
    Block,
    Compile,
    Leaf,
    Line,
    Program,
    Statement,
    Update,
    tidy,
)
from tests.gradients.programs.world import Invalid, replayed

Fails = Callable[[Program], bool]


def shrink(program: Program, fails: Fails, seconds: float = 300.0) -> Program:
    """The smallest program found that still fails.

    fails: whether a program (one that eager runs) fails as the first did.
    """
    end = time.monotonic() + seconds
    tried: set[Program] = {program}

    def holds(candidate: Program) -> bool:
        if candidate in tried:
            return False
        tried.add(candidate)
        try:
            reference(candidate)
        except Exception:  # whatever it is: a candidate that eager can't run is no program
            return False
        return fails(candidate)

    while True:
        before = program
        for simpler in PASSES:
            progress = True
            while progress:
                progress = False
                for candidate in _valid(simpler, program):
                    if time.monotonic() > end:
                        return program
                    if holds(candidate):
                        program, progress = candidate, True
                        break
        if program == before:
            return program


def _valid(simpler: Callable[[Program], Iterator[Program]], program: Program) -> Iterator[Program]:
    try:
        for candidate in simpler(program):
            yield tidy(candidate)
    except Invalid:
        return


def plain_surroundings(program: Program) -> Iterator[Program]:
    """Fewer steps, a plain optimizer, fewer switches, fewer outputs and terms."""
    plain = Update(lr=program.update.lr)
    yield replace(program, update=plain, outputs=(), steps=1)
    yield replace(program, update=plain)
    for name in ("optimizer", "groups", "zero", "clip", "micro", "backward"):
        value = getattr(plain, name)
        yield replace(program, update=replace(program.update, **{name: value}))
    for steps in range(1, program.steps):
        yield replace(program, steps=steps)
    how = program.compile
    yield replace(program, compile=Compile(how.capture, how.backend, (("fallback", False),)))
    for option in how.options:
        if option[0] != "fallback":
            left = tuple(o for o in how.options if o != option)
            yield replace(program, compile=replace(how, options=left))
    for name in program.outputs:
        yield replace(program, outputs=tuple(n for n in program.outputs if n != name))
    terms = [term for loss in program.losses for term in loss]
    for term in terms:
        yield replace(program, losses=((term,),))
        if len(program.losses) == 1 and len(terms) > 1:
            yield replace(program, losses=(tuple(t for t in terms if t != term),))
    if program.shown:
        yield replace(program, shown=False)


def cut_stretches(program: Program) -> Iterator[Program]:
    """Everything before a line is replaced by leaves, as late as it may be."""
    values = replayed(program.seed, program.leaves, program.body).values
    for at in reversed(range(1, len(program.body))):
        made = [name for line in program.body[:at] for name in line.targets]
        yield _as_leaves(replace(program, body=program.body[at:]), made, values)
    for at in reversed(range(len(program.body))):
        body = (*program.body[:at], *program.body[at + 1 :])
        yield _as_leaves(replace(program, body=body), list(program.body[at].targets), values)


def drop_statements(program: Program) -> Iterator[Program]:
    """One statement goes: a write outright, a value in favour of an operand of its kind, or of a
    leaf."""
    values = replayed(program.seed, program.leaves, program.body).values
    for statement in _statements(program.body):
        body = tuple(_without(program.body, statement))
        shorter = replace(program, body=body)
        if not statement.targets:
            yield shorter
            continue
        if len(statement.targets) == 1 and statement.targets[0] in values:
            (target,) = statement.targets
            for operand in sorted(statement.uses):
                if operand in values and _alike(values[operand], values[target]):
                    yield _renamed(shorter, {target: operand})
        if all(name in values for name in statement.targets):
            yield _as_leaves(shorter, list(statement.targets), values)


def unwrap_blocks(program: Program) -> Iterator[Program]:
    """A block's statements without the block."""
    for at, line in enumerate(program.body):
        if isinstance(line, Block):
            yield replace(program, body=(*program.body[:at], *line.body, *program.body[at + 1 :]))


def plain_leaves(program: Program) -> Iterator[Program]:
    """Leaves that are contiguous, fp32, plainly made, trainable, of one name; or constants."""
    for at, leaf in enumerate(program.leaves):
        for change in _plainer(leaf):
            leaves = (*program.leaves[:at], change, *program.leaves[at + 1 :])
            yield replace(program, leaves=leaves)
        if leaf.keep:
            yield replace(program, leaves=(*program.leaves[:at], *program.leaves[at + 1 :]))
        if leaf.tied:
            yield _renamed(program, {leaf.name: leaf.tied})
        if leaf.kind == "parameter" and len(program.of_kind("parameter")) > 1:
            name = _unused(program, "x")
            leaves = (
                *program.leaves[:at],
                replace(leaf, name=name, kind="input", tied=""),
                *program.leaves[at + 1 :],
            )
            yield _renamed(replace(program, leaves=leaves), {leaf.name: name})


def _plainer(leaf: Leaf) -> Iterator[Leaf]:
    if leaf.layout != "contiguous":
        yield replace(leaf, layout="contiguous")
    if leaf.is_float and leaf.dtype != "float32":
        yield replace(leaf, dtype="float32")
    if leaf.is_float and leaf.init != Leaf.init:
        yield replace(leaf, init="torch.randn({shape})")
    if not leaf.trainable:
        yield replace(leaf, trainable=True)


def smaller_sizes(program: Program) -> Iterator[Program]:
    """One size becomes smaller, wherever a leaf has it."""
    sizes = sorted(
        {size for leaf in program.leaves for size in (*leaf.shape, leaf.high)}, reverse=True
    )
    for size in sizes:
        for less in dict.fromkeys((1, 2, 3, size // 2, size - 1)):
            if 0 < less < size:
                yield replace(
                    program, leaves=tuple(_resized(leaf, size, less) for leaf in program.leaves)
                )
    for at, leaf in enumerate(program.leaves):
        for dim in range(len(leaf.shape)):
            if leaf.shape[dim] > 1 and leaf.is_float:
                shape = (*leaf.shape[:dim], 1, *leaf.shape[dim + 1 :])
                leaves = (
                    *program.leaves[:at],
                    replace(leaf, shape=shape),
                    *program.leaves[at + 1 :],
                )
                yield replace(program, leaves=leaves)


def _resized(leaf: Leaf, size: int, less: int) -> Leaf:
    shape = tuple(less if n == size else n for n in leaf.shape)
    return replace(leaf, shape=shape, high=less if leaf.high == size else leaf.high)


PASSES = (
    plain_surroundings,
    cut_stretches,
    drop_statements,
    unwrap_blocks,
    plain_leaves,
    smaller_sizes,
)


def _statements(body: Iterable[Line]) -> list[Statement]:
    """Every statement, last first."""
    flat: list[Statement] = []
    for line in body:
        flat += line.body if isinstance(line, Block) else [line]
    return flat[::-1]


def _without(body: Iterable[Line], statement: Statement) -> Iterator[Line]:
    for line in body:
        if isinstance(line, Block):
            left = tuple(s for s in line.body if s != statement)
            results = tuple(n for n in line.results if n not in statement.targets)
            if left:
                yield dataclasses.replace(line, body=left, results=results)
        elif line != statement:
            yield line


def _alike(one: Any, other: Any) -> bool:
    return (
        isinstance(one, Tensor)
        and isinstance(other, Tensor)
        and one.shape == other.shape
        and one.dtype == other.dtype
    )


def _unused(program: Program, letter: str) -> str:
    numbers = [int(leaf.name[1:]) for leaf in program.leaves if leaf.name[0] == letter]
    return f"{letter}{max(numbers, default=-1) + 1}"


def _as_leaves(program: Program, names: list[str], values: Mapping[str, Any]) -> Program:
    """The program with leaves in the place of values that are no longer computed."""
    needed = {name for line in program.body for name in _reads(line)}
    needed |= {name for loss in program.losses for name in loss} | set(program.outputs)
    mapping: dict[str, str] = {}
    for name in names:
        value = values.get(name)
        if name not in needed:
            continue
        if not isinstance(value, Tensor) or name[0] == "t":
            raise Invalid("it can be no leaf")
        learns = value.requires_grad and value.is_floating_point()
        leaf = Leaf(
            _unused(program, "p" if learns else "x"),
            "parameter" if learns else "input",
            tuple(value.shape),
            str(value.dtype).removeprefix("torch."),
            **_init(value),
        )
        mapping[name] = leaf.name
        program = replace(program, leaves=(*program.leaves, leaf))
    return _renamed(program, mapping)


def _init(value: Tensor) -> dict[str, Any]:
    if value.is_floating_point():
        return {}
    if value.dtype is torch.bool:
        return {"init": "torch.rand({shape}) < 0.6"}
    return {"init": "torch.randint({high}, ({shape},))", "high": int(value.max()) + 1}


def _reads(line: Line) -> set[str]:
    inside = line.body if isinstance(line, Block) else (line,)
    names = {name for statement in inside for name in statement.uses}
    return names | (set(line.arguments) if isinstance(line, Block) else set())


def _renamed(program: Program, names: Mapping[str, str]) -> Program:
    """The program with other operands; the arguments of checkpoints are found anew."""

    def other(name: str) -> str:
        return names.get(name, name)

    def statement(line: Statement) -> Statement:
        return Statement(line.targets, NAME.sub(lambda match: other(match[0]), line.text))

    body: list[Line] = []
    for line in program.body:
        if isinstance(line, Statement):
            body.append(statement(line))
            continue
        arguments = dict.fromkeys(other(name) for name in line.arguments)
        body.append(
            Block(
                line.kind,
                tuple(statement(s) for s in line.body),
                tuple(name for name in arguments if name[0] != "p"),
                tuple(other(name) for name in line.results),
            )
        )
    return replace(
        program,
        body=tuple(body),
        losses=tuple(tuple(other(name) for name in loss) for loss in program.losses),
        outputs=tuple(other(name) for name in program.outputs),
    )
