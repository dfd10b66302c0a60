"""What the leaves say: the log grammar, dumps, and errors."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import pytest

from trainfuse import log
from trainfuse.debug import dump
from trainfuse.errors import FusionError, TrainfuseError
from trainfuse.fields import Settings
from trainfuse.settings import current, settings


def test_debug_is_shorthand() -> None:
    assert log.parse(Settings(debug=1).log_text)["grouping"] == log.DECISIONS
    assert "cache" in log.parse(Settings(debug=2).log_text)
    assert Settings(debug=2).dump_path("program") is None
    assert Settings(debug=3).dump_path("program") == "-"
    assert Settings(debug=4).dump_path("kernel") == "-"
    assert Settings(debug=5).verifies
    assert not Settings(debug=4).verifies


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("", {}),
        ("program", {"program": log.GRAPHS}),
        (
            "program:>grouping:>>cache:>>>gate",
            {
                "program": log.GRAPHS,
                "grouping": log.DECISIONS,
                "cache": log.INTERNALS,
                "gate": log.EVERYTHING,
            },
        ),
        (">partition:graph_fuser", {"slicing": log.DECISIONS, "grouping": log.GRAPHS}),
        (
            ">partition:graph_fuser:>>kernel_cache",
            {"slicing": log.DECISIONS, "grouping": log.GRAPHS, "cache": log.INTERNALS},
        ),
        ("profiling_graph_executor_impl", {"program": log.GRAPHS}),
        ("cache:>>cache", {"cache": log.INTERNALS}),
    ],
)
def test_log_grammar(text: str, levels: dict[str, int]) -> None:
    assert log.parse(text) == levels


def test_log_levels_reach_the_loggers(capsys: pytest.CaptureFixture[str]) -> None:
    logger = log.get_logger("grouping")
    with settings.patch(log=">grouping"):
        logger.debug("a decision")
        logger.log(log.INTERNALS, "an internal")
    logger.debug("later")
    assert capsys.readouterr().err == "[trainfuse.grouping] a decision\n"
    assert logging.getLogger("trainfuse").propagate


def test_say_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        log.say_once("fallback", "test_say_once", "one line")
    assert [record.getMessage() for record in caplog.records] == ["one line"]


def test_dumps_go_to_a_folder_or_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "out"
    with settings.patch(dump=f"kernel({folder}),plan"):
        dump.emit(current(), "kernel", "forward 3", "x = 1")
        dump.emit(current(), "plan", "step", lambda: "one plan")
        dump.emit(current(), "graph", "step", lambda: pytest.fail("nobody asked"))
    assert (folder / "forward_3.py").read_text() == "x = 1\n"
    assert capsys.readouterr().err == "# ---- trainfuse plan: step\none plan\n"


@pytest.mark.parametrize(
    "value", [{"kernel": "out", "plan": None}, ["kernel", "plan"], "kernel,plan"]
)
def test_dump_takes_text_names_and_mappings(value: Any) -> None:
    with settings.patch(dump=value) as inside:
        assert [token.name for token in inside.dump] == ["kernel", "plan"]


def test_errors_say_what_where_and_the_fix_and_survive_pickling() -> None:
    error = FusionError(
        where="model.py:3", group="forward_1", stage="codegen", error="boom",
        operators="add", repro="repro.py",
    )  # fmt: skip
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert type(again) is FusionError
    assert str(error).splitlines() == [
        "forward_1 failed in codegen: boom",
        "  operators: add",
        "  at model.py:3",
        "  fix: leave fallback on to run it as ATen; repro: repro.py",
    ]
    assert isinstance(error, TrainfuseError)
