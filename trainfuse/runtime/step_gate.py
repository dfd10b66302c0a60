"""verify="step": all that a step makes is compared with eager and fp64 before it counts."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from autodiff.compare import TensorError, judge, least, luck
from autodiff.mismatch import wrong_integers
from autodiff.norms import Figures, Measurement
from trainfuse.errors import GradientMismatch
from trainfuse.log import get_logger
from trainfuse.runtime.captured import CapturedStep, Results, by_name
from trainfuse.runtime.fallback import Failure
from trainfuse.runtime.foreach import UpdateCall
from trainfuse.runtime.other_roundings import OtherRoundings, Sides, Values
from trainfuse.runtime.room import Room, device_of
from trainfuse.runtime.snapshot import Snapshot
from trainfuse.runtime.update_check import UpdateCheck

Part = Literal["gradient", "update", "result", "capture"]
_SUSPICIOUS = 1e-3
"""Share of a gradient's size by which eager may differ from fp64 before the capture is suspected;
thirty times as much where there are halves."""
_NOISE = 1e-6
"""The same share of the largest gradient: one whose true value is zero is noise."""
_CAPTURE_LEEWAY = 4.0
"""Eager's kernels and the operators that they were taken apart into may round differently; what a
wrong capture loses is no rounding."""
_log = get_logger("gate")
Known = Mapping[str, Figures]


@dataclass(frozen=True, slots=True)
class Doubt:
    """One comparison that failed, by its number in the step.

    least: of each tensor that did, the error of eager's beside which it would be right.
    """

    comparison: int
    least: Mapping[str, float]


class StepMismatch(Exception):
    """Stops a step before it counts. part: what was wrong.

    doubt: what other roundings may explain; None for nothing. strictly: what is raised where
    nothing may be replaced.
    """

    def __init__(
        self, failure: Failure, part: Part, strictly: GradientMismatch, doubt: Doubt | None
    ) -> None:
        super().__init__(failure.error)
        self.failure, self.part = failure, part
        self.strictly, self.doubt = strictly, doubt


class Unexplained(Exception):
    """Stops a step whose rounding doesn't explain how far eager is from the captured graph."""


@dataclass
class References:
    """What the step makes: by eager autograd (or ATen where there is none), and in fp64.

    share: of a gradient's size that the two may differ by before the capture is suspected; None
    where both were made from it. settled: it was suspected, and is right. otherwise: the native
    side under other roundings. What they differ by is asked of the device at once, and waited for
    when it is read.
    """

    native: Results
    exact: Results
    share: float | None
    otherwise: OtherRoundings
    settled: bool = False

    def __post_init__(self) -> None:
        self._pairs = [] if self.share is None else pairs_of(self.native, self.exact)
        items = [(theirs[name], ours[name]) for theirs, ours in self._pairs for name in ours]
        self._measurement = Measurement(items)

    def known(self, update: int) -> Known:
        """What `measure` gave for native and exact, of the gradients of one update."""
        return {} if self.share is None else self._known[update]

    @functools.cached_property
    def _known(self) -> list[Known]:
        found = iter(self._measurement.read())
        return [{name: next(found) for name in ours} for _, ours in self._pairs]

    @property
    def suspected(self) -> bool:
        """Whether eager is further from the captured graph than rounding explains at a glance."""
        return self.share is not None and not self.settled and self._differ(self.share)

    def _differ(self, share: float) -> bool:
        for figures in self._known:
            scale = max((size for size, _ in figures.values()), default=0.0)
            if any(not error <= share * s + _NOISE * scale for s, error in figures.values()):
                return True
        return False


