"""Every switch as one field of a frozen `Settings`: its type, its source names, its cost."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch

from autodiff.ops import differentiable_ops
from trainfuse import log, tokens
from trainfuse.errors import BadOption, UnknownOperator, UnknownToken
from trainfuse.tokens import Token, near

Backend = Literal["triton", "inductor", "eager"]
BACKENDS = ("triton", "inductor", "eager")
MODES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "reduce-overhead": {"cuda_graph": "require"},
    "max-autotune": {"autotune": "full"},
}
"""What each mode sets, unless the field itself is given beside it."""

DUMPS = ("kernel", "graph", "program", "plan")
_TRUE, _FALSE = ("1", "on", "true", "yes"), ("0", "off", "false", "no")
_DEBUG_LOG = ("", "capture:>slicing:>grouping", "program:recompute:cache:codegen:gate:cuda_graph")
_DEBUG_DUMP = ((), (), (), ("plan", "program"), ("kernel",), ("graph",))


@dataclass(frozen=True, slots=True)
class Kind:
    """What values a field takes.

    expected: for the error message. check: the normalised value, or ValueError. read: the same
    from an environment variable's text.
    """

    expected: str
    check: Callable[[Any], Any]
    read: Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class Switch:
    """What is known of one field.

    off, on: what the token of the field's name sets in TRAINFUSE_DISABLE and TRAINFUSE_ENABLE;
    None for both when the field is no token. cost: what a value other than the default costs.
    warns: say so when it is set. code: it changes generated code or the plan, so it is in the
    plan's guards. per_call: `compile` takes it too.
    """

    kind: Kind
    cost: str
    off: Any = None
    on: Any = None
    warns: bool = False
    code: bool = True
    per_call: bool = True

    @property
    def is_token(self) -> bool:
        """Whether TRAINFUSE_DISABLE and _ENABLE know the field's name."""
        return self.off is not None


def _bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _read_bool(text: str) -> bool:
    if text.lower() in _TRUE + _FALSE:
        return text.lower() in _TRUE
    raise ValueError


BOOL = Kind("True or False", _bool, _read_bool)


def _choice(*names: str, optional: bool = False) -> Kind:
    def check(value: Any) -> Any:
        if (optional and value is None) or (isinstance(value, str) and value in names):
            return value
        raise ValueError

    listed = ", ".join(map(repr, names)) + (" or None" if optional else "")
    return Kind(listed, check, lambda text: check(text.lower()))


def _integer(low: int, high: int | None = None, *, optional: bool = False) -> Kind:
    def check(value: Any) -> Any:
        if optional and value is None:
            return value
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError
        if value < low or (high is not None and value > high):
            raise ValueError
        return value

    bounds = f"an integer of at least {low}" if high is None else f"an integer, {low} to {high}"
    return Kind(bounds + (" or None" if optional else ""), check, lambda text: check(int(text)))


def _check_verify(value: Any) -> str | int:
    if isinstance(value, str) and value in ("off", "kernels", "step"):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise ValueError


def _check_budget(value: Any) -> float | int | None:
    if value is None or (isinstance(value, float) and 0.0 < value <= 1.0):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise ValueError


def _check_path(value: Any) -> Path | None:
    if value is None or isinstance(value, str | os.PathLike):
        return None if value is None else Path(value).expanduser()
    raise ValueError


def _names(value: Any) -> tuple[Any, ...]:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, Iterable):
        return tuple(value)
    raise ValueError


def _check_ops(value: Any) -> frozenset[str]:
    return frozenset(operator_name(name) for name in _names(value))


def operator_name(name: str) -> str:
    """`aten.add` for aten.add, aten::add or aten.add.Tensor; raises UnknownOperator for a typo."""
    namespace, _, rest = str(name).replace("::", ".").partition(".")
    packet = rest.partition(".")[0]
    if packet and hasattr(getattr(torch.ops, namespace, None), packet):
        return f"{namespace}.{packet}"
    known = {".".join(op.replace("::", ".").split(".")[:2]) for op in differentiable_ops()}
    raise UnknownOperator(name=name, near=near(str(name).replace("::", "."), sorted(known)))


