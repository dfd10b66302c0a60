"""The graph as it was captured, before any pass: what a plan must compute, by ATen."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from autodiff import ops
from autodiff.masks import Draw, Drawn, Masks
from autodiff.reference import Environment, Operation, widen
from trainfuse.runtime.fallback import Boundary
from trainfuse.runtime.reference import Native, Run, Widened, constants, evaluate
from trainfuse.runtime.reference_schedule import Schedule, computing_dtype, count_of, schedule
from trainfuse.runtime.room import SHARE, Room, device_of, free_bytes
from trainfuse.runtime.tape import Recording

if TYPE_CHECKING:
    from trainfuse.capture.lift import Captured
    from trainfuse.capture.shadow import Copies

_DROPOUT = torch.ops.aten.native_dropout.default


@dataclass(slots=True)
class Results:
    """What a step makes, by name, on the device or the host.

    gradients: of each update, by parameter. outputs: by position. written: new values of inputs.
    """

    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    written: dict[str, Tensor] = field(default_factory=dict)


class CapturedStep:
    """One captured graph as a reference.

    fast_rng: dropout takes the masks of the plan, here by their definition (autodiff.masks) and
    not by the pass that puts them into the plan's graph.
    """

    def __init__(self, captured: Captured, boundary: Boundary, *, fast_rng: bool) -> None:
        self.tg, self.shadow = captured.graph, captured.shadow
        self.boundary, self._fast_rng = boundary, fast_rng
        # not the capture itself: it holds the inputs of its first call
        self._sources, self._results_of = captured.sources, captured.results
        if self.shadow is not None:
            self.shadow.fast_rng = fast_rng
        self._placeholders = self.tg.graph.find_nodes(op="placeholder")
        facts = list(zip(self._placeholders, self.tg.inputs, strict=True))
        self.names = {node: fact.target or fact.name for node, fact in facts}
        self.updates = [n for n in self.tg.nodes() if ops.lookup(n.target).kind == "effect"]
        nodes = self.tg.output_nodes
        self._outputs = {
            f"output {i}": node
            for i, node in enumerate(nodes[: self.tg.num_outputs])
            if isinstance(node, fx.Node) and isinstance(node.meta.get("val"), Tensor)
        }
        by_name = {fact.name: node for node, fact in facts}
        targets = [by_name[name] for name in self.tg.mutations]
        values = nodes[self.tg.num_outputs :]
        self._written = {self.names[t]: v for t, v in zip(targets, values, strict=True)}
        self._position = {node: i for i, node in enumerate(self._placeholders)}
        self._places = {self.names[t]: self._position[t] for t in targets}
        values = (node.meta.get("val") for node in self.tg.graph.nodes)
        self.dtypes = {v.dtype for v in values if isinstance(v, Tensor)}
        self._wanted = [g for update in self.updates for g in _grads(update)]
        self._wanted += [*self._outputs.values(), *self._written.values()]
        self._live = _behind(self._wanted)
        live = [n for n in self.tg.nodes() if n in self._live] if fast_rng else []
        dropouts = [n for n in live if n.target is _DROPOUT]
        self._draws = [_draw(n) for n in dropouts]
        self._mask_bytes = sum(count_of(n.meta["val"][0]) for n in dropouts)
        self._drawn: Drawn | None = None
        self._unbounded: dict[tuple[bool, str], Schedule] = {}
        self._native = Native()
        self._widened: dict[str, Widened] = {}
        values = (n.meta.get("val") for n in self._placeholders)
        self._fixed = all(isinstance(v, Tensor) and _is_fixed(v) for v in values)
        self._recordings: dict[tuple[bool, str], Recording] = {}

    @property
    def result_bytes(self) -> int:
        """What everything that the step makes takes, in its own precision and one higher."""
        return sum(self._whole(wide=wide).kept_bytes for wide in (False, True))

    def _whole(self, *, wide: bool) -> Schedule:
        """The evaluation where memory is plenty: planned once."""
        key = self._key(wide)
        if key not in self._unbounded:
            self._unbounded[key] = schedule(self.tg.nodes(), self._wanted, wide=wide)
        return self._unbounded[key]

    def _key(self, wide: bool) -> tuple[bool, str]:
        return wide, torch.get_float32_matmul_precision()  # in TF32, products stay what they are

    def schedule(self, budget: int | None, keep: int | None, *, wide: bool) -> Schedule:
        """How everything that the step makes is evaluated within `budget` bytes.

        keep: bytes of results that may stay on the device at the end.
        """
        whole = self._whole(wide=wide)
        fits = budget is None or whole.peak_bytes <= budget
        if fits and (keep is None or whole.kept_bytes <= keep):
            return whole
        return schedule(self.tg.nodes(), self._wanted, wide=wide, budget=budget, keep=keep)

    def params(self, update: int) -> list[str]:
        """Names of the parameters of one update, in its order."""
        nodes: Any = self.updates[update].args[0]
        return [self.names[node] for node in nodes]

    # -- running ------------------------------------------------------------------------------

    @contextmanager
    def sharing_masks(self, room: Room) -> Iterator[None]:
        """Within the block each dropout mask is drawn once for all runs, where there is room."""
        self._drawn = {} if room.take(self._mask_bytes) else None
        try:
            yield
        finally:
            self._drawn = None

    def run(self, args: Sequence[Any], *, wide: bool, on_host: bool = False) -> Results:
        """Everything that the step makes, by ATen; nothing is written.

        wide: one precision higher than the graph says. on_host: where the results wait. Takes half
        of what is free on the device at most, but for one operator. Raises OutOfMemoryError.
        """
        free = free_bytes(device_of(args))
        budget = None if free is None else int(SHARE * free)
        plan = self.schedule(budget, 0 if on_host else None, wide=wide)
        given, draws = self._given(args), functools.partial(_same_draws, args)

        def evaluated() -> Environment:
            return evaluate(plan, given, self._runner(wide))

        key, masks = self._key(wide), self._shared_masks()
        if self._fixed and masks is not None and plan is self._unbounded[key]:
            recording = self._recordings.setdefault(key, Recording(self.boundary))
            values = recording.values(evaluated, plan.wanted, [*given.values(), *masks], draws)
        else:
            with draws():
                values = evaluated()
        return self._results(lambda node: values[node])

    def _shared_masks(self) -> list[Tensor] | None:
        """Every mask of a run, where all are drawn; None where the run draws some itself."""
        if not self._draws:
            return []
        drawn = self._drawn or {}
        keys = [*enumerate(self._draws)]
        return [drawn[key] for key in keys] if all(key in drawn for key in keys) else None

    def _given(self, args: Sequence[Any]) -> Environment:
        given = dict(zip(self._placeholders, args, strict=True))
        return {**given, **constants(self.tg.gm)}

    def _runner(self, wide: bool) -> Run:
        run: Run = self._native
        if wide:  # what runs wide depends on whether products may be in TF32
            precision = torch.get_float32_matmul_precision()
            run = self._widened.setdefault(precision, Widened(self.boundary))
        masks = self._masks()
        return run if masks is None else _with_masks(run, self._live, masks, wide=wide)

    def _masks(self) -> Masks | None:
        """What dropout takes in a run; None where torch draws."""
        return Masks(drawn=self._drawn, expected=self._draws) if self._fast_rng else None

    def _results(self, of: Callable[[fx.Node], Tensor]) -> Results:
        return Results(
            [
                dict(zip(self.params(i), map(of, _grads(update)), strict=True))
                for i, update in enumerate(self.updates)
            ],
            {name: of(node) for name, node in self._outputs.items()},
            {name: of(node) for name, node in self._written.items()},
        )

    def made(self, args: Sequence[Any], outputs: Sequence[Any]) -> Results:
        """What a plan has made: its outputs, and the inputs that it has written."""
        return Results(
            [],
            {name: outputs[int(name.split()[1])] for name in self._outputs},
            {name: args[place] for name, place in self._places.items()},
        )

    def seen(
        self,
        args: Sequence[Any],
        copies: Copies,
        within: AbstractContextManager[object] | None = None,
    ) -> Results | None:
        """What eager autograd makes of the step, from Dynamo's graph.

        within: entered for the step alone.

        None where there is no such graph, or where it drew other dropout masks than the plan will.
        """
        if self.shadow is None:
            return None
        with _same_draws(args):
            seen = self.shadow.look(copies, self._masks(), within)
        if seen.draws != len(self._draws) or len(seen.gradients) != len(self.updates):
            return None
        results = Results()
        for update, found in zip(self.updates, seen.gradients, strict=True):
            nodes: Any = update.args[0]
            names = {id(args[self._position[node]]): self.names[node] for node in nodes}
            results.gradients.append(
                {names.get(key, f"parameter {key}"): grad for key, grad in found.items()}
            )
        for name, node in self._outputs.items():
            place = self._results_of[int(name.split()[1])]
            if place is not None and _alike(seen.outputs[place], node):
                results.outputs[name] = seen.outputs[place]
        for name, position in self._places.items():
            source = self._sources[position]
            if source is not None and source in seen.written:
                results.written[name] = seen.written.pop(source)
        for source, value in seen.written.items():  # written by eager alone
            results.written[f"input {source}"] = value
        return results

    # -- looking for the first value that is not finite ------------------------------------------

    def first_nonfinite(self, args: Sequence[Any]) -> str | None:
        """By ATen: the operator that first makes a NaN or infinity of the loss or of a gradient.

        None when all of them are finite. Constants of minus infinity, as masks have, don't count.
        """
        given = self._given(args)
        flags = {n: _broken(t) for n, value in given.items() for t in _floating(value)}
        run = self._runner(wide=False)

        def watched(node: fx.Node) -> Operation:
            def looked_at(env: Environment) -> Any:
                made = run(node)(env)
                found = [_broken(t) for t in _floating(made)]
                if found:
                    flags[node] = torch.stack([f.to(found[0].device) for f in found]).amax(0)
                return made

            return looked_at

        free = free_bytes(device_of(args))
        budget = None if free is None else int(SHARE * free)
        judged = [g for update in self.updates for g in _grads(update)]
        outputs = [n for n in self._outputs.values() if n.meta["val"].numel() == 1]
        judged = judged + outputs or list(self._outputs.values())
        plan = schedule(self.tg.nodes(), judged, wide=False, budget=budget)
        with _same_draws(args):
            values = evaluate(plan, given, watched)
        worst = max((int(_broken(t)) for n in judged for t in _floating(values[n])), default=0)
        if not worst:
            return None
        guilty = (n for n, flag in flags.items() if int(flag) >= worst and not _selects(n))
        node = next(guilty, None)
        if node is None or node.op != "call_function":
            name = "a constant" if node is None else self.names.get(node, node.name)
            return f"{name}, as it comes into the step"
        where = self.tg.where(node)
        return ops.op_name(node.target) + (f" at {where}" if where else "")


def _broken(value: Tensor) -> Tensor:
    """0 for finite values, 1 where one is infinite, 2 where one is NaN."""
    infinite = value.isinf().any().to(torch.int8)
    return torch.maximum(infinite, 2 * value.isnan().any().to(torch.int8))


def _selects(node: fx.Node) -> bool:
    """Whether a node puts a constant in place, such as the minus infinity of a mask."""
    if node.op != "call_function":
        return False
    name = ops.op_name(node.target)
    return ops.lookup(node.target).kind == "creation" or "where" in name or "masked_fill" in name


def _floating(value: Any) -> Iterator[Tensor]:
    for one in value if isinstance(value, list | tuple) else [value]:
        if isinstance(one, Tensor) and one.is_floating_point() and one.numel():
            yield one


def _grads(update: fx.Node) -> list[fx.Node]:
    grads: Any = update.args[1]
    return list(grads)


def _behind(wanted: Sequence[fx.Node]) -> set[fx.Node]:
    """Everything that some values are computed from."""
    found: set[fx.Node] = set()
    pending = list(wanted)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending.extend(node.all_input_nodes)
    return found


def _alike(value: Any, node: fx.Node) -> bool:
    like = node.meta["val"]
    if not isinstance(value, Tensor):
        return False
    return (tuple(value.shape), value.dtype) == (tuple(like.shape), like.dtype)


def _is_fixed(value: Tensor) -> bool:
    """Whether a tensor of a graph has the same sizes and strides at every call."""
    return all(isinstance(size, int) for size in (*value.shape, *value.stride()))


def _draw(node: fx.Node) -> Draw:
    """What a dropout draws; a size that the data decides is like no other."""
    arguments: Any = node.args
    sizes = arguments[0].meta["val"].shape
    return float(arguments[1]), tuple(s if isinstance(s, int) else -1 for s in sizes)


def _with_masks(run: Run, live: set[fx.Node], masks: Masks, *, wide: bool) -> Run:
    """Dropout by the program's masks; a dropout that nothing reads draws none."""

    def masked(node: fx.Node) -> Operation:
        if node.target is not _DROPOUT or node not in live:
            return run(node)
        if len(node.args) > 2 and node.args[2] is False:
            return run(node)
        arguments: Any = node.args
        dtype = computing_dtype(node) if wide else None
        return lambda env: masks.scaled(widen(env[arguments[0]], dtype), float(arguments[1]))

    return masked


@contextmanager
def _same_draws(args: Sequence[Any]) -> Iterator[None]:
    """What runs inside draws what the plan will draw, and leaves the generators alone."""
    devices = {a.device.index for a in args if isinstance(a, Tensor) and a.is_cuda}
    with torch.random.fork_rng(sorted(devices)):
        yield


def by_name(results: Results) -> Mapping[str, Tensor]:
    """Outputs and new values, in one mapping."""
    return {**results.outputs, **{f"new {name}": v for name, v in results.written.items()}}
