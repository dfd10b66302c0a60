"""The options of one `compile` call: names, values, and what was given on purpose."""

from __future__ import annotations

from typing import Any

import pytest

from trainfuse.errors import OptionError
from trainfuse.options import CUDA_GRAPH, VERIFY, resolve
from trainfuse.settings import settings


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"verfy": "off"}, ["verfy", "'verify'", "memory_budget"]),
        ({"options": {"max_plan": 1}}, ["max_plan", "'max_plans'"]),
        ({"options": ["max_plans"]}, ["mapping"]),
        ({"dynamic": 1}, ["dynamic", "None"]),
        ({"fullgraph": "yes"}, ["fullgraph"]),
        ({"mode": "max"}, ["mode", "reduce-overhead"]),
        ({"backend": "cuda"}, ["backend", "inductor"]),
        ({"verify": -1}, ["verify", "kernels"]),
        ({"verify": "off", "options": {"verify": "step"}}, ["verify", "not both"]),
        ({"fullgraph": True, "options": {"fullgraph": False}}, ["fullgraph", "not both"]),
        ({"log": "program"}, ["log"]),
        ({"force_backend": "eager"}, ["force_backend"]),
    ],
)
def test_bad_call_options(keywords: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(OptionError) as caught:
        resolve(**keywords)
    assert all(word in str(caught.value) for word in words), caught.value


def test_call_options() -> None:
    options = resolve(dynamic=False, options={"fullgraph": True, "max_plans": 3}, rng="eager")
    assert (options.dynamic, options.fullgraph) == (False, True)
    held = options.settings()
    assert (held.max_plans, held.rng) == (3, "eager")
    assert options.layer.values == {"max_plans": 3, "rng": "eager"}


def test_a_default_given_on_purpose_differs_from_a_default() -> None:
    assert (VERIFY, CUDA_GRAPH) == ("kernels", "auto")
    settings.verify = "off"
    assert resolve(verify=VERIFY).settings().verify == "off"
    assert resolve(verify="kernels").settings().verify == "kernels"
