"""Find the optimizers and modules that a user's function refers to, without running it."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

_MAX_DEPTH = 6
"""How far attributes, containers and called functions are followed."""


@dataclass(slots=True)
class Found:
    """Optimizers and modules within a function's reach, in the order they were met."""

    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    wrappers: list[str] = field(default_factory=list)

    def parameter_names(self) -> dict[int, str]:
        """id of each parameter and buffer -> its qualified name in the first module that has it."""
        names: dict[int, str] = {}
        for module in self.modules:
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                names.setdefault(id(tensor), name)
        return names


def find_objects(target: Any, args: Iterable[Any] = ()) -> Found:
    """Walk a callable's closure, globals, bound object and arguments.

    Functions defined in the same module as the target are followed too; library code is not.
    """
    found = Found()
    seen: set[int] = set()
    home = getattr(inspect.unwrap(target), "__module__", None) if callable(target) else None
    _walk(target, found, seen, 0, home)
    for value in args:
        _walk(value, found, seen, 1, home)
    return found


def _walk(value: Any, found: Found, seen: set[int], depth: int, home: str | None) -> None:
    if depth > _MAX_DEPTH or id(value) in seen:
        return
    if isinstance(value, torch.Tensor | str | bytes | int | float | bool | types.ModuleType | None):
        return
    seen.add(id(value))
    match value:
        case torch.optim.Optimizer():
            found.optimizers.append(value)
        case nn.Module():
            found.modules.append(value)
            if type(value).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel"):
                found.wrappers.append(type(value).__name__)
            # a module may hold its optimizer (trainers do); its tensors need no walk
            for item in vars(value).values():
                if not isinstance(item, torch.Tensor):
                    _walk(item, found, seen, depth + 1, home)
        case types.FunctionType():
            for item in _function_values(value, home):
                _walk(item, found, seen, depth + 1, home)
        case types.MethodType():
            _walk(value.__self__, found, seen, depth + 1, home)
            _walk(value.__func__, found, seen, depth + 1, home)
        case functools.partial():
            for item in (value.func, *value.args, *value.keywords.values()):
                _walk(item, found, seen, depth + 1, home)
        case Mapping():
            for item in list(value.values()):
                _walk(item, found, seen, depth + 1, home)
        case list() | tuple() | set() | frozenset():
            for item in list(value):
                _walk(item, found, seen, depth + 1, home)
        case type():
            return
        case _:
            if not _from_library(value):
                for item in list(getattr(value, "__dict__", {}).values()):
                    _walk(item, found, seen, depth + 1, home)


def _function_values(function: types.FunctionType, home: str | None) -> Iterable[Any]:
    """What a function's body can name: cells, defaults, and globals (same module's functions)."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a cell not filled yet: nothing to find
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for name in _names(function.__code__):
        value = function.__globals__.get(name)
        if isinstance(value, types.FunctionType) and value.__module__ != home:
            continue
        if value is not None:
            yield value


def _names(code: types.CodeType) -> Iterable[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _from_library(value: Any) -> bool:
    module = type(value).__module__.partition(".")[0]
    return module in ("torch", "numpy", "builtins", "typing", "collections", "functools")
