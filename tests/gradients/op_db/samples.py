"""The differentiable operators of op_db, and which of their samples are run."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests.gradients.op_db.calls import Call, of_sample
from tests.gradients.op_db.invocations import (
    BinaryUfuncInfo,
    ReductionOpInfo,
    UnaryUfuncInfo,
    op_db,
)

LARGEST = 1 << 12
"""Elements of a sample's tensors in all, where it has smaller ones: the interpreter is slow."""
EVERY = 1 << 17
"""The same where every sample is run: a few of grid_sampler_3d have five million."""
LOOKED_AT = 160  # samples of an operator that a choice is made of: some have more than a thousand


@dataclass(frozen=True, slots=True)
class Operator:
    """One differentiable entry of op_db: an operator, in one of its variants."""

    name: str
    info: Any

    def types(self, kind: str = "cpu") -> frozenset[torch.dtype]:
        """The types in which it is differentiable on a kind of device."""
        forward, backward = self.info.supported_dtypes, self.info.supported_backward_dtypes
        return frozenset(forward(kind)) & frozenset(backward(kind))

    def takes(self, dtype: torch.dtype, device: str = "cpu") -> bool:
        """Whether it is differentiable in this type on this device."""
        return dtype in self.types(torch.device(device).type)

    def samples(self, dtype: torch.dtype, device: str = "cpu") -> Iterator[Call]:
        """Every sample, the same at each call."""
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        for sample in self.info.sample_inputs(device, dtype, requires_grad=True):
            yield of_sample(self.info.op, sample, self.name)


def _operators() -> dict[str, Operator]:
    found: dict[str, Operator] = {}
    for info in op_db:
        if info.supports_autograd:
            variant = f".{info.variant_test_name}" if info.variant_test_name else ""
            name = f"{info.name}{variant}"
            assert name not in found, name
            found[name] = Operator(name, info)
    return found


OPERATORS = _operators()
"""By name, `div.floor_rounding`."""
POINTWISE = tuple(
    name for name, op in OPERATORS.items() if isinstance(op.info, UnaryUfuncInfo | BinaryUfuncInfo)
)
REDUCTIONS = tuple(name for name, op in OPERATORS.items() if isinstance(op.info, ReductionOpInfo))


def choose(calls: Iterable[Call], count: int) -> list[Call]:
    """Up to `count` small calls that differ in kind, the same at each run."""
    kinds: dict[Any, Call] = {}
    looked = list(itertools.islice(calls, LOOKED_AT))
    largest = max(LARGEST, min((call.elements for call in looked), default=0))
    for call in looked:
        if call.elements > largest:
            continue
        kind = _kind(call)
        best = kinds.get(kind)
        if best is None or _rank(call) < _rank(best):
            kinds[kind] = call
    return _spread(sorted(kinds.values(), key=_rank), count)


def _rank(call: Call) -> tuple[bool, bool, int]:
    """Calls on empty tensors or only scalars show little; of the others, small ones are fast."""
    sizes = [leaf.numel() for leaf in call.leaves]
    return 0 in sizes, max(sizes, default=0) < 2, sum(sizes)


def _kind(call: Call) -> Any:
    """Ranks of the tensors, and the arguments that are no numbers or tensors."""
    args, kwargs = call.template
    words = [repr(arg) for arg in (*args, *kwargs.values()) if isinstance(arg, bool | str)]
    return tuple(leaf.dim() for leaf in call.leaves), tuple(sorted(kwargs)), tuple(words)


def _spread(calls: Sequence[Call], count: int) -> list[Call]:
    """The first, then such as are evenly spread over the rest."""
    useful = [call for call in calls if not any(_rank(call)[:2])] or list(calls)
    if len(useful) <= count:
        return useful
    return [useful[(i * (len(useful) - 1)) // max(count - 1, 1)] for i in range(count)]
