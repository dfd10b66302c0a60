"""`torch.compile(m, backend="trainfuse", options={...})`: regions, as a registered backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autodiff.graph import Refusal
from trainfuse import log
from trainfuse.capture.regions import region_backend
from trainfuse.capture.second_order import AGAIN
from trainfuse.options import MODE, resolve
from trainfuse.plans import Builder


def backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    **_: Any,
) -> Callable[..., Any]:
    """Compile one of Dynamo's graphs, forward and backward, under the options of the call.

    torch finds it by the entry point group `torch_dynamo_backends`, or once trainfuse is imported
    (a source tree on the path has no entry points). mode, options: as given to
    torch.compile, which forbids giving both. Raises OptionError; Dynamo wraps it.
    """
    settings = resolve(mode=mode or MODE, options=dict(options or {})).settings()
    if settings.chosen_backend == "none":
        return gm.forward
    build = Builder(settings)
    return region_backend(build, build.joint_passes, _notice)(gm, example_inputs)


def _notice(refusal: Refusal) -> None:
    more = ": it runs eagerly from now on" if refusal is AGAIN else ""
    log.say_once("capture", refusal.reason, f"{refusal.reason}{more}")


def register() -> None:
    """Make the backend known to torch under its name, unless its entry point already has."""
    if "trainfuse" not in torch.compiler.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(backend, "trainfuse")
