"""Which nodes the code generator can build, asked before grouping."""

from __future__ import annotations

import operator

from torch import Tensor, fx

from autodiff import ops
from autodiff.philox import KEEP_MASK
from trainfuse.codegen import reductions, triton_ops
from trainfuse.codegen.scalars import TRITON_TYPE
from trainfuse.fusion import indirect
from trainfuse.fusion.segment_ops import SEGMENT_SUM


def unsupported(node: fx.Node) -> str | None:
    """Why a node can't be part of a kernel, or None.

    Types and overloads are looked at; shapes are the domain's business.
    """
    row = ops.lookup(node.target)
    if node.target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return unsupported(source)
    base = row.name.rpartition(".")[0]
    known = (
        row.kind == "view"
        or row.name in (KEEP_MASK, SEGMENT_SUM)
        or base in reductions.OPS
        or node.target in indirect.TARGETS
        or triton_ops.supported(node.target)
    )
    if not known:
        return f"{row.name} has no kernel code"
    if row.name == "aten.gather.default" and not node.meta["val"].dtype.is_floating_point:
        return "an index out of range must raise: integers have no NaN to show it by"
    for value in _tensors(node):
        if value.dtype not in TRITON_TYPE:
            return f"{str(value.dtype).removeprefix('torch.')} has no kernels"
        if value.is_neg():
            return "it reads or makes a view with the sign bit of its elements still to be turned"
    return None


def _tensors(node: fx.Node) -> list[Tensor]:
    found: list[Tensor] = []
    for part in (node, *node.all_input_nodes):
        value = part.meta.get("val")
        found += [
            v for v in (value if isinstance(value, list | tuple) else (value,)) if v is not None
        ]
    return [v for v in found if isinstance(v, Tensor)]