class StepGate:
    """Compares one plan with the step as Dynamo saw it and with the captured graph in fp64.

    factor: how much worse than eager's own error one may be. strict: nothing may go on in the place
    of what is wrong.
    """

    def __init__(self, captured: CapturedStep, *, strict: bool, factor: float = 2.0) -> None:
        self.captured, self.strict, self.factor = captured, strict, factor

    def references(
        self, args: Sequence[Any], needed: int = 0, *, insist: bool = False
    ) -> References | None:
        """What to compare with; None, and one line, when the device has no room for it.

        needed: bytes of the device that the step itself will take. insist: raise OutOfMemoryError
        instead. Raises StepMismatch when the captured graph itself is seen to be wrong.
        """
        captured = self.captured
        room = Room(device_of(args), needed, captured.result_bytes)
        on_host = room.left == 0
        try:
            with captured.sharing_masks(room):
                native = self._eager(args, room)
                exact = captured.run(args, wide=True, on_host=on_host)
                share = None if native is None else self._share
                if native is None:
                    native = captured.run(args, wide=False, on_host=on_host)
        except torch.OutOfMemoryError as error:
            return _not_compared(error, insist)
        for theirs, ours in pairs_of(native, exact) if share is not None else ():
            if odd := ", ".join(sorted(theirs.keys() ^ ours.keys())):
                self.reject(TensorError(odd, 0, math.inf, 0.0, math.inf), 1, "capture")

        def otherwise(rounded: AbstractContextManager[object]) -> list[Sides] | None:
            room = Room(device_of(args), needed, captured.result_bytes)
            with captured.sharing_masks(room):
                if share is not None:
                    made = self._eager(args, room, rounded)
                else:
                    with rounded:
                        made = captured.run(args, wide=False, on_host=room.left == 0)
            return None if made is None else sides_of(made, exact)

        return References(native, exact, share, OtherRoundings(otherwise))

    @property
    def _share(self) -> float:
        halves = {torch.float16, torch.bfloat16} & self.captured.dtypes
        return _SUSPICIOUS * (30 if halves else 1)

    def settle(
        self, args: Sequence[Any], references: References, needed: int = 0, *, insist: bool = False
    ) -> References | None:
        """Whether the captured graph itself is right, by ATen: of references that are suspected.

        Arguments, result and errors as those of `references`.
        """
        room = Room(device_of(args), needed)
        eager = references.native
        pairs = pairs_of(eager, references.exact)

        def aten(rounded: AbstractContextManager[object]) -> list[Sides]:
            with rounded:
                native = self.captured.run(args, wide=False, on_host=room.left == 0)
            ours = (captured for _, captured in pairs_of(eager, native))
            return [(mine, fp64) for mine, (_, fp64) in zip(ours, pairs, strict=True)]

        try:
            with self.captured.sharing_masks(room):
                otherwise = OtherRoundings(aten)
                beside = zip(pairs, aten(nullcontext()), strict=True)
                for number, ((theirs, fp64), (ours, _)) in enumerate(beside):
                    try:
                        self.compare(theirs, ours, fp64, "capture", number)
                    except StepMismatch as wrong:
                        if not is_luck(wrong, otherwise):
                            raise
        except torch.OutOfMemoryError as error:
            return _not_compared(error, insist)
        references.settled = True
        return references

    def _eager(
        self,
        args: Sequence[Any],
        room: Room,
        within: AbstractContextManager[object] | None = None,
    ) -> Results | None:
        captured = self.captured
        seen = captured.boundary.attempt(lambda: captured.seen(args, room.copies, within), "step")
        if isinstance(seen, str):
            _log.info("eager autograd could not run Dynamo's graph: %s", seen)
            return None
        return seen

    # -- comparing ----------------------------------------------------------------------------

    def check(self, references: References | None) -> StepCheck:
        """A comparison of one call under way; without references, of its updates alone."""
        return StepCheck(self, references)

    def compare(
        self,
        ours: Values,
        native: Values,
        exact: Values,
        part: Part,
        number: int,
        known: Known | None = None,
        at_least: Mapping[str, float] | None = None,
    ) -> tuple[TensorError, ...]:
        """Reject what is further from fp64 than the factor allows; returns every error.

        number: of this comparison in the step. known: what `measure` gave for native and exact.
        at_least: errors that are eager's own where it has smaller ones.
        """
        errors, wrong = self._judged(ours, native, exact, part, known, at_least)
        if wrong:
            worst = max(wrong, key=lambda e: math.inf if math.isnan(e.ratio) else e.ratio)
            scale = max((error.size for error in errors), default=0.0)
            k = self._factor(part)
            doubt = {
                e.name: least(e, native[e.name].dtype, scale, k, k * luck(e.elements))
                for e in wrong
            }
            self.reject(worst, len(wrong), part, Doubt(number, doubt))
        return errors

    def _factor(self, part: Part) -> float:
        return self.factor * (_CAPTURE_LEEWAY if part == "capture" else 1.0)

    def explain(
        self, eager: Values, ours: Values, exact: Values, errors: Sequence[TensorError]
    ) -> None:
        """Raise Unexplained where eager is further from fp64 than what ours rounds explains.

        Ours comes from the captured graph, as ATen on that graph would. errors: what `compare` gave
        for the three.
        """
        known = {e.name: (e.size, e.ours, e.eager) for e in errors if e.name in eager}
        _, wrong = self._judged(eager, _chosen(ours, list(eager)), exact, "capture", known)
        if wrong:
            raise Unexplained

    def _judged(
        self,
        ours: Values,
        native: Values,
        exact: Values,
        part: Part,
        known: Known | None,
        at_least: Mapping[str, float] | None = None,
    ) -> tuple[tuple[TensorError, ...], list[TensorError]]:
        """Every floating tensor's error, and what is wrong."""
        factor = self._factor(part)
        whole = {n for n, t in native.items() if not t.is_floating_point()}
        wrong = [
            TensorError(name, 0, math.inf, 0.0, math.inf)
            for name in sorted(whole)
            if wrong_integers(ours[name], native[name], exact[name])
        ]
        names = [n for n in native if n not in whole]
        mine, theirs, fp64 = (_chosen(values, names) for values in (ours, native, exact))
        errors = judge(mine, theirs, fp64, k=factor, known=known, at_least=at_least)
        # a few elements may have been lucky in eager
        room = {name: factor * luck(theirs[name].numel()) for name in names}
        wrong += [e for e in errors if not e.ratio <= room[e.name]]
        return errors, wrong

    def reject(
        self, worst: TensorError, count: int, part: Part, doubt: Doubt | None = None
    ) -> None:
        """Raise for the worst of `count` tensors. doubt: what other roundings may explain."""
        what = {
            "gradient": f"gradient of {worst.name}",
            "update": f"update of {worst.name}",
            "result": worst.name,
            "capture": f"{worst.name}, as captured",
        }[part]
        slack = worst.ours / worst.ratio - worst.eager if math.isfinite(worst.ours) else 0.0
        strictly = GradientMismatch(
            name=worst.name,
            ours=worst.ours,
            eager=worst.eager,
            k=self.factor,
            epsilon=self.factor * max(slack, 0.0),
        )
        more = f" (and {count - 1} more)" if count > 1 else ""
        error = f"error against fp64 {worst.ours:.3g}, eager's own {worst.eager:.3g}{more}"
        raise StepMismatch(Failure("the step", "step", error, what), part, strictly, doubt)


