"""What a group moves: the bytes that a kernel's floor is made of."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch import fx

from trainfuse.fusion.flow import is_creation, is_view, looked_up, value_bytes
from trainfuse.fusion.plan import FusionGroup


@dataclass(frozen=True, slots=True)
class GroupCost:
    """Bytes a group reads and writes, each value once, and what its nodes would move as ATen."""

    read_bytes: int
    written_bytes: int
    aten_bytes: int

    @property
    def effective_bytes(self) -> int:
        """The floor: what must be moved whatever the kernel does."""
        return self.read_bytes + self.written_bytes

    @property
    def saved_bytes(self) -> int:
        """What fusion saves against one ATen kernel a node."""
        return self.aten_bytes - self.effective_bytes


def group_cost(group: FusionGroup) -> GroupCost:
    """Bytes of a group; views cost nothing, an expanded input is read once.

    Of a tensor that is only indexed, such as an embedding's table, what the indices can touch.
    """
    partly = looked_up(group.nodes)
    separate = 0
    for node in group.nodes:
        if not _is_free(node):
            own = looked_up((node,))
            reads = sum(own.get(n, value_bytes(n)) for n in node.all_input_nodes)
            separate += value_bytes(node) + reads
    return GroupCost(
        read_bytes=sum(partly.get(node, value_bytes(node)) for node in group.inputs),
        written_bytes=sum(value_bytes(node) for node in group.outputs),
        aten_bytes=separate,
    )


def _is_free(node: fx.Node) -> bool:
    return is_view(node) or is_creation(node) or node.target is operator.getitem
