"""torch's own update of one parameter, traced: the template that runs over the whole list.

No update rule is written here: torch.optim's single-tensor update is traced on one parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from trainfuse.capture import compat

_TRACED_LENGTH = 7
"""Elements of the traced parameter: any length over 1 gives the same nodes."""


@dataclass(frozen=True, slots=True)
class UpdateTemplate:
    """torch's update of one parameter, traced.

    gm: functional ATen over 1-D tensors; placeholders are named by `roles`, outputs by `written`.
    roles: "param", "grad", state names, then "step" (fp32, 0-d, one per parameter; absent for
    optimizers without one) and "lr" (fp64, 0-d, shared by a parameter group).
    """

    gm: fx.GraphModule
    roles: tuple[str, ...]
    written: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OptimizerRow:
    """What trainfuse knows of one optimizer class.

    states: names of the per-parameter tensors for one param group.
    call: torch's functional update over lists, given a group and role -> tensor.
    options: what the template bakes in of a group; a change makes a new handle.
    refuse: why a group can't be taken, or None.
    """

    states: Callable[[Mapping[str, Any]], tuple[str, ...]]
    call: Callable[[Mapping[str, Any], dict[str, Tensor]], None]
    options: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    has_step: bool
    refuse: Callable[[Mapping[str, Any]], str | None]


def _adam_states(group: Mapping[str, Any]) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq") + (("max_exp_avg_sq",) if group["amsgrad"] else ())


def _call_adam(group: Mapping[str, Any], t: dict[str, Tensor]) -> None:
    # capturable: the branch that keeps step and lr on the device. The step is a double here, as
    # the host-side branch computes its bias corrections in Python floats.
    adam(
        [t["param"]],
        [t["grad"]],
        [t["exp_avg"]],
        [t["exp_avg_sq"]],
        [t["max_exp_avg_sq"]] if group["amsgrad"] else [],
        [t["step"]],
        foreach=False,
        capturable=True,
        fused=False,
        amsgrad=group["amsgrad"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=t["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
        decoupled_weight_decay=group["decoupled_weight_decay"],
    )


def _call_sgd(group: Mapping[str, Any], t: dict[str, Tensor]) -> None:
    sgd(
        [t["param"]],
        [t["grad"]],
        [t.get("momentum_buffer")],
        foreach=False,
        fused=False,
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=t["lr"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
    )


def _refuse_common(group: Mapping[str, Any]) -> str | None:
    if group.get("differentiable"):
        return "differentiable=True asks for gradients through the update"
    for name in ("betas", "weight_decay", "eps", "momentum"):
        value = group.get(name)
        if any(isinstance(v, Tensor) for v in (value if isinstance(value, tuple) else (value,))):
            return f"{name} is a tensor"
    if any(p.is_complex() for p in group["params"]):
        return "complex parameters"
    if any(p.is_sparse for p in group["params"]):
        return "sparse parameters"
    return None


def _refuse_sgd(group: Mapping[str, Any]) -> str | None:
    if group["momentum"] and group["dampening"]:
        return "SGD with dampening treats its first step apart"
    return _refuse_common(group)


_ADAM = OptimizerRow(
    _adam_states,
    _call_adam,
    itemgetter(
        "betas",
        "eps",
        "weight_decay",
        "amsgrad",
        "maximize",
        "decoupled_weight_decay",
        "differentiable",
    ),
    True,
    _refuse_common,
)
_SGD = OptimizerRow(
    lambda group: ("momentum_buffer",) if group["momentum"] else (),
    _call_sgd,
    itemgetter("momentum", "dampening", "weight_decay", "nesterov", "maximize", "differentiable"),
    False,
    _refuse_sgd,
)
ROWS: Mapping[type, OptimizerRow] = MappingProxyType(
    {torch.optim.Adam: _ADAM, torch.optim.AdamW: _ADAM, torch.optim.SGD: _SGD}
)


def trace_template(
    row: OptimizerRow, group: Mapping[str, Any], param_dtype: torch.dtype, grad_dtype: torch.dtype
) -> UpdateTemplate:
    """Trace torch's own update of one flat parameter into a functional ATen graph."""
    states = row.states(group)
    roles = ("param", "grad", *states, *(("step",) if row.has_step else ()), "lr")
    written = ("param", *states, *(("step",) if row.has_step else ()))

    def update(*tensors: Tensor) -> tuple[Tensor, ...]:
        named = dict(zip(roles, tensors, strict=True))
        for name in written:
            named[name] = named[name].clone()
        # a half gradient whose cast was folded into the update is cast here
        named["grad"] = named["grad"].to(param_dtype)
        step = named.get("step")
        if step is not None:
            named["step"] = step.double()
        with torch.no_grad(), compat.pretend_compiling():
            row.call(group, named)
        if step is not None:
            named["step"] = named["step"].to(step.dtype)
        return tuple(named[name] for name in written)

    def example(role: str) -> Tensor:
        if role == "step":
            return torch.ones((), dtype=torch.float32)
        if role == "lr":
            return torch.full((), 0.1, dtype=torch.float64)
        return torch.ones(_TRACED_LENGTH, dtype=grad_dtype if role == "grad" else param_dtype)

    traced = make_fx(
        torch.func.functionalize(update), tracing_mode="fake", _allow_non_fake_inputs=False
    )(*(example(role) for role in roles))
    for node, role in zip(traced.graph.find_nodes(op="placeholder"), roles, strict=True):
        node.name = role
    _tidy_template(traced)
    return UpdateTemplate(traced, roles, written)


def _tidy_template(traced: fx.GraphModule) -> None:
    """Drop copies, and keep the learning rate on the device where SGD would read it back."""
    aten = torch.ops.aten
    for node in list(traced.graph.nodes):
        if node.target in (aten.clone.default, aten.detach.default):
            node.replace_all_uses_with(node.args[0])
        elif node.target is aten.copy.default:
            node.replace_all_uses_with(node.args[1])
        elif node.target is aten.add.Tensor and isinstance(node.kwargs.get("alpha"), fx.Node):
            base, scaled = node.args
            scalar = node.kwargs["alpha"]
            assert scalar.target is aten._local_scalar_dense.default, scalar.target
            with traced.graph.inserting_before(node):
                product = traced.graph.call_function(aten.mul.Tensor, (scaled, scalar.args[0]))
            product.meta["val"] = scaled.meta["val"]
            node.args = (base, product)
            node.kwargs = {}
    # reading a scalar back counts as impure, so it would survive
    traced.graph.eliminate_dead_code(lambda n: n.op in ("placeholder", "output"))
    traced.graph.lint()
    traced.recompile()
