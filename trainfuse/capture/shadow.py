"""The step as Dynamo saw it, run by eager autograd: what a check of a whole step is held against.

Nothing of ours has touched that graph but the stand-ins of the optimizer's methods: neither
AOTAutograd's trace, nor the lift, nor a pass, nor a kernel.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from autodiff.masks import ATTENTION, DROPOUT, Masks, installed
from trainfuse.capture import compat, modes
from trainfuse.capture.optimizers import find_handle

Copies = Callable[[Sequence[Tensor]], list[Tensor]]


@dataclass(slots=True)
class Seen:
    """What one eager run made, in memory of its own.

    gradients: of every update in order, by the parameter's id. outputs: of Dynamo's graph.
    written: new values of its inputs, by position. draws: how many dropouts took a mask.
    """

    gradients: list[dict[int, Tensor]] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    written: dict[int, Tensor] = field(default_factory=dict)
    draws: int = 0


class TakeOver(Exception):
    """What was captured is wrong: raised by a plan, once it has changed nothing."""


class Shadow:
    """Dynamo's graph of one step.

    fast_rng: whether dropout takes the masks that the compiled step draws.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self.fast_rng = True
        # as Dynamo guards it; AOTAutograd's wrapper, in which `look` is called, turns it off
        self._autocast = {
            device: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in ("cuda", "cpu")
        }
        self._args: Sequence[Any] = ()
        self._took_over = False
        self._written: frozenset[int] | None = None
        self._eager = _Eager()

    @functools.cached_property
    def _forward(self) -> Callable[..., Any]:
        return self._eager.forward_of(self.gm)

    def beside(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run` over the graph's inputs, which `look` sees meanwhile.

        From a TakeOver on, the graph itself runs in its place.
        """

        def call(*args: Any) -> Any:
            self._args = args
            try:
                if not self._took_over:
                    return run(*args)
            except TakeOver:
                self._took_over = True
            finally:
                self._args = ()
            return self.step(args)

        return call

    def look(
        self,
        copies: Copies,
        masks: Masks | None,
        within: contextlib.AbstractContextManager[object] | None = None,
    ) -> Seen:
        """Run the step on the inputs of the call under way, and put back what it wrote of them.

        copies: makes those that are kept. masks: taken by dropout; None for torch's own. within:
        entered for the step alone. The optimizer does not run.
        """
        seen, args = Seen(), self._args
        # the graph is a straight line: what its operators write, they write at every run
        watch = _Writes(args, copies, self._written)

        def update(params: Sequence[Tensor], grads: Sequence[Tensor], _: int) -> None:
            seen.gradients.append(dict(zip(map(id, params), copies(grads), strict=True)))

        try:
            with watch if self._written is None else contextlib.nullcontext():
                outputs = self._run(args, update, masks, within)
            self._written = watch.kept
            kept = iter(copies([o for o in outputs if isinstance(o, Tensor)]))
            seen.outputs = [next(kept) if isinstance(o, Tensor) else o for o in outputs]
            written = {i: arg for i, arg in enumerate(args) if watch.wrote(arg)}
            seen.written = dict(zip(written, copies([*written.values()]), strict=True))
            seen.draws = 0 if masks is None else masks.count
        finally:
            watch.undo()
        return seen

    def step(self, args: Sequence[Any]) -> Any:
        """Run the step for good, the optimizer's own step included."""

        def update(params: Sequence[Tensor], grads: Sequence[Tensor], number: int) -> None:
            handle = find_handle(number)
            with torch.no_grad():
                handle.run_eager([handle.index_of(p) for p in params], grads)

        return self._run(args, update, Masks() if self.fast_rng else None)

    def _run(
        self,
        args: Sequence[Any],
        update: Callable[..., None],
        masks: Masks | None,
        within: contextlib.AbstractContextManager[object] | None = None,
    ) -> Any:
        with contextlib.ExitStack() as stack:
            stack.enter_context(modes.kept())
            stack.enter_context(torch.enable_grad())
            for device, (enabled, dtype) in self._autocast.items():
                stack.enter_context(torch.autocast(device, dtype, enabled))
            if masks is not None:
                stack.enter_context(installed(masks))
            with self._eager.during(update, masks), within or contextlib.nullcontext():
                return self._forward(*args)


class _Eager:
    """Dynamo's graphs under torch's own autograd, where some calls are others' during a run.

    A graph runs as the text that torch.fx makes of it: one by one, its nodes' interpretation would
    take longer than all that they do.
    """

    def __init__(self) -> None:
        self._update: Callable[..., None] | None = None
        self._masks: Masks | None = None
        self._bodies: dict[fx.GraphModule, Callable[..., Any]] = {}
        # the text holds these: each must be one object
        self._instead = (self._updated, self._dropout, self._attend, self._checkpoint)

    @contextlib.contextmanager
    def during(self, update: Callable[..., None], masks: Masks | None) -> Iterator[None]:
        """Within the block `update` runs in the optimizer's place, and dropout takes masks."""
        self._update, self._masks = update, masks
        try:
            yield
        finally:
            self._update = self._masks = None

    def forward_of(self, gm: fx.GraphModule) -> Callable[..., Any]:
        """The graph as a function."""
        graph = fx.Graph()
        graph.output(graph.graph_copy(gm.graph, {}))
        for node in graph.nodes:
            if node.op == "call_function":
                node.target = self._in_place_of(node.target)
        return fx.GraphModule(gm, graph).forward

    def _in_place_of(self, target: Any) -> Any:
        updated, dropout, attend, checkpointed = self._instead
        if target is torch.ops.trainfuse.update:
            return updated
        if target is compat.linked_grad:
            return torch.autograd.grad
        if compat.is_checkpoint(target):
            return checkpointed
        return {DROPOUT: dropout, ATTENTION: attend}.get(target, target)

    def _updated(self, *args: Any) -> None:
        assert self._update is not None
        self._update(*args)

    def _dropout(self, *args: Any, **kwargs: Any) -> Tensor:
        masks = self._masks
        return DROPOUT(*args, **kwargs) if masks is None else masks.dropout(*args, **kwargs)

    def _attend(self, *args: Any, **kwargs: Any) -> Tensor:
        masks = self._masks
        return ATTENTION(*args, **kwargs) if masks is None else masks.attend(*args, **kwargs)

    def _checkpoint(self, body: fx.GraphModule, *args: Any, **_: Any) -> Any:
        """A checkpointed stretch, whatever its options; its second run draws the first's masks."""
        masks = self._masks
        first: list[int] = []
        if body not in self._bodies:
            self._bodies[body] = self.forward_of(body)
        forward = self._bodies[body]

        def run(*inputs: Any) -> Any:
            if masks is None:
                return forward(*inputs)
            count = masks.count
            if first:
                masks.count = first[0]
            else:
                first.append(count)
            try:
                return forward(*inputs)
            finally:  # the second run stops, by an exception, once it has what it needs
                masks.count = max(count, masks.count)

        return checkpoint(run, *args, use_reentrant=False)


class _Writes(TorchDispatchMode):
    """Keeps the old values of inputs when an operator is about to write one.

    Of floating ones that are no parameters always: batch norm writes its statistics, and its schema
    does not say so.
    """

    def __init__(
        self, inputs: Sequence[Any], copies: Copies, written: frozenset[int] | None = None
    ) -> None:
        """written: positions of the inputs that are written, where an earlier run has shown it."""
        super().__init__()
        self._copies = copies
        self._watched: dict[int, list[Tensor]] = {}
        self._old: dict[int, Tensor] = {}
        self._tensors: dict[int, Tensor] = {}
        self._inputs = inputs
        self._changed: frozenset[int] | None = None
        tensors = {place: value for place, value in enumerate(inputs) if isinstance(value, Tensor)}
        if written is not None:
            self._keep([tensors[place] for place in written])
            return
        each = {id(t): t for t in tensors.values()}.values()
        self._keep([t for t in each if _written_unsaid(t)])
        for value in each:
            if not _written_unsaid(value):
                self._watched.setdefault(_memory(value), []).append(value)

    def _keep(self, values: Sequence[Tensor]) -> None:
        new = {id(value): value for value in values}
        self._tensors |= new
        self._old |= dict(zip(new, self._copies([*new.values()]), strict=True))

    @property
    def kept(self) -> frozenset[int]:
        """Positions of the inputs whose old values are kept."""
        kept = self._old.keys()
        return frozenset(i for i, value in enumerate(self._inputs) if id(value) in kept)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        if schema.is_mutable:
            for i, argument in enumerate(schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    given = args[i] if i < len(args) else kwargs.get(argument.name)
                    for value in tree_leaves(given):
                        if isinstance(value, Tensor):
                            self._keep(self._watched.pop(_memory(value), ()))
        return func(*args, **kwargs)

    def wrote(self, value: Any) -> bool:
        """Whether this input has another value than before; asked when the graph has run."""
        if self._changed is None:
            self._changed = self._compare()
        return id(value) in self._changed

    def _compare(self) -> frozenset[int]:
        """The inputs, of those kept, that have another value; waits for the device once."""
        found: dict[torch.device, dict[int, Tensor]] = {}
        for key, old in self._old.items():
            now = self._tensors[key].detach().to(old.device)
            # a NaN is unlike itself: it is put back, and does no harm
            found.setdefault(old.device, {})[key] = (old != now).any()
        return frozenset(
            key
            for flags in found.values()
            for key, changed in zip(flags, torch.stack([*flags.values()]).tolist(), strict=True)
            if changed
        )

    def undo(self) -> None:
        """Put the old values back."""
        with torch.no_grad():
            for key, old in self._old.items():
                if self.wrote(self._tensors[key]):
                    self._tensors[key].copy_(old)


def _written_unsaid(value: Tensor) -> bool:
    """Whether an operator may write an input though its schema doesn't say so."""
    return value.is_floating_point() and not isinstance(value, torch.nn.Parameter)


def _memory(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()
