"""Turn result files into the README's tables and plots, or fail if the README differs from them.

python -m benchmarks.report             # print the tables
python -m benchmarks.report --write     # and put them between the README's markers
python -m benchmarks.report --check     # exit 1 if a table in the README differs
python -m benchmarks.report --plot docs/steps.svg
python -m benchmarks.report --plot docs/kernels.svg    # the roofline, as .svg and .png
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks import kernel_report

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
COLUMNS = ("ms a step", "spread", "host ms", "peak GiB", "cold compile s", "gradient error")

_STEPS = (
    "Whole steps with their optimizer (AdamW; fused in eager and torch.compile), contenders "
    "interleaved in one process; median of rounds."
)
_ERROR = (
    "Gradient error: against fp64, over eager's own, the largest over tensors (2 is the limit)."
)
_BUDGET = (
    "Peak: what the allocator reserved, with model, optimizer state and graph pools. After the "
    "dash: `memory_budget`, of the step's own peak with everything saved."
)
_GATE = (
    '`verify="step"`: what comparing a whole step with eager autograd and fp64 costs beside the '
    "step itself; medians of single calls. Peaks: what is allocated, with model and optimizer."
)

_HEAD = "A linear layer and its cross-entropy, forward and backward: rows x width x classes of"

Row = dict[str, Any]


def _figure(value: float | None, digits: int = 3) -> str:
    return "n/a" if value is None else f"{value:.{digits}g}"


def table(rows: list[Row]) -> str:
    """Markdown table: a line a case and contender, with trainfuse's speed-up over each."""
    lines = [
        f"case | contender | {' | '.join(COLUMNS)} | trainfuse is",
        "---|---" + "|---:" * (len(COLUMNS) + 1),
    ]
    ours = {row["case"]: row["ms"] for row in rows if row["contender"] == "trainfuse"}
    for row in rows:
        base = ours.get(row["case"])
        known = base and row["ms"] and row["contender"] != "trainfuse"
        faster = f"{row['ms'] / base:.2f}x as fast" if known else ""
        figures = [
            _figure(row["ms"]),
            _figure(row["ms_spread"], 2),
            _figure(row["host_ms"], 2),
            _figure(row["peak_gib"]),
            _figure(row["compile_s"]),
            _figure(row["grad_error_ratio"]),
        ]
        lines.append(" | ".join((row["case"], row["contender"], *figures, faster)).rstrip())
    return "\n".join(lines)


def memory_table(rows: list[Row]) -> str:
    """Markdown table: a line a case and contender, and both figures over torch.compile's."""
    lines = [
        "case | contender | peak GiB | of compile's | ms a step | of compile's",
        "---|---|---:|---:|---:|---:",
    ]
    base = {row["case"]: row for row in rows if row["contender"] == "compile"}
    for row in rows:
        cells = [row["case"], row["contender"]]
        for key in ("peak_gib", "ms"):
            value, other = row[key], base.get(row["case"], {}).get(key)
            cells.append("n/a" if value is None else f"{value:.4g}")
            cells.append(f"{value / other:.2f}" if value and other else "n/a")
        lines.append(" | ".join(cells))
    return "\n".join(lines)


def gate_table(rows: list[Row]) -> str:
    """Markdown table: what comparing a whole step costs, a line a case."""
    columns = {
        "eager_ms": "eager ms",
        "step_ms": "ms a step",
        "compared_ms": "compared ms",
        "comparison": "a comparison, eager steps",
        "first_s": "first call s",
        "first_compared_s": "compared s",
        "first_comparison": "the first one, eager steps",
        "eager_peak_gib": "eager's peak GiB",
        "peak_gib": "compared GiB",
    }
    lines = [f"case | {' | '.join(columns.values())}", "---" + "|---:" * len(columns)]
    for row in rows:
        cells = ("n/a" if row[key] is None else f"{row[key]:.4g}" for key in columns)
        lines.append(" | ".join((row["case"], *cells)))
    return "\n".join(lines)


def head_table(rows: list[Row]) -> str:
    """Markdown table: a linear layer and its loss by each contender."""
    lines = [
        "contender | ms | spread | peak GiB | weight gradient error",
        "---|---:|---:|---:|---:",
    ]
    for row in rows:
        cells = [f"{row[key]:.4g}" for key in ("ms", "ms_spread", "peak_gib")]
        error = row["weight_gradient_error"]
        lines.append(" | ".join((row["contender"], *cells, f"{error:.3g}")))
    return "\n".join(lines)


