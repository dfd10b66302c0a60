"""How far from fp64 a step's reference is under other roundings: asked where a step seems wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager

from torch import Tensor

from autodiff.jitter import AS_FAR, ROUNDINGS, Jitter
from autodiff.norms import Measurement

Values = Mapping[str, Tensor]
Sides = tuple[Values, Values]
Run = Callable[[AbstractContextManager[object]], "Iterable[Sides] | None"]


class OtherRoundings:
    """Errors of one call's reference, each run's as it is asked for; of a run nothing else is kept.

    run: what the reference makes within a context, beside fp64, by comparison and name; None where
    it could not.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._runs = 0
        self._largest: dict[tuple[int, str], list[float]] = {}

    def errors(self, comparison: int) -> dict[str, float]:
        """Of each tensor, the error that two runs have had at least."""
        return {
            name: largest[-1]
            for (at, name), largest in self._largest.items()
            if at == comparison and len(largest) == AS_FAR
        }

    def reach(self, comparison: int, least: Mapping[str, float]) -> bool:
        """Whether of each of these tensors two of 64 runs have such an error; stops when they have.

        Raises OutOfMemoryError.
        """
        if not all(map(math.isfinite, least.values())):
            return False  # no rounding
        while not self._reached(comparison, least):
            if self._runs == ROUNDINGS or not self._ask():
                return False
        return True

    def _reached(self, comparison: int, least: Mapping[str, float]) -> bool:
        errors = self.errors(comparison)
        return all(errors.get(name, 0.0) >= error for name, error in least.items())

    def _ask(self) -> bool:
        made = self._run(Jitter(self._runs, operands=True))
        self._runs += 1
        if made is None:
            return False
        pairs = {
            (i, name): (value, exact[name])
            for i, (native, exact) in enumerate(made)
            for name, value in native.items()
            if name in exact and value.is_floating_point() and value.shape == exact[name].shape
        }
        found = Measurement(list(pairs.values()), errors_only=True).read()
        for key, (error,) in zip(pairs, found, strict=True):
            if math.isfinite(error):
                largest = sorted([error, *self._largest.get(key, ())], reverse=True)
                self._largest[key] = largest[:AS_FAR]
        return True
