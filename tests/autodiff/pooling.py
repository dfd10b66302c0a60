"""Every operator of the table in autodiff/pools.py, and its gradient with a blank operand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autodiff import ops
from autodiff.pools import SHAPE_ALONE, save_less_of_pools
from autodiff.reference import run_graph
from tests.autodiff.training_graphs import training_graph

aten: Any = torch.ops.aten

CALLS: dict[str, tuple[Any, tuple[int, ...], tuple[Any, ...]]] = {
    "avg_pool2d": (aten.avg_pool2d, (2, 3, 8, 8), ([3, 3], [2, 2], [1, 1], False, True)),
    "avg_pool3d": (aten.avg_pool3d, (2, 3, 6, 6, 6), ([2, 2, 2],)),
    "_adaptive_avg_pool2d": (aten._adaptive_avg_pool2d, (2, 3, 8, 7), ([3, 2],)),
    "_adaptive_avg_pool3d": (aten._adaptive_avg_pool3d, (2, 3, 4, 5, 6), ([2, 2, 3],)),
    "max_pool2d_with_indices": (aten.max_pool2d_with_indices, (2, 3, 8, 8), ([2, 2],)),
    "max_pool3d_with_indices": (aten.max_pool3d_with_indices, (2, 3, 4, 4, 4), ([2, 2, 2],)),
    "adaptive_max_pool2d": (aten.adaptive_max_pool2d, (2, 3, 8, 8), ([3, 3],)),
    "adaptive_max_pool3d": (aten.adaptive_max_pool3d, (2, 3, 4, 5, 6), ([2, 2, 2],)),
    "reflection_pad1d": (aten.reflection_pad1d, (2, 3, 8), ([2, 1],)),
    "reflection_pad2d": (aten.reflection_pad2d, (2, 3, 8, 8), ([2, 1, 0, 1],)),
    "reflection_pad3d": (aten.reflection_pad3d, (2, 3, 4, 4, 4), ([1, 1, 0, 1, 1, 1],)),
    "replication_pad1d": (aten.replication_pad1d, (2, 3, 8), ([2, 1],)),
    "replication_pad2d": (aten.replication_pad2d, (2, 3, 8, 8), ([2, 1, 0, 1],)),
    "replication_pad3d": (aten.replication_pad3d, (2, 3, 4, 4, 4), ([1, 1, 0, 1, 1, 1],)),
}


def blank_operand_gradients(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient with the second operand in memory that holds NaN, and as it is."""
    op, _, rest = CALLS[name]

    def fn(x: Tensor) -> Tensor:
        result = op(x.exp(), *rest)
        return result[0] if isinstance(result, tuple) else result

    tg = training_graph(fn, [x], [0])
    assert any(ops.op_name(node.target) in SHAPE_ALONE for node in tg.nodes("backward"))
    changed = save_less_of_pools(tg)
    blank = [n for n in changed.nodes() if n.target is aten.empty_strided.default]
    assert len(blank) == 1
    inputs = [x, torch.randn_like(fn(x))]
    given = run_graph(tg, inputs)[1]
    torch.use_deterministic_algorithms(True, warn_only=True)  # new memory is filled with NaN
    try:
        return run_graph(changed, inputs)[1], given
    finally:
        torch.use_deterministic_algorithms(False)
