"""Versions of what is installed."""

from __future__ import annotations

import importlib.metadata


def installed(distribution: str) -> str | None:
    """A distribution's version; None where it runs from a source tree, or isn't there."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
