"""Training graphs for tests: traced from small functions, or written node by node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from autodiff.graph import InputFact, NodeFacts, Phase, TrainingGraph
from autodiff.verify import verify


def training_graph(
    fn: Callable[..., Any],
    args: Sequence[torch.Tensor],
    trainable: Sequence[int],
    *,
    table: dict[Any, Any] | None = None,
) -> TrainingGraph:
    """Trace one step of fn: its outputs, then gradients of args[trainable].

    The cotangents are extra inputs of kind "tangent", one for each differentiable output.
    """
    mode = FakeTensorMode()
    fakes = [
        mode.from_tensor(arg.detach()).requires_grad_(index in trainable)
        for index, arg in enumerate(args)
    ]
    with torch.enable_grad():
        probe = _tuple(
            fn(*[arg.detach().clone().requires_grad_(i in trainable) for i, arg in enumerate(args)])
        )
    tangents = [mode.from_tensor(torch.zeros_like(out)) for out in probe if out.requires_grad]
    marks: list[set[str]] = []

    def joint(primals: list[torch.Tensor], cotangents: list[torch.Tensor]) -> list[torch.Tensor]:
        outputs = _tuple(fn(*primals))
        returned = [out.detach() for out in outputs]
        proxy_mode = get_proxy_mode()
        assert proxy_mode is not None
        marks.append({node.name for node in proxy_mode.tracer.graph.nodes})
        differentiable = [out for out in outputs if out.requires_grad]
        setup_stacktrace_preservation_hooks([out.grad_fn for out in differentiable])
        gradients = torch.autograd.grad(
            differentiable, [primals[i] for i in trainable], cotangents, allow_unused=True
        )
        return [*returned, *gradients]

    with torch.fx.traceback.preserve_node_meta(), mode:
        gm = make_fx(joint, decomposition_table=table or {})(fakes, tangents)
    return _label(gm, marks[0], len(args), trainable, len(probe))


def step_graph(
    fn: Callable[..., Any],
    shapes: Sequence[tuple[tuple[int, ...], torch.dtype]],
    trainable: Sequence[int],
    table: dict[Any, Any] | None = None,
) -> TrainingGraph:
    """Trace fn (a loss, or a tuple that begins with it) and its gradients, as whole steps do.

    Nothing is allocated, and the cotangent is known: 1. shapes: of each argument, with its dtype.
    table: decompositions to trace with.
    """
    mode = FakeTensorMode()
    marks: list[set[str]] = []

    def joint(primals: list[torch.Tensor]) -> list[torch.Tensor]:
        outputs = _tuple(fn(*primals))
        proxy_mode = get_proxy_mode()
        assert proxy_mode is not None
        marks.append({node.name for node in proxy_mode.tracer.graph.nodes})
        setup_stacktrace_preservation_hooks([outputs[0].grad_fn])
        gradients = torch.autograd.grad(outputs[0], [primals[i] for i in trainable])
        return [*(out.detach() for out in outputs), *gradients]

    with mode:
        fakes = [
            torch.empty(shape, dtype=dtype).requires_grad_(index in trainable)
            for index, (shape, dtype) in enumerate(shapes)
        ]
    rules = {op: rule for op, rule in (table or {}).items() if "masked_fill_" not in str(op)}
    with torch.fx.traceback.preserve_node_meta(), mode:
        gm = make_fx(joint, decomposition_table=rules)(fakes)
    return _label(gm, marks[0], len(shapes), trainable, 1)


def _tuple(value: Any) -> tuple[torch.Tensor, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _label(
    gm: fx.GraphModule, forward: set[str], num_args: int, trainable: Sequence[int], num_outputs: int
) -> TrainingGraph:
    gm.graph.eliminate_dead_code()  # parts of tuples that are None have no value
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.masked_fill_.Scalar):
        node.target = torch.ops.aten.masked_fill.Scalar  # label smoothing's, of a fresh value
    facts: dict[fx.Node, NodeFacts] = {}
    by_sequence: dict[int, str] = {}
    inputs: list[InputFact] = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            index = len(inputs)
            kind = (
                "tangent" if index >= num_args else "parameter" if index in trainable else "input"
            )
            inputs.append(InputFact(node.name, kind, None, index in trainable))
        if node.op != "call_function":
            continue
        sequence = node.meta.get("seq_nr", -1)
        if node.name in forward:
            by_sequence[sequence] = node.name
            facts[node] = NodeFacts("forward")
        else:
            facts[node] = NodeFacts("backward", by_sequence.get(sequence))
    outputs = list(gm.graph.output_node().args[0])
    gm.graph.output_node().args = (tuple(outputs),)
    gm.recompile()
    tg = TrainingGraph(gm, facts, tuple(inputs), len(outputs))
    assert num_outputs <= len(outputs)
    return verify(tg, "tracing")


class Builder:
    """Write a training graph node by node: `b.input`, `b.call`, `b.finish`."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.mode = FakeTensorMode()
        self.inputs: list[InputFact] = []
        self.facts: dict[fx.Node, NodeFacts] = {}

    def input(
        self, *shape: int, trainable: bool = True, dtype: torch.dtype = torch.float32
    ) -> fx.Node:
        """A new placeholder of the given shape."""
        node = self.graph.placeholder(f"arg{len(self.inputs)}")
        with self.mode:
            node.meta["val"] = torch.empty(shape or (4, 4), dtype=dtype)
        kind = "parameter" if trainable else "input"
        self.inputs.append(InputFact(node.name, kind, None, trainable))
        return node

    def call(
        self,
        target: Any,
        *args: Any,
        phase: Phase = "forward",
        of: fx.Node | None = None,
        **kwargs: Any,
    ) -> fx.Node:
        """A new call whose value is inferred; of: the forward node it derives from."""
        node = self.graph.call_function(target, args, kwargs)
        values = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode:
            node.meta["val"] = target(*values[0], **values[1])
        self.facts[node] = NodeFacts(phase, None if of is None else of.name)
        return node

    def finish(self, *outputs: fx.Node, mutations: Sequence[fx.Node] = ()) -> TrainingGraph:
        """The verified graph returning outputs; the last len(mutations) of them are written."""
        output = self.graph.output(tuple(outputs))
        output.meta["val"] = tuple(node.meta.get("val") for node in outputs)
        gm = fx.GraphModule({}, self.graph)
        return verify(
            TrainingGraph(
                gm,
                self.facts,
                tuple(self.inputs),
                len(outputs) - len(mutations),
                tuple(node.name for node in mutations),
            )
        )
