"""Sums of rows by key, such as an embedding's gradient: no atomics, no row moved twice.

Few keys are compared with all rows of a small table, in one launch (few.py). Others are sorted:
some by their ranks (ranks.py), many before. Where most rows have entries, and are long, programs
belong to rows of the table (tables.py); else to chunks of the entries (chunks.py), whose time does
not depend on how often a key occurs.
"""

from __future__ import annotations

from trainfuse.codegen.builder import Group
from trainfuse.codegen.choices import Choice, products
from trainfuse.codegen.ir import Module
from trainfuse.codegen.schedules import chunks, tables
from trainfuse.codegen.schedules.sums import parse
from trainfuse.codegen.targets import CodegenOptions, Target
from trainfuse.fusion.segment_ops import unsorted

LONG = 1024
"""Elements of rows that a program each is not too little for."""

LIKELY = (Choice(rows=64), Choice(rows=128))
OTHERS = tuple(products(rows=(16, 32, 64, 128, 256), block=(64, 128, 256), warps=(1,)))


def build(group: Group, target: Target, options: CodegenOptions, choice: Choice) -> Module:
    """The kernels of the way that suits the sizes."""
    sums = parse(group)
    if sums.order is None and unsorted(sums.count, sums.rows, sums.width):
        return tables.build_few(group, target, options, choice)
    if sums.count >= sums.rows and sums.width >= LONG:
        return tables.build(group, target, options, choice)
    return chunks.build(group, target, options, choice)
