"""The rooms import in one direction, and autodiff stands alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("capture", "fusion", "codegen", "runtime", "debug", "integrations")
LEAVES = ("errors", "tokens", "log", "versions", "fields", "settings", "options")
# What each piece outside the rooms may see, beside the leaves.
TOP = {
    "pipeline": {"capture", "fusion", "codegen", "runtime", "debug"},
    "plans": {"pipeline", "capture", "runtime", "debug"},
    "api": {"plans", "capture", "runtime", "debug"},
    "lightning": {"integrations"},
    "testing": {"api"},
    "__main__": {"integrations"},
}
SOURCES = sorted(
    path.relative_to(ROOT)
    for room in ("autodiff", "trainfuse")
    for path in (ROOT / room).rglob("*.py")
)


class _Executed(ast.NodeTransformer):
    """Drops `if TYPE_CHECKING:` blocks: an annotation may name what comes later."""

    def visit_If(self, node: ast.If) -> ast.AST | None:
        test = node.test
        return None if isinstance(test, ast.Name) and test.id == "TYPE_CHECKING" else node


def imports(path: Path) -> Iterator[str]:
    """Absolute names of the modules that a file imports, wherever in the file."""
    tree = _Executed().visit(ast.parse((ROOT / path).read_text(encoding="utf-8")))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = ".".join(path.parts[: len(path.parts) - node.level]) if node.level else ""
            module = ".".join(filter(None, (package, node.module)))
            yield module
            if module in ("trainfuse", "autodiff"):
                yield from (f"{module}.{alias.name}" for alias in node.names)


def piece(module: str) -> str:
    """`runtime` of trainfuse.runtime.cache, `settings` of trainfuse.settings; "" of trainfuse."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def allowed(importer: str) -> set[str]:
    """Pieces of trainfuse that one piece may import."""
    if importer in LEAVES:
        return set(LEAVES[: LEAVES.index(importer)])
    if importer == "integrations":
        # the end of the line: it sees the public surface, and what it prints
        return {*LEAVES, *ROOMS, "", "api", "plans", "testing"}
    if importer in ROOMS:
        return {*LEAVES, *ROOMS[: ROOMS.index(importer) + 1]}
    if importer == "":
        return {*LEAVES, "api", "debug", "integrations", "testing"}
    return {*LEAVES, *TOP[importer], importer, ""}


@pytest.mark.parametrize("path", [p for p in SOURCES if p.parts[0] == "autodiff"], ids=str)
def test_autodiff_imports_torch_and_the_standard_library_only(path: Path) -> None:
    roots = {name.partition(".")[0] for name in imports(path)}
    assert roots <= {"torch", "autodiff", *sys.stdlib_module_names}


@pytest.mark.parametrize("path", [p for p in SOURCES if p.parts[0] == "trainfuse"], ids=str)
def test_trainfuse_imports_only_leftwards(path: Path) -> None:
    importer = (
        path.parts[1].removesuffix(".py")
        if path.name != "__init__.py" or len(path.parts) > 2
        else ""
    )
    seen = set()
    for name in imports(path):
        if name.partition(".")[0] != "trainfuse":
            continue
        seen.add(piece(name))
    names = {name for name in seen if (ROOT / "trainfuse" / name).is_dir() or _is_module(name)}
    assert names - {""} <= allowed(importer), f"{path} looks to the right"


def _is_module(name: str) -> bool:
    return (ROOT / "trainfuse" / f"{name}.py").is_file()


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_private_torch_stays_in_the_compat_modules(path: Path) -> None:
    if path.name == "_compat.py" or path.name.startswith("compat"):
        assert any(name.startswith("torch._") for name in imports(path)), "the file has no purpose"
        return
    private = [name for name in imports(path) if name.startswith("torch._")]
    assert private == []


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_files_stay_readable(path: Path) -> None:
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 600
    if lines and path.name != "__init__.py":
        assert "from __future__ import annotations" in lines


def test_autodiff_is_usable_alone() -> None:
    """Where triton can't be imported at all; torch itself imports it when it can."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import autodiff; print('trainfuse' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "False", done.stderr
