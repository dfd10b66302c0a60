"""What a process of `python -m tests.gradients.programs` runs; torch is imported in it."""

from __future__ import annotations

import gc
import os
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.gradients.programs.run import Outcome

CHUNK = 50
"""Seeds that are run, and told of, at once."""
CHUNKS = 10
"""Of one process, before it makes room for a fresh one: starting takes as long as ten programs, and
each leaves most of a megabyte behind."""


def run_chunk(task: tuple[int, int, str, float]) -> list[Outcome]:
    """Run a few seeds in this process."""
    start, count, device, shrink_s = task
    prepare(device)
    from tests.gradients.programs.run import run_range

    gc.freeze()  # what is imported stays: a collection need not look at it each time
    return run_range(start, count, device, shrink_s).outcomes


def prepare(device: str) -> None:
    """Set this process up: the interpreter before triton is imported, one thread, few words."""
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    import logging

    import torch

    torch.set_num_threads(1)
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
