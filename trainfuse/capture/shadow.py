"""The step as Dynamo saw it, run by eager autograd: what a check of a whole step is held against.

Nothing of ours has touched that graph but the stand-ins of the optimizer's methods: neither
AOTAutograd's trace, nor the lift, nor a pass, nor a kernel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from autodiff.masks import ATTENTION, DROPOUT, Masks, installed
from trainfuse.capture import compat
from trainfuse.capture.optimizers import find_handle

Copy = Callable[[Tensor], Tensor]


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

    def look(self, copy: Copy, drawn: dict[int, Tensor] | None = None) -> Seen:
        """Run the step on the inputs of the call under way, and put back what it wrote of them.

        copy: makes the copies that are kept. drawn: receives the dropout masks. The optimizer does
        not run.
        """
        seen, args = Seen(), self._args
        # the graph is a straight line: what its operators write, they write at every run
        watch = _Writes(args, copy, self._written)

        def update(params: Sequence[Tensor], grads: Sequence[Tensor], _: int) -> None:
            pairs = zip(params, grads, strict=True)
            seen.gradients.append({id(p): copy(g) for p, g in pairs})

        try:
            with watch if self._written is None else contextlib.nullcontext():
                outputs = self._run(args, update, seen, drawn)
            self._written = watch.kept
            seen.outputs = [copy(o) if isinstance(o, Tensor) else o for o in outputs]
            for i, arg in enumerate(args):
                if isinstance(arg, Tensor) and watch.wrote(arg):
                    seen.written[i] = copy(arg)
        finally:
            watch.undo()
        return seen

    def step(self, args: Sequence[Any]) -> Any:
        """Run the step for good, the optimizer's own step included."""

        def update(params: Sequence[Tensor], grads: Sequence[Tensor], number: int) -> None:
            handle = find_handle(number)
            with torch.no_grad():
                handle.run_eager([handle.index_of(p) for p in params], grads)

        return self._run(args, update, Seen())

    def _run(
        self,
        args: Sequence[Any],
        update: Callable[..., None],
        seen: Seen,
        drawn: dict[int, Tensor] | None = None,
    ) -> Any:
        masks = Masks(drawn=drawn) if self.fast_rng else None
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for device, (enabled, dtype) in self._autocast.items():
                stack.enter_context(torch.autocast(device, dtype, enabled))
            if masks is not None:
                stack.enter_context(installed(masks))
            outputs = _Eager(self.gm, update, masks).run(*args)
        seen.draws = 0 if masks is None else masks.count
        return outputs


class _Eager(fx.Interpreter):
    """Runs Dynamo's graph with torch's own autograd, and `update` in the optimizer's place."""

    def __init__(
        self, gm: fx.GraphModule, update: Callable[..., None], masks: Masks | None
    ) -> None:
        super().__init__(gm)
        self._update, self._masks = update, masks

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """One call, but for those that only a trace understands."""
        if target is torch.ops.trainfuse.update:
            return self._update(*args)
        if target is compat.linked_grad:
            return torch.autograd.grad(*args, **kwargs)
        if compat.is_checkpoint(target):
            return self._checkpoint(*args)
        if self._masks is not None and target is DROPOUT:
            return self._masks.dropout(*args, **kwargs)
        if self._masks is not None and target is ATTENTION:
            return self._masks.attend(*args, **kwargs)
        return super().call_function(target, args, kwargs)

    def _checkpoint(self, body: fx.GraphModule, *args: Any) -> Any:
        """A checkpointed stretch; its second run draws the masks of the first."""
        masks = self._masks
        first: list[int] = []

        def run(*inputs: Any) -> Any:
            if masks is None:
                return _Eager(body, self._update, masks).run(*inputs)
            count = masks.count
            if first:
                masks.count = first[0]
            else:
                first.append(count)
            try:
                return _Eager(body, self._update, masks).run(*inputs)
            finally:  # the second run stops, by an exception, once it has what it needs
                masks.count = max(count, masks.count)

        return checkpoint(run, *args, use_reentrant=False)


class _Writes(TorchDispatchMode):
    """Keeps the old values of inputs: of parameters when an operator is about to write one.

    Of other inputs always: batch norm writes its statistics, and its schema does not say so.
    """

    def __init__(
        self, inputs: Sequence[Any], copy: Copy, written: frozenset[int] | None = None
    ) -> None:
        """written: positions of the inputs that are written, where an earlier run has shown it."""
        super().__init__()
        self._copy = copy
        self._params: dict[int, list[Tensor]] = {}
        self._old: dict[int, Tensor] = {}
        self._tensors: dict[int, Tensor] = {}
        self._inputs = inputs
        for place, value in enumerate(inputs):
            if not isinstance(value, Tensor) or id(value) in self._old:
                continue
            if written is not None:
                if place in written:
                    self._keep(value)
            elif isinstance(value, torch.nn.Parameter):
                self._params.setdefault(_memory(value), []).append(value)
            else:
                self._keep(value)

    def _keep(self, value: Tensor) -> None:
        self._tensors[id(value)], self._old[id(value)] = value, self._copy(value)

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
                            for param in self._params.pop(_memory(value), ()):
                                self._keep(param)
        return func(*args, **kwargs)

    def wrote(self, value: Tensor) -> bool:
        """Whether this input has another value than before."""
        old = self._old.get(id(value))
        return old is not None and not torch.equal(old, value.detach().to(old.device))

    def undo(self) -> None:
        """Put the old values back."""
        with torch.no_grad():
            for key, old in self._old.items():
                if self.wrote(self._tensors[key]):
                    self._tensors[key].copy_(old)


def _memory(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()
