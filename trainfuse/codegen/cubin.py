"""What a compiled kernel takes of a multiprocessor. Imports neither torch nor trainfuse."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path


@cache
def _tool() -> Path:
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def resources(cubin: Path) -> dict[str, int]:
    """Registers a thread and bytes of stack a thread, of the one function of a cubin.

    A spill shows as stack: the worst spillers report few registers. Read by the cuobjdump that
    Triton ships; raises OSError or CalledProcessError where there is none that works.
    """
    command = [_tool(), "-res-usage", cubin]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"(REG|STACK):(\d+)", text))
    return {"registers": int(found["REG"]), "stack": int(found["STACK"])}
