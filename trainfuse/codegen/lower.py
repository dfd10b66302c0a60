"""A fusion group to a kernel: schedule, print, hash."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from functools import cache
from typing import Protocol

from torch import fx

from autodiff.graph import Refusal
from trainfuse.codegen import triton_lib
from trainfuse.codegen.builder import Group
from trainfuse.codegen.choices import MODEL, Choice
from trainfuse.codegen.ir import GroupKernel, Launch, Module
from trainfuse.codegen.schedules import column, full, nested, pointwise, row, row_column, segment
from trainfuse.codegen.targets import CodegenOptions, Target
from trainfuse.codegen.triton_ops import Unsupported
from trainfuse.codegen.triton_printer import print_module
from trainfuse.fusion.domains import DomainKind, infer
from trainfuse.fusion.plan import FusionGroup


class Schedule(Protocol):
    """A module that builds the kernels of one kind of group.

    LIKELY: choices that a short search compares with the cost model's. OTHERS: all the rest.
    """

    LIKELY: tuple[Choice, ...]
    OTHERS: tuple[Choice, ...]

    def build(
        self, group: Group, target: Target, options: CodegenOptions, choice: Choice
    ) -> Module:
        """The kernels; raises Unsupported."""
        ...


SCHEDULES: dict[DomainKind, Schedule] = {
    "pointwise": pointwise,
    "row": row,
    "column": column,
    "row_column": row_column,
    "full": full,
    "segment": segment,
    "nested": nested,
}


def candidates(
    group: Group, target: Target, options: CodegenOptions, *, thorough: bool
) -> list[tuple[Choice, GroupKernel]]:
    """Kernels of a group to be timed, the cost model's first: the likely few, or all.

    Empty when the group has no kernel. Choices that give the same kernel count once.
    """
    schedule = SCHEDULES[group.domain.kind]
    choices = (MODEL, *schedule.LIKELY, *(schedule.OTHERS if thorough else ()))
    found: dict[str, tuple[Choice, GroupKernel]] = {}
    for choice in choices:
        kernel = lower(group, target, options, choice)
        if isinstance(kernel, GroupKernel):
            found.setdefault(kernel.key, (choice, kernel))
    modelled = any(choice is MODEL for choice, _ in found.values())
    return list(found.values()) if modelled else []


def lower(
    group: Group,
    target: Target,
    options: CodegenOptions | None = None,
    choice: Choice = MODEL,
) -> GroupKernel | Refusal:
    """The kernel of a group for a target, or why it has none.

    choice: knobs to set by hand; those of `choices` are worth a try. Pure: equal groups give equal
    text, hence equal keys.
    """
    try:
        module = SCHEDULES[group.domain.kind].build(
            group, target, options or CodegenOptions(), choice
        )
    except Unsupported as refusal:
        node = refusal.node
        return Refusal("codegen", refusal.reason, f"{node.name}: {node.target}")
    return assemble(group.name, module, target)


def assemble(name: str, module: Module, target: Target) -> GroupKernel:
    """Text, launches and key of a module of kernels."""
    source = print_module(module, target)
    launches = tuple(
        Launch(kernel.name, kernel.grid, kernel.args, kernel.num_warps, kernel.max_registers)
        for kernel in module.kernels
    )
    workspaces = tuple((space.shape, space.dtype) for space in module.workspaces)
    facts = repr((source, launches, workspaces, library_digest()))
    key = hashlib.sha256(facts.encode()).hexdigest()
    return GroupKernel(
        key, name, source, launches, workspaces, module.in_place, module.whole_vectors
    )


@cache
def library_digest() -> str:
    """Hash of the helpers that kernels call: a change there is a change of every kernel."""
    return hashlib.sha256(inspect.getsource(triton_lib).encode()).hexdigest()


def lower_nodes(
    nodes: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    target: Target,
    options: CodegenOptions | None = None,
    name: str = "group",
    choice: Choice = MODEL,
) -> GroupKernel | Refusal:
    """Lower nodes that are not part of a plan: builds the group, then the kernel."""
    domain = infer(nodes)
    if isinstance(domain, Refusal):
        return domain
    members = set(nodes)
    inputs = dict.fromkeys(
        operand for node in nodes for operand in node.all_input_nodes if operand not in members
    )
    group = FusionGroup(name, "forward", tuple(nodes), tuple(inputs), tuple(outputs), domain)
    return lower(group, target, options, choice)
