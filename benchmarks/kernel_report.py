"""What the kernel results say: tables, the roofline plot, and the list of what must hold."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

LARGE = 64 << 20
"""Bytes of a floor from which the roof fraction counts."""
COLOURS = {
    "eager": "#999999",
    "compile": "#1f77b4",
    "compile-max-autotune": "#17becf",
    "liger": "#ff7f0e",
    "trainfuse": "#d62728",
    "trainfuse-max-autotune": "#8c1a1a",
}
CONTENDERS = tuple(COLOURS)
_TELLING = ("failed", "WRONG", "not ", "ATen", "gradients unchecked: ", "the process")
Row = Mapping[str, Any]


def dumps(result: Mapping[str, Any]) -> str:
    """A results file: one row a line."""
    parts = []
    for key, value in result.items():
        if key == "rows":
            text = "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in value) + "\n ]"
        else:
            text = json.dumps(value)
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


@dataclass(frozen=True, slots=True)
class Cell:
    """One phase of one case: its floor in bytes, or None, and its rows by contender."""

    case: str
    phase: str
    floor: int | None
    rows: Mapping[str, Row]

    @property
    def op(self) -> str:
        """The case's function."""
        return self.case.partition("-")[0]

    @property
    def large(self) -> bool:
        """Whether it is above the size from which the roof counts."""
        return self.floor is not None and self.floor >= LARGE

    def figure(self, contender: str, name: str = "ms") -> float | None:
        """A figure of a contender, or None."""
        return self.rows.get(contender, {}).get(name)

    def gain(self, over: str = "compile") -> float | None:
        """How many times as fast as a contender trainfuse is."""
        theirs, ours = self.figure(over), self.figure("trainfuse")
        return theirs / ours if theirs and ours else None

    @property
    def roof(self) -> float | None:
        """trainfuse's fraction of the roof."""
        return self.figure("trainfuse", "roof_fraction")

    def __str__(self) -> str:
        return f"{self.case} {self.phase}"


def cells(result: Mapping[str, Any]) -> list[Cell]:
    """The rows by case and phase, in order."""
    grouped: dict[tuple[str, str], dict[str, Row]] = {}
    for row in result["rows"]:
        grouped.setdefault((row["case"], row["phase"]), {})[row["contender"]] = row
    floors = result.get("floors", {})
    return [
        Cell(case, phase, floors.get(case, {}).get(phase), rows)
        for (case, phase), rows in grouped.items()
    ]


def geomean(values: Iterable[float | None]) -> float | None:
    """Geometric mean of what is known."""
    logs = [math.log(v) for v in values if v]
    return math.exp(statistics.fmean(logs)) if logs else None


# -- what must hold ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Claim:
    """One line of the list: figure as text, and whether it holds; None where nothing is known."""

    text: str
    figure: str
    holds: bool | None

    @property
    def mark(self) -> str:
        """A word for it."""
        return {True: "holds", False: "MISSED", None: "unknown"}[self.holds]


_FASTER = (
    ("softmax-16384x4096", "forward", 2.0),
    ("dropout_add_layernorm-16384x4096", "forward", 2.0),
    ("cross_entropy-8192x32000", "both", 2.0),
    ("layernorm-16384x16384", "backward", 1.6),
    ("layernorm-16384x5120", "backward", 1.3),
    ("groupnorm_silu-64x256x56x56", "backward", 1.5),
    ("batch_norm_relu_nhwc-64x256x56x56", "backward", 1.5),
    ("embedding-16384x32000x2048", "backward", 2.0),
)
_HEAD = "linear_cross_entropy-8192x2048x128256"


def claims(result: Mapping[str, Any]) -> list[Claim]:
    """What the kernels must reach, each with its figure."""
    table = cells(result)
    by_name = {(c.case, c.phase): c for c in table}
    found = [_coverage(table), *_roofs(table), *_gains(table)]
    for case, phase, least in _FASTER:
        cell = by_name.get((case, phase))
        gain = None if cell is None else cell.gain()
        text = f"{case} {phase}: at least {least}x torch.compile"
        found.append(Claim(text, _times(gain), None if gain is None else gain >= least))
    found += _head(by_name.get((_HEAD, "both")))
    return [*found, _gradients(table), _compile_time(result.get("kernels", {}))]


