"""Context-local settings: where each value comes from, and which source wins.

First wins: TRAINFUSE_DISABLE and TRAINFUSE_FORCE_BACKEND, the call (then its mode), `patch`,
assignment, environment, default. Autograd's threads and compile workers don't see the context:
take `current()` once, where the plan is made, and hand that on.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from trainfuse import log, tokens
from trainfuse.errors import (
    BackendUnavailable,
    BadOption,
    RemovedName,
    TokenConflict,
    TrainfuseWarning,
    UnknownOption,
    UnknownToken,
)
from trainfuse.fields import BACKENDS, MODES, SWITCHES, Settings, check, operator_name, read

_PREFIX = "TRAINFUSE_"
_DEFAULTS = Settings()
_SUCCESSORS = {
    "_jit_set_nvfuser_single_node_mode": "trainfuse.settings.single_node",
    "_jit_set_nvfuser_horizontal_mode": "trainfuse.settings.horizontal",
    "_jit_set_nvfuser_guard_mode": "nothing in its place: plans are always guarded",
    "_jit_set_nvfuser_skip_node_kind": "trainfuse.skip_op",
    "_jit_set_nvfuser_enabled": "trainfuse.set_enabled",
    "_debug_set_autodiff_subgraph_inlining": "trainfuse.settings.autodiff_inlining",
}
_warned: set[str] = set()


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """Values from one source; compared by identity, so that resolved settings can be memoised."""

    source: str
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class _Environment:
    """What the TRAINFUSE_* variables say: above code, and below it."""

    above: Layer
    below: Layer
    skipped_ops: frozenset[str]


@dataclass(frozen=True, slots=True, eq=False)
class _Context:
    assigned: Layer = Layer("assignment")
    patches: tuple[Layer, ...] = ()


NO_CALL = Layer("call")
_context: ContextVar[_Context] = ContextVar("trainfuse_settings", default=_Context())  # noqa: B039 -- frozen
_environment: _Environment | None = None


def validate(values: Mapping[str, Any]) -> dict[str, Any]:
    """Normalised values of named fields; raises UnknownOption and BadOption."""
    for name in values:
        known_field(name)
    return {name: check(name, value) for name, value in values.items()}


def known_field(name: str, valid: Iterable[str] = SWITCHES) -> str:
    """The name itself, or UnknownOption with the near matches; old nvFuser names: RemovedName."""
    names = tuple(valid)
    if name in names:
        return name
    if name in _SUCCESSORS:
        raise RemovedName(name=name, successor=_SUCCESSORS[name])
    raise UnknownOption(name=name, near=tokens.near(str(name), names), valid=", ".join(names))


def _read_tokens(environ: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any], set[str]]:
    """Values set by TRAINFUSE_DISABLE, by TRAINFUSE_ENABLE, and the operators to skip."""
    off: dict[str, Any] = {}
    on: dict[str, Any] = {}
    ops: set[str] = set()
    for source, found in ((_PREFIX + "DISABLE", off), (_PREFIX + "ENABLE", on)):
        valid = [name for name, switch in SWITCHES.items() if switch.is_token]
        if found is off:
            valid.append("op")
        for token in tokens.parse(source, environ.get(source, "")):
            if token.name not in valid:
                raise UnknownToken(
                    source=source,
                    name=token.name,
                    near=tokens.near(token.name, valid),
                    valid=", ".join(valid),
                )
            if bool(token.args) is not (token.name == "op"):
                raise BadOption(
                    name=source, value=str(token), expected="op(aten.add), other tokens bare"
                )
            if token.name == "op":
                ops.update(map(operator_name, token.args))
                continue
            switch = SWITCHES[token.name]
            found[token.name] = switch.off if found is off else switch.on
    for name in off.keys() & on.keys():
        raise TokenConflict(name=name)
    return off, on, ops


def _read_environment(environ: Mapping[str, str]) -> _Environment:
    off, on, ops = _read_tokens(environ)
    below: dict[str, Any] = {}
    for variable, text in environ.items():
        name = variable.removeprefix(_PREFIX).lower()
        if not variable.startswith(_PREFIX) or name in ("disable", "enable"):
            continue
        if name not in SWITCHES:
            valid = [_PREFIX + known.upper() for known in (*SWITCHES, "disable", "enable")]
            raise UnknownOption(
                name=variable, near=tokens.near(variable, valid), valid=", ".join(valid)
            )
        below[name] = read(name, text, variable)
    above = dict(off)
    if "force_backend" in below:
        above["force_backend"] = below.pop("force_backend")
    below.update(on)
    _warn_costly({**below, **above})
    return _Environment(
        Layer("environment, above code", above), Layer("environment", below), frozenset(ops)
    )


def _warn_costly(values: Mapping[str, Any]) -> None:
    """Say once a process what a setting that gives up speed or safety costs."""
    for name, value in values.items():
        switch = SWITCHES[name]
        if switch.warns and value != getattr(_DEFAULTS, name) and name not in _warned:
            _warned.add(name)
            warnings.warn(f"{name}={value!r}: {switch.cost}", TrainfuseWarning, stacklevel=4)


def _load_environment() -> _Environment:
    global _environment
    if _environment is None:
        _environment = _read_environment(os.environ)
    return _environment


@functools.lru_cache(maxsize=256)
def _resolve(
    environment: _Environment, context: _Context, call: Layer
) -> tuple[Settings, Mapping[str, str]]:
    """Merge the layers, lowest first. Memoised by identity: a resolved call costs one lookup."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    lowest_first = (environment.below, context.assigned, *context.patches, call, environment.above)
    modes = [layer for layer in lowest_first if "mode" in layer.values]
    for layer in lowest_first:
        implied = MODES[layer.values["mode"]] if modes and layer is modes[-1] else {}
        for name, value in {**implied, **layer.values}.items():
            values[name], sources[name] = value, layer.source
    if environment.skipped_ops:
        values["skip_ops"] = values.get("skip_ops", frozenset()) | environment.skipped_ops
        sources["skip_ops"] = environment.above.source
    return Settings(**values), sources


