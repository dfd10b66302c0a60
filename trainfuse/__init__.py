"""trainfuse: an autodiff-aware training accelerator for PyTorch."""

from __future__ import annotations

from trainfuse.api import (
    CompiledStep,
    bisect,
    compile,  # noqa: A004 -- torch's own name
    doctor,
    explain,
    restore,
)
from trainfuse.debug.explain import Explanation
from trainfuse.errors import (
    CaptureError,
    FusionError,
    GradientMismatch,
    OptionError,
    TrainfuseError,
)
from trainfuse.integrations.torch_compile import register
from trainfuse.settings import fuser, set_enabled, settings, skip_op, strict_fusion

register()

__all__ = [
    "CaptureError",
    "CompiledStep",
    "Explanation",
    "FusionError",
    "GradientMismatch",
    "OptionError",
    "TrainfuseError",
    "bisect",
    "compile",
    "doctor",
    "explain",
    "fuser",
    "restore",
    "set_enabled",
    "settings",
    "skip_op",
    "strict_fusion",
]
