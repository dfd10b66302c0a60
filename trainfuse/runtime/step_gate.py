"""verify="step": the gradients that reach an optimizer are compared with ATen's before it runs."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autodiff import ops
from autodiff.compare import TensorError, judge, luck
from autodiff.graph import TrainingGraph
from autodiff.reference import Environment, run_nodes
from trainfuse.errors import GradientMismatch
from trainfuse.log import get_logger
from trainfuse.runtime.fallback import Boundary, Failure, first_line
from trainfuse.runtime.foreach import UpdateCall

Run = Callable[[fx.Node, Environment], Any]
Gradients = list[list[Tensor]]
_log = get_logger("gate")


class StepMismatch(Exception):
    """Stops a step before its update; the plan then starts over on ATen."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.error)
        self.failure = failure


@dataclass(frozen=True, slots=True)
class _References:
    """By update: its gradients by ATen, in the graph's own precision and in fp64."""

    native: Gradients
    exact: Gradients


class StepGate:
    """Compares the gradients of one plan with those of the graph as it was captured.

    tg: the captured graph, with the masks of the plan but no other pass applied: an error of a
    pass shows like one of a kernel. factor: how much worse than eager's own error one may be.
    strict: raise GradientMismatch instead of going on with ATen.
    """

    def __init__(
        self, tg: TrainingGraph, boundary: Boundary, *, strict: bool, factor: float = 2.0
    ) -> None:
        self.tg, self.strict, self.factor = tg, strict, factor
        self._boundary = boundary
        placeholders = tg.graph.find_nodes(op="placeholder")
        facts = zip(placeholders, tg.inputs, strict=True)
        self._names = {node: fact.target or fact.name for node, fact in facts}
        self._updates = [n for n in tg.nodes() if _is_update(n)]

    @contextmanager
    def watching(self, updates: Sequence[UpdateCall], args: Sequence[Any]) -> Iterator[None]:
        """Within the block an update whose gradients are wrong raises before it writes.

        updates: in the program's order. args: the program's inputs, before they are written.
        Raises StepMismatch, or GradientMismatch when strict.
        """
        assert len(updates) == len(self._updates), "passes neither add nor drop an update"
        references = self._references(args)
        if references is not None:
            for number, update in enumerate(updates):
                update.check = functools.partial(self._compare, references, number)
        try:
            yield
        finally:
            for update in updates:
                update.check = None

    def _references(self, args: Sequence[Any]) -> _References | None:
        """None when the device has no room for them."""
        devices = {a.device.index for a in args if isinstance(a, Tensor) and a.is_cuda}
        try:
            with torch.no_grad(), torch.random.fork_rng(sorted(devices)):
                native = _gradients(self.tg, args, lambda node, env: run_nodes([node], env)[node])
            with torch.no_grad(), torch.random.fork_rng(sorted(devices)):
                exact = _gradients(self.tg, args, _Exact(self._boundary))
        except torch.OutOfMemoryError:
            _log.warning("the step's gradients were not compared: no memory for their reference")
            return None
        return _References(native, exact)

    def _compare(self, references: _References, number: int, grads: Sequence[Tensor]) -> None:
        params: Any = self._updates[number].args[0]
        names = [self._names[param] for param in params]
        native = dict(zip(names, references.native[number], strict=True))
        exact = dict(zip(names, references.exact[number], strict=True))
        # an update may take a half gradient and cast it itself
        ours = {n: g.to(native[n].dtype) for n, g in zip(names, grads, strict=True)}
        errors = judge(ours, native, exact, k=self.factor)
        # a few elements may have been lucky in eager
        room = {name: self.factor * luck(tensor.numel()) for name, tensor in native.items()}
        wrong = [e for e in errors if not e.ratio <= room[e.name]]
        if wrong:
            worst = max(wrong, key=lambda e: math.inf if math.isnan(e.ratio) else e.ratio)
            self._reject(worst, len(wrong))
        _log.info("update %d: %d gradients as ATen's", number, len(errors))

    def _reject(self, worst: TensorError, count: int) -> None:
        if self.strict:
            slack = worst.ours / worst.ratio - worst.eager if math.isfinite(worst.ours) else 0.0
            raise GradientMismatch(
                name=worst.name,
                ours=worst.ours,
                eager=worst.eager,
                k=self.factor,
                epsilon=self.factor * max(slack, 0.0),
            )
        more = f" (and {count - 1} more)" if count > 1 else ""
        error = f"error against fp64 {worst.ours:.3g}, eager's own {worst.eager:.3g}{more}"
        raise StepMismatch(Failure("the step", "step", error, f"gradient of {worst.name}"))


def _gradients(tg: TrainingGraph, args: Sequence[Any], run: Run) -> Gradients:
    """The gradients of every update, in memory of their own; other values go at their last use."""
    nodes = tg.nodes()
    nodes = nodes[: max(i for i, node in enumerate(nodes) if _is_update(node)) + 1]
    last = {read: i for i, node in enumerate(nodes) for read in node.all_input_nodes}
    values: Environment = dict(zip(tg.graph.find_nodes(op="placeholder"), args, strict=True))
    for node in tg.graph.find_nodes(op="get_attr"):
        values[node] = operator.attrgetter(str(node.target))(tg.gm)
    inputs = [t for t in values.values() if isinstance(t, Tensor)]
    shared = {t.untyped_storage().data_ptr() for t in inputs}
    found: Gradients = []
    for i, node in enumerate(nodes):
        if _is_update(node):
            read: Any = node.args[1]
            grads = [values[g] for g in read]
            found.append(
                [g.clone() if g.untyped_storage().data_ptr() in shared else g for g in grads]
            )
        else:
            values[node] = run(node, {n: values[n] for n in node.all_input_nodes})
        for dying in node.all_input_nodes:
            if last[dying] == i:
                del values[dying]
        if node not in last:
            values.pop(node, None)
    return found


class _Exact:
    """Runs nodes in fp64, but for those that can't be, or draw random numbers by precision."""

    def __init__(self, boundary: Boundary) -> None:
        self._boundary = boundary
        self._kept: set[str] = set()

    def __call__(self, node: fx.Node, env: Environment) -> Any:
        if node.target is operator.getitem:
            return run_nodes([node], env)[node]
        name = ops.op_name(node.target)
        if name not in self._kept and not _draws(node):
            made = self._boundary.attempt(
                lambda: run_nodes([node], env, dtype=torch.float64)[node], "step"
            )
            if not isinstance(made, str):
                return made
            self._kept.add(name)
            why = first_line(made, 80)
            _log.warning("%s stays in its own precision in the fp64 reference: %s", name, why)
        own = {n: _narrow(value, n.meta.get("val", value)) for n, value in env.items()}
        return run_nodes([node], own)[node]


def _narrow(value: Any, like: Any) -> Any:
    """Tensors in the element type that the graph gives them."""
    if isinstance(value, list | tuple):
        return [_narrow(v, m) for v, m in zip(value, like, strict=True)]
    return value.to(like.dtype) if isinstance(value, Tensor) else value


def _draws(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _is_update(node: fx.Node) -> bool:
    return ops.lookup(node.target).kind == "effect"
