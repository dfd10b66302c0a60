"""Comparisons that rounding decides: eager, a kernel and fp64 may each choose otherwise.

A backward that makes ReLU's argument again compares it with 0. Within the rounding error of that
argument both answers are right, and they differ by a whole gradient: among fifty million elements
a few are that near. What a result could be either way is found by evaluating it twice more, with
the comparisons shifted by eager's own error to one side and to the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autodiff import ops
from autodiff.reference import Environment

_COMPARISONS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "aten.lt": torch.lt,
    "aten.le": torch.le,
    "aten.gt": torch.gt,
    "aten.ge": torch.ge,
}
_SIGN_PRESERVING = frozenset(
    {
        "aten._to_copy.default",
        "aten.clone.default",
        "aten.relu.default",
        "prims.convert_element_type.default",
    }
)
"""Operators whose result compares with 0 as their operand does."""
_MARGIN = 2.0
"""Shift of a comparison, in eager's own largest error."""

Evaluate = Callable[[Collection[fx.Node], Environment], list[Tensor]]


@dataclass(frozen=True, slots=True)
class Decision:
    """A comparison of values that a group computes: its answer follows from left - right."""

    node: fx.Node
    left: fx.Node
    right: fx.Node | float

    @property
    def operands(self) -> list[fx.Node]:
        """What is compared."""
        return [n for n in (self.left, self.right) if isinstance(n, fx.Node)]

    def difference(self, values: Mapping[fx.Node, Any]) -> Tensor:
        """left - right, of given values."""
        left = values[self.left]
        if isinstance(self.right, fx.Node):
            return left - values[self.right].to(left.device)  # one of them may be on the host
        return left - self.right

    def answers(self, difference: Tensor) -> Tensor:
        """What the comparison says."""
        return _COMPARISONS[_base(self.node)](difference, 0.0)


def decisions(nodes: Sequence[fx.Node]) -> list[Decision]:
    """The comparisons of floating values that are computed by these nodes."""
    members = set(nodes)
    found: list[Decision] = []
    for node in nodes:
        if _base(node) not in _COMPARISONS:
            continue
        left, right = node.args[:2]
        if not isinstance(left, fx.Node) or not isinstance(right, fx.Node | int | float):
            continue
        while right == 0 and left in members and ops.op_name(left.target) in _SIGN_PRESERVING:
            left = left.args[0]
            assert isinstance(left, fx.Node)
        decision = Decision(node, left, right)
        if _floating(left) and any(_computed(n, members) for n in decision.operands):
            found.append(decision)
    return found


def _base(node: fx.Node) -> str:
    return ops.op_name(node.target).rpartition(".")[0]


def _floating(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()


def _computed(node: fx.Node, members: Collection[fx.Node]) -> bool:
    """Whether a value is rounded inside: no input, constant, or view or cast of one."""
    while node in members:
        kind = ops.lookup(node.target).kind
        if kind != "view" and ops.op_name(node.target) not in _SIGN_PRESERVING:
            return kind != "creation"
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return False


def slack(
    found: Sequence[Decision],
    native: Mapping[fx.Node, Any],
    exact: Mapping[fx.Node, Any],
    results: Sequence[Tensor],
    evaluate: Evaluate,
    device: torch.device,
) -> list[Tensor | None]:
    """How far each exact result moves when near comparisons fall otherwise; None: not at all.

    native, exact: the compared values, in eager's precision and a higher one. evaluate: the
    results for given answers of the comparisons, which are on the device.
    """
    given: list[Environment] = [{}, {}]
    near = False
    for decision in found:
        true = decision.difference(exact)
        error = (decision.difference(native).to(true) - true).abs()
        shift = _MARGIN * error[error.isfinite()].max() if bool(error.isfinite().any()) else 0.0
        near = near or bool((true.abs() <= shift).any())
        for side, environment in zip((1, -1), given, strict=True):
            environment[decision.node] = decision.answers(true + side * shift).to(device)
    if not near:
        return [None] * len(results)
    skipped = {decision.node for decision in found}
    moved = [evaluate(skipped, environment) for environment in given]
    found_room: list[Tensor | None] = []
    for result, up, down in zip(results, *moved, strict=True):
        if not result.is_floating_point():  # answers themselves: a share of them may differ
            found_room.append(None)
            continue
        sides = [(side.to(result.device) - result).abs() for side in (up, down)]
        found_room.append(sides[0] + sides[1])
    return found_room


def forgiven(value: Tensor, exact: Tensor, room: Tensor) -> Tensor:
    """A result brought nearer to the exact one by what ties may move it."""
    away = value.to(exact) - exact
    left = (away.abs() - room.to(away)).clamp(min=0).copysign(away)
    return torch.where(away.isfinite(), exact + left, value.to(exact)).to(value)
