"""Regions: Dynamo's graphs between breaks, each with its derived backward, run by autograd.

Hooks, DDP and FSDP2 work, since the real autograd engine calls the compiled backward.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from autodiff.graph import Refusal
from autodiff.split import partition
from trainfuse.capture import compat
from trainfuse.capture.layouts import with_eager_strides
from trainfuse.capture.lift import CaptureKind, CaptureRefused, input_fact, lift
from trainfuse.capture.objects import find_objects
from trainfuse.capture.overlap import OVERLAP
from trainfuse.capture.second_order import Region, RegionFacts
from trainfuse.capture.whole_step import Build
from trainfuse.errors import TrainfuseError

_HISTORY = "it writes a value that needs a gradient over an input that needs none"


def region_backend(
    build: Build, joint_passes: Callable[..., Any], notice: Callable[[Refusal], None]
) -> Callable[..., Any]:
    """A torch.compile backend that hands every graph of a region to `build`.

    joint_passes: called with the joint graph and AOTAutograd's keywords, gives (forward, backward).
    notice: told why a region runs eagerly.
    """

    def backend(gm: fx.GraphModule, examples: Sequence[Any], **_: Any) -> Any:
        compat.make_lawful(gm)
        placeholders = gm.graph.find_nodes(op="placeholder")
        known = RegionFacts()
        known.static |= {
            i
            for i, (node, value) in enumerate(zip(placeholders, examples, strict=True))
            if isinstance(value, torch.nn.Parameter) or compat.static_by_address(node)
        }
        known.fixed = all(isinstance(value, Tensor) for value in examples)

        def compiler(kind: CaptureKind) -> Callable[..., Any]:
            def compile_(traced: fx.GraphModule, inputs: Sequence[Any]) -> Any:
                known.derived = True
                if kind == "forward" and compat.overwritten_with_history(examples):
                    raise CaptureRefused(_HISTORY)
                facts, values = [], []
                for node, fake in zip(
                    traced.graph.find_nodes(op="placeholder"), inputs, strict=True
                ):
                    if kind != "backward" and compat.stands_for_overlapping(node):
                        raise CaptureRefused(OVERLAP)
                    value, source = compat.origin(node, gm, placeholders, examples)
                    if value is None:
                        value = fake
                    static = source is not None and compat.static_by_address(source)
                    facts.append(input_fact(node.name, value, static, None))
                    values.append(value)
                if kind == "forward":
                    _copy_overwritten(traced)
                captured = lift(traced, facts, values, kind)
                if kind != "backward":
                    known.see(captured.graph, compat.written_inputs(len(placeholders)))
                return compat.boxed(build(captured))

            return compile_

        def cut(*args: Any, **kwargs: Any) -> Any:
            known.derived = True
            return joint_passes(*args, **kwargs)

        reason = None
        try:
            compiled = compat.aot(
                gm,
                examples,
                forward=compiler("forward"),
                backward=compiler("backward"),
                inference=compiler("inference"),
                partition=cut,
            )
        except CaptureRefused as refused:
            compiled, reason = None, refused.reason
        except compat.CAPTURE_ERRORS:
            raise  # Dynamo's own signals, such as that it has to trace again
        except (RuntimeError, AssertionError) as error:
            if known.derived:
                raise
            line = str(error).strip().partition("\n")[0]
            compiled, reason = None, f"its gradients could not be derived: {line}"
        if reason is not None:
            notice(Refusal("capture", f"a region runs eagerly: {reason}"))
        region = with_eager_strides(gm, Region(gm, compiled, known, notice))
        return torch.compiler.disable(region)

    return backend


def _copy_overwritten(forward: fx.GraphModule) -> None:
    """Give copies out of inputs that AOTAutograd writes when the forward has run."""
    graph, output = forward.graph, forward.graph.output_node()
    inputs = graph.find_nodes(op="placeholder")
    values: Any = output.args[0]
    for node in {inputs[i] for i in compat.written_after()} & set(values):
        with graph.inserting_before(output):
            copy = graph.call_function(torch.ops.aten.clone.default, (node,))
        copy.meta = dict(node.meta)
        values = tuple(copy if value is node else value for value in values)
    output.args = (values,)


class _PlainUpdates:
    """Keeps Dynamo out of the `step` of the optimizers that a target refers to.

    It would trace Adam with the step counter, an fp32 tensor, in the place of a Python float:
    1 - beta2 ** step then loses half of its digits.
    """

    def __init__(self, target: Callable[..., Any]) -> None:
        self._target = target
        # a module's forward runs no optimizer, though the module may hold one
        self._may_update = not isinstance(getattr(target, "__self__", None), nn.Module)
        # optimizer, its step, and the same out of Dynamo's sight, which guards on its identity
        self._steps: list[tuple[torch.optim.Optimizer, Any, Any]] = []

    @contextlib.contextmanager
    def kept(self, args: Sequence[Any]) -> Iterator[None]:
        """For the length of a call with these arguments."""
        if self._may_update and not self._steps:
            found = find_objects(self._target, args).optimizers
            self._steps = [(o, None, None) for o in found]
        with contextlib.ExitStack() as stack:
            for i, (optimizer, own, hidden) in enumerate(self._steps):
                if optimizer.step != own:  # a scheduler puts a step of its own there
                    own = optimizer.step
                    hidden = torch.compiler.disable(own)
                    self._steps[i] = (optimizer, own, hidden)
                stack.callback(_put_back, optimizer, vars(optimizer).get("step", _ABSENT))
                vars(optimizer)["step"] = hidden
            yield


_ABSENT = object()


def _put_back(optimizer: torch.optim.Optimizer, step: Any) -> None:
    """Undo a replaced `step`: what the instance had of its own, or nothing."""
    if step is _ABSENT:
        del vars(optimizer)["step"]
    else:
        vars(optimizer)["step"] = step


class Regions:
    """A function or module compiled region by region.

    `breaks` collects Dynamo's reasons for splitting; the target's own optimizers run as they are.
    """

    def __init__(
        self,
        target: Callable[..., Any],
        build: Build,
        *,
        joint_passes: Callable[..., Any] = partition,
        notice: Callable[[Refusal], None] = lambda _: None,
        max_plans: int,
        fullgraph: bool,
        dynamic: bool | None,
    ) -> None:
        def regions(*args: Any, **kwargs: Any) -> Any:
            return target(*args, **kwargs)

        self._updates = _PlainUpdates(target)
        # a code object of its own, so that no two compiled targets share a cache or its limit
        self._code = types.FunctionType(
            regions.__code__.replace(), regions.__globals__, "regions", None, regions.__closure__
        )
        self._compiled = torch.compile(
            self._code,
            backend=region_backend(build, joint_passes, notice),
            fullgraph=fullgraph,
            dynamic=False if dynamic is None else dynamic,
        )
        self._settings = compat.DynamoSettings(
            recompile_limit=max_plans,
            accumulated_recompile_limit=1 << 20,
            skip_nnmodule_hook_guards=False,
            allow_rnn=True,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the target; its results stay differentiable."""
        try:
            with self._settings, self._updates.kept((*args, *kwargs.values())):
                return self._compiled(*args, **kwargs)
        except compat.CAPTURE_ERRORS as error:
            cause = compat.user_cause(error)
            if isinstance(cause, TrainfuseError):
                raise cause from error
            raise

    def close(self) -> None:
        """Forget every plan."""
        compat.reset_frame(self._code)
