"""What is asked of a plan's calls beside the check of its kernels: comparisons, and no NaN of ours.

Every check runs before its call counts: a call that fails one has changed nothing, and runs again
with what was wrong out of the way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autodiff.graph import TrainingGraph
from trainfuse.capture.shadow import TakeOver
from trainfuse.log import say_once
from trainfuse.runtime.captured import CapturedStep
from trainfuse.runtime.fallback import Failure
from trainfuse.runtime.finite import NotFinite, Watch, all_finite, losses
from trainfuse.runtime.foreach import UpdateCall
from trainfuse.runtime.plan import Plan
from trainfuse.runtime.repro_steps import write_step_repro
from trainfuse.runtime.snapshot import Snapshot
from trainfuse.runtime.step_gate import (
    References,
    StepCheck,
    StepGate,
    StepMismatch,
    Unexplained,
    is_luck,
)


class Checks:
    """The checks of one plan, which calls it in the place of its own work.

    gate: compares first calls, or None. on_aten: makes the captured graph as a plan on ATen runs
    it. every: calls from one first call to the next, or None. nan_check: look at every call, from
    a copy of the training state.
    """

    def __init__(
        self,
        captured: CapturedStep,
        gate: StepGate | None,
        on_aten: Callable[[], TrainingGraph],
        *,
        every: int | None,
        nan_check: bool,
    ) -> None:
        self._captured, self._gate, self._on_aten = captured, gate, on_aten
        self._every, self._nan_check = every, nan_check
        self._watch = Watch()
        self._due = self._runs_aten = False
        self._judging = True
        self._scaled = torch.float16 in captured.dtypes
        self._snapshot: Snapshot | None = None

    def __call__(self, plan: Plan, args: list[Any]) -> list[Any]:
        """One call of the plan. Raises TakeOver, GradientMismatch when strict."""
        if self._due:
            self._due = False
            plan.verify_next()
            with plan.suspecting():
                return plan.roomy(lambda: self._first(plan, args))
        if self._every is not None and plan.calls_since_check >= self._every:
            plan.verify_next()
        if plan.calls_since_check == 0:
            return plan.roomy(lambda: self._first(plan, args))
        if not self._judging:
            return plan.later(args)
        if self._nan_check:
            return self._from_a_copy(plan, args)
        outputs = plan.later(args)
        self._due = self._watch.see(outputs)
        return outputs

    # -- comparing ----------------------------------------------------------------------------

    def _first(self, plan: Plan, args: Sequence[Any]) -> list[Any]:
        """A first call, compared where that is asked for; what was wrong is replaced."""
        if self._gate is None:
            return self._finite(plan, args, None)
        references = self._references(plan, args)
        looked = False
        while self._gate is not None:
            suspecting = plan.suspecting() if looked else nullcontext()
            wrong: StepMismatch | None = None
            try:
                with suspecting:
                    return self._finite(plan, args, self._gate.check(references))
            except Unexplained:
                pass
            except StepMismatch as error:
                wrong = error.with_traceback(None)  # its frames hold what the step has allocated
            if wrong is None:
                references = self._references(plan, args, references)
            elif not self._is_luck(plan, references, wrong):
                self._refuse(wrong)
                # values of today may show a fault of a kernel that those of its own check did not
                if looked or wrong.part == "update" or not plan.program.groups:
                    self._replace(plan, args, wrong)
                    looked = False
                else:
                    looked = True
        return self._finite(plan, args, None)

    def _is_luck(self, plan: Plan, references: References | None, wrong: StepMismatch) -> bool:
        """Whether eager under other roundings is as far off: the call may be judged beside that."""
        try:
            return references is not None and is_luck(wrong, references.otherwise)
        except torch.OutOfMemoryError:
            if not plan.tight:
                raise
            return False

    def _refuse(self, wrong: StepMismatch) -> None:
        """Raise what is wrong where nothing may be replaced."""
        if self._gate is not None and self._gate.strict:
            raise wrong.strictly from wrong

    def _references(
        self, plan: Plan, args: Sequence[Any], suspected: References | None = None
    ) -> References | None:
        """What the call is compared with; or, given that, the same once the capture is known right.

        Raises TakeOver where it is not.
        """
        assert self._gate is not None
        needed, insist = plan.needed(args), not plan.tight
        try:
            if suspected is None:
                return self._gate.references(args, needed, insist=insist)
            return self._gate.settle(args, suspected, needed, insist=insist)
        except StepMismatch as wrong:
            raise self._take_over(plan, wrong) from wrong

    def _replace(self, plan: Plan, args: Sequence[Any], wrong: StepMismatch) -> None:
        """Put what was wrong out of use: the update, the plan, and at last the captured graph."""
        if wrong.part == "update":
            self._record(plan, wrong)
            plan.update_by_torch("our update was wrong: it is torch's own step")
        elif not self._runs_aten:
            self._record(plan, wrong, self._repro(plan, args, wrong.failure.error))
            self._run_aten(plan, "the step was wrong: it runs as ATen")
        elif self._captured.shadow is not None:
            raise self._take_over(plan, wrong) from wrong
        else:
            self._gate = None

    def _run_aten(self, plan: Plan, because: str) -> None:
        self._runs_aten = True
        plan.run_instead(self._on_aten(), because)

    def _take_over(self, plan: Plan, wrong: StepMismatch) -> TakeOver:
        self._record(plan, wrong)
        plan.no_graph("the captured step was wrong: eager autograd runs it")
        return TakeOver(wrong.failure.error)

    def _record(self, plan: Plan, wrong: StepMismatch, repro: str = "") -> None:
        self._refuse(wrong)
        failure = replace(wrong.failure, repro=repro)
        plan.options.boundary.record(f"{wrong.part}-{id(self)}", failure)

    def _repro(self, plan: Plan, args: Sequence[Any], problem: str) -> str:
        """A script of the whole step; nothing has changed since before it ran."""
        captured, options = self._captured, plan.options
        params = [captured.params(i) for i in range(len(captured.updates))]
        write = functools.partial(
            write_step_repro, options.repro_folder, self._on_aten(), plan.program, params, args
        )
        return options.boundary.attempt(lambda: write(problem), "step")

    # -- no NaN or infinity of ours -------------------------------------------------------------

    def _finite(self, plan: Plan, args: Sequence[Any], check: StepCheck | None) -> list[Any]:
        """A first call; should it make a NaN, one whose every kernel is looked at."""
        try:
            return self._attempt(plan, args, check)
        except NotFinite:
            return self._investigate(plan, args)

    def _attempt(self, plan: Plan, args: Sequence[Any], check: StepCheck | None) -> list[Any]:
        def look(saved: Snapshot) -> Callable[[Sequence[Any], Sequence[Any]], None]:
            if check is not None:
                check.saved = saved

            def judge(args: Sequence[Any], outputs: Sequence[Any]) -> None:
                if check is not None:
                    check.finish(args, outputs)
                seen = () if check is None else check.finite
                self._demand_finite(plan, args, outputs, seen)

            return judge

        updates = plan.program.updates.values()
        with nullcontext() if check is None else check.watching(list(updates)):
            return plan.first(args, look)

    def _demand_finite(
        self,
        plan: Plan,
        args: Sequence[Any],
        outputs: Sequence[Any],
        seen: Sequence[UpdateCall] = (),
    ) -> None:
        """Raise NotFinite for a NaN or infinity. seen: updates whose results are known to be."""
        if not self._judging:
            return
        judged = [*plan.trained(args, seen), *losses(outputs)]
        # a region's backward: its results are gradients, which loss scaling may well overflow
        if not self._captured.tg.nodes("forward") and (self._nan_check or not self._scaled):
            judged += [o for o in outputs if isinstance(o, Tensor)]
        if not all_finite(judged):
            raise NotFinite

    def _from_a_copy(self, plan: Plan, args: list[Any]) -> list[Any]:
        """A call from whose result the training state can be put back."""
        given, written = list(args), plan.written(args)
        if self._snapshot is not None and self._snapshot.of(written):
            self._snapshot.take()
        else:
            self._snapshot = Snapshot(written)
        try:
            with self._snapshot.restored_on_failure():
                outputs = plan.later(args)
                self._demand_finite(plan, given, outputs)
                return outputs
        except NotFinite:
            plan.drop_replay()
        return plan.roomy(lambda: self._investigate(plan, given))

    def _investigate(self, plan: Plan, args: Sequence[Any]) -> list[Any]:
        """The call again, every kernel beside ATen: the first that differs is put out of use.

        Where none does, ATen runs the whole: if it is finite, it goes on; if not, the NaN is the
        user's own, and is said to be so once.
        """
        judge = None if self._gate is None else self._gate.check(None)
        try:
            with plan.suspecting():
                return self._attempt(plan, args, judge)
        except NotFinite:
            pass
        except StepMismatch as wrong:
            self._replace(plan, args, wrong)
            return self._finite(plan, args, None)
        cause = "what comes into the step"
        if all_finite(plan.trained(args)):
            cause = self._captured.first_nonfinite(args)
        self._judging = cause is None
        if cause is not None:
            line = "the loss or a gradient is not finite, and in eager neither: it starts at "
            hint = "" if self._nan_check else "; nan_check=True looks at every step"
            say_once("gate", f"not finite {id(self)}", f"{line}{cause}{hint}")
        elif not self._runs_aten:
            problem = "not finite, where ATen is"
            repro = self._repro(plan, args, problem)
            failure = Failure("the step", "step", problem, "loss or gradient", repro=repro)
            plan.options.boundary.record(f"finite-{id(self)}", failure)
            self._run_aten(plan, "the step was not finite: it runs as ATen")
        return self._attempt(plan, args, None)
