"""A region as Dynamo calls it, and the gradients of its gradients.

AOTAutograd's backward of a region has no derivative. Whether one is wanted shows when the backward
runs in grad mode (`create_graph`): its gradients are then replaced by those of Dynamo's graph, run
once more on the same inputs and with the same masks, after a comparison with the compiled ones.
From then on the region runs eagerly.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from autodiff import ops
from autodiff.graph import Refusal, TrainingGraph
from autodiff.masks import ATTENTION, DROPOUT, Masks, installed
from trainfuse.capture import compat
from trainfuse.capture.overlap import OVERLAP, OverlapGuard
from trainfuse.errors import GradientOfGradient

AGAIN = Refusal("capture", "its gradient is differentiated again (create_graph)")
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

    root, depth: which result leads to the node, and by how many views. results: node output ->
    result. inputs: the input behind each of the node's edges, None where no gradient goes.
    problem: why the region can't be repeated, or None.
    """

    root: int
    depth: int
    results: dict[int, int]
    inputs: tuple[int | None, ...]
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
        self._overlaps: OverlapGuard | None = None

    def __call__(self, *args: Any) -> Sequence[Any]:
        """The region's results; differentiable, as its graph's are."""
        compiled = self._compiled
        if compiled is None:
            return self._gm(*args)
        if self._facts.written and self._overlap(args):
            self._notice(_OVERLAPS)
            return self._gm(*args)
        if not torch.is_grad_enabled():
            return compiled(*args)
        states = compat.rng_states(args) if self._facts.draws else None
        wiring = self._wiring
        versions = [_version(a) for a in args] if wiring is None else []
        results = compiled(*args)
        if wiring is None:
            wiring = self._wiring = _wire(args, results, versions)
        if wiring.root >= 0:
            node = _node(results[wiring.root], wiring.depth)
            node.register_hook(functools.partial(self._differentiated, _hold(args), states))
        return results

    def _overlap(self, args: Sequence[Any]) -> bool:
        guard = self._overlaps
        if guard is None:
            facts = self._facts
            guard = OverlapGuard(args, facts.written, facts.static, fixed=facts.fixed)
            self._overlaps = guard
            return guard.overlaps
        return guard.needed and guard.violated(args)

    def _differentiated(
        self, held: list[Any], states: Any, grads: Grads, cotangents: Grads
    ) -> tuple[Tensor | None, ...] | None:
        """The node's post hook: nothing to do unless the gradients get a graph of their own."""
        if not torch.is_grad_enabled():
            return None
        made = self._repeated(held, states, grads, cotangents)
        self._compiled = None
        self._notice(AGAIN)
        if isinstance(made, str):
            raise GradientOfGradient(reason=made)
        return made

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


def _version(value: Any) -> int | None:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else None


def _node(result: Tensor, depth: int) -> Any:
    node: Any = result.grad_fn
    for _ in range(depth):
        node = node.next_functions[0][0]
    return node


def _wire(args: Sequence[Any], results: Sequence[Any], versions: Sequence[int | None]) -> _Wiring:
    """versions: of the inputs before the call."""
    root, depth, node = _find_node(results)
    if node is None:
        return _Wiring(-1, 0, {}, (), None)
    outputs = {
        r.output_nr: i for i, r in enumerate(results) if isinstance(r, Tensor) and r.grad_fn is node
    }
    edges = {
        tuple(torch.autograd.graph.get_gradient_edge(a))[:2]: i
        for i, a in enumerate(args)
        if isinstance(a, Tensor) and a.requires_grad
    }
    inputs = tuple(None if n is None else edges.get((n, nr)) for n, nr in node.next_functions)
    written = any(
        old is not None and old != _version(a) and a.requires_grad
        for old, a in zip(versions, args, strict=True)
    )
    problem = "it writes to an input that requires a gradient" if written else None
    if any(
        index is None and edge[0] is not None
        for index, edge in zip(inputs, node.next_functions, strict=True)
    ):
        problem = problem or "two of its inputs share memory"
    return _Wiring(root, depth, outputs, inputs, problem)


def _find_node(results: Sequence[Any]) -> tuple[int, int, Any]:
    """The first result that leads to the compiled node, over how many views, and the node."""
    for index, result in enumerate(results):
        node: Any = result.grad_fn if isinstance(result, Tensor) else None
        for depth in range(4):
            if node is None:
                break
            if compat.is_compiled_node(node):
                return index, depth, node
            node = node.next_functions[0][0] if node.next_functions else None
    return -1, 0, None


@contextmanager
def _as_before(facts: RegionFacts, states: Any) -> Iterator[None]:
    """Grad mode, autocast and generators as they were when the region ran."""
    with ExitStack() as stack:
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
