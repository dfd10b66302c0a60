"""What tests of checks share."""

from __future__ import annotations

import pytest

from trainfuse import plans
from trainfuse.runtime.gate import Gate


@pytest.fixture
def fresh_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has passed yet, and every line may be said once more."""
    monkeypatch.setattr(plans, "GATE", Gate())
    monkeypatch.setattr("trainfuse.log._said", set())
