"""What a group of sums by key sums, for all schedules of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from autodiff.ops import op_name
from trainfuse.codegen.builder import Builder, Group
from trainfuse.codegen.ir import ArgRef, Kernel, Load, Workspace
from trainfuse.codegen.op_text import Unsupported
from trainfuse.codegen.scalars import TRITON_TYPE, compute_dtype
from trainfuse.codegen.schedules import ranks
from trainfuse.codegen.targets import Target
from trainfuse.codegen.tile import VECTOR_BYTES
from trainfuse.fusion.arguments import argument
from trainfuse.fusion.segment_ops import SEGMENT_SUM, key_bias


@dataclass(frozen=True, slots=True)
class Sums:
    """The sum by key of a group.

    keys, order: sorted, and where in the source each came from; None for keys as they come. bias:
    what to add to a key to have its row. rows, width: of the table. count: rows of the source.
    outputs: those that depend on the sums.
    """

    node: fx.Node
    source: fx.Node
    keys: fx.Node | ArgRef
    order: fx.Node | ArgRef | None
    bias: int
    rows: int
    width: int
    count: int
    skip: int
    outputs: tuple[fx.Node, ...]

    @property
    def dtype(self) -> torch.dtype:
        """Type of the sums."""
        return compute_dtype(self.node.meta["val"].dtype)

    @property
    def vectors(self) -> bool:
        """Whether rows of the source begin where a vector does."""
        source = self.source.meta["val"]
        return source.stride(0) * source.dtype.itemsize % VECTOR_BYTES == 0


@dataclass(frozen=True, slots=True)
class Writer:
    """Statements of a kernel about entries in the order of their keys."""

    builder: Builder
    sums: Sums

    def note(self, name: str, expr: str, why: str = "") -> None:
        """Define a name."""
        self.builder.note(name, expr, why)

    def use(self, value: fx.Node | ArgRef) -> ArgRef:
        """An argument of this kernel."""
        arg: ArgRef = ("input", self.builder.inputs[value]) if isinstance(value, fx.Node) else value
        self.builder.args[arg] = None
        return arg

    def key(self, name: str, place: str) -> None:
        """The key of an entry, biased as it was sorted."""
        self.builder.body.append(Load(name, self.use(self.sums.keys), place, cast="tl.int32"))


def parse(group: Group) -> Sums:
    """What is summed, into which rows, and which outputs wait for it."""
    node = next(n for n in group.nodes if op_name(n.target) == SEGMENT_SUM)
    source, keys, order = (argument(node, name) for name in ("source", "keys", "order"))
    if node.meta["val"].dtype not in TRITON_TYPE:
        raise Unsupported(node, f"{node.meta['val'].dtype} has no kernels")
    behind = {node}
    for other in group.nodes:
        if not behind.isdisjoint(other.all_input_nodes):
            behind.add(other)
    rows, width = node.meta["val"].shape
    count = source.meta["val"].shape[0]
    outputs = tuple(n for n in group.outputs if n in behind)
    skip, bias = argument(node, "skip"), key_bias(keys.meta["val"].dtype)
    return Sums(node, source, keys, order, bias, rows, width, count, skip, outputs)


def in_order(
    group: Group, target: Target, sums: Sums, spaces: list[Workspace], kernels: list[Kernel]
) -> Sums:
    """The same with sorted keys; what sorts those that come in no order is added to the kernels."""
    if sums.order is not None:
        return sums
    assert isinstance(sums.keys, fx.Node)
    lists = ranks.workspaces(spaces, sums.count)
    kernels.append(ranks.build(group, target, sums.keys, sums.rows, lists))
    return replace(sums, keys=lists[0], order=lists[1])
