"""Times the contenders of one kernel case by CUDA graph replay, in turn; and the roof.

One graph holds as many calls as move ROTATE bytes, each on buffers of its own, so that none finds
its operands in L2 and a graph's launch costs nothing; short ones hold at most MOST calls. A replay
is timed behind an untimed one of the same graph. On a CPU, where nothing is captured, calls are
timed by the clock.
"""

from __future__ import annotations

import functools
import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks import kernel_contenders as field
from benchmarks.kernel_cases import Case
from benchmarks.kernel_contenders import Entrant, attempt

ROTATE = 768 << 20
MOST = 48
ROUNDS = 20
COPY_SIZES = tuple(1 << n for n in range(18, 31))
_COPIES = ((1024, 4), (2048, 4), (4096, 8), (8192, 8))
Row = dict[str, Any]


class Replay:
    """Calls that run again and again: one CUDA graph of them, or on a CPU just the calls."""

    def __init__(self, calls: Sequence[Callable[[], Any]], device: str) -> None:
        self.count, self._calls, self._graph, self._kept = len(calls), calls, None, None
        if device == "cuda":
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=torch.cuda.current_stream()):
                # kept until the end: every call writes to memory of its own
                self._kept = [call() for call in calls]

    def __call__(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        else:
            for call in self._calls:
                call()

    def milliseconds(self) -> float:
        """One call's time, from a replay behind another."""
        self()
        if self._graph is None:
            began = time.perf_counter()
            self()
            return (time.perf_counter() - began) / self.count * 1e3
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / self.count

    def close(self) -> None:
        """Free the graph and its memory."""
        if self._graph is not None:
            self._graph.reset()
        self._kept = None
        self._calls = ()


def race(replays: Mapping[str, Replay], rounds: int) -> dict[str, tuple[float, float]]:
    """Median and interquartile range in ms, contenders in turn."""
    names = list(replays)
    times: dict[str, list[float]] = {name: [] for name in names}
    for name in names:  # clocks and caches settle
        for _ in range(3):
            replays[name]()
    for i in range(rounds):
        turn = i % len(names)
        for name in names[turn:] + names[:turn]:
            times[name].append(replays[name].milliseconds())
    figures = {}
    for name, values in times.items():
        low, middle, high = statistics.quantiles(values, n=4)
        figures[name] = (middle, high - low)
    return figures


def calls_of(
    entrant: Entrant, phase: str, copies: Sequence[tuple[Tensor, ...]]
) -> list[Callable[[], Any]]:
    """Calls of a phase, one a copy of the inputs; a backward has run once, its forward too."""
    if phase == "backward":
        return [_backward(entrant, args) for args in copies]
    call = entrant.call if phase == "forward" else entrant.whole
    assert call is not None
    call(*copies[0])
    return [functools.partial(call, *args) for args in copies]


def _backward(entrant: Entrant, args: tuple[Tensor, ...]) -> Callable[[], Any]:
    outputs = field.outputs_of(entrant.call(*args))
    wanted, given = field.leaves(args), field.cotangents(outputs)

    def backward() -> Any:
        return torch.autograd.grad(outputs, wanted, given, retain_graph=True)

    backward()
    return backward


def copies_of(args: tuple[Tensor, ...], floor: int | None, device: str) -> list[tuple[Tensor, ...]]:
    """As many copies of the inputs as one graph is to work on."""
    count = 1 if floor is None or device != "cuda" else min(MOST, math.ceil(ROTATE / floor))
    return [args, *(field.clones(args) for _ in range(count - 1))]


def host_ms(call: Callable[[], Any], device: str) -> float:
    """Time until a call returns, the device idle; median of five."""
    times = []
    for _ in range(5):
        _synchronize(device)
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1e3)
    return round(statistics.median(times), 4)


