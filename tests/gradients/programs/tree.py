"""A random training program as data: leaves, statements, and how the step is run and compiled.

Names are unique in a program: `p0` a parameter, `x0` an input, `b0` a buffer, `v0` a value, `t0` a
term of a loss, so that a statement's operands can be read off its text.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

NAME = re.compile(r"\b[pxbvt]\d+\b")

LeafKind = Literal["parameter", "input", "buffer"]
BlockKind = Literal["checkpoint", "checkpoint_reentrant", "no_grad", "autocast"]
Capture = Literal["whole", "model", "step", "function"]


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor that the program is given.

    init: an expression of `{shape}` (and `{high}`, the exclusive bound of integers).
    layout: "permuted" where its memory runs along the second last dimension. tied: the parameter
    that this is one more name of. keep: it stays though nothing uses it.
    """

    name: str
    kind: LeafKind
    shape: tuple[int, ...]
    dtype: str = "float32"
    init: str = "torch.randn({shape})"
    high: int = 0
    layout: Literal["contiguous", "permuted"] = "contiguous"
    trainable: bool = True
    tied: str = ""
    keep: bool = False

    @property
    def is_float(self) -> bool:
        """Whether gradients may reach it."""
        return self.dtype in ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Statement:
    """One line: `targets = text`, or `text` alone where it writes in place."""

    targets: tuple[str, ...]
    text: str

    @property
    def uses(self) -> frozenset[str]:
        """Names that the line reads or writes in place."""
        return frozenset(NAME.findall(self.text))

    @property
    def line(self) -> str:
        """The line itself."""
        return f"{', '.join(self.targets)} = {self.text}" if self.targets else self.text


@dataclass(frozen=True, slots=True)
class Block:
    """Statements under a context, or as the body of a checkpointed function.

    arguments: what a checkpointed function is called with; parameters reach it by closure.
    results: what it returns.
    """

    kind: BlockKind
    body: tuple[Statement, ...]
    arguments: tuple[str, ...] = ()
    results: tuple[str, ...] = ()

    @property
    def targets(self) -> tuple[str, ...]:
        """Names bound inside that are known after it."""
        return self.results or self.body_targets

    @property
    def body_targets(self) -> tuple[str, ...]:
        """Names bound inside."""
        return tuple(name for statement in self.body for name in statement.targets)

    @property
    def uses(self) -> frozenset[str]:
        """Names read inside that come from outside."""
        own = {name for statement in self.body for name in statement.targets}
        inside = {name for statement in self.body for name in statement.uses}
        return frozenset((inside | set(self.arguments)) - own)


Line = Statement | Block


@dataclass(frozen=True, slots=True)
class Update:
    """The rest of the step: optimizer, clearing of gradients, clipping, accumulation.

    optimizer: a constructor's text without the parameters. groups: 1, or 2 with another rate.
    zero: when gradients are cleared: "none" to None, "zeros", or "never". clip: a statement or "".
    micro: how many batches' gradients one update adds up. backward: "sum" of the losses at once,
    or one "each".
    """

    optimizer: str = "torch.optim.SGD({params}, lr={lr})"
    lr: float = 0.1
    groups: int = 1
    zero: Literal["none", "zeros", "never"] = "none"
    clip: str = ""
    micro: int = 1
    backward: Literal["sum", "each"] = "sum"


@dataclass(frozen=True, slots=True)
class Compile:
    """How it is compiled.

    capture: the whole step; its "model" in place; the "step" by regions; or a plain "function",
    differentiated outside. options: further arguments of `trainfuse.compile`.
    """

    capture: Capture = "whole"
    backend: str = "triton"
    options: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """One random training program.

    losses: the terms of each loss. shown: whether the step returns them. outputs: what else it
    returns.
    """

    seed: int
    leaves: tuple[Leaf, ...]
    body: tuple[Line, ...]
    losses: tuple[tuple[str, ...], ...]
    shown: bool = True
    outputs: tuple[str, ...] = ()
    update: Update = Update()
    compile: Compile = Compile()
    steps: int = 3

    @property
    def has_half(self) -> bool:
        """Whether a value may be of a half type: the rule then allows 3 instead of 2."""
        text = " ".join([*(leaf.dtype for leaf in self.leaves), *self.texts()])
        return "16" in text or any(
            isinstance(line, Block) and line.kind == "autocast" for line in self.body
        )

    def texts(self) -> Iterator[str]:
        """Every statement's text."""
        for line in self.body:
            body = line.body if isinstance(line, Block) else (line,)
            yield from (statement.text for statement in body)

    @property
    def draws(self) -> bool:
        """Whether it has dropout."""
        return any("dropout" in text for text in self.texts())

    @property
    def statements(self) -> int:
        """How many lines of computation it has."""
        return sum(1 for _ in self.texts())

    def of_kind(self, kind: LeafKind) -> list[Leaf]:
        """Its leaves of one kind, in order."""
        return [leaf for leaf in self.leaves if leaf.kind == kind]


def tidy(program: Program) -> Program:
    """The program without values and leaves that nothing uses; writes in place stay."""
    needed = {name for terms in program.losses for name in terms} | set(program.outputs)
    body = _needed(program.body, needed)
    needed |= {leaf.tied for leaf in program.leaves if leaf.name in needed}
    leaves = tuple(leaf for leaf in program.leaves if leaf.name in needed or leaf.keep)
    return dataclasses.replace(program, leaves=leaves, body=body)


def _needed(body: Iterable[Line], needed: set[str]) -> tuple[Line, ...]:
    """Lines that something needs, last first; `needed` grows by what they use."""
    kept: list[Line] = []
    for line in reversed(tuple(body)):
        if isinstance(line, Statement):
            if line.targets and not needed.intersection(line.targets):
                continue
            kept.append(line)
            needed |= line.uses
            continue
        results = tuple(name for name in line.results if name in needed)
        inside = set(results) if line.results else needed
        statements = [s for s in _needed(line.body, inside) if isinstance(s, Statement)]
        if not statements or (line.results and not results):
            continue
        own = {name for s in statements for name in s.targets}
        used = {name for s in statements for name in s.uses} - own
        arguments = tuple(name for name in line.arguments if name in used)
        kept.append(
            dataclasses.replace(line, body=tuple(statements), arguments=arguments, results=results)
        )
        needed |= used
    return tuple(reversed(kept))
