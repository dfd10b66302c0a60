"""Models of every kind that people train: tiny, from config, with random weights."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.gradients.zoo import language, nested, routing, vision
from trainfuse.testing import Training

ZOO: dict[str, Callable[[str], Training]] = {
    "llama": language.llama,
    "bert": language.bert,
    "t5": language.t5,
    "vit": vision.vit,
    "convnext": vision.convnext,
    "unet": vision.unet,
    "experts": routing.experts,
    "experts_routed": routing.experts_routed,
    "recommender": routing.recommender,
    "gan": nested.gan,
    "pinn": nested.pinn,
}

NESTED = ("gan", "pinn")
"""Their steps differentiate gradients: as regions, that is eager's work."""
NESTED_WHOLE = torch.__version__ >= "2.13"
"""Earlier versions trace no create_graph, so that such a step runs eagerly there."""
DATA_DEPENDENT = ("experts_routed",)
"""Their sizes are only known on the device: no CUDA graph."""
