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
    optimizers without one) and the `shared` ones.
    shared: "lr" and what else a scheduler may change (fp64, 0-d, one a parameter group).
    """

    gm: fx.GraphModule
    roles: tuple[str, ...]
    written: tuple[str, ...]
    shared: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OptimizerRow:
    """What trainfuse knows of one optimizer class.

    states: names of the per-parameter tensors for one param group.
    call: torch's functional update over lists, given a group and role -> tensor.
    options: what the template bakes in of a group; a change makes a new handle.
    scalars: role -> how to read a group's number that schedulers change (OneCycleLR moves beta1 or
    the momentum); it stays out of the template, on the device.
    refuse: why a group can't be taken, or None.
    """

    states: Callable[[Mapping[str, Any]], tuple[str, ...]]
    call: Callable[[Mapping[str, Any], dict[str, Tensor]], None]
    options: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    scalars: Mapping[str, Callable[[Mapping[str, Any]], float | Tensor]]
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
        "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay", "differentiable"
    ),
    {
        "lr": itemgetter("lr"),
        "beta1": lambda group: group["betas"][0],
        "beta2": lambda group: group["betas"][1],
    },
    True,
    _refuse_common,
)
_SGD = OptimizerRow(
    lambda group: ("momentum_buffer",) if group["momentum"] else (),
    _call_sgd,
    # whether there is a momentum decides on the state; how large it is doesn't
    lambda group: (
        bool(group["momentum"]),
        *itemgetter("dampening", "weight_decay", "nesterov", "maximize", "differentiable")(group),
    ),
    {"lr": itemgetter("lr"), "momentum": itemgetter("momentum")},
    False,
    _refuse_sgd,
)
ROWS: Mapping[type, OptimizerRow] = MappingProxyType(
    {torch.optim.Adam: _ADAM, torch.optim.AdamW: _ADAM, torch.optim.SGD: _SGD}
)


_STAND_INS = {"beta1": 0.8125371, "beta2": 0.9312543, "momentum": 0.7543219}
"""Numbers that no update contains by itself: where one is found, its role belongs."""


def _with_stand_ins(group: Mapping[str, Any]) -> dict[str, Any]:
    changed = dict(group)
    if "betas" in group:
        changed["betas"] = (_STAND_INS["beta1"], _STAND_INS["beta2"])
    if group.get("momentum"):
        changed["momentum"] = _STAND_INS["momentum"]
    return changed


def _stands_in(value: Any) -> bool:
    return isinstance(value, float) and any(value in (v, 1 - v) for v in _STAND_INS.values())


_SHARED: dict[Any, UpdateTemplate] = {}
_MOST_SHARED = 64


def template_of(
    row: OptimizerRow, group: Mapping[str, Any], param_dtype: torch.dtype, grad_dtype: torch.dtype
) -> UpdateTemplate:
    """The template of a group's update: the same, not to be changed, for all groups like it."""
    # as text, 0.0 is neither -0.0 nor False, and nan is itself
    key = (row.call, repr(row.options(group)), param_dtype, grad_dtype)
    if key not in _SHARED:
        if len(_SHARED) == _MOST_SHARED:
            del _SHARED[next(iter(_SHARED))]
        _SHARED[key] = trace_template(row, group, param_dtype, grad_dtype)
    return _SHARED[key]


