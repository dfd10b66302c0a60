"""Ways to compile a training: whole step or regions, by each code generator that runs here."""

from __future__ import annotations

from typing import Any

from torch import nn

import trainfuse
from trainfuse.capture import compat
from trainfuse.testing import Step, Training

BACKENDS = ("triton", "inductor", "eager")
# Inductor draws torch's masks; our kernels, and the plan on ATen, those of trainfuse's one seed.
MASKS = {"triton": "fast", "eager": "fast", "inductor": "eager"}


class Compiler:
    """A compile_fn for `gradient_report` that keeps what it compiled, to be looked at after."""

    def __init__(self, capture: str, backend: str, **options: Any) -> None:
        self.capture, self.backend, self.options = capture, backend, options
        self.steps: list[Any] = []

    def __call__(self, training: Training) -> Step:
        if self.capture == "whole":
            step = trainfuse.compile(training.step, backend=self.backend, **self.options)
            self.steps.append(step)
            return step
        model = training.model
        for part in model.values() if isinstance(model, nn.ModuleDict) else [model]:
            trainfuse.compile(part, backend=self.backend, **self.options)
            self.steps.append(compat.compiled_call(part))
        return training.step

    def check(self) -> None:
        """The plans are of the kind that was asked for, and no kernel failed or fell back."""
        for step in self.steps:
            with trainfuse.settings.patch(keep_gradients=True):  # what `gradient_report` runs under
                explanation = step.explain()
            expected = "whole_step" if self.capture == "whole" else "regions"
            assert explanation.capture == expected, explanation.capture_reason
            stats = step.stats()
            assert stats["plans"] >= 1
            assert stats["gate"] == "pass"
            if self.backend == "triton":
                assert stats["kernels"] > 0, "nothing was fused: the test shows nothing"

    def close(self) -> None:
        """Free the plans."""
        for step in self.steps:
            step.close()
