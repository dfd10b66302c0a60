"""Seeds for the runs that are compared."""

from __future__ import annotations

import torch


def seed_all(seed: int) -> None:
    """Seed the generators of the CPU and of the GPUs.

    Without a GPU, `torch.manual_seed` queues every seed, with the stack of its call, for devices
    that never start: most of a small program's time there, and memory that grows.
    """
    if torch.cuda.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
