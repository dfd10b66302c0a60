"""The kernels of a loss over logits, forward and backward in one, through every pass."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.autodiff.training_graphs import step_graph
from tests.gradients.loss_cases import LOSSES
from trainfuse.capture.compat import capture_decompositions
from trainfuse.codegen.check import Usage, compile_only
from trainfuse.codegen.ir import GroupKernel
from trainfuse.codegen.lower import candidates
from trainfuse.codegen.targets import H200, CodegenOptions, Target
from trainfuse.fields import Settings
from trainfuse.fusion.plan import FusionGroup
from trainfuse.pipeline import Facts, run_passes

# name: loss, rows, classes, type of the logits
CASES: dict[str, tuple[str, int, int, torch.dtype]] = {
    "cross_entropy_4096": ("mean", 8192, 4096, torch.bfloat16),
    "cross_entropy_32000": ("mean", 8192, 32000, torch.bfloat16),
    "cross_entropy_128256": ("mean", 4096, 128256, torch.bfloat16),
    "cross_entropy_int64": ("mean", 65536, 50257, torch.bfloat16),
    "smoothing_5120": ("label smoothing", 8192, 5120, torch.bfloat16),
    "smoothing_50257": ("label smoothing", 8192, 50257, torch.bfloat16),
    "class_weights_32000": ("class weights", 8192, 32000, torch.bfloat16),
    "soft_targets_32000": ("soft targets", 4096, 32000, torch.bfloat16),
    "z_loss_128256": ("z-loss", 4096, 128256, torch.float32),
    "softcap_11008": ("softcap", 8192, 11008, torch.bfloat16),
    "softcap_32000": ("softcap", 8192, 32000, torch.bfloat16),
    "distillation_32000": ("distillation", 4096, 32000, torch.bfloat16),
}


def kernels(name: str, target: Target = H200) -> list[tuple[FusionGroup, GroupKernel]]:
    """Every kernel of a step of the loss over given logits, in order of execution."""
    loss_name, rows, classes, dtype = CASES[name]
    loss = LOSSES[loss_name]
    more = loss.extra(2, classes)
    shapes = [((rows, classes), dtype), ((rows,), torch.int64)]
    for tensor in more:
        shape = tuple(rows if size == 2 else size for size in tensor.shape)
        shapes.append((shape, tensor.dtype))

    def step(logits: Tensor, target: Tensor, *extra: Tensor) -> Any:
        return loss.value(logits.float(), target, *extra)

    graph = step_graph(step, shapes, [0], capture_decompositions())
    state = run_passes(graph, Facts(Settings(autotune="off"), target, "triton", "whole_step"))
    assert state.fusion is not None
    return [(group, state.kernels[group.name]) for group in state.fusion.groups]


def head_kernels(target: Target = H200) -> list[tuple[FusionGroup, GroupKernel]]:
    """Every kernel of a step of a linear layer and cross-entropy in chunks, at their real size."""

    def step(x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(functional.linear(x, weight).float(), y)

    half = torch.bfloat16
    shapes = [((8192, 2048), half), ((128256, 2048), half), ((8192,), torch.int64)]
    graph = step_graph(step, shapes, [0, 1], capture_decompositions())
    state = run_passes(graph, Facts(Settings(autotune="off"), target, "triton", "whole_step"))
    assert state.fusion is not None
    return [(group, state.kernels[group.name]) for group in state.fusion.groups]


def uses(group: FusionGroup, kernel: GroupKernel) -> list[Usage]:
    """What a kernel takes; where it spills, what the candidate takes that runs in its place."""
    types = [[n.meta["val"].dtype for n in nodes] for nodes in (group.inputs, group.outputs)]
    found = compile_only(kernel, *types, H200)
    if not any(use.stack for use in found):
        return found
    others = candidates(group, H200, CodegenOptions(), thorough=False)
    tried = (compile_only(other, *types, H200) for _, other in others[1:])
    return next((each for each in tried if not any(use.stack for use in each)), found)


def main(names: list[str]) -> None:
    """Compile for the H200, and print a line of numbers a launch."""
    for name in names:
        found = head_kernels() if name == "head" else kernels(name)
        for group, kernel in {kernel.key: (group, kernel) for group, kernel in found}.values():
            for use in uses(group, kernel):
                facts = {**dataclasses.asdict(use), "vector": use.vector_bytes, "name": name}
                del facts["ptx"]
                print(json.dumps(facts))


if __name__ == "__main__":
    main(sys.argv[1:])
