"""Training graphs: slicing, derivation, recompute and the reference evaluator."""

from __future__ import annotations

from .derive import cleanup, decompose
from .graph import InputFact, NodeFacts, Phase, Refusal, TrainingGraph
from .inlining import dissolve_unfused
from .ops import differentiable_ops, is_simple_map, lookup
from .recompute import RecomputeReport, plan_recompute
from .reference import run_graph, run_nodes
from .rng import functionalize_dropout
from .slicing import slice_graph
from .split import partition
from .subgraphs import UNSLICED, Slices, Subgraph
from .verify import GraphDefect, verify

__all__ = [
    "UNSLICED",
    "GraphDefect",
    "InputFact",
    "NodeFacts",
    "Phase",
    "RecomputeReport",
    "Refusal",
    "Slices",
    "Subgraph",
    "TrainingGraph",
    "cleanup",
    "decompose",
    "differentiable_ops",
    "dissolve_unfused",
    "functionalize_dropout",
    "is_simple_map",
    "lookup",
    "partition",
    "plan_recompute",
    "run_graph",
    "run_nodes",
    "slice_graph",
    "verify",
]
