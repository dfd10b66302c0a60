"""What every test gets: the interpreter where there is no GPU, one thread, seeds, its own cache."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads it once, at its first import: before any test module is collected.
    os.environ["TRITON_INTERPRET"] = "1"
# A developer's own switches must not decide what the tests see.
for _name in [name for name in os.environ if name.startswith("TRAINFUSE_")]:
    _value = os.environ.pop(_name)
    if _name.startswith("TRAINFUSE_PROGRAMS"):  # no switch: which random programs to run
        os.environ[_name.removeprefix("TRAINFUSE_")] = _value

GOLDEN = Path(__file__).parent / "golden"

collect_ignore = [] if torch.cuda.is_available() else ["gpu"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--accept` rewrites the golden files (`make accept`)."""
    parser.addoption("--accept", action="store_true", help="rewrite tests/golden/")


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The session's own kernel cache: nothing is read from, or left in, the user's.

    Inductor's cache stays where it is: it is torch's, keyed by content, and slow to fill.
    """
    folder = tmp_path_factory.mktemp("trainfuse-cache")
    folder.chmod(0o700)
    os.environ["TRAINFUSE_CACHE_DIR"] = str(folder)
    torch.set_num_threads(1)
    return folder


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """Equal seeds for every test, and no setting that outlives one."""
    from trainfuse.settings import settings

    random.seed(0)
    torch.manual_seed(0)
    settings.reset()
    yield
    settings.reset()
    torch._dynamo.reset()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with tests/golden/NAME; with --accept, write it there.

    Call it as golden("pointwise/add.py", source). A missing file is a failure too.
    """
    accept = request.config.getoption("--accept")

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if accept:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return
        assert path.exists(), f"no golden file {name}: run `make accept` and review it"
        assert text == path.read_text(), f"{name} differs: run `make accept` and review the diff"

    return compare
