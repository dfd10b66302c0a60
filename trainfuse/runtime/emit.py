"""Prints a program: readable Python text, one statement a step. Printed text is executed text."""

from __future__ import annotations

import keyword
import operator
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from autodiff.graph import TrainingGraph
from trainfuse.runtime.memory import IN_PLACE, MemoryPlan, Step, deaths
from trainfuse.runtime.reuse import memory_of

RESERVED = frozenset({"_", "aten", "prims", "torch", "slice", "args", "step", "inf", "nan"})
_WIDTH = 96
CALLED_AS: dict[Any, tuple[torch._ops.OpOverload, tuple[str, ...]]] = {
    torch.ops.prims.convert_element_type.default: (torch.ops.aten._to_copy.default, ("dtype",)),
}
"""Operators that torch implements in Python, ten times slower than the one that does the same: that
one, and its names of the arguments behind the first."""


@dataclass
class Namer:
    """Gives every graph value a Python name that nothing else in the text uses."""

    taken: set[str]
    names: dict[fx.Node, str] = field(default_factory=dict)

    def __getitem__(self, node: fx.Node) -> str:
        if node not in self.names:
            self.names[node] = self.fresh(node.name)
        return self.names[node]

    def fresh(self, name: str) -> str:
        """A name like this one that nothing uses yet."""
        while name in self.taken or keyword.iskeyword(name):
            name += "_"
        self.taken.add(name)
        return name


@dataclass
class Expressions:
    """Python text of ATen calls and their arguments; namespace collects what the text refers to.

    owner: the module that get_attr nodes read from.
    """

    owner: Any
    namer: Namer
    namespace: dict[str, Any]

    def __post_init__(self) -> None:
        self.namespace.update(torch=torch, aten=torch.ops.aten, prims=torch.ops.prims)
        self.namespace.update(inf=float("inf"), nan=float("nan"))

    def name(self, node: fx.Node) -> str:
        """The variable that holds a value."""
        return self.constant(node) if node.op == "get_attr" else self.namer[node]

    def constant(self, node: fx.Node) -> str:
        """A get_attr's value, bound under the node's name."""
        name = self.namer[node]
        if name not in self.namespace:
            self.namespace[name] = operator.attrgetter(str(node.target))(self.owner)
        return name

    def call(
        self,
        node: fx.Node,
        args: Sequence[Any] | None = None,
        kwargs: Any | None = None,
        target: Any = None,
    ) -> str:
        """A call_function node, an overload by its full name; with other arguments if given.

        target: the operator to call instead.
        """
        args = node.args if args is None else args
        if node.target is operator.getitem:
            return f"{self.value(args[0])}[{self.value(args[1])}]"
        kwargs = node.kwargs if kwargs is None else kwargs
        target = target or node.target
        if target in CALLED_AS:
            target, names = CALLED_AS[target]
            named = dict(zip(names, args[1:], strict=True))
            args, kwargs = args[:1], named | dict(kwargs)
        parts = [self.value(a) for a in args]
        parts += [f"{key}={self.value(v)}" for key, v in kwargs.items()]
        return f"{self._callee(target)}({', '.join(parts)})"

    def _callee(self, target: Any) -> str:
        if isinstance(target, torch._ops.OpOverload):
            space = target.namespace
            prefix = space if space in ("aten", "prims") else f"torch.ops.{space}"
            return f"{prefix}.{target._schema.name.split('::')[1]}.{target._overloadname}"
        name = getattr(target, "__name__", "function")
        while name in self.namer.taken and self.namespace.get(name) is not target:
            name += "_"
        self.namespace[name] = target
        self.namer.taken.add(name)
        return name

    def value(self, value: Any) -> str:
        """Python text of an argument."""
        match value:
            case fx.Node():
                return self.name(value)
            case list():
                return f"[{', '.join(self.value(v) for v in value)}]"
            case tuple():
                return f"({''.join(self.value(v) + ', ' for v in value)})"
            case slice():
                parts = (value.start, value.stop, value.step)
                return f"slice({', '.join(self.value(v) for v in parts)})"
            case dict():
                return f"{{{', '.join(f'{k!r}: {self.value(v)}' for k, v in value.items())}}}"
            case torch.device():
                return device_text(value)
            case torch._ops.OperatorBase():  # what a higher-order operator is to call
                return self._callee(value)
            case _:
                assert not isinstance(value, Tensor), "a tensor constant must be a get_attr node"
                return repr(value)


