"""The oracle of the test suite: are these gradients as right as eager's own, against fp64?

A tensor passes when rmse(ours, fp64) <= k * rmse(eager, fp64) + floor, with random cotangents or
over whole training steps whose weights move. The three runs share no storage: a reference that
aliases what it checks passes anything. Parameters after an update are never compared: Adam turns
rounding noise in a zero gradient into a full step.

Dropout: trainfuse draws its own masks (`rng="fast"`), so eager and fp64 draw the same ones here,
from the same generator, through `fused_masks`.
"""

from __future__ import annotations

from autodiff.compare import GradientReport, TensorError, judge
from autodiff.norms import rmse
from trainfuse.testing.functions import assert_gradients_match
from trainfuse.testing.interpreter import rounded_bf16
from trainfuse.testing.reference import double_precision, fused_masks
from trainfuse.testing.steps import Step, StepTrace, Training, gradient_report, step_gradients

__all__ = [
    "GradientReport",
    "Step",
    "StepTrace",
    "TensorError",
    "Training",
    "assert_gradients_match",
    "double_precision",
    "fused_masks",
    "gradient_report",
    "judge",
    "rmse",
    "rounded_bf16",
    "step_gradients",
]
