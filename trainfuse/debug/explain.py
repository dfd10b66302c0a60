"""What became of a step: how it was captured, what was fused, and what was not and why."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from autodiff.graph import PHASES, Refusal

_RUN_BY = {
    "inductor": "it compiles each phase's graph whole; the groups are what Triton would run",
    "eager": "ATen runs every node; the groups are what Triton would run",
}
_PHASE_STYLE = {"forward": "green", "backward": "magenta", "update": "cyan"}


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One ATen node. where: the user's line, "file.py:12", or None when capture carried none."""

    name: str
    op: str
    phase: str
    where: str | None = None


@dataclass(frozen=True, slots=True)
class SubgraphRow:
    """One differentiable subgraph. nodes: names of its forward nodes; groups by name."""

    name: str
    nodes: tuple[str, ...]
    forward_groups: tuple[str, ...]
    backward_groups: tuple[str, ...]
    saved_bytes: int
    recomputed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One kernel's worth of nodes.

    schedule: how codegen loops over it. bytes: what it reads and writes, each tensor once.
    kernel: the kernel's id (equal groups share one), or None when ATen or Inductor runs it.
    """

    name: str
    phase: str
    nodes: tuple[NodeRow, ...]
    schedule: str
    bytes: int
    kernel: str | None = None


@dataclass(frozen=True, slots=True)
class SavedRow:
    """Forward values that the backward needs, alike in operator, type, shape and reason.

    kept: saved from forward to backward; else computed again there. bytes: of all of them. where:
    the user's lines that they came from. why: the reason for either.
    """

    kept: bool
    op: str
    value: str
    times: int
    bytes: int
    where: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Bytes of a whole step's own values: not its inputs, nor what it gives back.

    peak: the most alive at once, while the program is `at`. between: alive from forward to
    backward. results: of what it gives back: outputs, and gradients for the update. limit: what
    memory_budget asks for; unlimited: the peak with everything saved; None without a budget.
    """

    peak: int
    at: str
    between: int
    results: int
    limit: int | None = None
    unlimited: int | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `trainfuse.explain` gives back: plain data, that prints itself.

    capture: "whole_step" or "regions"; capture_reason: why not the other. cuda_graph: "used", or
    why not. aten_nodes: executed nodes that stay ATen.
    """

    capture: str
    capture_reason: str
    backend: str
    graph_count: int
    graph_break_count: int
    break_reasons: tuple[str, ...]
    subgraphs: tuple[SubgraphRow, ...]
    groups: tuple[GroupRow, ...]
    refusals: tuple[Refusal, ...]
    cuda_graph: str
    aten_nodes: tuple[NodeRow, ...]
    saved: tuple[SavedRow, ...] = ()
    memory: MemoryRow | None = None

    def to_dict(self) -> dict[str, Any]:
        """The same as dicts, lists, strings and numbers: fit for JSON."""
        return json.loads(json.dumps(asdict(self)))

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write one self-contained page; returns its path."""
        from trainfuse.debug import report

        return report.write(path, self)

    def print(self, console: Console | None = None, *, groups: int | None = 24) -> None:
        """Show it in the terminal. groups: at most so many rows of each table; None for all."""
        (console or Console()).print(self._rendered(groups))

    def __str__(self) -> str:
        console = Console(width=100, no_color=True)
        with console.capture() as capture:
            self.print(console, groups=None)
        return capture.get()

    def count(self, phase: str) -> int:
        """Groups of one phase."""
        return sum(group.phase == phase for group in self.groups)

    def _rendered(self, limit: int | None) -> Group:
        parts: list[Any] = [Panel(self._headline(), title="trainfuse", title_align="left")]
        parts += ["", _phase_table(self)]
        if self.groups:
            parts += ["", _group_table(self.groups, limit)]
        if self.aten_nodes:
            parts += ["", _aten_table(self.aten_nodes, limit)]
        for kept, title in _SAVED_TITLES.items():
            rows = [row for row in self.saved if row.kept is kept]
            if rows:
                parts += ["", _saved_table(title, rows, limit)]
        if self.refusals:
            parts += ["", _refusal_table(self.refusals, limit)]
        return Group(*parts)

    def _headline(self) -> Text:
        text = Text()
        for label, value in (
            ("captured as", self.capture.replace("_", " ") + _because(self.capture_reason)),
            ("graphs", f"{self.graph_count}, breaks: {self.graph_break_count}"),
            ("backend", self.backend + _because(_RUN_BY.get(self.backend, ""))),
            ("CUDA graph", self.cuda_graph),
            ("subgraphs", _subgraph_line(self.subgraphs)),
            *((("memory", memory_line(self.memory)),) if self.memory is not None else ()),
        ):
            text.append(f"{label:<12}", style="bold")
            text.append(f"{value}\n")
        for reason in self.break_reasons:
            text.append(f"{'break':<12}", style="bold")
            text.append(f"{reason}\n", style="yellow")
        text.right_crop(1)
        return text


def _because(reason: str) -> str:
    return f" ({reason})" if reason else ""


def _subgraph_line(subgraphs: Sequence[SubgraphRow]) -> str:
    saved = sum(row.saved_bytes for row in subgraphs)
    recomputed = sum(len(row.recomputed) for row in subgraphs)
    return f"{len(subgraphs)}, saving {human_bytes(saved)}, recomputing {recomputed} nodes"


