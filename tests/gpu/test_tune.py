"""Large kernels are timed in a few forms, once; nothing else notices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import trainfuse
from trainfuse.runtime import tune


def normed(x: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x, (x.shape[-1],), w)


def test_the_fastest_form_is_kept_and_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    x = torch.randn(16384, 5120, device="cuda", requires_grad=True)
    w = torch.ones(5120, device="cuda", requires_grad=True)
    timed: list[int] = []
    times = tune._times

    def counted(group, launchers):
        timed.append(len(launchers))
        return times(group, launchers)

    monkeypatch.setattr(tune, "_times", counted)
    expected = torch.autograd.grad(normed(x, w).square().sum(), (x, w))
    for turn in range(2):
        torch._dynamo.reset()
        compiled = trainfuse.compile(normed, options={"cache_dir": folder})
        state = torch.cuda.get_rng_state()
        out = compiled(x, w)
        assert torch.equal(torch.cuda.get_rng_state(), state)
        torch.testing.assert_close(
            torch.autograd.grad(out.square().sum(), (x, w)), expected, rtol=1e-3, atol=1e-3
        )
        if turn == 0:
            assert len(timed) == 2  # forward and backward
            assert min(timed) > 2
    assert len(timed) == 2, "the second time everything is remembered"
    assert len(list(folder.rglob("tuned-large-*.json"))) == 2


def test_small_kernels_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(tune, "_times", never)
    x = torch.randn(64, 64, device="cuda")
    torch.testing.assert_close(
        trainfuse.compile(normed)(x, torch.ones(64, device="cuda")),
        normed(x, torch.ones(64, device="cuda")),
    )
