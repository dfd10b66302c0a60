"""The values that a program has so far, computed as it is made: shapes and aliases need no rules.

Statements run eagerly on real tensors with autograd's history, so that what may be written in place
is known exactly: a storage that autograd has saved may not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.gradients.programs.render import leaf_text
from tests.gradients.programs.tree import Block, BlockKind, Leaf, Line, Statement
from trainfuse.testing.seeds import seed_all

SCOPE: dict[str, Any] = {"torch": torch, "nn": nn, "functional": functional, "DEVICE": "cpu"}


class Invalid(Exception):
    """The statement can't stand here."""


@contextlib.contextmanager
def context_of(kind: BlockKind) -> Iterator[None]:
    """The context that a block's statements run in."""
    with contextlib.ExitStack() as stack:
        if kind == "no_grad":
            stack.enter_context(torch.no_grad())
        elif kind == "autocast":
            stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
        yield


class World:
    """Values by name. saved: storages that a backward will read, by address, which nothing else may
    be given: a program must not depend on where memory is free."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.values: dict[str, Any] = {}
        self.saved: dict[int, torch.UntypedStorage] = {}

    def add(self, leaf: Leaf) -> None:
        """Make a leaf's tensor, from a generator of its own name."""
        with torch.random.fork_rng(devices=()):
            seed_all(self.seed * 1009 + int(leaf.name[1:]) * 31 + ord(leaf.name[0]))
            if leaf.tied:
                value = self.values[leaf.tied]
            else:
                value = eval(leaf_text(leaf), dict(SCOPE))
                value.requires_grad_(leaf.kind == "parameter" and leaf.trainable)
        self.values[leaf.name] = value

    def run(self, statement: Statement, kind: BlockKind | None = None) -> list[Tensor]:
        """Execute one statement; its targets' values. Raises Invalid for what torch refuses."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                torch.autograd.graph.saved_tensors_hooks(self._saved, lambda kept: kept)
            )
            if kind is not None:
                stack.enter_context(context_of(kind))
            try:
                exec(statement.line, SCOPE, self.values)
            except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError) as error:
                raise Invalid(str(error)) from None
        return [self.values[name] for name in statement.targets]

    def _saved(self, tensor: Tensor) -> Tensor:
        self._save(tensor)
        return tensor.detach()  # an operator's own result would keep the operator, and itself

    def _save(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.saved[storage.data_ptr()] = storage

    def play(self, leaves: Sequence[Leaf], body: Sequence[Line]) -> None:
        """Start over with these leaves and lines."""
        self.values.clear()
        self.saved.clear()
        for leaf in leaves:
            self.add(leaf)
        for line in body:
            if isinstance(line, Statement):
                self.run(line)
                continue
            self.protect(line.arguments)
            for statement in line.body:
                self.run(statement, line.kind)
            if line.results:
                self.forget(set(line.body_targets) - set(line.results))

    def protect(self, names: Sequence[str]) -> None:
        """A checkpoint reads its arguments again: nothing may write to them."""
        for name in names:
            self._save(self.values[name])

    def forget(self, names: set[str]) -> None:
        """Names of a checkpoint's inside."""
        for name in names:
            self.values.pop(name, None)

    def writable(self, name: str) -> bool:
        """Whether a statement may write to a value in place."""
        value = self.values[name]
        try:
            if value.is_leaf and value.requires_grad:
                return False
        except RuntimeError:  # one of several views, of what was written to since
            return False
        if value.untyped_storage().data_ptr() in self.saved:
            return False
        return not overlaps(value)


def overlaps(value: Tensor) -> bool:
    """Whether two elements share memory."""
    end = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    places = torch.arange(end).as_strided(value.shape, value.stride())
    return places.unique().numel() < value.numel()


def replayed(seed: int, leaves: Sequence[Leaf], body: Sequence[Line]) -> World:
    """A world with these leaves and lines."""
    world = World(seed)
    world.play(leaves, body)
    return world


def block_of(
    kind: BlockKind, body: Sequence[Statement], world: World, rest: Sequence[str]
) -> Block:
    """A block around statements, with the arguments and results that its kind needs.

    rest: names inside that are to be known afterwards.
    """
    if not kind.startswith("checkpoint"):
        return Block(kind, tuple(body))
    block = Block(kind, tuple(body), (), tuple(rest))
    outside = sorted(name for name in block.uses if not _is_parameter(world.values[name]))
    return Block(kind, tuple(body), tuple(outside), tuple(rest))


def _is_parameter(value: Tensor) -> bool:
    return value.is_leaf and value.requires_grad
