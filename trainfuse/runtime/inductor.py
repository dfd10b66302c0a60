"""The inductor backend: each phase's graph, whole, through torch's own compiler."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx

from autodiff import ops
from autodiff.graph import Phase, TrainingGraph
from autodiff.reference import run_nodes
from trainfuse.capture.compat import real_tensors
from trainfuse.log import get_logger, say_once
from trainfuse.runtime.emit import operators
from trainfuse.runtime.fallback import Boundary, Failure
from trainfuse.runtime.layout import as_planned, strayed
from trainfuse.runtime.memory import is_view

_log = get_logger("program")
_OPTIONS = {"config_patches": {"fallback_random": True, "triton.cudagraphs": False}}
"""Random operators stay ATen, so that the masks are eager's; replay is the plan's business."""

_READS_A_NUMBER = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.scalar_tensor.default,
)
"""All that a `return loss.item()` leaves behind the update; Inductor takes no such graph."""
_F32 = torch.float32
_MANY_ROWS = 64  # a shorter sum in order is as close as a cascade


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive nodes of one phase, between effects, compiled as one graph."""

    name: str
    phase: Phase
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


def cut(tg: TrainingGraph) -> list[Segment | fx.Node]:
    """Split a graph at phase changes and at effects (which stay nodes).

    A segment's inputs are values from outside it, its outputs whatever outlives it; a view that
    only a later segment needs is still made where the graph makes it.
    """
    runs: list[list[fx.Node]] = []
    for node in tg.nodes():
        effect = ops.lookup(node.target).kind == "effect"
        if not runs or effect or _ends(tg, runs[-1][-1], node):
            runs.append([])
        runs[-1].append(node)
    users = tg.graph.output_node()
    parts: list[Segment | fx.Node] = []
    for nodes in runs:
        if ops.lookup(nodes[0].target).kind == "effect":
            parts.append(nodes[0])
            continue
        inside = set(nodes)
        reads = dict.fromkeys(n for node in nodes for n in node.all_input_nodes)
        inputs = tuple(n for n in reads if n not in inside and n.op != "get_attr")
        outputs = tuple(
            n for n in nodes if any(user is users or user not in inside for user in n.users)
        )
        if outputs:
            phase = tg.phase(nodes[0])
            name = f"{phase}_graph_{len(parts)}"
            parts.append(Segment(name, phase, tuple(nodes), inputs, outputs))
    return parts


def _ends(tg: TrainingGraph, before: fx.Node, node: fx.Node) -> bool:
    return ops.lookup(before.target).kind == "effect" or tg.phase(before) != tg.phase(node)


def worth_compiling(segment: Segment) -> bool:
    """Whether a segment computes anything, and only hands over plain tensors."""
    plain = all(isinstance(n.meta.get("val"), Tensor) for n in (*segment.inputs, *segment.outputs))
    return plain and not all(is_view(n) or n.target in _READS_A_NUMBER for n in segment.nodes)


def segment_module(tg: TrainingGraph, segment: Segment) -> fx.GraphModule:
    """The segment as a module of its own; returns a tuple."""
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in segment.inputs:
        mapping[node] = graph.placeholder(node.name)
        mapping[node].meta = dict(node.meta)

    def visit(node: fx.Node) -> fx.Node:
        if node not in mapping:
            assert node.op == "get_attr", f"{node.name} is read before it is made"
            mapping[node] = graph.node_copy(node)
        return mapping[node]

    for node in segment.nodes:
        for read in node.all_input_nodes:  # constants must precede the node that reads them
            visit(read)
        mapping[node] = (
            _staged_sum(graph, node, visit)
            or _product_apart(graph, node, visit)
            or graph.node_copy(node, visit)
        )
    graph.output(tuple(mapping[n] for n in segment.outputs))
    for node in graph.nodes:
        # what is made again has been chosen: torch 2.14 would choose anew, by checkpoints' tags
        node.meta.pop("recompute", None)
    return fx.GraphModule(tg.gm, graph)


def _product_apart(
    graph: fx.Graph, node: fx.Node, visit: Callable[[fx.Node], fx.Node]
) -> fx.Node | None:
    """A sum of a matrix product and another matrix, out of Inductor's sight as such; else None.

    As `addmm`, which it would make of it, a CPU adds a small gradient to a large one row by row,
    rounded each time: over 294 rows 12 times eager's error.
    """
    if node.target is not torch.ops.aten.add.Tensor or node.kwargs:
        return None
    product = next((n for n in node.args if _is_a_product(n)), None)
    if product is None:
        return None
    lift, drop = torch.ops.aten.unsqueeze.default, torch.ops.aten.squeeze.dim
    hidden = graph.call_function(lift, (visit(product), 0))
    reads: list[Any] = [
        hidden if n is product else visit(n) if isinstance(n, fx.Node) else n for n in node.args
    ]
    total = graph.call_function(drop, (graph.call_function(node.target, tuple(reads)), 0))
    total.meta = dict(node.meta)
    return total


def _is_a_product(value: object) -> TypeGuard[fx.Node]:
    if not isinstance(value, fx.Node) or value.target is not torch.ops.aten.mm.default:
        return False
    return value.meta["val"].device.type == "cpu"


