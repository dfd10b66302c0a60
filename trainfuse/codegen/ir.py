"""Kernel IR: what a schedule makes of a group, printed to Triton by triton_printer.

Expressions are Triton text over names that earlier statements define; every name is defined once.
Names are canonical (in0, out0, t3), so that equal groups give equal text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

ArgKind = Literal["input", "output", "workspace"]
ArgRef = tuple[ArgKind, int]
PREFIX: dict[ArgKind, str] = {"input": "in", "output": "out", "workspace": "part"}


def arg_name(arg: ArgRef) -> str:
    """Parameter name of an argument: in0, out0, part0."""
    return f"{PREFIX[arg[0]]}{arg[1]}"


@dataclass(frozen=True, slots=True)
class Constant:
    """A named compile-time number."""

    name: str
    value: int


@dataclass(frozen=True, slots=True)
class Define:
    """Arithmetic on indices, masks and accumulators; `note` says why."""

    name: str
    expr: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Load:
    """name = arg[offset], under a mask, then cast to the compute type when that differs.

    other: what masked lanes hold when something reads them; else they are undefined. row: in place
    of a mask, where vectors of a row that begins at any address lie: arguments of lib.load_row.
    evict: what the L2 cache is told of it, "first" or "last".
    """

    name: str
    arg: ArgRef
    offset: str
    mask: str = ""
    cast: str = ""
    note: str = ""
    other: str = ""
    row: str = ""
    evict: str = ""


@dataclass(frozen=True, slots=True)
class Map:
    """An elementwise operation; `note` is its ATen op."""

    name: str
    expr: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Reduce:
    """A reduction of a tile along one of its axes."""

    name: str
    expr: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Random:
    """A Bernoulli mask drawn by Philox from (seed, offset, element index)."""

    name: str
    expr: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Store:
    """arg[offset] = value, rounded to the argument's type.

    row: in place of a mask, where vectors of a row lie: arguments of lib.store_row. evict: as of
    loads.
    """

    arg: ArgRef
    offset: str
    value: str
    mask: str = ""
    note: str = ""
    row: str = ""
    evict: str = ""


@dataclass(frozen=True, slots=True)
class Barrier:
    """All warps of a program meet; no load from before it is merged with one from after it."""

    note: str = ""


@dataclass(frozen=True, slots=True)
class Loop:
    """for var in range(start, stop, step)."""

    var: str
    start: str
    stop: str
    step: str
    body: tuple[Statement, ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """Stops the program where the condition doesn't hold."""

    condition: str
    message: str


Statement = Constant | Check | Define | Load | Map | Reduce | Random | Store | Barrier | Loop


@dataclass(frozen=True, slots=True)
class Kernel:
    """One @triton.jit function and how it is launched.

    max_registers: that a thread may take, where what a program leaves to others matters.
    """

    name: str
    doc: str
    args: tuple[ArgRef, ...]
    body: tuple[Statement, ...]
    grid: tuple[int, int, int]
    num_warps: int
    max_registers: int | None = None


@dataclass(frozen=True, slots=True)
class Workspace:
    """A scratch tensor that the launches of a group share; contents don't outlive them."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Module:
    """The kernels of a group in launch order.

    in_place: (output, input) numbers of the group where the output may have the input's memory:
    every element is written by the program that reads it, when it needs it no more.
    whole_vectors: whether 16 bytes are read where an input ends amid them: it must be aligned.
    """

    kernels: tuple[Kernel, ...]
    workspaces: tuple[Workspace, ...] = ()
    in_place: frozenset[tuple[int, int]] = frozenset()
    whole_vectors: bool = False


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch: function of the module, grid, and its arguments in order."""

    function: str
    grid: tuple[int, int, int]
    args: tuple[ArgRef, ...]
    num_warps: int
    max_registers: int | None = None


@dataclass(frozen=True, slots=True)
class GroupKernel:
    """Compiled form of a fusion group.

    key: sha256 of the source and the launch facts; equal groups share it.
    source: a complete Python module with one @triton.jit function a launch.
    workspaces: (shape, dtype) of the scratch tensors, in ArgRef order. in_place,
    whole_vectors: as in Module.
    """

    key: str
    name: str
    source: str
    launches: tuple[Launch, ...]
    workspaces: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()
    in_place: frozenset[tuple[int, int]] = frozenset()
    whole_vectors: bool = False
