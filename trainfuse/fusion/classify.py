"""Rows, columns and kind of a domain: what is reduced, and what reads the results back."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import torch
from torch import fx

from autodiff.ops import op_name
from trainfuse.fusion.axes import Misfit

DomainKind = Literal["pointwise", "row", "column", "row_column", "full", "segment", "nested"]
Axes = frozenset[int]
Side = Literal["cols", "rows", "both"]

# Column accumulators of a row-and-column kernel live in registers, beside a row up to this width.
MAX_ROW_COLUMN_WIDTH = 8192
# A wider row is read again for each level of its reductions; so many accumulators fit alone.
MAX_ACCUMULATORS = 36864
SEGMENTWISE = ("aten.sum.", "aten.mean.", "aten.amax.", "aten.amin.")
"""Reductions of a row that is read in segments."""
# A reduction over everything that is read back runs in one program, so it must stay small.
MAX_SINGLE_PROGRAM = 1 << 16
# Rows that are only summed, too few to occupy a GPU and too long for one program each.
FEW_ROWS, LONG_ROW = 512, 1 << 15
# Programs of a row kernel, and elements of each: with fewer and longer ones most of the GPU waits,
# and summing in slabs, then reading everything again, is faster.
FEW_PROGRAMS, LONG_PROGRAM = 128, 1 << 17
# Parts of a nested row that a tile can have. Rows of so many elements are too long for a program
# each, where there are few of them: apart, each part has a program.
MAX_PARTS, LONG_NESTED = 64, 1 << 14
# Elements that one load takes: rows in pieces of other lengths are read one by one, each at an
# address of its own.
VECTOR = 8
# Rows that lie side by side in memory and share a program: whole sectors of each operand.
NEIGHBOURS = 32


def classify(
    nodes: Sequence[fx.Node],
    sizes: tuple[int, ...],
    own: Mapping[fx.Node, Axes],
    reduced: Mapping[fx.Node, Axes],
) -> tuple[tuple[int, ...], tuple[int, ...], DomainKind]:
    """(rows, cols, kind). own: axes of each value; reduced: axes that each reduction sums over.

    Raises Misfit when no partition fits all reductions, or one kernel can't do it.
    """
    space = {node: own[node] | axes for node, axes in reduced.items() if axes}
    every = frozenset(range(len(sizes)))
    if not space:
        return (), tuple(sorted(every)), "pointwise"
    read_back = axes_read_back(nodes, own, reduced)
    sums = [reduced[node] for node in space]
    if read_back:
        cols = frozenset[int]().union(*(axes for axes in sums if axes & read_back))
    else:
        cols = columns_of_sums(sizes, sums)
    rows = every - cols
    if rows and read_back and (inner := inner_of(cols, reduced)):  # without rows: one program
        check_nested(sizes, own, reduced, cols, inner)
        return tuple(sorted(rows)), tuple(sorted(cols)), "nested"
    sides = {node: side(node, space[node], reduced[node], cols, rows) for node in space}
    check_late(nodes, own, sides, rows)
    kind: DomainKind = "row_column"
    if set(sides.values()) == {"cols"}:
        kind = "row"
    elif set(sides.values()) == {"rows"}:
        kind = "column" if cols else "full"
    width = math.prod(sizes[axis] for axis in cols)
    if kind == "row_column" and width > MAX_ROW_COLUMN_WIDTH:
        check_wide(nodes, sides, width)
    if kind == "row" and not rows and width > MAX_SINGLE_PROGRAM:
        raise Misfit(nodes[-1], "a reduction over everything is read back")
    if kind == "row" and read_back and few_long_programs(sizes, rows, width):
        raise Misfit(nodes[-1], "its rows are too few and too long for a program each")
    if kind == "row" and read_back and width >= LONG_ROW and in_odd_pieces(sizes, cols):
        raise Misfit(nodes[-1], "its rows are long, and in pieces that no vectors divide")
    return tuple(sorted(rows)), tuple(sorted(cols)), kind


def inner_of(cols: Axes, reduced: Mapping[fx.Node, Axes]) -> Axes:
    """The innermost of a row's axes where some reductions stop; () where all take the whole row."""
    inner = {axes for axes in reduced.values() if axes < cols and max(cols) in axes}
    return inner.pop() if len(inner) == 1 else Axes()


def check_nested(
    sizes: tuple[int, ...],
    own: Mapping[fx.Node, Axes],
    reduced: Mapping[fx.Node, Axes],
    cols: Axes,
    inner: Axes,
) -> None:
    """Whether rows can be reduced part by part, and the parts' results again; else Misfit."""
    every, middle = frozenset(range(len(sizes))), cols - inner
    for node, axes in reduced.items():
        space = {inner: every, middle: every - inner, cols: every}.get(axes)
        if axes and own[node] | axes != space:
            raise Misfit(node, "it reduces other axes than the group's rows, or parts of rows")
        if axes == cols and node.target is torch.ops.aten.gather.default:
            raise Misfit(node, "its index counts over a row, not within the row's parts")
    last = next(node for node in reversed(reduced) if reduced[node])
    if max(middle) > min(inner) or max(every - cols, default=-1) > min(middle):
        raise Misfit(last, "the parts of its rows don't lie one after the other in memory")
    if math.prod(sizes[axis] for axis in middle) > MAX_PARTS:
        raise Misfit(last, "its rows have too many parts")
    programs = math.prod(sizes[axis] for axis in every - cols)
    if programs < FEW_PROGRAMS and math.prod(sizes[axis] for axis in cols) >= LONG_NESTED:
        raise Misfit(last, "its rows are too few and too long for a program each")


