"""Rows that begin anywhere, moved in whole vectors: tiles are laid from an aligned address before.

A row of 50257 halves begins at an odd address: element by element, a warp moves 64 bytes at a time.
Vectors at a row's ends have elements of its neighbours: those are read with them and masked out,
and never written. 16 aligned bytes that hold one element of a tensor can be read as a whole, also
at its end; an input that begins elsewhere is copied first (`Module.whole_vectors`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from trainfuse.codegen.builder import Builder, Group, masks
from trainfuse.codegen.ir import Barrier
from trainfuse.codegen.schedules.common import own_axes
from trainfuse.codegen.tile import VECTOR_BYTES, Segment, Vectors, value_strides


def elements(group: Group, rows: Sequence[int], cols: Sequence[int]) -> int:
    """Elements of a vector, or 1 where rows can't be moved so, or are moved in vectors as they lie.

    All whole operands lie row by row without gaps, so that their vectors begin at the same lanes;
    none varies along the columns alone, as its own vectors would begin at others.
    """
    domain = group.domain
    width = domain.extent(cols)
    owns = {n: own_axes(domain, n) for n in (*group.inputs, *group.outputs) if n in domain.axes}
    whole = [node for node, own in owns.items() if len(own) == len(domain.sizes)]
    apart = any(own and own <= frozenset(cols) for own in owns.values())
    if not whole or apart or domain.indirect or masks(group):
        return 1
    dense = 1
    for axis in reversed((*rows, *cols)):
        if domain.sizes[axis] > 1 and any(value_strides(domain, n)[axis] != dense for n in whole):
            return 1
        dense *= domain.sizes[axis]
    # of the narrowest, so that the lanes of everyone's vectors are masked alike
    count = VECTOR_BYTES // min(node.meta["val"].dtype.itemsize for node in whole)
    return count if width % count and width >= count * count else 1


def segment(plain: Segment, count: int, *, first: str | None = None) -> Segment:
    """A block of rows that are moved in vectors of so many elements, of programs of one row.

    first: place of the block's first lane, where blocks write a row's ends that they have; else
    `store_ends` does.
    """
    ends = "False" if first is None else has_ends(first, plain.width, count)
    moved = Vectors(
        element="row * COLS + col",
        offset="row_first + place",
        index="place",
        before=count - 1,
        stop="row_stop",
        load="place, row_stop",
        store=f"place, lead, row_stop, {count}, {ends}",
    )
    return replace(plain, mask="col_mask", quad=None, vectors=moved)


def has_ends(first: str, width: int, count: int) -> str:
    """Whether a block has elements that share a vector with another row: most blocks have none."""
    return f"({first} < lead) | ({first} + {width} > row_stop // {count} * {count})"


def begin(builder: Builder, count: int) -> None:
    """Where a program's row begins and ends."""
    builder.note("row_first", f"row * COLS // {count} * {count}", "aligned, at or before the row")
    builder.note("lead", "row * COLS - row_first", "elements from there to the row")
    builder.note("row_stop", "lead + COLS")


def place(builder: Builder, text: str) -> None:
    """A block's indices and mask, from its lanes' places in the vectors."""
    builder.note("place", text)
    builder.note("col", "place - lead")
    builder.note("col_mask", "(col >= 0) & (col < COLS)")


def store_ends(builder: Builder, nodes: Sequence[fx.Node], count: int) -> None:
    """Values once more where a row shares vectors with others, and nowhere else, to be written.

    nodes: outputs of the whole row. Blocks of a loop would compare every element with both ends.
    """
    name, whole = f"{builder.name_of(nodes[0])}_end", builder.tile["col"]
    lane = f"tl.arange(0, {2 * count})"
    head = f"{lane} < {_up('lead', count)} - lead"
    tail = f"row_stop // {count} * {count} - lead + {lane} - {count}"
    builder.note(name, f"tl.where({lane} < {count}, {lane}, {tail})", "before and after vectors")
    builder.note(f"{name}_mask", f"({lane} >= {count}) & ({name} < COLS) | ({head})")
    at = Segment(name, f"{name}_mask", 2 * count)
    builder.tile["col"] = replace(whole, segments=(at,))
    builder.suffix = f"_{name}"
    builder.push("col")
    for node in nodes:
        builder.value(node)
    # threads are more than elements: several read each
    builder.body.append(Barrier("every thread has its elements: they may be written over"))
    for node in nodes:
        builder.store(node)
    body = builder.pop()
    builder.body.extend(body)
    builder.tile["col"], builder.suffix = whole, ""


def _up(text: str, count: int) -> str:
    return f"({text} + {count - 1}) // {count} * {count}"