def trace_template(
    row: OptimizerRow, group: Mapping[str, Any], param_dtype: torch.dtype, grad_dtype: torch.dtype
) -> UpdateTemplate:
    """Trace torch's own update of one flat parameter into a functional ATen graph."""
    states = row.states(group)
    # without a momentum there is no buffer, and no number to put anywhere
    shared = tuple(r for r in row.scalars if r != "momentum" or group["momentum"])
    stepped = ("step",) if row.has_step else ()
    roles = ("param", "grad", *states, *stepped, *shared)
    written = ("param", *states, *stepped)
    traced_group = _with_stand_ins(group)

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
            row.call(traced_group, named)
        if step is not None:
            named["step"] = named["step"].to(step.dtype)
        return tuple(named[name] for name in written)

    def example(role: str) -> Tensor:
        if role == "step":
            return torch.ones((), dtype=torch.float32)
        if role in shared:
            return torch.full((), 0.1, dtype=torch.float64)
        return torch.ones(_TRACED_LENGTH, dtype=grad_dtype if role == "grad" else param_dtype)

    traced = make_fx(
        torch.func.functionalize(update), tracing_mode="fake", _allow_non_fake_inputs=False
    )(*(example(role) for role in roles))
    placeholders = dict(zip(roles, traced.graph.find_nodes(op="placeholder"), strict=True))
    for role, node in placeholders.items():
        node.name = role
    _Scalars(traced, {r: n for r, n in placeholders.items() if r in _STAND_INS}).lift()
    _tidy_template(traced)
    return UpdateTemplate(traced, roles, written, shared)


class _Scalars:
    """Puts the device's scalars where the trace has numbers that stand in for them.

    Only a number itself and its difference to 1 are known; any other use of a stand-in is an error
    of the trace, not a wrong update.
    """

    def __init__(self, traced: fx.GraphModule, roles: Mapping[str, fx.Node]) -> None:
        self.graph = traced.graph
        self.roles = roles

    def lift(self) -> None:
        """Rewrite every node that has a stand-in among its arguments."""
        for node in list(self.graph.nodes):
            if node.op != "call_function":
                continue
            if any(_stands_in(a) for a in (*node.args, *node.kwargs.values())):
                with self.graph.inserting_before(node):
                    made = self._rewritten(node)
                made.meta = dict(node.meta)
                node.replace_all_uses_with(made)
                self.graph.erase_node(node)
        left = [n for n in self.graph.nodes for a in (*n.args, *n.kwargs.values()) if _stands_in(a)]
        assert not left, f"stand-ins were left in {left}"

    def _scalar(self, number: Any) -> fx.Node:
        """The fp64 0-d node for a stand-in or its difference to 1."""
        for role, node in self.roles.items():
            if number == _STAND_INS[role]:
                return node
            if number == 1 - _STAND_INS[role]:
                return self._call(torch.ops.aten.rsub.Scalar, (node, 1), node.meta["val"])
        raise AssertionError(f"{number} stands in for nothing")

    def _call(self, target: Any, args: tuple[Any, ...], value: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = value
        return node

    def _rewritten(self, node: fx.Node) -> fx.Node:
        aten = torch.ops.aten
        call, args = self.graph.call_function, node.args
        value = node.meta["val"]
        match node.target:
            case aten.mul.Tensor:
                return call(aten.mul.Tensor, (args[0], self._scalar(args[1])))
            case aten.pow.Scalar:
                return call(aten.pow.Tensor_Tensor, (self._scalar(args[0]), args[1]))
            case aten.lerp.Scalar:
                # rounded to the operands' type, as ATen rounds a number
                weight = call(
                    aten._to_copy.default, (self._scalar(args[2]),), {"dtype": value.dtype}
                )
                weight.meta["val"] = self.roles[next(iter(self.roles))].meta["val"].to(value.dtype)
                return call(aten.lerp.Tensor, (args[0], args[1], weight))
            case aten.add.Tensor:
                scaled = self._call(
                    aten.mul.Tensor, (args[1], self._scalar(node.kwargs["alpha"])), value
                )
                return call(aten.add.Tensor, (args[0], scaled))
            case aten.addcmul.default:
                factor = self._scalar(node.kwargs["value"])
                scaled = self._call(aten.mul.Tensor, (args[1], factor), value)
                product = self._call(aten.mul.Tensor, (scaled, args[2]), value)
                return call(aten.add.Tensor, (args[0], product))
            case _:
                raise AssertionError(f"{node.target} takes a scheduled number in an unknown way")


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
