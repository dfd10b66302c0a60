"""Which Lightning is in use: `lightning.pytorch` and `pytorch_lightning` are the same code twice.

A Trainer of one tree does not accept a Callback of the other, and importing both costs seconds and
wraps `torch.compile` twice. So the classes are looked up in the tree that is loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

NAMES = ("lightning.pytorch", "pytorch_lightning")


def callback_bases() -> tuple[type, ...]:
    """Callback classes of every loaded tree; when none is loaded, of every installed one.

    Raises ImportError when no Lightning is installed.
    """
    loaded = [name for name in NAMES if name in sys.modules]
    names = loaded or [name for name in NAMES if importlib.util.find_spec(name.split(".")[0])]
    if not names:
        raise ImportError("FusionCallback needs Lightning: pip install 'trainfuse[lightning]'")
    return tuple(importlib.import_module(name).Callback for name in names)


def tree_of(trainer: Any) -> str:
    """Name of the tree that a Trainer, or a subclass of it, comes from."""
    for cls in type(trainer).__mro__:
        for name in NAMES:
            if cls.__module__.startswith(name + "."):
                return name
    raise TypeError(f"{type(trainer).__qualname__} is not a Lightning Trainer")


def part(trainer: Any, path: str) -> ModuleType:
    """Module `path` ("strategies", "loops.optimization.automatic") of the Trainer's own tree."""
    return importlib.import_module(f"{tree_of(trainer)}.{path}")


def library_folder(trainer: Any) -> str:
    """Folder that the Trainer's tree was loaded from."""
    return next(iter(sys.modules[tree_of(trainer)].__path__))
