"""Dissolving subgraphs that are too small, or in which nothing was fused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import fx

from .graph import Refusal
from .subgraphs import UNSLICED, Slices, producers


def large_enough(
    groups: Sequence[list[fx.Node]], threshold: int, *, horizontal: bool
) -> list[list[fx.Node]]:
    """First inlining: drop groups with fewer than threshold executed nodes.

    groups: executed nodes only. horizontal: groups that read one tensor, not a scalar, count
    together, since they may share a kernel.
    """
    if not horizontal:
        return [group for group in groups if len(group) >= threshold]
    reads = [_shared_reads(group) for group in groups]
    together: Counter[fx.Node] = Counter()
    for group, values in zip(groups, reads, strict=True):
        for value in values:
            together[value] += len(group)
    return [
        group
        for group, values in zip(groups, reads, strict=True)
        if max([len(group), *(together[value] for value in values)]) >= threshold
    ]


def _shared_reads(group: list[fx.Node]) -> set[fx.Node]:
    inside = set(group)
    found: set[fx.Node] = set()
    for node in group:
        for parent in producers(node) - inside:
            value = parent.meta.get("val")
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                found.add(parent)
    return found


def dissolve_unfused(slices: Slices, fused: Collection[fx.Node]) -> Slices:
    """Second inlining: drop subgraphs of whose nodes, in either phase, none was fused.

    fused: the nodes of all fusion groups. The nodes dropped run as ATen, in their own place.
    """
    taken = set(fused)
    kept = [
        subgraph
        for subgraph in slices.subgraphs
        if not taken.isdisjoint(subgraph.nodes) or not taken.isdisjoint(subgraph.backward)
    ]
    if len(kept) == len(slices.subgraphs):
        return slices
    renumbered = {subgraph.index: index for index, subgraph in enumerate(kept)}
    owner = {
        node: index if index == UNSLICED else renumbered[index]
        for node, index in slices.owner.items()
        if index == UNSLICED or index in renumbered
    }
    refusals = [
        Refusal("slicing", "none of its subgraph was fused", f"{node.name}: {node.target}")
        for subgraph in slices.subgraphs
        if subgraph.index not in renumbered
        for node in subgraph.nodes
    ]
    return Slices(
        tuple(replace(subgraph, index=renumbered[subgraph.index]) for subgraph in kept),
        owner,
        (*slices.refusals, *refusals),
    )
