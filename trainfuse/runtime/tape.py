"""Torch's calls of one evaluation, noted once, and run again as text: a line each.

Which views a reference makes node by node, what it converts and when it forgets a value depends on
sizes and element types alone. Where these are fixed, all of it but torch's calls is done once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from autodiff.reference import Environment
from trainfuse.log import get_logger
from trainfuse.runtime.fallback import Boundary

Replay = Callable[..., list[Tensor]]
_DECIDES = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
"""Operators from whose values, and not sizes alone, Python may go on."""
_log = get_logger("gate")
_aten = torch.ops.aten
_SHORT: dict[Any, Callable[..., Any]] = {
    _aten.add.Tensor: torch.add,
    _aten.addmm.default: torch.addmm,
    _aten.clone.default: torch.clone,
    _aten.div.Tensor: torch.div,
    _aten.mm.default: torch.mm,
    _aten.mul.Tensor: torch.mul,
    _aten.native_layer_norm.default: torch.native_layer_norm,
    _aten.permute.default: torch.permute,
    _aten.sub.Tensor: torch.sub,
    _aten.sum.dim_IntList: torch.sum,
    _aten.t.default: torch.t,
    _aten.transpose.int: torch.transpose,
    _aten.unsqueeze.default: torch.unsqueeze,
    _aten.view.default: torch.Tensor.view,
}
"""The same operators, called in half the time."""


class Untaped(Exception):
    """An evaluation that can't be run from a recording. Its message says why."""


@dataclass(frozen=True, slots=True)
class _Line:
    """One call: the names of the tensors that it reads and makes, and its text."""

    reads: tuple[str, ...]
    makes: tuple[str, ...]
    text: str


class Tape(TorchDispatchMode):
    """Notes torch's calls within its block, in which they run as ever.

    inputs: every tensor that the calls read from outside. Within the block a call raises Untaped
    where it reads another one, or where what follows depends on a tensor's values.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._names: Any = WeakIdKeyDictionary()
        self._inputs = [f"i{n}" for n in range(len(inputs))]
        for name, value in zip(self._inputs, inputs, strict=True):
            if value in self._names:
                raise Untaped("an input is passed twice")
            self._names[value] = name
        self._lines: list[_Line] = []
        self._scope: dict[str, Any] = {}
        self._made = 0
        self._latest: Any = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _DECIDES.intersection(func.tags):
            raise Untaped(f"{func} decides by values")
        kwargs = kwargs or {}
        reads: list[str] = []
        shown = [self._show(value, reads) for value in args]
        shown += [f"{name}={self._show(value, reads)}" for name, value in kwargs.items()]
        self._latest = None
        # kept until the next call: a weak reference would not outlive the way back to the caller
        self._latest = made = func(*args, **kwargs)
        several = isinstance(made, list | tuple)
        makes = tuple(map(self._name, made if several else [made]))
        left = f"[{', '.join(makes)}]" if several else makes[0]
        self._lines.append(_Line(tuple(reads), makes, f"{left} = {self._call(func, args, shown)}"))
        return made

    def replay(self, results: Sequence[Tensor]) -> Replay:
        """The calls as a function of the inputs, which returns these."""
        kept = [self._show(result, []) for result in results]
        last = {name: i for i, line in enumerate(self._lines) for name in line.reads + line.makes}
        lines = [f"def replay({', '.join(self._inputs)}):"]
        for i, line in enumerate(self._lines):
            names = dict.fromkeys(line.reads + line.makes)
            dead = [n for n in names if last[n] == i and n[0] == "v" and n not in kept]
            lines.append(f"    {line.text}{''.join(f'; del {name}' for name in dead)}")
        lines.append(f"    return [{', '.join(kept)}]")
        scope = dict(self._scope)
        exec(compile("\n".join(lines), "<replayed reference>", "exec"), scope)
        return scope["replay"]

    def _call(self, func: Any, args: Sequence[Any], shown: Sequence[str]) -> str:
        if func is _aten._to_copy.default and len(shown) == 2 and shown[1].startswith("dtype="):
            return f"{shown[0]}.to({shown[1].removeprefix('dtype=')})"
        return f"{self._constant(_SHORT.get(func, func))}({', '.join(shown)})"

    def _show(self, value: Any, reads: list[str]) -> str:
        if isinstance(value, Tensor):
            if value not in self._names:
                raise Untaped("it reads a tensor from elsewhere")
            reads.append(self._names[value])
            return reads[-1]
        if isinstance(value, list | tuple):
            if any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
                return f"[{', '.join(self._show(part, reads) for part in value)}]"
        elif value is None or isinstance(value, bool | int):
            return repr(value)
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        name = f"c{len(self._scope)}"
        self._scope[name] = value
        return name

    def _name(self, value: Any) -> str:
        if not isinstance(value, Tensor):
            return "_"
        if value not in self._names:
            self._names[value] = f"v{self._made}"
            self._made += 1
        return self._names[value]


class Recording:
    """One evaluation over many runs: as ever at first, noted at the second, then replayed.

    The first run shows which operators fail in a higher precision. What can't be recorded, or
    replayed, runs as ever from then on.
    """

    def __init__(self, boundary: Boundary) -> None:
        self._boundary = boundary
        self._seen = self._refused = False
        self._replay: Replay | None = None

    def values(
        self,
        evaluate: Callable[[], Environment],
        wanted: Sequence[fx.Node],
        inputs: Sequence[Tensor],
        draws: Callable[[], AbstractContextManager[None]],
    ) -> Environment:
        """The wanted values, of these inputs. draws: within it the generators' state is today's."""

        def replayed() -> Environment:
            with draws(), torch.no_grad():
                if self._replay is not None:
                    return dict(zip(wanted, self._replay(*inputs), strict=True))
                with Tape(inputs) as tape:
                    values = evaluate()
                self._replay = tape.replay([values[node] for node in wanted])
                return values

        if self._seen and not self._refused:
            made = self._boundary.attempt(replayed, "step")
            if not isinstance(made, str):
                return made
            _log.info("a reference runs node by node: %s", made)
            self._refused, self._replay = True, None
        self._seen = True
        with draws():
            return evaluate()