def memory_line(memory: MemoryRow) -> str:
    """`peak 1.5 GiB of the step's own, ...`, and what became of a budget."""
    line = (
        f"peak {human_bytes(memory.peak)} of the step's own, "
        f"{human_bytes(memory.between)} kept for the backward"
    )
    if memory.limit is None or memory.unlimited is None:
        return line
    line += f"; {human_bytes(memory.unlimited)} with everything saved, "
    if memory.peak <= memory.limit:
        return line + f"at most {human_bytes(memory.limit)} allowed"
    return line + (
        f"{human_bytes(memory.limit)} allowed: the least that was found is over memory_budget"
    )


_SAVED_TITLES = {True: "kept for the backward", False: "computed again in the backward"}


def _saved_table(title: str, rows: Sequence[SavedRow], limit: int | None) -> Table:
    columns = ("operator", "value", "times", "bytes", "from", "why")
    table = _table(title, columns, ("times", "bytes"))
    table.padding = (0, 1, 0, 0)
    shown = rows[:limit]
    for row in shown:
        more = f", +{len(row.where) - 2}" if len(row.where) > 2 else ""
        where = ", ".join(row.where[:2]) + more
        cells = (short_op(row.op), row.value, str(row.times), human_bytes(row.bytes))
        table.add_row(*cells, where, row.why)
    return _more(table, len(shown), len(rows))


def _phase_table(explanation: Explanation) -> Table:
    numbers = ("groups", "nodes fused", "nodes left ATen", "bytes moved by groups")
    table = _table("phases", ("phase", *numbers), numbers)
    for phase in PHASES:
        groups = [group for group in explanation.groups if group.phase == phase]
        left = sum(node.phase == phase for node in explanation.aten_nodes)
        if groups or left:
            table.add_row(
                Text(phase, style=_PHASE_STYLE[phase]),
                str(len(groups)),
                str(sum(len(group.nodes) for group in groups)),
                str(left),
                human_bytes(sum(group.bytes for group in groups)),
            )
    return table


_LEAST_WIDTH = {"operators": 14, "from": 12}
"""In 80 columns, `scalar_tensor,` and `train.py:85,` stay in one piece."""


def _table(title: str, columns: Sequence[str], right: Sequence[str] = ()) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        header_style="dim",
        pad_edge=False,
    )
    for name in columns:
        table.add_column(
            name,
            justify="right" if name in right else "left",
            overflow="fold",
            min_width=_LEAST_WIDTH.get(name),
        )
    return table


def _more(table: Table, shown: int, total: int) -> Table:
    if shown < total:
        table.caption = f"... and {total - shown} more: to_dict() and to_html() have them all"
        table.caption_justify = "left"
    return table


def _group_table(groups: Sequence[GroupRow], limit: int | None) -> Table:
    columns = ("group", "times", "schedule", "operators", "from", "bytes", "kernel")
    table = _table("fused", columns, ("times", "bytes"))
    table.padding = (0, 1, 0, 0)  # seven columns in 80: no more than one space between them
    alike: dict[tuple[Any, ...], list[GroupRow]] = {}
    for group in groups:
        same = (group.phase, group.kernel or op_summary(group.nodes), group.bytes)
        alike.setdefault(same, []).append(group)
    rows = list(alike.values())[:limit]
    for members in rows:
        first = members[0]
        table.add_row(
            Text(first.name, style=_PHASE_STYLE.get(first.phase, "")),
            str(len(members)),
            first.schedule,
            op_summary(first.nodes),
            line_summary([node for group in members for node in group.nodes]),
            human_bytes(first.bytes),
            (first.kernel or "-")[:8],
        )
    return _more(table, len(rows), len(alike))


def _aten_table(nodes: Sequence[NodeRow], limit: int | None) -> Table:
    table = _table("left as ATen calls", ("phase", "operator", "times", "from"), ("times",))
    found: dict[tuple[str, str], list[NodeRow]] = {}
    for node in nodes:
        found.setdefault((node.phase, node.op), []).append(node)
    rows = list(found.items())[:limit]
    for (phase, op), members in rows:
        style = _PHASE_STYLE.get(phase, "")
        name = op.removesuffix(".default")
        table.add_row(Text(phase, style=style), name, str(len(members)), line_summary(members))
    return _more(table, len(rows), len(found))


def _refusal_table(refusals: Sequence[Refusal], limit: int | None) -> Table:
    table = _table("why not", ("stage", "reason", "times", "first at", "line"), ("times",))
    counts = Counter((refusal.stage, refusal.reason) for refusal in refusals)
    first: dict[tuple[str, str], Refusal] = {}
    for refusal in refusals:
        first.setdefault((refusal.stage, refusal.reason), refusal)
    rows = list(counts.items())[:limit]
    for (stage, reason), times in rows:
        example = first[stage, reason]
        node = example.node.partition(":")[0] or "-"
        table.add_row(stage, reason, str(times), node, example.where or "-")
    return _more(table, len(rows), len(counts))


def op_summary(nodes: Sequence[NodeRow], most: int = 8) -> str:
    """`mul, add x3, rsqrt`: operators in order of first use, with their counts, getitem aside."""
    counts = Counter(short_op(node.op) for node in nodes if node.op != "getitem")
    words = [op if times == 1 else f"{op} x{times}" for op, times in counts.items()]
    return ", ".join(words[:most]) + (f", +{len(words) - most}" if len(words) > most else "")


def line_summary(nodes: Sequence[NodeRow], most: int = 2) -> str:
    """The user's lines that the nodes came from, each once."""
    lines = list(dict.fromkeys(node.where for node in nodes if node.where))
    return ", ".join(lines[:most]) + (f", +{len(lines) - most}" if len(lines) > most else "")


def short_op(op: str) -> str:
    """`add` for `aten.add.Tensor`."""
    parts = op.split(".")
    return parts[1] if len(parts) > 1 and parts[0] in ("aten", "prims") else op


def human_bytes(count: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
