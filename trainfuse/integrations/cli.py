"""`python -m trainfuse`: demo, explain, doctor, settings, cache, bench."""

from __future__ import annotations

import importlib.util
import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import trainfuse
from trainfuse.debug.environment import examine
from trainfuse.debug.explain import human_bytes
from trainfuse.errors import TrainfuseError
from trainfuse.fields import SWITCHES
from trainfuse.runtime.cache import default_folder
from trainfuse.settings import current, settings

app = typer.Typer(
    help="An ordinary PyTorch training step goes in; the same step comes out fused.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

JsonFlag = Annotated[bool, typer.Option("--json", help="End with one JSON line on stdout.")]


class UsageError(TrainfuseError):
    """The command line names something that is not there."""

    message = "{what}"
    fix = "{hint}"


@app.command()
def demo(
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Train a small GPT on text that Python carries; show what was fused and what it is worth."""
    from trainfuse.integrations.demo import run  # late: the other commands need no model

    result = run(steps, Console(stderr=as_json))
    if as_json:
        print(result.to_json())


@app.command()
def explain(
    target: Annotated[str, typer.Argument(metavar="FILE:FUNCTION")],
    html: Annotated[Path | None, typer.Option(help="Also write a page.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show how FUNCTION is captured and fused; inputs come from example_inputs() in FILE."""
    function, inputs = load_target(target)
    explanation = trainfuse.explain(function, *inputs)
    explanation.print(Console(stderr=as_json), groups=None)
    if html is not None:
        Console(stderr=as_json).print(f"written: {explanation.to_html(html)}")
    if as_json:
        print(json.dumps(explanation.to_dict()))


@app.command()
def doctor(
    target: Annotated[str | None, typer.Argument(metavar="[FILE:FUNCTION]")] = None,
) -> None:
    """Say what this machine offers, or what became of FUNCTION, and what to mend."""
    if target is not None:
        function, inputs = load_target(target)
        trainfuse.doctor(function, *inputs).print()
        return
    table = Table(box=None, show_header=False)
    findings = examine()
    marks = {True: "[green]ok[/]", False: "[yellow]![/]", None: ""}
    for finding in findings:
        table.add_row(finding.name, finding.value, marks[finding.ok])
    console = Console()
    console.print(table)
    for finding in findings:
        if finding.ok is False:
            console.print(f"[yellow]{finding.name}[/]: {finding.fix}")


@app.command(name="settings")
def show_settings(
    all_fields: Annotated[bool, typer.Option("--all", help="Also those at their default.")] = False,
) -> None:
    """Show every setting that is not at its default, where it came from and what it costs."""
    if not all_fields:
        print(settings)
        return
    changed, resolved = settings.changed(), current()
    table = Table(box=None)
    for column in ("setting", "value", "from", "takes", "another value costs"):
        table.add_column(column, overflow="fold")
    for name, switch in SWITCHES.items():
        source = changed[name][1] if name in changed else "default"
        row = (name, str(getattr(resolved, name)), source, switch.kind.expected, switch.cost)
        table.add_row(*row)
    Console().print(table)


@app.command()
def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Delete what it holds.")] = False,
) -> None:
    """Show where compiled kernels are kept and how much they take, or delete them."""
    folder = (current().cache_dir or default_folder()) / "kernels"
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = human_bytes(sum(path.stat().st_size for path in files))
    kernels = sum(path.is_dir() for path in folder.iterdir()) if folder.is_dir() else 0
    print(f"{folder}: {kernels} kernels, {size}")
    if clear and folder.is_dir():
        shutil.rmtree(folder)
        print("cleared")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(
    context: typer.Context,
    suite: Annotated[str, typer.Argument(metavar="SUITE")],
) -> None:
    """Run one benchmark suite of a checkout; further arguments go to it."""
    root = Path(trainfuse.__file__).resolve().parents[1]
    suites = [path.stem for path in (root / "benchmarks").glob("*.py") if _is_script(path)]
    if suite not in suites:
        known = ", ".join(sorted(suites))
        hint = f"use one of: {known}" if known else "run it in a checkout of the repository"
        raise UsageError(what=f"there is no benchmark suite {suite!r}", hint=hint)
    command = [sys.executable, "-m", f"benchmarks.{suite}", *context.args]
    raise typer.Exit(subprocess.run(command, cwd=root, check=False).returncode)


def _is_script(path: Path) -> bool:
    return 'if __name__ == "__main__"' in path.read_text(encoding="utf-8")


def load_target(target: str) -> tuple[Callable[..., Any], Sequence[Any]]:
    """The function that FILE:FUNCTION names, and its example inputs; raises UsageError."""
    file, separator, name = target.rpartition(":")
    path = Path(file)
    if not separator or not path.is_file():
        raise UsageError(
            what=f"{target!r} names no function in a file",
            hint="write FILE:FUNCTION, like examples/mlp.py:train_step",
        )
    module = _import(path)
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(
            what=f"{file} has no function {name!r}", hint=f"use one of: {_names(module)}"
        )
    inputs = getattr(module, "example_inputs", None)
    if not callable(inputs):
        raise UsageError(
            what=f"{file} has no example_inputs()",
            hint=f"add a function example_inputs() returning the arguments of {name}, a tuple",
        )
    made = inputs()
    return function, made if isinstance(made, tuple | list) else (made,)


def _import(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickles look their module up
    sys.path.insert(0, str(path.parent.resolve()))
    spec.loader.exec_module(module)
    return module


def _names(module: ModuleType) -> str:
    own = (
        name
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__
    )
    return ", ".join(name for name in own if not name.startswith("_"))


def main() -> None:
    """Run a command; a user's mistake is a message and exit code 2, not a traceback."""
    # torch says so wherever the CUDA toolkit is installed and a GPU is not; doctor says it better
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    try:
        app(prog_name="python -m trainfuse")
    except TrainfuseError as error:
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        console.print(f"error: {error}", style="red", markup=False)
        sys.exit(2)
