"""The watch over losses: it asks nothing of a device that is being captured."""

from __future__ import annotations

import pytest
import torch

from trainfuse.runtime.finite import EVERY, Watch


def test_a_captured_call_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the user's own graph of a compiled region would break at the 32nd call."""
    bad = torch.tensor(float("nan"))
    watch = Watch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not any(watch.see([bad]) for _ in range(2 * EVERY))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert [watch.see([bad]) for _ in range(EVERY)].index(True) == EVERY - 1
