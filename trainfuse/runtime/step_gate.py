"""verify="step": all that a step makes is compared with eager and fp64 before it counts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from autodiff.compare import TensorError, judge, luck
from autodiff.mismatch import wrong_integers
from autodiff.norms import Figures, measure
from trainfuse.errors import GradientMismatch
from trainfuse.log import get_logger
from trainfuse.runtime.captured import CapturedStep, Results, by_name
from trainfuse.runtime.fallback import Failure
from trainfuse.runtime.foreach import UpdateCall
from trainfuse.runtime.room import Room, device_of
from trainfuse.runtime.snapshot import Snapshot
from trainfuse.runtime.update_check import wrong_update

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


class StepMismatch(Exception):
    """Stops a step before it counts. part: what was wrong."""

    def __init__(self, failure: Failure, part: Part) -> None:
        super().__init__(failure.error)
        self.failure, self.part = failure, part


@dataclass(frozen=True, slots=True)
class References:
    """What the step makes: by eager autograd (or ATen where there is none), and in fp64.

    known: what `measure` gave for the two, of each update's gradients, by name.
    """

    native: Results
    exact: Results
    known: Sequence[Mapping[str, Figures]]


class StepGate:
    """Compares one plan with the step as Dynamo saw it and with the captured graph in fp64.

    factor: how much worse than eager's own error one may be. strict: raise GradientMismatch
    instead of going on with something else.
    """

    def __init__(self, captured: CapturedStep, *, strict: bool, factor: float = 2.0) -> None:
        self.captured, self.strict, self.factor = captured, strict, factor

    def references(
        self, args: Sequence[Any], needed: int = 0, *, insist: bool = False
    ) -> References | None:
        """What to compare with; None, and one line, when the device has no room for it.

        needed: bytes of the device that the step itself will take. insist: raise OutOfMemoryError
        instead. Raises StepMismatch when the captured graph itself is wrong.
        """
        captured = self.captured
        room = Room(device_of(args), needed, captured.result_bytes)
        on_host = room.left == 0
        try:
            with captured.sharing_masks(room):
                native = self._eager(args, room)
                exact = captured.run(args, wide=True, on_host=on_host)
                if native is None:
                    native = captured.run(args, wide=False, on_host=on_host)
                    return References(native, exact, [{}] * len(native.gradients))
                pairs = _pairs(native, exact)
                odd = any(theirs.keys() != ours.keys() for theirs, ours in pairs)
                known = [] if odd else _figures(pairs)
                if odd or self._suspicious(known):
                    own = captured.run(args, wide=False, on_host=on_host)
                    self._check_capture(native, own, exact)
        except torch.OutOfMemoryError:
            if insist:
                raise
            _log.warning("the step was not compared: no memory for its reference")
            return None
        return References(native, exact, known)

    def _eager(self, args: Sequence[Any], room: Room) -> Results | None:
        captured = self.captured
        seen = captured.boundary.attempt(lambda: captured.seen(args, room.copies), "step")
        if isinstance(seen, str):
            _log.info("eager autograd could not run Dynamo's graph: %s", seen)
            return None
        return seen

    def _suspicious(self, found: Sequence[Mapping[str, Figures]]) -> bool:
        """Whether eager is further from the captured graph than rounding explains at a glance."""
        halves = {torch.float16, torch.bfloat16} & self.captured.dtypes
        share = _SUSPICIOUS * (30 if halves else 1)
        for figures in found:
            scale = max((size for size, _ in figures.values()), default=0.0)
            if any(not error <= share * s + _NOISE * scale for s, error in figures.values()):
                return True
        return False

    def _check_capture(self, eager: Results, native: Results, exact: Results) -> None:
        for (theirs, fp64), (_, ours) in zip(
            _pairs(eager, exact), _pairs(eager, native), strict=True
        ):
            if theirs.keys() != ours.keys():
                odd = ", ".join(sorted(theirs.keys() ^ ours.keys()))
                self.reject(TensorError(odd, 0, math.inf, 0.0, math.inf), 1, "capture")
            self.compare(theirs, ours, fp64, "capture")

    # -- comparing ----------------------------------------------------------------------------

    def check(self, references: References | None) -> StepCheck:
        """A comparison of one call under way; without references, of its updates alone."""
        return StepCheck(self, references)

    def compare(
        self,
        ours: Mapping[str, Tensor],
        native: Mapping[str, Tensor],
        exact: Mapping[str, Tensor],
        part: Part,
        known: Mapping[str, Figures] | None = None,
    ) -> None:
        """Reject what is further from fp64 than the factor allows.

        known: what `measure` gave for native and exact.
        """
        factor = self.factor * (_CAPTURE_LEEWAY if part == "capture" else 1.0)
        whole = {n for n, t in native.items() if not t.is_floating_point()}
        for name in sorted(whole):
            if wrong_integers(ours[name], native[name], exact[name]):
                self.reject(TensorError(name, 0, math.inf, 0.0, math.inf), 1, part)
        names = [n for n in native if n not in whole]
        # an update may take a half gradient and cast it itself
        mine = {n: ours[n].to(native[n].dtype) if part == "gradient" else ours[n] for n in names}
        theirs, fp64 = ({n: values[n] for n in names} for values in (native, exact))
        errors = judge(mine, theirs, fp64, k=factor, known=known)
        # a few elements may have been lucky in eager
        room = {name: factor * luck(theirs[name].numel()) for name in names}
        wrong = [e for e in errors if not e.ratio <= room[e.name]]
        if wrong:
            worst = max(wrong, key=lambda e: math.inf if math.isnan(e.ratio) else e.ratio)
            self.reject(worst, len(wrong), part)

    def reject(self, worst: TensorError, count: int, part: Part) -> None:
        """Raise for the worst of `count` tensors."""
        what = {
            "gradient": f"gradient of {worst.name}",
            "update": f"update of {worst.name}",
            "result": worst.name,
            "capture": f"{worst.name}, as captured",
        }[part]
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
        raise StepMismatch(Failure("the step", "step", error, what), part)


@dataclass
class StepCheck:
    """One comparison. saved: what the step found, set before it runs."""

    gate: StepGate
    references: References | None
    saved: Snapshot | None = None
    _updates: list[UpdateCall] = field(default_factory=list)

    @contextmanager
    def watching(self, updates: Sequence[UpdateCall]) -> Iterator[None]:
        """Within the block a wrong gradient stops its update, and a wrong update the step.

        updates: in the program's order. Raises StepMismatch, or GradientMismatch when strict.
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
        """Compare the gradients that reach an update."""
        if self.references is None:
            return
        number = self._updates.index(call)
        ours = dict(zip(self.gate.captured.params(number), grads, strict=True))
        native, exact = self.references.native, self.references.exact
        theirs, fp64 = native.gradients[number], exact.gradients[number]
        self.gate.compare(ours, theirs, fp64, "gradient", self.references.known[number])
        _log.info("update %d: %d gradients as eager's", number, len(ours))

    def after(self, call: UpdateCall, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Compare what an update wrote with torch's own step on the same gradients."""
        if self.saved is None or call.by_torch:
            return
        wrong = wrong_update(call, params, grads, self.saved.old, self.gate.factor)
        if wrong is not None:
            position, error = wrong
            name = self.gate.captured.params(self._updates.index(call))[position]
            worst = TensorError(f"{name} ({error.name})", 0, error.ours, error.eager, error.ratio)
            self.gate.reject(worst, 1, "update")

    def finish(self, args: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Compare outputs and the inputs' new values with what eager makes of them."""
        if self.references is None:
            return
        made = by_name(self.gate.captured.made(args, outputs))
        native, exact = by_name(self.references.native), by_name(self.references.exact)
        names = [name for name in made if name in native]
        three = (_chosen(values, names) for values in (made, native, exact))
        self.gate.compare(*three, "result")


Values = dict[str, Tensor]


def _pairs(eager: Results, ours: Results) -> list[tuple[Values, Values]]:
    """What a capture must have right: each update's gradients, and the inputs' new values.

    An input that eager alone has written stays without a partner.
    """
    pairs = list(zip(eager.gradients, ours.gradients, strict=True))
    names = {n for n in eager.written if n in ours.written}
    written = {n: t for n, t in ours.written.items() if n in names}
    return [*pairs, (eager.written, written)]


def _figures(pairs: Sequence[tuple[Values, Values]]) -> list[dict[str, Figures]]:
    """`measure` of pairs of the same names: of all of them at once."""
    items = [(theirs[name], ours[name]) for theirs, ours in pairs for name in ours]
    found = iter(measure(items))
    return [{name: next(found) for name in ours} for _, ours in pairs]


def _chosen(values: Mapping[str, Tensor], names: Sequence[str]) -> Values:
    return {name: values[name] for name in names}
