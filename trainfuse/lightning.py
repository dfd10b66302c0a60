"""The Lightning callback, under its public name. Import Lightning itself first."""

from __future__ import annotations

from trainfuse.integrations.lightning import FusionCallback, FusionReport

__all__ = ["FusionCallback", "FusionReport"]
