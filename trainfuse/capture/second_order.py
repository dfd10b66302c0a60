"""A region as Dynamo calls it, and what AOTAutograd's backward of it lacks.

It has no derivative. Whether one is wanted shows when the backward runs in grad mode
(`create_graph`): its gradients are then replaced by those of Dynamo's graph, run once more on the
same inputs and with the same masks, after a comparison with the compiled ones. From then on the
region runs eagerly.

It knows no missing gradient. Where a result of the region isn't used, those that eager would leave
out are left out again (see reach.py).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from autodiff import ops
from autodiff.graph import Refusal, TrainingGraph
from autodiff.masks import ATTENTION, DROPOUT, Masks, installed
from trainfuse.capture import compat, modes
from trainfuse.capture.overlap import OVERLAP, OverlapGuard
from trainfuse.capture.reach import Outline, reached
from trainfuse.errors import GradientOfGradient

AGAIN = Refusal("capture", "its gradient is differentiated again (create_graph)")
_ZEROS = "gradients of what the loss does not depend on are zeros, not None"
_VIEWS = 8
"""How many views apart a region's result and its compiled node are looked for."""
_OVERLAPS = Refusal("capture", f"a call of a region runs eagerly: {OVERLAP}")

Grads = Sequence[Tensor | None]


@dataclass(slots=True)
class RegionFacts:
    """What a region's compilation finds out. derived: AOTAutograd has done its part.

    draws: random numbers; seeded: masks from one seed. autocast: (device type, enabled, dtype)
    around the region. written, static: inputs that it writes, and that keep their address; fixed:
    all sizes are the same at every call.
    """

    derived: bool = False
    draws: bool = False
    seeded: bool = False
    autocast: tuple[tuple[str, bool, torch.dtype], ...] = field(default_factory=compat.autocasts)
    written: set[int] = field(default_factory=set)
    static: set[int] = field(default_factory=set)
    fixed: bool = True

    def see(self, graph: TrainingGraph, written: set[int]) -> None:
        """Take in a forward graph and the inputs that it writes."""
        self.written |= written
        for node in graph.nodes():
            self.draws |= ops.draws_randomness(node)
            self.seeded |= node.target is torch.ops.trainfuse.seed.default


@dataclass(frozen=True, slots=True)
class _Wiring:
    """How the compiled node hangs between a region's inputs and outputs; equal at every call.

    Results and, numbered after them, inputs as the call leaves them: root, depth: which one leads
    to the node, and by how many views; views: node output -> all that are it or a view of it.
    results: node output -> the result that is it. inputs: the input behind each of the node's
    edges, None where no gradient goes. outlines: of the inputs. problem: why the region can't be
    repeated, or None.
    """

    root: int
    depth: int
    results: dict[int, int]
    inputs: tuple[int | None, ...]
    views: dict[int, list[int]]
    outlines: tuple[Any, ...]
    problem: str | None


