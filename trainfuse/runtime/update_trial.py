"""The traced update of one parameter by ATen, and the trial of a kernel against it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from autodiff.reference import run_nodes
from trainfuse.log import get_logger
from trainfuse.runtime.gate import Gate, References

if TYPE_CHECKING:
    from trainfuse.capture.update_templates import UpdateTemplate

Entry = dict[str, Tensor]
GATED_ELEMENTS = 1 << 22
"""Elements that the gate compares: parameters, small ones first, and the head of the next one."""
_log = get_logger("gate")


def update_by_aten(template: UpdateTemplate, entry: Entry) -> None:
    """Run the traced update of one parameter with ATen, in place; may be captured."""
    nodes, inputs, outputs = _parts(template)
    values = run_nodes(nodes, _flat(inputs, entry))
    for role, node in zip(template.written, outputs, strict=True):
        entry[role].copy_(values[node].view(entry[role].shape))


def compare_update(
    template: UpdateTemplate,
    sample: list[Entry],
    launch: Callable[[Sequence[Entry]], None],
    gate: Gate,
) -> str | None:
    """What is wrong with a launch's update of a sample, or None; the sample is written."""
    nodes, inputs, outputs = _parts(template)
    found = gate.all_references(nodes, [_flat(inputs, entry) for entry in sample], outputs)
    launch(sample)
    pairs: list[tuple[list[Tensor], References]] = []
    for entry, refs in zip(sample, found, strict=True):
        if refs is None:
            _log.warning("an update was not compared: no memory for its reference")
            continue
        written = zip(template.written, refs.native, strict=True)
        pairs.append(([entry[role].reshape(native.shape) for role, native in written], refs))
    return gate.compare_all(pairs)


def sample_of(entries: list[Entry], shared: Collection[str], aged: bool) -> list[Entry]:
    """Copies of the smallest parameters up to the gate's budget, the last one cut to fit.

    aged: with state as if after some steps. Before the first one it is zero, which hides what is
    done with it. shared: roles that all parameters of a bucket have in common.
    """
    chosen: list[Entry] = []
    left = GATED_ELEMENTS
    for entry in sorted(entries, key=lambda e: e["param"].numel()):
        count = entry["param"].numel()
        if count <= left:
            chosen.append({role: tensor.detach().clone() for role, tensor in entry.items()})
        elif left:
            chosen.append({role: _head(tensor, left) for role, tensor in entry.items()})
        left = max(left - count, 0)
    return [_aged(entry, shared) for entry in chosen] if aged else chosen


def _aged(entry: Entry, shared: Collection[str]) -> Entry:
    size = entry["grad"].abs().mean()

    def aged(role: str, tensor: Tensor) -> Tensor:
        if role in ("param", "grad") or role in shared:
            return tensor
        if role == "step":
            return tensor + 7
        spread = torch.linspace(0.25, 1.0, tensor.numel(), device=tensor.device)
        return torch.empty_like(tensor).copy_(size * spread.view(tensor.shape))

    return {role: aged(role, tensor) for role, tensor in entry.items()}


def _head(tensor: Tensor, count: int) -> Tensor:
    """A copy of the first elements; 0-d tensors whole."""
    return (tensor.detach().reshape(-1)[:count] if tensor.dim() else tensor.detach()).clone()


def _flat(inputs: dict[str, fx.Node], entry: Entry) -> dict[fx.Node, Tensor]:
    """The template's inputs: 1-D as it was traced, since a 0-d operand promotes otherwise."""
    return {
        node: entry[role].reshape(-1) if node.meta["val"].dim() else entry[role]
        for role, node in inputs.items()
    }


def _parts(
    template: UpdateTemplate,
) -> tuple[list[fx.Node], dict[str, fx.Node], list[fx.Node]]:
    """The template's computing nodes, its inputs by role, and its outputs."""
    graph = template.gm.graph
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    inputs = dict(zip(template.roles, graph.find_nodes(op="placeholder"), strict=True))
    results: Any = graph.output_node().args[0]
    return nodes, inputs, list(results[: len(template.written)])