def current(call: Layer = NO_CALL) -> Settings:
    """The settings that hold here and now.

    call: what a `compile` call gave (`CompileOptions.layer`). The same object comes back until
    a source changes, so it may be compared with `is`.
    """
    return _resolve(_load_environment(), _context.get(), call)[0]


def _enter(context: _Context, values: Mapping[str, Any]) -> None:
    _context.set(context)
    _warn_costly(values)
    _sync_log(values)


def _sync_log(values: Mapping[str, Any]) -> None:
    """Logging belongs to the process: bring its levels in line when a change may touch them."""
    if "log" in values or "debug" in values:
        log.apply(log.parse(current().log_text))


class SettingsView:
    """`trainfuse.settings`: every switch as an attribute, plus `patch` and `reload_env`.

    Reading gives the value that holds here, assignment sets it for this context, `print` shows
    what differs from the default, where that came from and what it costs.
    """

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(current(), known_field(name))

    def __setattr__(self, name: str, value: Any) -> None:
        values = validate({name: value})
        context = _context.get()
        assigned = Layer("assignment", {**context.assigned.values, **values})
        _enter(_Context(assigned, context.patches), values)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *SWITCHES]

    @contextlib.contextmanager
    def patch(self, **values: Any) -> Iterator[Settings]:
        """Set fields for a block; nests, and restores on the way out. Raises OptionError."""
        checked = validate(values)
        context = _context.get()
        patches = (*context.patches, Layer("patch", checked))
        _enter(_Context(context.assigned, patches), checked)
        try:
            yield current()
        finally:
            assigned = _context.get().assigned  # an assignment made inside outlives the block
            same = assigned is context.assigned
            _context.set(context if same else _Context(assigned, context.patches))
            _sync_log(checked)

    def reload_env(self) -> None:
        """Read the TRAINFUSE_* variables again; on an error the former reading stays."""
        global _environment
        _environment = _read_environment(os.environ)
        log.apply(log.parse(current().log_text))

    def reset(self) -> None:
        """Forget every assignment made in this context."""
        _context.set(_Context(Layer("assignment"), _context.get().patches))
        log.apply(log.parse(current().log_text))

    def changed(self) -> dict[str, tuple[Any, str, str]]:
        """Field -> (value, source, cost), of every field that is not at its default."""
        resolved, sources = _resolve(_load_environment(), _context.get(), NO_CALL)
        return {
            name: (getattr(resolved, name), sources[name], switch.cost)
            for name, switch in SWITCHES.items()
            if getattr(resolved, name) != getattr(_DEFAULTS, name)
        }

    def __repr__(self) -> str:
        rows = [
            f"{name} = {_shown(value)}  [{source}]  {cost}"
            for name, (value, source, cost) in self.changed().items()
        ]
        return "trainfuse settings: " + ("\n  ".join(["", *rows]) if rows else "all at default")


def _shown(value: Any) -> str:
    if isinstance(value, tuple | frozenset):
        return ",".join(sorted(map(str, value)))
    return repr(value)


settings = SettingsView()


def set_enabled(on: bool) -> bool:
    """Turn fusion on or off for this context; returns the value that held before."""
    before = current().enabled
    settings.enabled = on
    return before


def skip_op(name: str, on: bool = True) -> bool:
    """Keep an operator ATen (or stop doing so); returns whether it was skipped before.

    name: aten.add, aten::add or an overload; raises UnknownOperator for a typo.
    """
    op = operator_name(name)
    skipped = current().skip_ops
    settings.skip_ops = skipped | {op} if on else skipped - {op}
    return op in skipped


@contextlib.contextmanager
def fuser(name: str) -> Iterator[None]:
    """Choose the code generator for a block: "triton", "inductor", "eager" or "none".

    Raises BackendUnavailable for "triton" with neither a GPU nor TRITON_INTERPRET=1.
    """
    if name not in (*BACKENDS, "none"):
        raise BadOption(name="fuser", value=name, expected=", ".join((*BACKENDS, "none")))
    if name == "triton":
        require_triton()
    values = {"enabled": False} if name == "none" else {"enabled": True, "backend": name}
    with settings.patch(**values):
        yield


def require_triton() -> None:
    """Raise BackendUnavailable where Triton kernels can neither run nor be interpreted."""
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        raise BackendUnavailable(
            backend="triton",
            reason="there is no GPU",
            hint="set TRITON_INTERPRET=1 before the first import (slow, for tests), or"
            ' use backend="inductor"',
        )


@contextlib.contextmanager
def strict_fusion() -> Iterator[None]:
    """Raise UnfusedOperator, naming it and its line, instead of leaving an operator ATen."""
    with settings.patch(strict=True):
        yield
