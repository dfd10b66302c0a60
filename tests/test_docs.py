"""The documentation says what the code does: tables match, links resolve, snippets run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from trainfuse import log
from trainfuse.fields import DUMPS, SWITCHES
from trainfuse.settings import settings

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "AGENTS.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))


def snippets(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


def test_switches_page_has_every_field_with_its_cost() -> None:
    page = (ROOT / "docs" / "switches.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", page, re.MULTILINE))
    assert rows == {name: switch.cost for name, switch in SWITCHES.items()}
    names = [name for name, switch in SWITCHES.items() if switch.is_token]
    for name in (*names, *DUMPS, *log.AREAS, *log.TORCHSCRIPT_NAMES):
        assert f"`{name}`" in page, name


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_resolve(path: Path) -> None:
    text = path.read_text()
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if not link.startswith("http"):
            assert (path.parent / link).exists(), link
    for example in re.findall(r"\bexamples/\w+\.py", text):
        assert (ROOT / example).is_file(), example


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_variables_on_the_page_exist(path: Path) -> None:
    text = path.read_text()
    known = {name.upper() for name in SWITCHES} | {"DISABLE", "ENABLE"}
    found = set(re.findall(r"TRAINFUSE_([A-Z_]+[A-Z])", text))
    assert found - {"NAME"} <= known
    for field in re.findall(r"trainfuse\.settings\.(\w+)", text):
        assert field in {*dir(settings), "name"}


def test_the_quickstart_runs() -> None:
    namespace: dict[str, Any] = {}
    blocks = snippets(ROOT / "docs" / "quickstart.md")
    assert len(blocks) == 4
    for block in blocks:
        exec(compile(block, "quickstart.md", "exec"), namespace)
    assert namespace["loss"].isfinite()
    assert namespace["train_step"].stats()["gate"] == "pass"


def test_the_testing_page_and_the_two_lines_of_the_readme_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    namespace: dict[str, Any] = {}
    blocks = snippets(ROOT / "docs" / "testing.md")
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "testing.md", "exec"), namespace)
    assert float(capsys.readouterr().out.split()[0]) <= 2.0
    (two,) = (b for b in snippets(ROOT / "README.md") if "assert_gradients_match" in b)
    assert two.count("\n") == 2
    x = torch.randn(3, 4, requires_grad=True)
    exec(compile(two, "README.md", "exec"), {"model": torch.nn.Linear(4, 2), "x": x})