def section(suite: str, result: dict[str, Any]) -> str:
    """One results file as the README shows it: conditions, table, set-ups."""
    if suite == "kernels":
        return kernel_report.section(result)
    e = result["environment"]
    conditions = (
        f"{e['gpu']}, driver {e['driver']}, torch {e['torch']}, triton {e['triton']}, "
        f"Python {e['python']}, {kernel_report.measured_at(result)}, {e['date']}."
    )
    command = f"`python -m benchmarks.{suite}`"
    if suite == "head":
        size = " x ".join(map(str, result["size"]))
        return f"{conditions}\n{_HEAD} {size}. {command}\n\n{head_table(result['rows'])}"
    setups = {row["case"]: row["note"].split("; ")[0] for row in result["rows"]}
    notes = "\n".join(f"- `{case}`: {note}." for case, note in setups.items())
    if suite == "gate":
        meaning, shown = _GATE, gate_table
    else:
        shown, more = (memory_table, _BUDGET) if suite == "memory" else (table, _ERROR)
        meaning = f"{_STEPS} {more}"
    return f"{conditions}\n{meaning} {command}\n\n{shown(result['rows'])}\n\n{notes}"


def load(folder: Path = RESULTS) -> dict[str, list[dict[str, Any]]]:
    """Result files by suite, newest name last."""
    suites: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")):
        suites.setdefault(path.name.split("-")[0], []).append(json.loads(path.read_text()))
    return suites


def rendered(readme: str, suites: dict[str, list[dict[str, Any]]]) -> str:
    """The README's text with every marked section replaced by what the results say."""

    def fill(match: re.Match[str]) -> str:
        suite = match["suite"]
        if suite not in suites:  # nothing was measured yet: the section stays as it is
            return match[0]
        body = "\n\n".join(section(suite, result) for result in suites[suite])
        return f"<!-- results:{suite} -->\n{body}\n<!-- /results:{suite} -->"

    pattern = r"<!-- results:(?P<suite>\w+) -->.*?<!-- /results:(?P=suite) -->"
    return re.sub(pattern, fill, readme, flags=re.DOTALL)


def plot(suites: dict[str, list[dict[str, Any]]], target: Path) -> None:
    """The plot of the suite that the file is named after: docs/steps.svg, docs/kernels.png.

    Of steps: bars of each contender's speed relative to eager, a group a case. Of kernels: the
    roofline. Needs matplotlib.
    """
    from matplotlib import pyplot

    suite = "kernels" if target.stem.startswith("kernels") else "steps"
    (result, *_) = suites[suite]
    if suite == "kernels":
        kernel_report.plot(result, target)
        return
    rows = result["rows"]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    names = list(dict.fromkeys(row["contender"] for row in rows))
    ms = {(row["case"], row["contender"]): row["ms"] for row in rows}
    figure, axes = pyplot.subplots(figsize=(1.6 + 2.4 * len(cases), 3.6))
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        speeds = [
            ms[case, "eager"] / ms[case, name] if ms.get((case, name)) else 0.0 for case in cases
        ]
        places = [j + (i - (len(names) - 1) / 2) * width for j in range(len(cases))]
        bars = axes.bar(places, speeds, width, label=name)
        axes.bar_label(bars, fmt="%.1f", fontsize=7)
    axes.set_xticks(range(len(cases)), cases)
    axes.set_ylabel("steps per second, eager = 1")
    axes.set_title(f"{result['environment']['gpu']}, torch {result['environment']['torch']}")
    axes.legend(fontsize=8)
    figure.tight_layout()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 1 when --check finds a difference, 2 when a plot can't be drawn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", action="store_true")
    action.add_argument("--check", action="store_true")
    action.add_argument("--plot", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    suites = load(options.results)
    if options.plot:
        try:
            plot(suites, options.plot)
        except ImportError:
            print("the plot needs matplotlib: pip install trainfuse[bench]", file=sys.stderr)
            return 2
    elif options.write or options.check:
        before = options.readme.read_text()
        after = rendered(before, suites)
        if options.write:
            options.readme.write_text(after)
        elif before != after:
            message = "README.md differs from benchmarks/results: run benchmarks.report --write"
            print(message, file=sys.stderr)
            return 1
    else:
        for suite, results in suites.items():
            for result in results:
                if suite == "kernels":
                    kernel_report.print_table(result)
                print(f"## {suite}\n\n{section(suite, result)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
