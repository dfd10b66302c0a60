"""The options of one `compile` call, validated where the call is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainfuse.errors import BadOption
from trainfuse.fields import SWITCHES, Settings
from trainfuse.settings import Layer, current, known_field, validate


class Default(str):
    """A default that reads as its value, yet can be told from the same value given on purpose.

    `compile(verify="kernels")` must beat `settings.verify = "off"`; `compile()` must not.
    """

    __slots__ = ()


MODE, VERIFY, CUDA_GRAPH = Default("default"), Default("kernels"), Default("auto")
_FLAGS = ("dynamic", "fullgraph")
VALID = (*_FLAGS, *(name for name, switch in SWITCHES.items() if switch.per_call))
"""Every option that `compile` takes, as a keyword or in `options=`."""


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """What one call asked for.

    dynamic: None (static first, symbolic once a size changes), True or False. fullgraph: raise
    CaptureError instead of splitting. layer: the settings given in the call, on top of those
    that hold around it.
    """

    dynamic: bool | None
    fullgraph: bool
    layer: Layer

    def settings(self) -> Settings:
        """The settings that hold for a call made here and now."""
        return current(self.layer)


def resolve(
    *,
    mode: str = MODE,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    backend: str | None = None,
    verify: str | int = VERIFY,
    cuda_graph: str = CUDA_GRAPH,
    memory_budget: float | int | None = None,
    options: Mapping[str, Any] | None = None,
    **more: Any,
) -> CompileOptions:
    """Validated options from the keywords of `trainfuse.compile`.

    `options` and further keywords name any setting. Raises OptionError for unknown names, wrong
    types and values, and for one name given in two places.
    """
    keywords = {
        "mode": mode,
        "backend": backend,
        "verify": verify,
        "cuda_graph": cuda_graph,
        "memory_budget": memory_budget,
    }
    given = {
        name: value
        for name, value in keywords.items()
        if value is not None and not isinstance(value, Default)
    }
    flags: dict[str, Any] = {"dynamic": dynamic, "fullgraph": fullgraph}
    if options is not None and not isinstance(options, Mapping):
        raise BadOption(name="options", value=options, expected="a mapping of option names")
    given.update(more)
    for name, value in (options or {}).items():
        if name in given or (name in flags and flags[name] not in (None, False)):
            raise BadOption(name=name, value=value, expected="a keyword or options=, not both")
        (flags if name in flags else given)[name] = value
    for name in given:
        known_field(name, VALID)
    return CompileOptions(
        dynamic=_flag("dynamic", flags["dynamic"], optional=True),
        fullgraph=bool(_flag("fullgraph", flags["fullgraph"], optional=False)),
        layer=Layer("call", validate(given)),
    )


def _flag(name: str, value: Any, *, optional: bool) -> bool | None:
    if isinstance(value, bool) or (optional and value is None):
        return value
    expected = "True, False or None" if optional else "True or False"
    raise BadOption(name=name, value=value, expected=expected)
