"""What trainfuse makes of each operator of op_db: the table in docs/op-coverage.md."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from trainfuse.debug.explain import Explanation

DOCUMENT = Path(__file__).parents[3] / "docs" / "op-coverage.md"
COMMAND = "python -m tests.gradients.op_db"

FUSED, PARTLY, ATEN, VIEWS, LEFT = "kernels", "partly", "ATen", "views", "eager"
_LEGEND = {
    FUSED: "forward and backward are kernels of ours",
    PARTLY: "some operators are, those named stay ATen",
    ATEN: "all of it stays ATen",
    VIEWS: "only views: there is nothing to compute",
    LEFT: "Dynamo leaves the call to eager: its result's shape, or whether it raises, is data",
}

_HEAD = """# Operators

What becomes of every differentiable operator of torch's `op_db`: torch {version}, fp32, captured
on a CPU. Written by `{command}`; `tests/gradients/test_op_db.py` fails when a row is out of date.
Each operator is compiled node by node (`single_node=True`), forward and backward, on two to four of
its samples; outputs, gradients, layouts and flags are compared with eager's.

{total} operators: {counts}.

{legend}

| operator | runs as | stays ATen | because it, mostly, |
|---|---|---|---|"""
_NOT_COMPARED = """
## Not compared

| operator | because |
|---|---|"""


@dataclass(frozen=True, slots=True)
class Row:
    """One operator. left: ATen operators that no kernel holds; reason: why, of most of them."""

    name: str
    kind: str
    left: tuple[str, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        left = " ".join(f"`{op}`" for op in self.left)
        return f"| `{self.name}` | {self.kind} | {left} | {self.reason} |"


def row_of(name: str, explanation: Explanation) -> Row:
    """The row that an explanation of the operator, compiled node by node, amounts to."""
    left = tuple(sorted({_short(node.op) for node in explanation.aten_nodes}))
    if not explanation.graph_count:
        return Row(name, LEFT)
    if not left:
        return Row(name, FUSED if explanation.groups else VIEWS)
    return Row(name, PARTLY if explanation.groups else ATEN, left, _reason(explanation))


def _short(op: str) -> str:
    """aten.add.Tensor as add.Tensor, aten.mm.default as mm."""
    return op.removeprefix("aten.").removesuffix(".default")


def _reason(explanation: Explanation) -> str:
    """The most frequent refusal of what stays ATen, without the operator that it names."""
    nodes = {node.name for node in explanation.aten_nodes}
    reasons = Counter(
        re.sub(r"^[\w.]+ (?=has no )", "", refusal.reason)
        for refusal in explanation.refusals
        if refusal.node.partition(":")[0] in nodes
    )
    # what merely follows from another refusal comes last
    ranked = sorted(reasons, key=lambda r: ("outside" in r or "readers" in r, -reasons[r], r))
    return ranked[0] if ranked else ""


def version() -> str:
    """The torch version that the table is of, "2.14"."""
    return ".".join(torch.__version__.split(".")[:2])


def render(rows: Mapping[str, Row], excluded: Mapping[str, str]) -> str:
    """The whole document."""
    counts = Counter(row.kind for row in rows.values())
    head = _HEAD.format(
        version=version(),
        command=COMMAND,
        total=len(rows) + len(excluded),
        counts=", ".join(f"{counts[kind]} {kind}" for kind in _LEGEND),
        legend="\n".join(f"- **{kind}**: {text}." for kind, text in _LEGEND.items()),
    )
    body = [str(rows[name]) for name in sorted(rows)]
    rest = [f"| `{name}` | {reason} |" for name, reason in sorted(excluded.items())]
    return "\n".join([head, *body, _NOT_COMPARED, *rest, ""])


def recorded() -> tuple[str, Mapping[str, str]]:
    """(torch version, line by operator) of the document as it is."""
    text = DOCUMENT.read_text() if DOCUMENT.exists() else ""
    found = re.search(r"torch (\d+\.\d+), fp32", text)
    return found[1] if found else "", dict(_lines(text.splitlines()))


def _lines(lines: Iterable[str]) -> Iterable[tuple[str, str]]:
    for line in lines:
        if line.startswith("| `"):
            yield line.split("`")[1], line