def _coverage(table: Sequence[Cell]) -> Claim:
    sizes: dict[str, set[str]] = {}
    for cell in table:
        if cell.floor is not None:
            sizes.setdefault(cell.op, set()).add(cell.case)
    fewest = min(map(len, sizes.values()), default=0)
    text = "at least 18 ops, at least 6 sizes each"
    return Claim(text, f"{len(sizes)} ops, {fewest} sizes", len(sizes) >= 18 and fewest >= 6)


def _roofs(table: Sequence[Cell]) -> list[Claim]:
    roofs = {str(c): c.roof for c in table if c.large}
    known = {name: roof for name, roof in roofs.items() if roof is not None}
    if not known:
        return [Claim("at least 85% of the roof in 90% of the large cases", "n/a", None)]
    share = sum(roof >= 0.85 for roof in known.values()) / len(roofs)
    name = min(known, key=lambda n: known[n])
    return [
        Claim("at least 85% of the roof in 90% of the large cases",
              f"{share:.0%} of {len(roofs)}", share >= 0.9),
        Claim("no large case under 65% of the roof", f"{known[name]:.0%}, {name}",
              known[name] >= 0.65 and len(known) == len(roofs)),
    ]  # fmt: skip


def _gains(table: Sequence[Cell]) -> list[Claim]:
    gains = {str(c): gain for c in table if (gain := c.gain()) is not None}
    mean = geomean(gains.values())
    if mean is None:
        return [Claim("geometric mean over torch.compile at least 1.4x", "n/a", None)]
    name = min(gains, key=lambda n: gains[n])
    slow = sum(gain < 0.97 for gain in gains.values())
    return [
        Claim("geometric mean over torch.compile at least 1.4x",
              f"{mean:.2f}x over {len(gains)} of {len(table)}", mean >= 1.4),
        Claim("no case under 0.97x torch.compile",
              f"{slow} under; worst {gains[name]:.2f}x, {name}", slow == 0),
    ]  # fmt: skip


def _head(cell: Cell | None) -> list[Claim]:
    def ratio(name: str) -> float | None:
        if cell is None:
            return None
        ours, theirs = cell.figure("trainfuse", name), cell.figure("compile", name)
        return ours / theirs if ours and theirs else None

    memory, taken = ratio("peak_gib"), ratio("ms")
    error = None if cell is None else cell.figure("trainfuse", "grad_error_ratio")
    limits = (
        ("peak memory at most 30% of torch.compile's", memory, 0.30),
        ("time at most 1.05x torch.compile's", taken, 1.05),
        ("gradient error at most eager's", error, 1.0),
    )
    return [
        Claim(f"{_HEAD}: {text}", _times(value), None if value is None else value <= limit)
        for text, value, limit in limits
    ]


def _gradients(table: Sequence[Cell]) -> Claim:
    ratios = {str(c): c.figure("trainfuse", "grad_error_ratio") for c in table}
    known = {name: r for name, r in ratios.items() if r is not None}
    if not known:
        return Claim("every case passes the gradient rule", "n/a", None)
    wrong = [name for name, ratio in known.items() if ratio > 2.0]
    figure = f"{len(known)} of {len(ratios)} checked, {len(wrong)} wrong {', '.join(wrong[:5])}"
    holds = not wrong and len(known) == len(ratios)
    return Claim("every case passes the gradient rule", figure.strip(), holds)


def _compile_time(kernels: Mapping[str, tuple[int, float]]) -> Claim:
    """Planning and compiling, in one of many processes, over the number of kernels made."""
    text = "at most 1.5 s a kernel to plan and compile, autotune included"
    each = {case: seconds / count for case, (count, seconds) in kernels.items() if count}
    if not each:
        return Claim(text, "n/a", None)
    worst = max(each, key=lambda case: each[case])
    middle = statistics.median(each.values())
    figure = f"median {middle:.2f} s, worst {each[worst]:.2f} s, {worst}"
    return Claim(text, figure, each[worst] <= 1.5)


