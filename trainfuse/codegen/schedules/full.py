"""Full reductions: losses and norms to a scalar. Partials, then one tail program."""

from __future__ import annotations

import math

from trainfuse.codegen.builder import Group
from trainfuse.codegen.choices import Choice, products
from trainfuse.codegen.ir import Module
from trainfuse.codegen.schedules import accumulate
from trainfuse.codegen.schedules.common import describe, needed, row_extents
from trainfuse.codegen.targets import CodegenOptions, Target
from trainfuse.codegen.tile import Segment, TileAxis, divide_up, power_of_two

BLOCK = 2048
PROGRAMS_PER_SM = 4


LIKELY = (Choice(warps=8, block=1024, per_sm=8), Choice(warps=8, block=8192, per_sm=4))
OTHERS = tuple(products(warps=(4, 8), block=(1024, 2048, 4096, 8192), per_sm=(2, 4, 8)))


def build(group: Group, target: Target, options: CodegenOptions, choice: Choice) -> Module:
    """Every program walks the elements in strides, a lane an accumulator."""
    del options
    domain = group.domain
    extents = row_extents(group, domain.rows)
    total = math.prod(extents[axis] for axis in domain.rows)
    block = 1 << 15 if target.interpreted else choice.block or BLOCK
    block = min(power_of_two(total), block)
    per_sm = choice.per_sm or PROGRAMS_PER_SM
    programs = min(per_sm * target.num_sms, divide_up(total, block), accumulate.MAX_PROGRAMS)
    mask = "row_mask" if total % block or extents != domain.sizes else ""
    quad = "start // 4" if block % 4 == 0 else None
    tile = [
        TileAxis("row", domain.rows, total, (Segment("row", mask, block, quad),), 0, programs > 1)
    ]
    doc = f"Reduction of everything: {describe(group, needed(group))}."
    warps = choice.warps or (4 if block < 2048 else 8)
    plan = accumulate.Plan(programs, block, "full_kernel", doc, warps, extents=extents)
    return accumulate.build(group, target, tile, plan, [])
