"""The Lightning callback, under its public name. Import Lightning itself first."""

from __future__ import annotations

from trainfuse.integrations.lightning import FusionCallback
from trainfuse.integrations.lightning_report import FusionReport

__all__ = ["FusionCallback", "FusionReport"]
