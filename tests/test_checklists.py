"""Every row of the checklists has a test, and every mark names a row."""

from __future__ import annotations

from tests.checklists import ROWS, covered

WITHOUT: dict[str, str] = {}
"""Rows that no test proves, and why."""


def test_every_row_has_a_test() -> None:
    missing = [row for row in ROWS if row not in covered() and row not in WITHOUT]
    assert not missing, f"rows without a test: {missing}"


def test_marks_name_rows() -> None:
    unknown = {row: tests for row, tests in covered().items() if row not in ROWS}
    assert not unknown


def test_reasons_are_not_kept_longer_than_needed() -> None:
    assert set(WITHOUT) <= set(ROWS) - set(covered())
