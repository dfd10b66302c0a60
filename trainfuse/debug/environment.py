"""What this machine offers, and what trainfuse would use: `python -m trainfuse doctor`."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass

import torch

from trainfuse.settings import current
from trainfuse.versions import installed

CXX_FIX = "install g++ (apt-get install g++) or name a compiler in CXX"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor. ok: None for a plain fact; fix: what to do when it is not ok."""

    name: str
    value: str
    ok: bool | None = None
    fix: str = ""


def cxx() -> str | None:
    """Path of the C++ compiler that Inductor would run, or None."""
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")


def default_backend() -> str:
    """Code generator that a plan gets here when nobody chooses one."""
    if torch.cuda.is_available():
        return "triton"
    return "inductor" if cxx() else "eager"


def examine() -> list[Finding]:
    """Facts about this machine in the order in which they matter."""
    chosen = current().chosen_backend
    findings = [
        Finding("python", platform.python_version()),
        _torch(),
        _triton(),
        _gpu(),
        Finding("C++ compiler", cxx() or "none", cxx() is not None, CXX_FIX),
        Finding("fusion", "off" if chosen == "none" else "on", chosen != "none", OFF_FIX),
        Finding("backend", chosen if chosen not in (None, "none") else default_backend()),
        _cache(),
    ]
    return findings


OFF_FIX = "see `python -m trainfuse settings` for the setting that turned it off"


def _torch() -> Finding:
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    fix = "trainfuse is tested with torch 2.11 to 2.14"
    return Finding("torch", torch.__version__, (2, 11) <= (major, minor) < (2, 15), fix)


def _triton() -> Finding:
    version = installed("triton")
    if version is None:
        return Finding("triton", "none", not torch.cuda.is_available(), "pip install triton")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return Finding("triton", version + (", interpreted" if interpreted else ""), True)


def _gpu() -> Finding:
    if not torch.cuda.is_available():
        return Finding("GPU", "none: plans run on the CPU, through Inductor's C++ code")
    major, minor = torch.cuda.get_device_capability()
    value = f"{torch.cuda.get_device_name()}, sm_{major}{minor}"
    return Finding("GPU", value, major >= 8, "kernels are built for sm_80 and later")


def _cache() -> Finding:
    from trainfuse.runtime.cache import default_folder, why_unsafe

    folder = current().cache_dir or default_folder()
    reason = why_unsafe(folder)
    value = str(folder) if reason is None else f"{folder}: {reason}"
    fix = "kernels stay in memory until it is yours alone: chmod 700, or set TRAINFUSE_CACHE_DIR"
    return Finding("kernel cache", value, reason is None, fix)