def check_wide(nodes: Sequence[fx.Node], sides: Mapping[fx.Node, Side], width: int) -> None:
    """Whether rows that are too wide to be held can be walked; Misfit when they can't."""
    for node, where in sides.items():
        if where == "cols" and not op_name(node.target).startswith(SEGMENTWISE):
            raise Misfit(node, "it needs a row whole that is too wide for registers")
    sums = sum(where != "cols" for where in sides.values())
    if sums * width > MAX_ACCUMULATORS:
        raise Misfit(nodes[-1], "its columns are too many to accumulate in registers")


def axes_read_back(
    nodes: Sequence[fx.Node], own: Mapping[fx.Node, Axes], reduced: Mapping[fx.Node, Axes]
) -> Axes:
    """Axes that a reduction sums over and that a value computed from its result has again."""
    taken: dict[fx.Node, Axes] = {}  # axes reduced somewhere above a node
    found: Axes = frozenset()
    for node in nodes:
        above = frozenset[int]().union(*(taken.get(n, Axes()) for n in node.all_input_nodes))
        found |= own[node] & above
        taken[node] = above | reduced.get(node, Axes())
    return found


def columns_of_sums(sizes: tuple[int, ...], sums: Sequence[Axes]) -> Axes:
    """Columns when every reduction is a result: those that reduce the innermost axis are rows'."""
    every = frozenset(range(len(sizes)))
    partial = [axes for axes in sums if axes != every]
    if not partial:
        return frozenset()
    inner = [axes for axes in partial if max(every) in axes]
    cols = inner[0] if inner else every - partial[0]
    if len(set(partial)) == 1 and few_long_rows(sizes, every, cols):
        # One program a row would leave the GPU idle: sum it as a column, in slabs.
        return every - cols
    return cols


def few_long_rows(sizes: tuple[int, ...], every: frozenset[int], cols: frozenset[int]) -> bool:
    rows = math.prod(sizes[axis] for axis in every - cols)
    return rows <= FEW_ROWS and math.prod(sizes[axis] for axis in cols) >= LONG_ROW


def few_long_programs(sizes: tuple[int, ...], rows: Axes, width: int) -> bool:
    """Whether a row kernel would leave most of a GPU idle for long."""
    programs = math.prod(sizes[axis] for axis in rows)
    if len(sizes) - 1 in rows:  # axes are numbered as they lie in memory: rows are neighbours
        share = min(NEIGHBOURS, programs)
        programs, width = -(-programs // share), width * share
    return programs < FEW_PROGRAMS and width >= LONG_PROGRAM


def in_odd_pieces(sizes: Sequence[int], cols: Collection[int]) -> bool:
    """Whether a row is several pieces of memory that vectors don't divide, such as odd images.

    Its elements' addresses take a division each, every time that the row is read. In slabs of
    several rows a division serves all of them, and what follows the sums needs none.
    """
    piece = 1
    for axis in range(len(sizes) - 1, -1, -1):
        if axis not in cols:
            break
        piece *= sizes[axis]
    pieces = math.prod(sizes[axis] for axis in cols) // piece
    return piece > 1 and pieces > 1 and piece % VECTOR != 0


def side(node: fx.Node, space: Axes, reduced: Axes, cols: Axes, rows: Axes) -> Side:
    """Which side of the partition a reduction sums over; Misfit when it cuts across.

    A value that lacks some of the axes to sum over would be counted once for each of them.
    """
    if cols and reduced == cols:
        if space != rows | cols:
            raise Misfit(node, "every row would reduce it again")
        return "cols"
    if rows and reduced == rows:
        return "rows"
    if reduced == space == rows | cols:
        return "both"
    raise Misfit(node, "it reduces other axes than the group's rows or columns")


def check_late(
    nodes: Sequence[fx.Node],
    own: Mapping[fx.Node, Axes],
    sides: Mapping[fx.Node, Side],
    rows: Axes,
) -> None:
    """What follows a reduction over rows runs in the tail: it has no rows, reduces nothing."""
    late: set[fx.Node] = set()
    for node in nodes:
        if any(operand in late for operand in node.all_input_nodes):
            late.add(node)
            if own[node] & rows:
                raise Misfit(node, "a reduction over rows is read back by every row")
            if node in sides:
                raise Misfit(node, "a reduction over rows is reduced again")
        elif sides.get(node, "cols") != "cols":
            late.add(node)
