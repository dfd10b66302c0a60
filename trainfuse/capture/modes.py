"""Modes that Dynamo's graphs set by calls: a graph that raises in between would leave them set."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from trainfuse.capture import compat


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Within, grad mode and autocast may be left as they are by a graph that raises.

    They are put back then, as the ends of the user's own blocks would have done. Autocast's depth,
    too: while it is not zero, casts of parameters are cached, and go on being read when those are
    updated.
    """
    grad, autocasts, depth = torch.is_grad_enabled(), compat.autocasts(), _autocast_depth()
    try:
        yield
    except BaseException:
        torch.set_grad_enabled(grad)
        for kind, enabled, dtype in autocasts:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        for _ in range(_autocast_depth() - depth):
            torch.autocast_decrement_nesting()
        if depth == 0:
            torch.clear_autocast_cache()
        raise


def _autocast_depth() -> int:
    inner = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return inner - 1
