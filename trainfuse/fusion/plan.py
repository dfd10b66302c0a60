"""What fusion decides: which nodes become one kernel, which stay ATen, and in which order."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from autodiff.graph import Phase, Refusal
from trainfuse.fusion.domains import Domain


@dataclass(frozen=True, slots=True)
class FusionGroup:
    """Nodes that become one kernel.

    nodes: in topological order, views between them included; a cheap one (a cast, a mask) may
    stand in several groups. inputs: every value read from outside, in order of first use; a view
    of an outside value is an input with its own strides. outputs: nodes of the group that are
    read outside it; never views. exact: a node is compared with what is made of it, so that each
    of its computations must have the same result: products and sums round apart.
    """

    name: str
    phase: Phase
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    domain: Domain
    exact: bool = False


@dataclass(frozen=True, slots=True)
class FusionPlan:
    """A training graph, grouped.

    aten: nodes executed as they are. order: everything executable, each after what it reads;
    forward before backward before update. A node is in `aten`, in a group, or dead.
    """

    groups: tuple[FusionGroup, ...]
    aten: tuple[fx.Node, ...]
    order: tuple[FusionGroup | fx.Node, ...]
    refusals: tuple[Refusal, ...] = ()


@dataclass(frozen=True, slots=True)
class FusionOptions:
    """Switches of the grouping.

    horizontal: join siblings that share a read. single_node: let one operation be a group.
    skip_ops: operators that are never fused, "aten.add" or "aten.add.Tensor". fuse_first: fuse
    only that many groups, in execution order (for bisecting).
    max_pointers, max_nodes: limits of one kernel.
    """

    horizontal: bool = True
    single_node: bool = False
    skip_ops: frozenset[str] = frozenset()
    fuse_first: int | None = None
    max_pointers: int = 24
    max_nodes: int = 96