class Printer(Expressions):
    """Text and namespace of one program.

    callables: names that the text may call (group launches, compiled phases, updates).
    """

    def __init__(self, tg: TrainingGraph, plan: MemoryPlan, callables: Mapping[str, Any]) -> None:
        super().__init__(tg.gm, Namer(set(RESERVED | callables.keys())), dict(callables))
        self.tg = tg
        self.plan = plan
        for fact, node in zip(tg.inputs, tg.graph.find_nodes(op="placeholder"), strict=True):
            if fact.target is not None:
                name = re.sub(r"\W", "_", fact.target)
                name = name if name.isidentifier() else f"p_{name}"
                self.namer.names[node] = self.namer.fresh(name)
        self._ours = {node for step in plan.steps if step.group for node in step.writes}
        self._kept = {n: self.namer.fresh(f"{self.name(n)}_kept") for n in plan.kept}

    def render(self) -> str:
        """The whole module: `def step(args)`, which empties `args` and returns the outputs."""
        lines = ["def step(args):", *self._unpack()]
        dead = deaths(self.plan, self.tg)
        lines += self._delete(dead[0])
        phase, where = "", None
        for step, dying in zip(self.plan.steps, dead[1:], strict=True):
            if step.node is not None or step.group is not None:
                first = step.node if step.group is None else step.group.nodes[0]
                assert first is not None
                if (now := self.tg.phase(first)) != phase:
                    phase = now
                    lines += ["", f"    # {phase}"]
                if (line := self.tg.where(first)) not in (None, where):
                    where = line
                    lines.append(f"    # {where}")
            lines += self._statement(step)
            lines += self._delete(dying)
        outputs = ", ".join(self._output(n) for n in self.tg.output_nodes[: self.tg.num_outputs])
        return "\n".join([*lines, f"    return [{outputs}]", ""])

    # -- statements ---------------------------------------------------------------------------

    def _unpack(self) -> list[str]:
        names = [self.namer[n] for n in self.tg.graph.find_nodes(op="placeholder")]
        if not names:
            return []
        return [*_wrapped("    (", [*names[:-1], names[-1]], ",) = args"), "    args.clear()"]

    def _delete(self, nodes: Iterable[fx.Node]) -> list[str]:
        names = [self.namer[n] for n in nodes]
        return _wrapped("    del ", names, "", bare=True) if names else []

    def _statement(self, step: Step) -> list[str]:
        match step.kind:
            case "aten":
                assert step.node is not None
                if step.node in self.plan.reused:
                    over = self.call(step.node, target=IN_PLACE[step.node.target])
                    return [f"    {self.namer[step.node]} = {over}"]
                if step.writes == (step.node,):
                    return [f"    {self.namer[step.node]} = {self.call(step.node)}"]
                return self._unpacked(step.node, step.writes)
            case "group":
                return self._launch(step)
            case "graph":
                call = _wrapped(f"    {step.name}(", [self.name(n) for n in step.reads])
                results = _wrapped("    (", [self.namer[n] for n in step.writes], ",) = ")
                return [*results[:-1], results[-1] + call[0].lstrip(), *call[1:]]
            case "update":
                assert step.node is not None
                arguments = [self.value(a) for a in step.node.args[:2]]
                return _wrapped(f"    {step.name}(", arguments)
            case "copy":
                assert step.target is not None
                return [f"    {self.namer[step.target]}.copy_({self._output(step.reads[0])})"]
            case "clone":
                name = self.name(step.reads[0])
                return [f"    {self._output(step.reads[0])} = {name}.clone()"]

    def _unpacked(self, node: fx.Node, results: Sequence[fx.Node]) -> list[str]:
        """An operator's results by name; those that nobody reads are freed at once."""
        names = ["_"] * len(node.meta["val"])
        for result in results:
            index: Any = result.args[1]
            names[index] = self.namer[result]
        lines = _wrapped("    (", names, ",) = ")
        if len(lines) == 1:
            lines = [f"    {', '.join(names)}{',' * (len(names) == 1)} = "]
        lines[-1] += self.call(node)
        return lines + ["    del _"] * ("_" in names)

    def _launch(self, step: Step) -> list[str]:
        assert step.group is not None
        lines = [f"    # {step.name}: {operators(step.group.nodes)}"]
        for node in step.writes:
            if node in self.plan.reused:
                lines.append(f"    {self.namer[node]} = {self._memory(node)}")
            elif node not in self.plan.in_place:
                v = node.meta["val"]
                lines.append(
                    f"    {self.namer[node]} = torch.empty_strided({tuple(v.shape)},"
                    f" {tuple(v.stride())}, dtype={v.dtype}, device={device_text(v.device)})"
                )
        outputs = ", ".join(self.name(n) for n in step.writes)
        arguments = [self.name(n) for n in step.reads]
        return [*lines, *_wrapped(f"    {step.name}(", [*arguments, f"out=[{outputs}]"])]

    def _memory(self, node: fx.Node) -> str:
        """What a result is written over; only kernels of ours surely lay theirs out as planned."""
        dead = self.plan.reused[node]
        if dead in self._ours:
            return self.name(dead)
        strides = tuple(node.meta["val"].stride())
        return f"{self._callee(memory_of)}({self.name(dead)}, {strides})"

    # -- values -------------------------------------------------------------------------------

    def name(self, node: fx.Node) -> str:
        """The variable that holds a value: its placeholder's if it was written in place."""
        return super().name(self.plan.in_place.get(node, node))

    def _output(self, node: Any) -> str:
        kept = self._kept.get(node) if isinstance(node, fx.Node) else None
        return self.value(node) if kept is None else kept


def operators(nodes: Iterable[fx.Node]) -> str:
    """Names of the operators of some nodes, each once, in order."""
    names = (getattr(n.target, "_opname", getattr(n.target, "__name__", "?")) for n in nodes)
    return ", ".join(dict.fromkeys(names))


def device_text(device: torch.device) -> str:
    return f"torch.device({str(device)!r})"


def _wrapped(start: str, parts: list[str], end: str = ")", bare: bool = False) -> list[str]:
    """`start part, part end` on one line, or filled over several."""
    line = f"{start}{', '.join(parts)}{end}"
    if len(line) <= _WIDTH:
        return [line]
    body = textwrap.fill(
        ", ".join(parts),
        _WIDTH,
        initial_indent=" " * 8,
        subsequent_indent=" " * 8,
        break_long_words=False,
        break_on_hyphens=False,
    ).split("\n")
    if bare:
        return [f"{start.rstrip()} (", *body, "    )"]
    if end.startswith(","):
        body[-1] += ","
    return [start, *body, f"    {end.removeprefix(',')}"]
