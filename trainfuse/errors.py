"""Every error a user can meet: what happened, where in their code, and the fix."""

from __future__ import annotations

from typing import Any, ClassVar


class TrainfuseError(Exception):
    """Base of all errors that trainfuse raises on purpose.

    A subclass fixes `message` and `fix`; the raise only supplies the facts that they name.
    where: the user's source line, "file.py:12". Errors survive pickling (compile workers).
    """

    message: ClassVar[str] = "{what}"
    fix: ClassVar[str] = ""

    def __init__(self, *, where: str | None = None, **facts: Any) -> None:
        self.where = where
        self.facts = facts
        lines = [self.message.format(**facts)]
        if where is not None:
            lines.append(f"  at {where}")
        if self.fix:
            lines.append(f"  fix: {self.fix.format(**facts)}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.where, self.facts))


def _rebuild(
    kind: type[TrainfuseError], where: str | None, facts: dict[str, Any]
) -> TrainfuseError:
    return kind(where=where, **facts)


class OptionError(TrainfuseError):
    """A name, a value or a combination that trainfuse does not know."""


class UnknownOption(OptionError, AttributeError):
    """A misspelt option or setting."""

    message = "{name!r} is not an option{near}"
    fix = "use one of: {valid}"


class RemovedName(OptionError, AttributeError):
    """A switch of nvFuser's that has a successor here."""

    message = "{name} was removed from PyTorch together with nvFuser"
    fix = "use {successor}"


class BadOption(OptionError):
    """A value that the option does not take."""

    message = "{name}={value!r} is not valid"
    fix = "{name} takes {expected}"


class UnknownToken(OptionError):
    """A misspelt token in one of the TRAINFUSE_* lists."""

    message = "{source}: {name!r} is not a token{near}"
    fix = "use one of: {valid}"


class BadTokenList(OptionError):
    """A token list that can't be read."""

    message = "{source}={text!r}: {reason}"
    fix = "write token,token(arg,arg), for example {example}"


class TokenConflict(OptionError):
    """A token that is both disabled and enabled."""

    message = "{name!r} is in both TRAINFUSE_DISABLE and TRAINFUSE_ENABLE"
    fix = "keep it in one of them"


class UnknownOperator(OptionError):
    """skip_op of something that is no operator."""

    message = "{name!r} is not an operator{near}"
    fix = "name an ATen operator, like aten.add or aten::add"


class BackendUnavailable(OptionError):
    """A backend that this machine can't run."""

    message = "the {backend} backend can't run here: {reason}"
    fix = "{hint}"


class NotCompilable(OptionError):
    """A target of `compile` that is neither a module nor a function."""

    message = "trainfuse.compile takes a train step, a module or a function, not {kind}"
    fix = "pass the function or the module itself: not its result, its class or its optimizer"


class CaptureError(TrainfuseError):
    """The program could not be captured in the way that was demanded."""

    message = "the step can't be captured whole: {reason}"
    fix = "fullgraph=False splits it into regions instead of raising"


class TracingFailed(CaptureError):
    """Torch failed to trace a part of the program, and running it eagerly was not allowed."""

    message = "torch failed to trace a part of the program: {reason}"
    fix = "leave fallback on to run that part eagerly"
    why_eager = "torch failed to trace it"


class CompilingFailed(CaptureError):
    """Trainfuse failed at what torch had traced, and running it eagerly was not allowed."""

    message = "trainfuse failed to compile a part of the program: {reason}"
    fix = "report this, it is trainfuse's fault; leave fallback on to run that part eagerly"
    why_eager = "trainfuse failed to compile it, which is its fault and worth a report"


class CudaGraphUnavailable(CaptureError):
    """A CUDA graph was required and can't be had."""

    message = "no CUDA graph: {reason}"
    fix = 'cuda_graph="auto" (mode="default") runs the plan without one'


class GradientsDropped(TrainfuseError):
    """A call that adds to gradients that an earlier call did not keep."""

    message = (
        "this call updates with gradients that it did not clear, and an earlier call of the step,"
        " which had cleared its own, did not keep them"
    )
    fix = "compile with keep_gradients=True, or call zero_grad() before every backward"


class GradientOfGradient(TrainfuseError):
    """A region's gradient is to be differentiated, and eager can't repeat that region."""

    message = (
        "the gradient of a compiled region is differentiated again (create_graph), and eager can't"
        " repeat the region: {reason}"
    )
    fix = "leave what is differentiated twice uncompiled, or compile the whole training step"


class FusionError(TrainfuseError):
    """A group failed and no ATen rescue was allowed."""

    message = "{group} failed in {stage}: {error}\n  operators: {operators}"
    fix = "leave fallback on to run it as ATen; repro: {repro}"


class UnfusedOperator(FusionError):
    """Something stayed ATen under strict_fusion()."""

    message = "strict_fusion: {node} was not fused: {reason}"
    fix = "change that line, or leave strict_fusion() to keep it as ATen"


class GradientMismatch(TrainfuseError):
    """A gradient is further from fp64 than eager's own, beyond the allowed factor."""

    message = (
        "{name}: error against fp64 {ours:.3g}, eager's own {eager:.3g},"
        " allowed {k} times that plus {epsilon:.3g}"
    )
    fix = 'find the group with trainfuse.bisect(step, *args), or run with backend="eager"'


class TrainfuseWarning(UserWarning):
    """Category of every warning that trainfuse gives."""
