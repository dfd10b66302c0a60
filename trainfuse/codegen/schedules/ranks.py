"""Few keys sorted in one launch: each is written where as many others come before it.

A program ranks a block of keys against all of them, N^2 comparisons of registers in all. A key and
its place are one number, so equal keys keep their order and no two are equal.
"""

from __future__ import annotations

import torch
from torch import fx

from trainfuse.codegen.builder import Builder, Group
from trainfuse.codegen.ir import ArgRef, Kernel, Load, Loop, Store, Workspace
from trainfuse.codegen.schedules.common import constants, kernel
from trainfuse.codegen.targets import Target
from trainfuse.codegen.tile import divide_up, power_of_two
from trainfuse.fusion.segment_ops import key_bias

OWN, OTHERS, WARPS = 16, 256, 4
"""Keys that a program ranks, those that it compares them with at a time, and its warps."""


def workspaces(spaces: list[Workspace], count: int) -> tuple[ArgRef, ArgRef]:
    """Places for the sorted keys and where each came from, added to the workspaces of a group."""
    found: tuple[ArgRef, ArgRef] = ("workspace", len(spaces)), ("workspace", len(spaces) + 1)
    spaces += [Workspace((count,), torch.int32)] * 2
    return found


def build(
    group: Group, target: Target, keys: fx.Node, rows: int, lists: tuple[ArgRef, ArgRef]
) -> Kernel:
    """The sorting kernel. keys: an input of the group, below `rows` but for its bias, or `rows`."""
    count = keys.meta["val"].numel()
    own = min(power_of_two(count), 2048 if target.interpreted else OWN)
    others = min(power_of_two(count), 2048 if target.interpreted else OTHERS)
    builder = Builder(group, [], "")
    constants(builder, [("COUNT", count)])
    source: ArgRef = ("input", builder.inputs[keys])
    for arg in (source, *lists):
        builder.args[arg] = None
    # whatever the bias, a key's place is less than one key's step
    span = power_of_two(count)
    bits = 32 if (rows + 1) * span < 1 << 31 else 64
    bias = key_bias(keys.meta["val"].dtype)
    unbiased = f" + {bias}" if bias else ""
    own_mask = "own_mask" if count % own else ""
    other_mask = "other_mask" if count % others else ""
    builder.note("own", f"tl.program_id(0) * {own} + tl.arange(0, {own})[:, None]")
    if own_mask:
        builder.note(own_mask, "own < COUNT")
    builder.body.append(Load("key", source, "own", own_mask, "tl.int32"))
    builder.note("mine", f"(key{unbiased}).to(tl.int{bits}) * {span} + own", "a key and its place")
    builder.note("before", f"tl.zeros(({own}, {others}), tl.int32)")
    builder.push()
    builder.note("other", f"start + tl.arange(0, {others})[None, :]")
    if other_mask:
        builder.note(other_mask, "other < COUNT")
    builder.body.append(Load("its_key", source, "other", other_mask, "tl.int32"))
    its = f"(its_key{unbiased}).to(tl.int{bits}) * {span} + other"
    if other_mask:
        its = f"tl.where({other_mask}, {its}, {(1 << bits - 1) - 1})"
    builder.note("its", its)
    sign = f"(its - mine) >> {bits - 1}"
    sign = sign if bits == 32 else f"({sign}).to(tl.int32)"
    builder.note("before", f"before - ({sign})", "the sign is -1 where it is less")
    step = builder.pop()
    builder.body.append(Loop("start", "0", "COUNT", str(others), step))
    builder.note("rank", "tl.sum(before, 1)[:, None]")
    for arg, value in zip(lists, ("key", "own"), strict=True):
        builder.body.append(Store(arg, "rank", value, own_mask))
    doc = "Keys in order, by how many come before each, and where each came from."
    return kernel(builder, "rank_kernel", doc, (divide_up(count, own), 1, 1), WARPS)
