"""The operator table agrees with torch's own schemas, and answers for what it doesn't know."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from training_graphs import Builder

import autodiff.accumulation  # registers an operator
import autodiff.rng  # noqa: F401  # the same
from autodiff import ops

aten: Any = torch.ops.aten


def overload(name: str) -> torch._ops.OpOverload:
    namespace, packet, variant = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), variant)


# prims.fma is registered by Inductor when it is imported; it has no other home.
ROWS = [name for name in ops.TABLE if "." in name and name != "prims.fma.default"]
OURS = {"trainfuse.update.default"}  # registered by capture


@pytest.mark.parametrize("name", [name for name in ROWS if name not in OURS])
def test_row_names_an_overload_and_its_aliasing(name: str) -> None:
    op = overload(name)
    assert ops.op_name(op) == name
    assert ops.lookup(op) is ops.TABLE[name]
    assert not op._schema.is_mutable
    returns_view = any(
        r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns
    )
    # Contiguous inputs are aliased by these two, though their schemas don't say so.
    if name not in ("aten._unsafe_view.default", "aten.lift_fresh_copy.default"):
        assert ops.TABLE[name].aliases == returns_view or name == "aten.reshape.default"


def test_every_random_aten_row_is_never_computed_twice() -> None:
    for name in ROWS:
        if name in OURS or name == "trainfuse.keep_mask.default":
            continue
        if torch.Tag.nondeterministic_seeded in overload(name).tags:
            assert ops.is_random(overload(name)), name
            assert ops.TABLE[name].cost in ("never", "expensive"), name


def test_unknown_operator_is_opaque_and_never_recomputed() -> None:
    row = ops.lookup(aten._fft_r2c.default)
    assert (row.kind, row.cost) == ("opaque", "never")
    assert ops.lookup(len).kind == "opaque"
    assert ops.lookup(operator.getitem).kind == "view"
    assert ops.lookup(operator.mul).kind == "creation"  # arithmetic on sizes


def test_attention_draws_only_with_dropout() -> None:
    b = Builder()
    q = b.input(1, 2, 8, 16)
    target = aten._scaled_dot_product_flash_attention_for_cpu.default
    quiet = b.call(target, q, q, q, 0.0, True)
    assert not ops.draws_randomness(quiet)
    graph = quiet.graph
    noisy = graph.call_function(target, (q, q, q, 0.1, True))
    dropped = aten._scaled_dot_product_flash_attention.default
    assert not ops.draws_randomness(graph.call_function(dropped, (q, q, q)))
    assert ops.draws_randomness(graph.call_function(dropped, (q, q, q, 0.5)))
    assert ops.draws_randomness(graph.call_function(aten.native_dropout.default, (q, 0.5, True)))
    assert ops.draws_randomness(noisy) == ops.is_random(target)


def test_simple_map_wants_one_dense_output_like_its_inputs() -> None:
    b = Builder()
    x, row = b.input(4, 6), b.input(6)
    assert ops.is_simple_map(b.call(aten.mul.Tensor, x, x))
    assert ops.is_simple_map(b.call(aten.tanh.default, x))
    assert not ops.is_simple_map(b.call(aten.mul.Tensor, x, row))  # broadcast
    assert not ops.is_simple_map(b.call(aten.eq.Tensor, x, x))  # another dtype
    assert not ops.is_simple_map(b.call(aten.sum.dim_IntList, x, [1]))
    every_other = b.call(aten.slice.Tensor, x, 1, 0, 6, 2)
    assert not ops.is_simple_map(b.call(aten.tanh.default, every_other))


def test_differentiable_ops_are_the_rows_that_may_be_members() -> None:
    names = ops.differentiable_ops()
    assert {"aten.mul.Tensor", "aten.mm.default", "aten._softmax.default"} <= names
    assert not names & {"aten.sort.default", "trainfuse.update.default", "aten.full.default"}