# -- tables --------------------------------------------------------------------------------------


def _times(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.2f}x"


def _percent(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.0%}"


def _micro(value: float | None) -> str:
    return "n/a" if value is None else f"{value * 1e3:.4g}"


def _names(table: Sequence[Cell]) -> list[str]:
    return [n for n in CONTENDERS if any(n in cell.rows for cell in table)]


def print_table(result: Mapping[str, Any], console: Console | None = None) -> None:
    """Every case, then the list of what must hold, on the console."""
    table, console = cells(result), console or Console(width=160)
    names = _names(table)
    shown = Table("case", "phase", "MiB", box=None)
    for name in (*names, "spread", "over compile", "roof", "compile's", "error"):
        shown.add_column(name, justify="right")
    for cell in table:
        times = [_micro(cell.figure(name)) for name in names]
        gain, size = cell.gain(), "" if cell.floor is None else f"{cell.floor / 2**20:.4g}"
        colour = "" if gain is None else "[green]" if gain >= 0.97 else "[red]"
        error = cell.figure("trainfuse", "grad_error_ratio")
        shown.add_row(
            cell.case, cell.phase, size, *times, _micro(cell.figure("trainfuse", "ms_spread")),
            f"{colour}{_times(gain)}", _percent(cell.roof),
            _percent(cell.figure("compile", "roof_fraction")),
            "n/a" if error is None else f"{error:.2f}",
        )  # fmt: skip
    console.print(shown)
    _print_notes(table, console)
    for claim in claims(result):
        colour = {True: "green", False: "red", None: "yellow"}[claim.holds]
        console.print(f"[{colour}]{claim.mark:8s}[/] {claim.text}: {claim.figure}")


def _print_notes(table: Sequence[Cell], console: Console) -> None:
    """What went wrong, and what trainfuse left to ATen, each once with the cases that say so."""
    found: dict[str, list[str]] = {}
    for cell in table:
        for name, row in cell.rows.items():
            for note in row["note"].split("; "):
                if note.startswith(_TELLING):
                    found.setdefault(f"{name}: {note}", []).append(str(cell))
    for note, places in found.items():
        more = f" and {len(places) - 2} more" if len(places) > 2 else ""
        line = f"{note} ({', '.join(places[:2])}{more})"
        console.print(line, markup=False, highlight=False)


def measured_at(result: Mapping[str, Any]) -> str:
    """The commits that the rows were measured at, with how many rows each has."""
    counts = Counter(row.get("commit", result["environment"]["commit"]) for row in result["rows"])
    if len(counts) < 2:
        return f"commit {next(iter(counts), result['environment']['commit'])}"
    return "commits " + ", ".join(f"{commit} ({n} rows)" for commit, n in counts.most_common())


def section(result: Mapping[str, Any]) -> str:
    """The README's section: by op, the named cases, the worst, and what must hold."""
    table = cells(result)
    e = result["environment"]
    roof = f"{result['copy'][-1][1] / 1e12:.2f} TB/s" if result.get("copy") else "not measured"
    conditions = (
        f"{e['gpu']}, driver {e['driver']}, torch {e['torch']}, triton {e['triton']}, "
        f"Liger-Kernel {e.get('liger') or 'not installed'}, Python {e['python']}, "
        f"{measured_at(result)}, {e['date']}."
    )
    meaning = (
        "GPU time by CUDA graph replay, contenders interleaved in one process, buffers rotated "
        f"past L2; bf16 unless said. Roof: our elementwise copy kernel in the same run, {roof}. "
        "Gains are geometric means over sizes; roof: median over sizes whose floor is at least "
        "64 MiB, trainfuse and (torch.compile). `python -m benchmarks.kernels`"
    )
    named = [cell for cell in table if _is_named(cell)]
    worst = sorted((c for c in table if c.gain()), key=lambda c: c.gain() or 0.0)[:5]
    parts = (conditions + "\n" + meaning, _by_op(table), "Named cases, µs:", _lines(named),
             "Worst against torch.compile, µs:", _lines(worst),
             "\n".join(f"- {c.mark}: {c.text}: {c.figure}" for c in claims(result)))  # fmt: skip
    return "\n\n".join(parts)


