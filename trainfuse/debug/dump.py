"""TRAINFUSE_DUMP: show kernels, graphs, programs and plans, on stderr or in a folder."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

from trainfuse.fields import Settings

_SUFFIX = {"kernel": ".py", "program": ".py", "graph": ".txt", "plan": ".txt"}


def emit(settings: Settings, token: str, name: str, text: str | Callable[[], str]) -> None:
    """Write one text where `token` asks for it, if it does.

    name: what the text is of ("forward_3", "after recompute"); it names the file. text: the
    text, or a function that makes it, called only when somebody reads it.
    """
    target = settings.dump_path(token)
    if target is None:
        return
    body = text if isinstance(text, str) else text()
    if target == "-":
        sys.stderr.write(f"# ---- trainfuse {token}: {name}\n{body.rstrip()}\n")
        return
    target.mkdir(parents=True, exist_ok=True)
    path = target / (re.sub(r"[^\w.-]+", "_", name) + _SUFFIX[token])
    path.write_text(body.rstrip() + "\n")
