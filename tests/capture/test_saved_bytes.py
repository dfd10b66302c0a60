"""What crosses from forward to backward: no more than torch's partitioner saves for Inductor."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch._inductor.lowering  # Inductor's decompositions look it up
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

import trainfuse
from autodiff.split import partition
from benchmarks import models
from benchmarks.cases import Case, full_cases
from benchmarks.contenders import forward_of, step_of
from trainfuse.capture import compat

FULL = full_cases()


def _smaller(name: str, model: Callable[[], Any], batch: Callable[[], Any]) -> Case:
    return replace(FULL[name], model=model, batch=batch)


def _tokens(batch: int, time: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(vocabulary, (batch, time + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _images(batch: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, 224, 224), torch.randint(1000, (batch,))


# The widths of the full cases; fewer layers and a smaller batch.
SHALLOW = {
    "gpt2": _smaller(
        "gpt2",
        lambda: models.Language(50304, 1024, 2, 768, 12, causal=True, dropout=0.0),
        lambda: _tokens(1, 1024, 50304),
    ),
    "resnet50": _smaller("resnet50", lambda: models.resnet((1, 1)), lambda: _images(4)),
    "vit": _smaller("vit", lambda: models.ViT(224, 16, 2, 384, 6, 1000), lambda: _images(4)),
}


# A norm's statistics may be saved in another form than Inductor's: a few numbers a channel.
STATISTICS = 1.0001


class _Traced(BaseException):
    """Stops a call once its joint graph is there."""


@dataclass(frozen=True, slots=True)
class _Joint:
    graph: fx.GraphModule
    inputs: Any
    facts: dict[str, Any]

    def saved_bytes(self, split: Callable[..., Any], **options: Any) -> int:
        """Bytes of what the forward hands to the backward; parameters and inputs aside."""
        _, backward = split(copy.deepcopy(self.graph), self.inputs, **self.facts, **options)
        crossing = backward.graph.find_nodes(op="placeholder")
        values = (
            node.meta["val"]
            for node in crossing
            if not node.name.startswith(("primals", "tangents"))
        )
        return sum(v.numel() * v.element_size() for v in values if isinstance(v, Tensor))


def joint_of(case: Case, table: dict[Any, Any]) -> _Joint:
    """The joint graph of a case's forward and loss, traced on fake tensors; nothing runs."""
    found: list[_Joint] = []

    def keep(graph: fx.GraphModule, inputs: Any, **facts: Any) -> Any:
        found.append(_Joint(graph, inputs, facts))
        raise _Traced

    def backend(gm: fx.GraphModule, inputs: Any, **_: Any) -> Any:
        with torch.fx.traceback.preserve_node_meta():
            compiled = aot_autograd(
                fw_compiler=lambda graph, _: graph,
                partition_fn=keep,
                decompositions=table,
                keep_inference_input_mutations=True,
            )
            return compiled(gm, inputs)

    model, batch = case.build("cpu")
    with pytest.raises(_Traced):
        torch.compile(forward_of(case, model, "cpu"), backend=backend, dynamic=False)(*batch)
    torch._dynamo.reset()
    return found[0]


def _check(case: Case) -> None:
    inductor = joint_of(case, select_decomp_table())
    theirs = inductor.saved_bytes(min_cut_rematerialization_partition, compiler="inductor")
    ours = joint_of(case, compat.capture_decompositions())
    saved = [ours.saved_bytes(partition, memory_budget=b) for b in (None, 0.5, 0.25)]
    assert saved[0] <= STATISTICS * theirs
    assert saved == sorted(saved, reverse=True)
    model, batch = case.build("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = trainfuse.compile(step_of(forward_of(case, model, "cpu"), optimizer), backend="triton")
    explanation = step.explain(*batch)
    assert explanation.capture == "whole_step"
    assert explanation.memory.between <= STATISTICS * theirs
    dear = [row.op for row in explanation.saved if not row.kept and _is_dear(row.op)]
    assert not dear, "without a budget no contraction is computed twice"


def _is_dear(op: str) -> bool:
    return any(part in op for part in ("mm.", "convolution", "scaled_dot_product"))


@pytest.mark.parametrize(
    "name", ["gpt2", "resnet50", pytest.param("vit", marks=pytest.mark.nightly)]
)
def test_no_more_is_saved_than_for_inductor(name: str) -> None:
    _check(SHALLOW[name])


@pytest.mark.nightly
@pytest.mark.parametrize("name", SHALLOW)
def test_no_more_is_saved_than_for_inductor_at_full_size(name: str) -> None:
    _check(FULL[name])
