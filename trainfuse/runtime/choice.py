"""What a captured graph runs on: its device, the target of its kernels, the code generator."""

from __future__ import annotations

import torch
from torch import Tensor

from autodiff.graph import TrainingGraph
from trainfuse.codegen.targets import SIMULATED, Target
from trainfuse.fields import Settings
from trainfuse.settings import require_triton


def device_of(graph: TrainingGraph) -> torch.device:
    """The device that does the work: a GPU if any value is on one."""
    devices = [
        value.device
        for node in graph.graph.nodes
        if isinstance(value := node.meta.get("val"), Tensor)
    ]
    return next((d for d in devices if d.type == "cuda"), torch.device("cpu"))


def target_of(device: torch.device) -> Target:
    """What kernels are generated for; without a GPU, the interpreter."""
    if device.type != "cuda":
        return SIMULATED
    facts = torch.cuda.get_device_properties(device)
    arch = f"sm_{facts.major}{facts.minor}"
    return Target(arch, facts.multi_processor_count, l2_bytes=facts.L2_cache_size)


def choose_backend(settings: Settings, device: torch.device) -> str:
    """The backend asked for, or the device's default; raises BackendUnavailable."""
    chosen = settings.chosen_backend
    if chosen is None:
        return "triton" if device.type == "cuda" else "inductor"
    if chosen == "triton" and device.type != "cuda":
        require_triton()
    return chosen