class Region:
    """One of Dynamo's graphs, as Dynamo calls it.

    compiled: what runs at first, or None where there is nothing but the graph. notice: told why a
    call of the region runs eagerly; after AGAIN all do.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        compiled: Callable[..., Sequence[Any]] | None,
        facts: RegionFacts,
        notice: Callable[[Refusal], None],
    ) -> None:
        self._gm, self._compiled, self._facts, self._notice = gm, compiled, facts, notice
        self._wiring: _Wiring | None = None
        self._reach: Sequence[Collection[int]] | None = None
        self._overlaps: OverlapGuard | None = None

    def __call__(self, *args: Any) -> Sequence[Any]:
        """The region's results; differentiable, as its graph's are."""
        compiled = self._compiled
        if compiled is None:
            return self._eagerly(args)
        if self._facts.written and self._overlap(args):
            self._notice(_OVERLAPS)
            return self._eagerly(args)
        if not torch.is_grad_enabled():
            return compiled(*args)
        states = compat.rng_states(args) if self._facts.draws else None
        wiring = self._wiring
        before = _Before.of(args) if wiring is None else None
        results = compiled(*args)
        if wiring is None:
            assert before is not None
            wiring = self._wiring = _wire(args, results, before)
        if wiring.root >= 0:
            node = _node((*results, *args)[wiring.root], wiring.depth)
            node.register_hook(functools.partial(self._differentiated, _hold(args), states))
        return results

    def _eagerly(self, args: Sequence[Any]) -> Sequence[Any]:
        with modes.kept():
            return self._gm(*args)

    def _overlap(self, args: Sequence[Any]) -> bool:
        guard = self._overlaps
        if guard is None:
            facts = self._facts
            guard = OverlapGuard(args, facts.written, facts.static, fixed=facts.fixed)
            self._overlaps = guard
            return guard.overlaps
        return guard.needed and guard.violated(args)

    @torch.compiler.disable  # a backward within a target would have Dynamo trace it
    def _differentiated(
        self, held: list[Any], states: Any, grads: Grads, cotangents: Grads
    ) -> tuple[Tensor | None, ...] | None:
        """The node's post hook: gradients that get a graph of their own, and missing ones."""
        if not torch.is_grad_enabled():
            return self._left_out(grads, cotangents)
        made = self._repeated(held, states, grads, cotangents)
        self._compiled = None
        self._notice(AGAIN)
        if isinstance(made, str):
            raise GradientOfGradient(reason=made)
        return made

    def _left_out(self, grads: Grads, cotangents: Grads) -> tuple[Tensor | None, ...] | None:
        """The gradients without those that no cotangent reaches, or None where all are reached."""
        wiring = self._wiring
        assert wiring is not None
        used = {k for k, g in enumerate(cotangents) if g is not None}
        if not used <= wiring.views.keys():
            return None
        if used >= wiring.views.keys() and not self._writes_a_leaf():
            return None
        reach = self._reach
        if reach is None:
            reach = self._reach = self._follow(wiring)
        kept = {i for k in used for value in wiring.views[k] for i in reach[value]}
        return tuple(
            grad if index is None or index in kept else None
            for grad, index in zip(grads, wiring.inputs, strict=True)
        )

    def _writes_a_leaf(self) -> bool:
        """Whether it writes, past autograd, an input with a gradient: of a `detach()`, or `data`.

        The written value is one more output of the compiled node, whose zeros go to the input.
        """
        assert self._wiring is not None
        outlines = self._wiring.outlines
        return any(
            o.requires_grad for i in self._facts.written if isinstance(o := outlines[i], Outline)
        )

    def _follow(self, wiring: _Wiring) -> Sequence[Collection[int]]:
        try:
            with _as_before(self._facts, None):
                return reached(self._gm, wiring.outlines)
        except Exception as error:  # whatever an operator raises that can't do without values
            line = str(error).strip().partition("\n")[0]
            self._notice(Refusal("capture", f"{_ZEROS}: {line}"))
            everything = range(len(wiring.outlines))
            return [everything] * (1 + max(v for views in wiring.views.values() for v in views))

    def _repeated(
        self, held: list[Any], states: Any, grads: Grads, cotangents: Grads
    ) -> tuple[Tensor | None, ...] | str:
        wiring = self._wiring
        assert wiring is not None
        if wiring.problem is not None:
            return wiring.problem
        given = [(k, g) for k, g in enumerate(cotangents) if g is not None]
        if any(k not in wiring.results for k, _ in given):
            return "an output is a view of a value that another output shares"
        args = [a() if isinstance(a, weakref.ref) else a for a in held]
        if any(a is None and isinstance(h, weakref.ref) for a, h in zip(args, held, strict=True)):
            return "one of its inputs is gone"
        wanted = [
            (slot, index)
            for slot, index in enumerate(wiring.inputs)
            if index is not None and grads[slot] is not None
        ]
        # a running statistic is not to be updated twice
        args = [a.clone() if isinstance(a, Tensor) and not a.requires_grad else a for a in args]
        with _as_before(self._facts, states):
            results = _Repeat(self._gm, self._facts.seeded).run(*args)
        made = torch.autograd.grad(
            [results[wiring.results[k]] for k, _ in given],
            [args[index] for _, index in wanted],
            [g for _, g in given],
            create_graph=True,
            allow_unused=True,
        )
        ours: list[Tensor | None] = [None] * len(grads)
        for (slot, _), grad in zip(wanted, made, strict=True):
            ours[slot] = grad
        if not _agree(grads, ours):
            return "repeated, it has another gradient"
        return tuple(ours)


def _hold(args: Sequence[Any]) -> list[Any]:
    """The inputs, until the backward has run; nearly always that saves them anyway.

    Weakly inside a checkpoint, which is there to free them. Leaves live as long as the graph.
    """
    if not compat.saving_is_hooked():
        return list(args)
    return [weakref.ref(a) if isinstance(a, Tensor) and not _is_leaf(a) else a for a in args]


def _is_leaf(tensor: Tensor) -> bool:
    return tensor.requires_grad and tensor.is_leaf


