"""trainfuse: an autodiff-aware training accelerator for PyTorch."""

from __future__ import annotations

from trainfuse.api import CompiledStep, compile, explain, restore  # noqa: A004 -- torch's own name
from trainfuse.debug.explain import Explanation
from trainfuse.errors import (
    CaptureError,
    FusionError,
    GradientMismatch,
    OptionError,
    TrainfuseError,
)
from trainfuse.settings import fuser, set_enabled, settings, skip_op, strict_fusion

__all__ = [
    "CaptureError",
    "CompiledStep",
    "Explanation",
    "FusionError",
    "GradientMismatch",
    "OptionError",
    "TrainfuseError",
    "compile",
    "explain",
    "fuser",
    "restore",
    "set_enabled",
    "settings",
    "skip_op",
    "strict_fusion",
]