def _is_named(cell: Cell) -> bool:
    named = {(case, phase) for case, phase, _ in _FASTER} | {(_HEAD, "both")}
    return (cell.case, cell.phase) in named or cell.case == "rope-1x8192x32x128"


def _by_op(table: Sequence[Cell]) -> str:
    lines = [
        "op | phase | sizes | over eager | over compile | least | roof | error",
        "---|---|---:|---:|---:|---:|---:|---:",
    ]
    for op in dict.fromkeys(cell.op for cell in table):
        for phase in ("forward", "backward", "both"):
            mine = [c for c in table if c.op == op and c.phase == phase]
            if mine:
                lines.append(" | ".join((op, phase, str(len(mine)), *_op_figures(mine))))
    return "\n".join(lines)


def _op_figures(mine: Sequence[Cell]) -> tuple[str, ...]:
    def middle(of: Callable[[Cell], float | None]) -> float | None:
        values = [v for c in mine if c.large and (v := of(c)) is not None]
        return statistics.median(values) if values else None

    gains = [g for c in mine if (g := c.gain()) is not None]
    errors = [e for c in mine if (e := c.figure("trainfuse", "grad_error_ratio")) is not None]
    theirs = middle(lambda c: c.figure("compile", "roof_fraction"))
    return (
        _times(geomean(c.gain("eager") for c in mine)),
        _times(geomean(gains)),
        _times(min(gains, default=None)),
        f"{_percent(middle(lambda c: c.roof))} ({_percent(theirs)})",
        f"{max(errors):.2f}" if errors else "n/a",
    )


def _lines(mine: Sequence[Cell]) -> str:
    names = _names(mine)
    lines = [
        f"case | phase | {' | '.join(names)} | over compile | roof",
        "---|---" + "|---:" * (len(names) + 2),
    ]
    for cell in mine:
        times = [_micro(cell.figure(name)) for name in names]
        figures = (cell.case, cell.phase, *times, _times(cell.gain()), _percent(cell.roof))
        lines.append(" | ".join(figures))
    return "\n".join(lines)


# -- the plot ------------------------------------------------------------------------------------


def plot(result: Mapping[str, Any], target: Path) -> None:
    """Roofline as .png and .svg: bytes a second over bytes, a dot a case, a colour a contender.

    The line is the copy kernel at that size. Needs matplotlib.
    """
    from matplotlib import pyplot

    table = [cell for cell in cells(result) if cell.floor]
    phases = [p for p in ("forward", "backward") if any(c.phase == p for c in table)]
    figure, axes = pyplot.subplots(
        1, len(phases), figsize=(6.5 * len(phases), 4.8), sharey=True, squeeze=False
    )
    for axis, phase in zip(axes[0], phases, strict=True):
        for name in _names(table):
            points = [
                (cell.floor / 2**20, cell.floor / (ms * 1e6))
                for cell in table
                if cell.floor and cell.phase == phase and (ms := cell.figure(name))
            ]
            ours = name == "trainfuse"
            axis.scatter(
                [x for x, _ in points], [y for _, y in points], s=26 if ours else 16, label=name,
                color=COLOURS[name], alpha=0.9 if ours else 0.55, linewidths=0,
                zorder=3 if ours else 2,
            )  # fmt: skip
        if result.get("copy"):
            line = [(size / 2**20, speed / 1e9) for size, speed in result["copy"]]
            axis.plot(
                [x for x, _ in line], [y for _, y in line], color="black", linewidth=1,
                label="copy kernel",
            )  # fmt: skip
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("floor, MiB: what must be read and written once")
        axis.set_title(phase)
        axis.grid(alpha=0.2)
    axes[0][0].set_ylabel("floor / time, GB/s")
    axes[0][0].legend(fontsize=8, loc="lower right")
    e = result["environment"]
    figure.suptitle(f"{e['gpu']}, torch {e['torch']}, triton {e['triton']}", fontsize=10)
    figure.tight_layout()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target.with_suffix(".svg"), metadata={"Date": None})
    figure.savefig(target.with_suffix(".png"), dpi=150)
    pyplot.close(figure)