@dataclass(frozen=True, slots=True)
class _Before:
    """A region's inputs before its call.

    versions: how often each was written. edges: where its gradient goes -> its position. nodes:
    compiled nodes of other regions that it is a result of. outlines: see reach.py.
    """

    versions: list[int | None]
    edges: dict[tuple[Any, int], int]
    nodes: set[Any]
    outlines: tuple[Any, ...]

    @classmethod
    def of(cls, args: Sequence[Any]) -> _Before:
        """Of the inputs of a call to come."""
        edges = {
            tuple(torch.autograd.graph.get_gradient_edge(a))[:2]: i
            for i, a in enumerate(args)
            if isinstance(a, Tensor) and a.requires_grad
        }
        sources = (_source(a) for a in args)
        return cls(
            [_version(a) for a in args],
            edges,
            {source[1] for source in sources if source is not None},
            tuple(Outline.of(a) for a in args),
        )


def _version(value: Any) -> int | None:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else None


def _node(result: Tensor, depth: int) -> Any:
    node: Any = result.grad_fn
    for _ in range(depth):
        node = node.next_functions[-1][0]
    return node


def _wire(args: Sequence[Any], results: Sequence[Any], before: _Before) -> _Wiring:
    root, depth, node = -1, 0, None
    whole: dict[int, int] = {}
    views: dict[int, list[int]] = {}
    for i, value in enumerate((*results, *args)):
        source = _source(value)
        # what the region makes of an input, as a view, leads to the node that made the input
        if source is None or source[1] in before.nodes:
            continue
        if node is None:
            root, depth, node = i, *source[:2]
        if source[1] is node:
            views.setdefault(source[2], []).append(i)
            if source[0] == 0 and i < len(results):
                whole[source[2]] = i
    if node is None:
        return _Wiring(-1, 0, {}, (), {}, before.outlines, None)
    edges = before.edges
    inputs = tuple(None if n is None else edges.get((n, nr)) for n, nr in node.next_functions)
    written = any(
        old is not None and old != _version(a) and a.requires_grad
        for old, a in zip(before.versions, args, strict=True)
    )
    problem = "it writes to an input that requires a gradient" if written else None
    if any(
        index is None and edge[0] is not None
        for index, edge in zip(inputs, node.next_functions, strict=True)
    ):
        problem = problem or "two of its inputs share memory"
    return _Wiring(root, depth, whole, inputs, views, before.outlines, problem)


def _source(value: Any) -> tuple[int, Any, int] | None:
    """The compiled node that a tensor comes from: over how many views, the node, which output."""
    node: Any = value.grad_fn if isinstance(value, Tensor) else None
    number = value.output_nr if node is not None else 0
    for depth in range(_VIEWS):
        if node is None:
            break
        if compat.is_compiled_node(node):
            return depth, node, number
        # a view has one operand; of a copy, and of one into a view, the source is the last
        node, number = node.next_functions[-1] if node.next_functions else (None, 0)
    return None


@contextmanager
def _as_before(facts: RegionFacts, states: Any) -> Iterator[None]:
    """Grad mode, autocast and generators as they were when the region ran."""
    with ExitStack() as stack:
        stack.enter_context(modes.kept())
        stack.enter_context(torch.enable_grad())
        for device_type, enabled, dtype in facts.autocast:
            stack.enter_context(torch.autocast(device_type, dtype=dtype, enabled=enabled))
        if states is not None:
            stack.enter_context(compat.rng_restored(states))
        yield


class _Repeat(fx.Interpreter):
    """Runs a region's graph; seeded: dropouts keep what the compiled program's one seed kept."""

    def __init__(self, gm: fx.GraphModule, seeded: bool) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self._masks = Masks() if seeded else None

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        masks = self._masks
        if masks is None:
            return super().call_function(target, args, kwargs)
        if target is DROPOUT:
            return masks.dropout(*args, **kwargs)
        if target is ATTENTION:
            return masks.attend(*args, **kwargs)
        if target is functional.multi_head_attention_forward:
            # Dynamo leaves it whole, with its dropout inside
            with installed(masks):
                return super().call_function(target, args, kwargs)
        return super().call_function(target, args, kwargs)


def _agree(compiled: Grads, repeated: Grads) -> bool:
    """Whether both are one gradient but for rounding; a missing one is zero."""
    pairs = [
        (c.detach().double(), (torch.zeros_like(c) if r is None else r).detach().double(), c.dtype)
        for c, r in zip(compiled, repeated, strict=True)
        if c is not None
    ]
    scale = max((float(_rms(r)) for _, r, _ in pairs), default=0.0)
    for c, r, dtype in pairs:
        if c.shape != r.shape or not torch.equal(torch.isfinite(c), torch.isfinite(r)):
            return False
        loose = {torch.float64: 1e-7, torch.float32: 1e-3}.get(dtype, 5e-2)
        if float(_rms(c - r)) > loose * max(float(_rms(r)), 0.01 * scale):
            return False
    return True


def _rms(x: Tensor) -> Tensor:
    x = x[torch.isfinite(x)]
    return x.square().mean().sqrt() if x.numel() else x.new_zeros(())
