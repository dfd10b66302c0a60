"""Random training programs, natively: other kernels than in the interpreter, and CUDA graphs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
COUNT = int(os.environ.get("PROGRAMS", "150"))
START = int(os.environ.get("PROGRAMS_START", "0"))


def test_programs():
    """In processes of their own, as most of the time goes into compiling one after the other."""
    jobs = max(1, min(8, (os.cpu_count() or 2) // 2))
    command = [sys.executable, "-m", "tests.gradients.programs", "--device", "cuda"]
    command += ["--start", str(START), "--count", str(COUNT), "--jobs", str(jobs), "--shrink", "30"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    print(done.stdout)  # every failure, with a file that reproduces it; then the counts
    assert done.returncode == 0, f"{_seeds(done.stdout)}\n{done.stderr[-4000:]}"


def _seeds(text: str) -> str:
    """The failures' first lines."""
    return "\n".join(line for line in text.splitlines() if line.startswith("random program "))
