"""Where a figure was measured, and the name of the file that holds it."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe(device: str) -> dict[str, Any]:
    """GPU, driver, versions, commit and date; what can't be known is null."""
    gpu = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "CPU"
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    commit = os.environ.get("BENCH_COMMIT") or _output("git", "rev-parse", "--short", "HEAD")
    return {
        "gpu": gpu,
        "driver": _output(*query) if device == "cuda" else None,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def results_name(suite: str, environment: dict[str, Any]) -> str:
    """steps-H200-torch2.11.0.json."""
    gpu = re.sub(r"^NVIDIA[- ]", "", environment["gpu"])
    gpu = re.sub(r"[^A-Za-z0-9]+", "_", gpu).strip("_")
    version = environment["torch"].split("+")[0]
    return f"{suite}-{gpu}-torch{version}.json"


def write_results(folder: Path, suite: str, body: dict[str, Any]) -> Path:
    """A suite's file under the name of its body's environment; says where it is."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / results_name(suite, body["environment"])
    path.write_text(json.dumps(body, indent=1) + "\n")
    print(f"written: {path}")
    return path
