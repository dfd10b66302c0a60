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
from trainfuse.capture.compat_frames import compile_frames, trace_again
from trainfuse.capture.layouts import with_eager_strides
from trainfuse.capture.lift import CaptureKind, CaptureRefused, input_fact, lift
from trainfuse.capture.objects import find_objects
from trainfuse.capture.overlap import OVERLAP
from trainfuse.capture.own_results import with_own_results
from trainfuse.capture.second_order import Region, RegionFacts
from trainfuse.capture.whole_step import Build
from trainfuse.errors import CaptureError, CompilingFailed, TracingFailed, TrainfuseError

PartFailed = type[TracingFailed] | type[CompilingFailed]

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
            @_compiling()
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
                run = build(captured)
                return compat.boxed(run if kind == "backward" else with_own_results(traced, run))

            return compile_

        @_compiling()
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


_OUTCOMES = (TrainfuseError, CaptureRefused, torch.OutOfMemoryError, MemoryError)


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    """Within, or as a decorator: what goes wrong is no fault of torch's tracing."""
    try:
        yield
    except (*_OUTCOMES, *compat.CAPTURE_ERRORS):
        raise
    except Exception as error:
        raise CompilingFailed(reason=f"{type(error).__name__}: {error}") from error


def eager_part(fault: Refusal, kind: PartFailed) -> Refusal:
    """What is told of a part that runs eagerly since tracing or compiling failed."""
    reason = f"a part runs eagerly, as {kind.why_eager}: {fault.reason}"
    return Refusal("capture", reason, where=fault.where)


class Regions:
    """A function or module compiled region by region.

    `breaks` collects Dynamo's reasons for splitting; the target's own optimizers run as they are.
    A frame that Dynamo fails to trace, or that trainfuse fails to compile, runs eagerly. failed:
    told of the failure before that, and may raise; notice: told of it once the call has ended well.
    """

    def __init__(
        self,
        target: Callable[..., Any],
        build: Build,
        *,
        joint_passes: Callable[..., Any] = partition,
        notice: Callable[[Refusal], None] = lambda _: None,
        failed: Callable[[Refusal, PartFailed, Exception], None] = lambda *_: None,
        max_plans: int,
        fullgraph: bool,
        dynamic: bool | None,
    ) -> None:
        def regions(*args: Any, **kwargs: Any) -> Any:
            return target(*args, **kwargs)

        self._updates = _PlainUpdates(target)
        self._notice = notice
        self._on_failure = failed
        self._fullgraph = fullgraph
        self._failed: list[tuple[types.CodeType, Refusal]] = []  # in the call in hand
        # a code object of its own, so that no two compiled targets share a cache or its limit
        self._code = types.FunctionType(
            regions.__code__.replace(), regions.__globals__, "regions", None, regions.__closure__
        )
        self._compiled = compile_frames(
            self._code,
            region_backend(build, joint_passes, notice),
            self._rescue,
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
        around, self._failed = self._failed, []
        ended = False
        try:
            with self._settings, self._updates.kept((*args, *kwargs.values())):
                result = self._compiled(*args, **kwargs)
            ended = True
            return result
        except compat.CAPTURE_ERRORS as error:
            cause = compat.user_cause(error)
            if isinstance(cause, TrainfuseError):
                raise cause from error
            if self._fullgraph and not compat.over_budget(error):
                refusal = compat.refusal_of(error)
                raise CaptureError(reason=refusal.reason, where=refusal.where) from error
            raise
        finally:
            failed, self._failed = self._failed, around
            if failed:
                self._settle(failed, ended)

    def _rescue(self, code: types.CodeType, error: Exception) -> bool:
        """Whether a frame that Dynamo failed to trace runs eagerly."""
        cause = compat.user_cause(error)
        kind = CompilingFailed if isinstance(cause, CompilingFailed) else TracingFailed
        if kind is TracingFailed and isinstance(cause, TrainfuseError | torch.OutOfMemoryError):
            return False
        fault = compat.fault_of(error, code)
        self._on_failure(fault, kind, error)
        self._failed.append((code, eager_part(fault, kind)))
        return True

    def _settle(self, failed: Sequence[tuple[types.CodeType, Refusal]], ended: bool) -> None:
        """Tell of the parts that ran eagerly in a call, or forget them where it raised.

        Eager raised too then: the program may be at fault, and be mended.
        """
        if not ended:
            for code, _ in failed:
                trace_again(code)
            return
        # the frame around the target has no line of the user's: the target's own tells it better
        located = {refusal.reason for _, refusal in failed if refusal.where}
        for _, refusal in failed:
            if refusal.where or refusal.reason not in located:
                self._notice(refusal)

    def close(self) -> None:
        """Forget every plan."""
        compat.reset_frame(self._code)