def _check_dump(value: Any) -> tuple[Token, ...]:
    if isinstance(value, Mapping):
        parsed = tuple(
            Token(name, () if path is None else (str(path),)) for name, path in value.items()
        )
    elif isinstance(value, str):
        parsed = tokens.parse("TRAINFUSE_DUMP", value)
    else:
        parsed = tuple(
            item if isinstance(item, Token) else Token(str(item)) for item in _names(value)
        )
    for token in parsed:
        if token.name not in DUMPS:
            raise UnknownToken(
                source="TRAINFUSE_DUMP",
                name=token.name,
                near=near(token.name, DUMPS),
                valid=", ".join(DUMPS),
            )
        if len(token.args) > 1:
            raise ValueError
    return parsed


def _check_log(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    log.parse(value)
    return value


_BACKEND = _choice(*BACKENDS, optional=True)
_VERIFY = Kind(
    "'off', 'kernels', 'step' or a number of steps",
    _check_verify,
    lambda text: _check_verify(int(text) if text.isdigit() else text.lower()),
)
_BUDGET = Kind(
    "None, a fraction between 0 and 1 (a float) or bytes (an int)",
    _check_budget,
    lambda text: _check_budget(int(text) if text.isdigit() else float(text)),
)
_PATH = Kind("a folder or None", _check_path, _check_path)
_OPS = Kind("operator names, like 'aten.add,aten.mul'", _check_ops, _check_ops)
_DUMP = Kind("tokens with an optional folder, like 'kernel(out/),plan'", _check_dump, _check_dump)
_LOG = Kind("'program:>grouping:>>cache'", _check_log, _check_log)


def _switch(default: Any, kind: Kind, cost: str, **facts: Any) -> Any:
    return field(default=default, metadata={"switch": Switch(kind, cost, **facts)})


def _on(cost: str, **facts: Any) -> Any:
    """A boolean that is on, and a token that turns it off."""
    return _switch(True, BOOL, cost, off=False, on=True, **facts)


def _off(cost: str, **facts: Any) -> Any:
    """A boolean that is off, and a token that turns it on."""
    return _switch(False, BOOL, cost, off=False, on=True, **facts)


@dataclass(frozen=True, slots=True)
class Settings:
    """Every switch, resolved for one call: plain values that a plan keeps and guards on."""

    enabled: bool = _switch(True, BOOL, "nothing is fused")
    mode: str = _switch("default", _choice(*MODES), "a CUDA graph or an error")
    backend: Backend | None = _switch(None, _BACKEND, "not this device's default code generator")
    force_backend: str | None = _switch(
        None,
        _choice(*BACKENDS, "none", optional=True),
        "beats what the program asks for",
        per_call=False,
    )
    verify: str | int = _switch(
        "kernels", _VERIFY, "'off' drops the check of new kernels, more costs steps",
        off="off", on="kernels",
    )  # fmt: skip
    nan_check: bool = _off("a copy of the training state and a wait for the device, every step")
    cuda_graph: str = _switch(
        "auto", _choice("auto", "require", "off"), "'off' pays for every launch",
        off="off", on="auto",
    )  # fmt: skip
    whole_step: bool = _on("backward and update are not planned together")
    recompute: bool = _on("the backward saves everything it needs: more memory")
    horizontal: bool = _on("siblings that read one tensor read it once each")
    single_node: bool = _off("kernels that cost more than they save")
    autodiff_inlining: bool = _on("subgraphs too small to pay are kept")
    min_subgraph_nodes: int | None = _switch(
        None, _integer(1, optional=True), "another threshold than 2"
    )
    skip_ops: frozenset[str] = _switch(frozenset(), _OPS, "these operators stay ATen")
    fuse_first: int | None = _switch(None, _integer(0, optional=True), "later groups stay ATen")
    fallback: bool = _on("what fails raises instead of running as ATen")
    fma: bool = _on("Triton kernels round products and sums separately: slower", warns=True)
    autotune: str = _switch(
        "large", _choice("off", "large", "full"), "'full' compiles and times many kernels",
        off="off", on="large",
    )  # fmt: skip
    rng: str = _switch("fast", _choice("fast", "eager"), "dropout stays ATen, with eager's masks")
    memory_budget: float | int | None = _switch(None, _BUDGET, "recomputes more in the backward")
    chunk_memory: int = _switch(
        512 << 20, _integer(0), "logits larger than this are made in chunks of rows; 0: never",
        off=0, on=512 << 20,
    )  # fmt: skip
    max_plans: int = _switch(8, _integer(1), "another number of plans is kept", code=False)
    keep_gradients: bool = _switch(False, BOOL, "one buffer a parameter stays allocated")
    strict: bool = _switch(False, BOOL, "an operator that is not fused raises")
    check: bool = _off("the verifier runs after every pass: slower compile", code=False)
    cache_dir: Path | None = _switch(None, _PATH, "not the default cache folder", code=False)
    dump: tuple[Token, ...] = _switch((), _DUMP, "writes files or stderr", code=False)
    log: str = _switch("", _LOG, "writes to stderr", code=False, per_call=False)
    debug: int = _switch(0, _integer(0, 5), "writes to stderr", code=False, per_call=False)

    @property
    def chosen_backend(self) -> str | None:
        """Backend to use: "none" when off, None for the device's default.

        force_backend beats `enabled`, which beats `backend`.
        """
        if self.force_backend is not None:
            return self.force_backend
        return self.backend if self.enabled else "none"

    @property
    def threshold(self) -> int:
        """Executed nodes that a subgraph needs, at least; an explicit number beats the switches."""
        if self.min_subgraph_nodes is not None:
            return self.min_subgraph_nodes
        return 1 if self.single_node or not self.autodiff_inlining else 2

    @property
    def verifies(self) -> bool:
        """Whether the graph verifier runs after every pass."""
        return self.check or self.debug >= 5

    @property
    def log_text(self) -> str:
        """TRAINFUSE_LOG with what `debug` is shorthand for."""
        return ":".join(filter(None, (*_DEBUG_LOG[: self.debug + 1], self.log)))

    def dump_path(self, token: str) -> Path | Literal["-"] | None:
        """Folder to dump into, "-" for stderr, None when the token is off."""
        assert token in DUMPS, token
        for asked in self.dump:
            if asked.name == token:
                return Path(asked.args[0]).expanduser() if asked.args else "-"
        implied = {name for level in _DEBUG_DUMP[: self.debug + 1] for name in level}
        return "-" if token in implied else None

    def plan_key(self) -> tuple[Any, ...]:
        """The values that a plan depends on: equal keys may share one."""
        return tuple(getattr(self, name) for name, switch in SWITCHES.items() if switch.code)


SWITCHES: Mapping[str, Switch] = {f.name: f.metadata["switch"] for f in fields(Settings)}
"""The table: one row a field, in the order in which they are printed."""


def check(name: str, value: Any) -> Any:
    """A field's normalised value; raises BadOption with what it takes."""
    try:
        return SWITCHES[name].kind.check(value)
    except (ValueError, TypeError):
        raise BadOption(name=name, value=value, expected=SWITCHES[name].kind.expected) from None


def read(name: str, text: str, source: str) -> Any:
    """A field's value from an environment variable; raises BadOption that names the variable."""
    try:
        return SWITCHES[name].kind.read(text.strip())
    except ValueError:
        raise BadOption(name=source, value=text, expected=SWITCHES[name].kind.expected) from None
