"""Faults of generated text: of kernels, and of how they walk their tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.gradients.planted.planting import (
    Fault,
    Hits,
    text,
)
from tests.gradients.planted.trainings import MODEL_WIDTH
from trainfuse.codegen import lower as lowering
from trainfuse.runtime import launch

GUARDED = r"tl\.where\([^()]*\)"
STORE = r"tl\.store\((?P<where>out\d+[^,]*), (?P<value>\w+)"


def _kernel(name: str, *rewrite: Any, on: str = "residual", phase: str = "backward") -> Fault:
    return Fault(name, "kernel", "kernels", on, text(tuple(rewrite), phase=phase))


KERNELS = (
    _kernel("factor", STORE, r"tl.store(\g<where>, \g<value> * 1.001"),
    _kernel("sign", STORE, r"tl.store(\g<where>, -\g<value>"),
    _kernel("nan", STORE, r'tl.store(\g<where>, \g<value> * float("nan")'),
    _kernel("wrong element", STORE, r"tl.store(\g<where> * 0, \g<value>"),
    _kernel("forward factor", STORE, r"tl.store(\g<where>, \g<value> * 1.001", phase="forward"),
    _kernel("dropped term", r"(t\d+ = t\d+) - t\d+\b", r"\1"),
    _kernel("lost cotangent", r"(t\d+ =) x\d+ \+ (t\d+\b)", r"\1 \2"),
    _kernel(
        "low-precision sum",
        r"(?P<acc>t\d+_acc) = (?P=acc) \+ (?P<term>.*)",
        r"\g<acc> = (\g<acc> + \g<term>).to(tl.bfloat16).to(tl.float32)",
    ),
    _kernel(
        "maximum for sum",
        rf"= lib\.reduce_sums\((?P<a>{GUARDED}), (?P<b>{GUARDED}), 1, True\)",
        r"= lib.reduce_max(\g<a>, 1, True), lib.reduce_sum(\g<b>, 1, True)",
    ),
    _kernel("wrong mean divisor", rf"_sum / {MODEL_WIDTH}\b", f"_sum / {MODEL_WIDTH - 1}"),
    _kernel("neighbour's row", r"(tl\.load\(in\d+ \+) row \* COLS", r"\1 (row ^ 1) * COLS"),
    _kernel("no eps", r"\+ 0\.01\b", "+ 0.0", phase="forward"),
    _kernel("wrong gelu", r"lib\.gelu_slope\(", "lib.gelu_tanh_slope("),
    _kernel(
        "swapped outputs",
        r"out(?P<a>\d) \+ col, (?P<x>t\d+)(?P<mid>.*\n.*)out(?P<b>\d) \+ col, (?P<y>t\d+)",
        r"out\g<a> + col, \g<y>\g<mid>out\g<b> + col, \g<x>",
    ),
    _kernel("bias dropped, while it is zero", r"(t\d+ = t\d+) \+ x2\b", r"\1", phase="forward"),
    _kernel("gain dropped, while it is one", r"(t\d+ = t\d+) \* x1\b", r"\1", phase="forward"),
    _kernel("wrong operator", r"libdevice\.cos", "libdevice.sin", on="square"),
    _kernel(
        "missing broadcast sum in a kernel",
        r"lib\.reduce_sum\(t0_acc, 0, True\)",
        "lib.reduce_sum(tl.where(tl.arange(0, 16)[:, None] == 0, t0_acc, 0.0), 0, True)",
        on="square",
    ),
    _kernel(
        "wrong axis in a kernel",
        r"lib\.reduce_sum\(tl\.where\(col_mask, t5, 0\.0\), 1, True\)",
        "tl.trans(lib.reduce_sum(tl.where(row_mask, t5, 0.0), 0, True))",
        on="square",
    ),
    _kernel(
        "transposed operand in a kernel",
        r"(tl\.load\(in\d \+) row \+ col \* COLS",
        r"\1 row * COLS + col",
        on="square",
    ),
)


# -- schedules ------------------------------------------------------------


def _grid(monkeypatch: Any, hits: Hits) -> None:
    """One program too few; what it should have written holds what memory held before."""
    run = launch.GroupLauncher.__call__

    def fewer(self: Any, inputs: Any, out: Any) -> None:
        own = {t.data_ptr() for t in inputs}
        for tensor in out:
            if tensor.data_ptr() not in own:
                tensor.fill_(7)
        run(self, inputs, out)

    assemble = lowering.assemble

    def short(name: str, module: Any, target: Any) -> Any:
        kernels = [
            replace(k, grid=(k.grid[0] - 1, *k.grid[1:])) if k.grid[0] > 1 else k
            for k in module.kernels
        ]
        hits.extend(k.name for k in module.kernels if k.grid[0] > 1)
        return assemble(name, replace(module, kernels=tuple(kernels)), target)

    monkeypatch.setattr(launch.GroupLauncher, "__call__", fewer)
    monkeypatch.setattr(lowering, "assemble", short)


def _schedule(name: str, *rewrites: Any, on: str, phase: str = "backward") -> Fault:
    plant = text(*rewrites, phase=phase, chunks=on == "long_rows")
    return Fault(name, "schedule", "kernels", on, plant)


SCHEDULES = (
    _schedule("bad tail mask", (r"row_mask = row < ROWS", r"\g<0> - 1"), on="residual"),
    _schedule(
        "column mask off by one",
        (r"col_mask = col < COLS", r"\g<0> - 1"),
        on="long_rows",
        phase="forward",
    ),
    _schedule(
        "dropped partial",
        (r"(part \* COLS \+ col, mask=col_mask)", r"\1 & (part < 1)"),
        on="residual",
    ),
    _schedule(
        "last chunk missed",
        (r"range\(0, COLS, 32\)", "range(0, COLS - 32, 32)"),
        on="long_rows",
        phase="forward",
    ),
    _schedule(
        "overwrite for accumulate",
        (r"(t0_acc) = t0_acc \+ ", r"\1 = "),
        on="wide",
    ),
    _schedule(
        "accumulator not reset",
        (r"(t\d+_m2) = tl\.full\(\(32,\), 0\.0, tl\.float32\)", r"\1 = t0_count + 1.0"),
        on="long_rows",
        phase="forward",
    ),
    Fault("a program too few", "schedule", "kernels", "wide", _grid),
    _schedule(
        "wrong column tile",
        (
            r"(tl\.load\(in0 \+ row \* COLS \+) col(, mask=row_mask & col_mask)",
            r"\1 (col % 2048)\2",
        ),
        on="wide",
    ),
    _schedule(
        "counted twice at the tail",
        (r"row = (start \+ tl\.arange\(0, \d+\)\[:, None\])", r"row = tl.minimum(\1, ROWS - 1)"),
        on="residual",
    ),
)