@dataclass
class StepCheck:
    """One comparison. saved: what the step found, set before it runs.

    finite: updates that wrote nothing but finite values.
    """

    gate: StepGate
    references: References | None
    saved: Snapshot | None = None
    finite: list[UpdateCall] = field(default_factory=list)
    _updates: list[UpdateCall] = field(default_factory=list)
    _asked: _Gradients | None = None

    @contextmanager
    def watching(self, updates: Sequence[UpdateCall]) -> Iterator[None]:
        """Within the block a wrong gradient stops the step, and so does a wrong update.

        updates: in the program's order. Raises StepMismatch.
        """
        self._updates = list(updates)
        assert len(updates) == len(self.gate.captured.updates), "passes keep every update"
        for update in updates:
            update.watcher = self
        try:
            yield
        finally:
            for update in updates:
                update.watcher = None

    def before(self, call: UpdateCall, grads: Sequence[Tensor]) -> None:
        """Ask how the gradients that reach an update compare.

        The answer is read when the update has been launched, too: should a gradient be wrong, all
        that it wrote is undone. What torch's own step keeps may be no tensors, and can't be: there
        it is read before.
        """
        if self.references is None:
            return
        number = self._updates.index(call)
        self._asked = _Gradients(self, number, grads)
        if call.by_torch:
            self._asked.judge()
            self._asked = None

    def after(self, call: UpdateCall, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Compare what an update wrote with torch's own step on the same gradients."""
        if self.saved is None or call.by_torch:
            return
        written = UpdateCheck(call, params, grads, self.saved.old, self.gate.factor)
        asked, self._asked = self._asked, None
        if asked is not None:
            asked.judge()
        verdict = written.verdict()
        if verdict.finite:
            self.finite.append(call)
        if verdict.wrong is not None:
            position, error = verdict.wrong
            name = self.gate.captured.params(self._updates.index(call))[position]
            worst = TensorError(f"{name} ({error.name})", 0, error.ours, error.eager, error.ratio)
            self.gate.reject(worst, 1, "update")

    def finish(self, args: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Compare outputs and the inputs' new values with what eager makes of them."""
        references = self.references
        if references is None:
            return
        made = by_name(self.gate.captured.made(args, outputs))
        native, exact = by_name(references.native), by_name(references.exact)
        names = [name for name in made if name in native]
        mine, theirs, fp64 = (_chosen(values, names) for values in (made, native, exact))
        number = len(self.gate.captured.updates)
        at_least = references.otherwise.errors(number)
        errors = self.gate.compare(mine, theirs, fp64, "result", number, None, at_least)
        if references.suspected:
            written = [name for name in names if name not in references.native.outputs]
            self.gate.explain(_chosen(theirs, written), mine, fp64, errors)


class _Gradients:
    """The gradients of one update beside the references: asked for when it is made."""

    def __init__(self, check: StepCheck, number: int, grads: Sequence[Tensor]) -> None:
        references = check.references
        assert references is not None
        self._gate, self._references, self._number = check.gate, references, number
        self._theirs, self._exact = (
            side.gradients[number] for side in (references.native, references.exact)
        )
        names = check.gate.captured.params(number)
        # an update may take a half gradient and cast it itself
        self._ours = {n: g.to(self._theirs[n].dtype) for n, g in zip(names, grads, strict=True)}
        self._names = [
            name
            for name, grad in self._ours.items()
            if grad.shape == self._exact[name].shape and grad.is_floating_point()
        ]
        self._errors = None
        if references.share is not None:
            items = [(self._ours[n], self._exact[n]) for n in self._names]
            self._errors = Measurement(items, errors_only=True)

    def judge(self) -> None:
        """Raise for one that is wrong."""
        sides = self._ours, self._theirs, self._exact
        number, at_least = self._number, self._references.otherwise.errors(self._number)
        errors = self._gate.compare(*sides, "gradient", number, self._known(), at_least)
        if self._references.suspected:
            self._gate.explain(self._theirs, self._ours, self._exact, errors)
        _log.info("update %d: %d gradients as eager's", self._number, len(self._ours))

    def _known(self) -> Known:
        """Errors beside those that are known of eager; without what is not finite."""
        if self._errors is None:
            return {}
        known = self._references.known(self._number)
        found = zip(self._names, self._errors.read(), strict=True)
        figures = {name: known[name] + error for name, error in found}
        return {n: each for n, each in figures.items() if all(map(math.isfinite, each))}


def pairs_of(eager: Results, ours: Results) -> list[tuple[Values, Values]]:
    """What a capture must have right: each update's gradients, and the inputs' new values.

    An input that eager alone has written stays without a partner.
    """
    pairs = list(zip(eager.gradients, ours.gradients, strict=True))
    names = {n for n in eager.written if n in ours.written}
    written = {n: t for n, t in ours.written.items() if n in names}
    return [*pairs, (eager.written, written)]


def sides_of(native: Results, exact: Results) -> list[Sides]:
    """What a plan must have right beside fp64: each update's gradients, and all results."""
    gradients = zip(native.gradients, exact.gradients, strict=True)
    return [*gradients, (by_name(native), by_name(exact))]


def is_luck(wrong: StepMismatch, otherwise: OtherRoundings) -> bool:
    """Whether what seemed wrong is as near to fp64 as eager would be if it rounded otherwise.

    Raises OutOfMemoryError.
    """
    doubt = wrong.doubt
    if doubt is None or not otherwise.reach(doubt.comparison, doubt.least):
        return False
    _log.info("%s (%s): eager is as far under other roundings", wrong.failure.where, wrong)
    return True


def _not_compared(error: torch.OutOfMemoryError, insist: bool) -> None:
    if insist:
        raise error
    _log.warning("the step was not compared: no memory for its reference")


def _chosen(values: Mapping[str, Tensor], names: Sequence[str]) -> Values:
    return {name: values[name] for name in names}