def peak_gib(entrant: Entrant, phase: str, device: str) -> float | None:
    """What one call allocates at its peak, beside its inputs; of a backward, with its forward."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    if phase == "backward":
        field.differentiate(entrant.call, entrant.args)
    else:
        call = entrant.call if phase == "forward" else entrant.whole
        assert call is not None
        call(*entrant.args)
    return round((torch.cuda.max_memory_allocated() - before) / 2**30, 4)


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def run_case(
    case: Case, names: Sequence[str], device: str, *, roof: float | None, rounds: int = ROUNDS
) -> list[Row]:
    """Every row of a case. roof: bytes a second."""
    args = case.make(device)
    entrants: list[Entrant] = []
    rows: dict[tuple[str, str], Row] = {}
    for name in names:
        made = attempt(lambda n=name: _ready(n, case, args))
        if isinstance(made, str):
            for phase in case.op.phases:
                rows[name, phase] = empty_row(case, name, phase, [f"failed: {made}"])
        else:
            entrants.append(made)
    verdicts = _checked(case, entrants)
    if any(found == field.NO_MEMORY for found in verdicts.values()):
        verdicts = _checked_at_fewer_rows(case, [e.name for e in entrants], device)
    for phase in case.op.phases:
        timed = _timed(case, phase, entrants, device, rounds)
        for entrant in entrants:
            ratio, why = _verdict(verdicts[entrant.name], phase)
            notes = ["nothing to compile"] if entrant.name == "eager" else []
            notes += [] if device == "cuda" else ["no roof, no peak memory on a CPU"]
            row = empty_row(case, entrant.name, phase, [*entrant.notes, why, *notes])
            row |= {"compile_s": entrant.compile_s, "grad_error_ratio": ratio}
            row |= timed[entrant.name]
            floor = case.floors.get(phase)
            if floor and roof and row["ms"]:
                row["roof_fraction"] = round(floor / roof / row["ms"] * 1e3, 4)
            row["note"] = "; ".join(filter(None, (row["note"], row.pop("failed", ""))))
            rows[entrant.name, phase] = row
    for entrant in entrants:
        entrant.close()
    torch.compiler.reset()
    gc.collect()
    return [rows[name, phase] for phase in case.op.phases for name in names]


def _ready(name: str, case: Case, args: tuple[Tensor, ...]) -> Entrant:
    entrant = field.build(name, case, args)
    entrant.first_calls()
    return entrant


def _checked(case: Case, entrants: Sequence[Entrant]) -> dict[str, Any]:
    """By contender: its verdicts by phase, or a line on why there are none."""
    refs = attempt(lambda: field.references(case, entrants[0].args)) if entrants else ""
    verdicts: dict[str, Any] = {}
    for entrant in entrants:
        if entrant.name == "eager":
            verdicts["eager"] = dict.fromkeys(case.op.phases, (1.0, ""))
        elif isinstance(refs, str):
            verdicts[entrant.name] = refs
        else:
            verdicts[entrant.name] = attempt(lambda e=entrant: field.check(e, refs))
    return verdicts


def _checked_at_fewer_rows(case: Case, names: Sequence[str], device: str) -> dict[str, Any]:
    """The same where fp64 doesn't fit: of an eighth of the rows, compiled for that."""
    gc.collect()
    small = replace(case, dims=(max(1, case.dims[0] // 8), *case.dims[1:]))
    args = small.make(device)
    entrants = [field.build(name, small, args) for name in names]
    verdicts = _checked(small, entrants)
    for entrant in entrants:
        entrant.close()
        found = verdicts[entrant.name]
        if entrant.name != "eager" and not isinstance(found, str):
            at = f"gradients checked at {small.name}"
            verdicts[entrant.name] = {
                phase: (ratio, "; ".join(filter(None, (why, at))))
                for phase, (ratio, why) in found.items()
            }
    return verdicts


def _verdict(found: Any, phase: str) -> tuple[float | None, str]:
    """Error ratio and note of one phase."""
    return (None, f"gradients unchecked: {found}") if isinstance(found, str) else found[phase]


def _timed(
    case: Case, phase: str, entrants: Sequence[Entrant], device: str, rounds: int
) -> dict[str, Row]:
    """Figures of one phase by contender."""
    floor = case.floors.get(phase)
    figures: dict[str, Row] = {}
    replays: dict[str, Replay] = {}
    for entrant in entrants:

        def prepare(entrant: Entrant = entrant) -> tuple[Row, Replay]:
            peak = peak_gib(entrant, phase, device)
            calls = calls_of(entrant, phase, copies_of(entrant.args, floor, device))
            figure = {"host_ms": host_ms(calls[0], device), "peak_gib": peak}
            return figure, Replay(calls, device)

        made = attempt(prepare)
        if isinstance(made, str):
            figures[entrant.name] = {"failed": f"not timed: {made}"}
        else:
            figures[entrant.name], replays[entrant.name] = made
    if replays:
        for name, (middle, spread) in race(replays, rounds).items():
            figures[name] |= {"ms": round(middle, 5), "ms_spread": round(spread, 5)}
    for replay in replays.values():
        replay.close()
    return figures


def empty_row(case: Case, name: str, phase: str, notes: Sequence[str]) -> Row:
    """A row without figures; a case without a roof says so."""
    roof = "" if phase in case.floors else "no roof: it is a matrix product"
    empty = dict.fromkeys(("ms", "ms_spread", "host_ms", "peak_gib", "compile_s"))
    return {
        "case": case.name,
        "contender": name,
        "phase": phase,
        **empty,
        "grad_error_ratio": None,
        "roof_fraction": None,
        "note": "; ".join(filter(None, (*notes, roof))),
    }


# -- the roof ------------------------------------------------------------------------------------


@triton.jit
def copy_kernel(source, target, count, BLOCK: tl.constexpr):
    """target = source, elementwise: the plainest kernel that moves memory."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    tl.store(target + offsets, tl.load(source + offsets, mask=mask), mask=mask)


def copy(source: Tensor, target: Tensor, block: int, warps: int) -> None:
    """Copy one contiguous tensor to another."""
    count = source.numel()
    copy_kernel[(triton.cdiv(count, block),)](source, target, count, BLOCK=block, num_warps=warps)


def measure_roof(device: str, sizes: Sequence[int] = COPY_SIZES) -> list[tuple[int, float]]:
    """(bytes moved, bytes a second) of the copy kernel, by size; the last is the roof.

    Its block size is the best of a few at the largest size.
    """
    best = max(_COPIES, key=lambda c: _copy_speed(sizes[-1], device, *c))
    return [(size, _copy_speed(size, device, *best)) for size in sizes]


def _copy_speed(size: int, device: str, block: int, warps: int) -> float:
    count = min(MOST, math.ceil(ROTATE / size)) if device == "cuda" else 1
    pairs = []
    for _ in range(count):
        source = torch.randn(size // 4, device=device).to(torch.bfloat16)
        pairs.append((source, torch.empty_like(source)))
    calls = [lambda p=pair: copy(*p, block, warps) for pair in pairs]
    calls[0]()
    replay = Replay(calls, device)
    ms, _ = race({"copy": replay}, ROUNDS if device == "cuda" else 2)["copy"]
    replay.close()
    return size / ms * 1e3
