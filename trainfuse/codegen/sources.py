"""Values that no operand gives: constants, ranges, random masks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from autodiff.ops import op_name
from autodiff.philox import dropped_words
from trainfuse.codegen.ir import Map, Random
from trainfuse.codegen.op_text import Unsupported
from trainfuse.codegen.scalars import TRITON_TYPE, compute_dtype, typed
from trainfuse.codegen.scope import Value
from trainfuse.codegen.tile import axis_strides, run_terms, word_strides
from trainfuse.fusion.arguments import argument

if TYPE_CHECKING:
    from trainfuse.codegen.builder import Builder


RUN = 8
"""Neighbours whose words `lib.keep_run` draws at a time."""
# What each creation fills with: a number, or the argument that says it; None for ranges.
CREATIONS: dict[str, int | str | None] = {
    "zeros": 0,
    "zeros_like": 0,
    "new_zeros": 0,
    "ones": 1,
    "ones_like": 1,
    "new_ones": 1,
    "full": "fill_value",
    "full_like": "fill_value",
    "new_full": "fill_value",
    "scalar_tensor": "s",
    "arange": None,
    "iota": None,
}


def create(builder: Builder, node: fx.Node) -> Value:
    """Constants and ranges."""
    dtype = node.meta["val"].dtype
    if dtype not in TRITON_TYPE:
        raise Unsupported(node, f"{dtype} has no kernels")
    held = compute_dtype(dtype)
    name = op_name(node.target)
    constant = _constant(node, name)
    if constant is not None:
        names, depth = builder.define(node, frozenset(), ())
        builder.scopes[depth].body.append(Map(names[0], typed(constant, held), name))
        return builder.put(node, Value(tuple(names), frozenset(), depth, held))
    start, step = _range(node, name)
    strides = axis_strides(builder.domain.axes[node], (1,), builder.domain.sizes)
    deps = builder.dependences(strides)
    names, depth = builder.define(node, deps, ())
    for index, target in enumerate(names):
        text = f"({builder.offset(strides, index)})"
        if not deps:
            text = f"tl.full([], {start}, tl.int64)"
        elif start or step != 1:
            # the index counts to the length; what it is scaled to may need 64 bits
            text = f"({text}.to(tl.int64) * {step} + {start})"
        builder.scopes[depth].body.append(Map(target, f"{text}.to({TRITON_TYPE[held]})", name))
    return builder.put(node, Value(tuple(names), deps, depth, held))


def random(builder: Builder, node: fx.Node) -> Value:
    """trainfuse.keep_mask: by fours where the mask's last dim runs along the tile's inner axis."""
    seed = builder.value(node.args[0])  # type: ignore[arg-type]  # the seed tensor
    offset, p = argument(node, "offset"), argument(node, "p")
    strides = word_strides(builder.domain, node)
    deps = builder.dependences(strides)
    names, depth = builder.define(node, deps, (seed,))
    for index, name in enumerate(names):
        fours = quads(builder, strides, deps, index)
        function, text = "lib.keep", fours or builder.offset(strides, index)
        if fours:
            function = "lib.keep_vector" if builder.rank == 1 else "lib.keep_rows"
        elif run := consecutive(builder, strides, index):
            function, text = "lib.keep_run", run
        if not deps:
            text = "tl.full([], 0, tl.int32)"
        builder.scopes[depth].body.append(
            Random(
                name,
                f"{function}({seed.names[0]}, {offset & 0xFFFFFFFF}, {text}, {dropped_words(p)})",
                f"{op_name(node.target)}, p = {p!r}",
            )
        )
    return builder.put(node, Value(tuple(names), deps, depth, torch.bool))


def quads(builder: Builder, strides: dict[int, int], deps: frozenset[str], index: int) -> str:
    """Blocks of four words, of the tile's groups of four neighbours; "" when it has none."""
    held = [axis for axis in builder.tile.values() if axis.position is not None]
    if not held:
        return ""
    inner = max(held, key=lambda axis: axis.position or 0)
    segment = builder.segment(inner.name, index)
    blocks = [axis.name for axis in held]
    terms = run_terms(inner.axes, "i", strides, builder.extents, {})
    if terms != ["i"] or segment.width % 4 or segment.quad is None:
        return ""
    if not frozenset(blocks) <= deps and builder.rank > 1:
        return ""
    others = {axis: step for axis, step in strides.items() if axis not in inner.axes}
    if any(step % 4 for step in others.values()):
        return ""
    quarter = {axis: step // 4 for axis, step in others.items()}
    rest = [
        term
        for axis in builder.tile.values()
        if axis is not inner
        for term in run_terms(
            axis.axes, builder.segment(axis.name, index).index, quarter, builder.extents, {}
        )
    ]
    lanes = f"tl.arange(0, {segment.width // 4})"
    if builder.rank > 1:
        lanes += "[None, :]"
    if segment.quad != "0":
        rest.append(segment.quad)
    return " + ".join([*rest, lanes])


def consecutive(builder: Builder, strides: dict[int, int], index: int) -> str:
    """First word and number of words of a block of neighbours; "" where nothing says it is one."""
    axis = builder.tile[builder.segmented]
    segment = builder.segment(axis.name, index)
    vectors = segment.vectors
    if builder.rank > 1 or vectors is None or not vectors.first or segment.width % RUN:
        return ""
    if run_terms(axis.axes, "i", strides, builder.extents, {}) != ["i"]:
        return ""
    rest = [
        term
        for other in builder.tile.values()
        if other is not axis
        for term in run_terms(
            other.axes, builder.segment(other.name, 0).index, strides, builder.extents, {}
        )
    ]
    return " + ".join([*rest, vectors.first]) + f", {segment.width}"


def _constant(node: fx.Node, name: str) -> Any:
    """The number that a creation fills with; None for a range."""
    if name.split(".")[1] not in CREATIONS:
        raise Unsupported(node, "this creation has no code")
    given = CREATIONS[name.split(".")[1]]
    value = argument(node, given) if isinstance(given, str) else given
    if value is None:
        return None
    if not isinstance(value, bool | int | float):
        raise Unsupported(node, "it fills with a value that is no number")
    return value


def _range(node: fx.Node, name: str) -> tuple[Any, Any]:
    """(start, step) of an arange or iota."""
    start, step = argument(node, "start"), argument(node, "step")
    start, step = 0 if start is None else start, 1 if step is None else step
    if not isinstance(start, int) or not isinstance(step, int):
        raise Unsupported(node, "a range of floating steps has no code")
    return start, step