def _staged_sum(
    graph: fx.Graph, node: fx.Node, visit: Callable[[fx.Node], fx.Node]
) -> fx.Node | None:
    """A long fp32 sum over more than a row (a bias gradient), as sums of sums; else None.

    Inductor's C++ adds up to 4096 rows one after the other, ATen in a cascade: over 768 rows that
    is seven times eager's error. A dimension at a time, and a long first one in two steps of about
    the square root each, are as close as ATen.
    """
    if node.target is not torch.ops.aten.sum.dim_IntList or node.kwargs:
        return None
    arguments = list[Any](node.args)
    x, keepdim = arguments[0], len(arguments) > 2 and arguments[2]
    given: Sequence[int] | None = arguments[1]
    value = x.meta.get("val") if isinstance(x, fx.Node) else None
    if not isinstance(value, Tensor) or value.device.type != "cpu" or value.dtype is not _F32:
        return None
    sizes = list(value.shape)
    dims = sorted({dim % value.ndim for dim in given or range(value.ndim)}) if sizes else []
    if value.ndim < 2 or dims == [value.ndim - 1] or not all(isinstance(n, int) for n in sizes):
        return None  # the elements of a row are added by lanes
    if math.prod(sizes[dim] for dim in dims) < _MANY_ROWS:
        return None
    x = visit(x)
    for dim in reversed(dims):
        if dim == 0 and sizes[0] >= _MANY_ROWS:
            x = _in_two_steps(graph, x, sizes)
        else:
            x = graph.call_function(torch.ops.aten.sum.dim_IntList, (x, [dim], True))
        sizes[dim] = 1
    total = x if keepdim else graph.call_function(torch.ops.aten.squeeze.dims, (x, dims))
    total.meta = dict(node.meta)
    return total


def _in_two_steps(graph: fx.Graph, x: fx.Node, sizes: Sequence[int]) -> fx.Node:
    """The sum over the first dimension, which is kept."""
    rows = sizes[0]
    root = math.isqrt(rows)
    inner = next((n for n in range(root, root // 4, -1) if rows % n == 0), root)
    count = -(-rows // inner)
    if rest := count * inner - rows:  # rows of zeros, which Inductor reads from nowhere
        pad = [*(0, 0) * (len(sizes) - 1), 0, rest]
        x = graph.call_function(torch.ops.aten.constant_pad_nd.default, (x, pad))
    parts = [count, inner, *sizes[1:]]
    split = graph.call_function(torch.ops.aten.view.default, (x, parts))
    partial = graph.call_function(torch.ops.aten.sum.dim_IntList, (split, [1]))
    return graph.call_function(torch.ops.aten.sum.dim_IntList, (partial, [0], True))


class SegmentCall:
    """A compiled segment as the program calls it; `failed` once its first call fell to ATen."""

    def __init__(
        self, segment: Segment, key: str, code: Callable[..., Sequence[Any]], boundary: Boundary
    ) -> None:
        self.segment, self._key, self._code, self._boundary = segment, key, code, boundary
        self._trusted = False
        self._strayed: tuple[int, ...] = ()
        self.failed = False

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        """The segment's outputs, laid out as planned: other code was compiled for that."""
        nodes = self.segment.outputs
        if self._trusted:
            return as_planned(nodes, self._code(*inputs), self._strayed)
        result = self._boundary.attempt(lambda: self._code(*inputs), "inductor")
        if not isinstance(result, str):
            self._trusted = True
            self._strayed = strayed(nodes, result)
            return as_planned(nodes, result, self._strayed)
        self.failed = True
        self._boundary.record(self._key, _failure(self.segment, result))
        values = run_nodes(self.segment.nodes, dict(zip(self.segment.inputs, inputs, strict=True)))
        return [values[node] for node in self.segment.outputs]


def compile_segment(tg: TrainingGraph, segment: Segment, boundary: Boundary) -> SegmentCall | None:
    """Inductor's code for a segment, or None, with one line of explanation, where it has none."""
    module = segment_module(tg, segment)
    key = segment_key(module)
    if key in boundary.failures:
        return None
    result = boundary.attempt(lambda: _compile(module, segment), "inductor")
    if isinstance(result, str):
        if not boundary.allowed:
            boundary.record(key, _failure(segment, result))
        hint = ": no C++ compiler (install g++)" if "Compiler" in result else f": {result}"
        line = f"Inductor can't compile here{hint}; those parts of the step run as plain ATen"
        say_once("fallback", f"inductor {hint}", line)
        return None
    _log.info("compiled %s with Inductor, %d nodes", segment.name, len(segment.nodes))
    return SegmentCall(segment, key, result, boundary)


def segment_key(module: fx.GraphModule) -> str:
    """A hash of what is compiled: operators, constants, shapes, strides and dtypes."""
    layouts = [
        (v.shape, v.stride(), v.dtype, v.device)
        for node in module.graph.nodes
        if isinstance(v := node.meta.get("val"), Tensor)
    ]
    return hashlib.sha256(f"{module.code}{layouts}".encode()).hexdigest()


def _failure(segment: Segment, problem: str) -> Failure:
    return Failure(segment.name, "inductor", problem, operators(segment.nodes))


def _compile(module: fx.GraphModule, segment: Segment) -> Callable[..., Sequence[Any]]:
    examples = [_example(n.meta["val"]) for n in segment.inputs]
    # constants of the graph are copied, which can't be done amid the capture's fake tensors
    with torch.no_grad(), real_tensors():
        # documented by torch as its entry point for other compilers, underscore or not
        return torch._inductor.standalone_compile(
            module, examples, dynamic_shapes="from_example_inputs", options=_OPTIONS
        )


def _example(value: Tensor) -> Tensor:
    """A real tensor of the same layout; only its metadata is looked at."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
