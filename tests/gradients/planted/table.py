"""The faults: at least one of every kind of error that a compiler of training steps can make."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autodiff import cut, rng
from autodiff.graph import TrainingGraph
from autodiff.philox import dropped_words
from autodiff.rewrite import GraphEdit
from tests.gradients.planted.kernel_table import KERNELS, SCHEDULES
from tests.gradients.planted.planting import (
    Fault,
    Hits,
    Plant,
    captured,
    edited,
    lifted,
    patched,
    phase_of,
    text,
    update_text,
)
from trainfuse.capture.optimizers import UpdateHandle
from trainfuse.codegen import tile
from trainfuse.runtime import foreach, foreach_launch, memory

aten: Any = torch.ops.aten
# -- derivation: a wrong graph, with right kernels ------------------------------------------------


def _backward(edit: GraphEdit, node: fx.Node, target: Any) -> bool:
    return phase_of(edit, node) == "backward" and node.target is target


def _lost_second(edit: GraphEdit, node: fx.Node) -> bool:
    """A sum of two cotangents keeps the first."""
    if not _backward(edit, node, aten.add.Tensor):
        return False
    if not all(isinstance(a, fx.Node) and phase_of(edit, a) == "backward" for a in node.args):
        return False
    node.replace_all_uses_with(node.args[0])
    return True


def _no_sum(edit: GraphEdit, node: fx.Node) -> bool:
    """The gradient of a broadcast operand is one row's."""
    if not _backward(edit, node, aten.sum.dim_IntList) or node.args[1] != [0]:
        return False
    fact = edit.facts[node]
    with edit.graph.inserting_before(node):
        row = edit.emit(aten.slice.Tensor, (node.args[0], 0, 0, 1), fact=fact)
        made = edit.emit(aten.clone.default, (row,), fact=fact)
    node.replace_all_uses_with(made)
    return True


def _transposed(place: int, target: Any) -> Any:
    """One operand of an operator, or what it sums, turned over."""

    def turn(edit: GraphEdit, node: fx.Node) -> bool:
        source: Any = node.args[place] if node.target is target else None
        if source is None or phase_of(edit, node) != "backward":
            return False
        shape = source.meta["val"].shape
        if len(shape) != 2 or shape[0] != shape[1]:
            return False
        if target is aten.sum.dim_IntList and node.args[1] != [0]:
            return False
        with edit.graph.inserting_before(node):
            turned = edit.emit(aten.permute.default, (source, [1, 0]), fact=edit.facts[node])
        node.replace_input_with(source, turned)
        return True

    return turn


def _unsquared(edit: GraphEdit, node: fx.Node) -> bool:
    """The slope of tanh as 1 - t."""
    if not _backward(edit, node, aten.mul.Tensor) or node.args[0] is not node.args[1]:
        return False
    node.replace_all_uses_with(node.args[0])
    return True


def _no_mean(edit: GraphEdit, node: fx.Node) -> bool:
    """The gradient of a mean, not divided."""
    if not _backward(edit, node, aten.mul.Tensor) or not isinstance(node.args[1], float):
        return False
    node.args = (node.args[0], 1.0)
    return True


def _cut(edit: GraphEdit, node: fx.Node) -> bool:
    """A cotangent that never arrives."""
    if not _backward(edit, node, aten.mm.default):
        return False
    with edit.graph.inserting_after(node):
        zero = edit.emit(aten.mul.Tensor, (node, 0.0), fact=edit.facts[node])
    node.replace_all_uses_with(zero, delete_user_cb=lambda user: user is not zero)
    return True


def _wrong_value(edit: GraphEdit, node: fx.Node) -> bool:
    """The backward reads what went into tanh where it needs what came out."""
    if not _backward(edit, node, aten.mul.Tensor) or node.args[0] is not node.args[1]:
        return False
    out: Any = node.args[0]
    if out.target is not aten.tanh.default:
        return False
    node.replace_input_with(out, out.args[0])
    return True


def _derivation(name: str, edit_node: Any, on: str = "square") -> Fault:
    return Fault(name, "derivation", "step", on, edited(edit_node))


DERIVATION = (
    _derivation("lost second cotangent", _lost_second),
    _derivation("missing broadcast sum", _no_sum),
    _derivation("wrong axis", _transposed(0, aten.sum.dim_IntList)),
    _derivation("transposed operand", _transposed(1, aten.mm.default)),
    _derivation("wrong derivative", _unsquared, "scheduled"),
    _derivation("mean not divided", _no_mean),
    _derivation("cotangent cut off", _cut),
)


# -- recompute and memory ------------------------------------------------------------


def _forward_reads(function: Any, met: Any) -> Any:
    """Readers in the backward don't count: the new value comes before they have read the old."""

    def last_reads(steps: Any, roots: Any, made: Any, kept: Any) -> dict[fx.Node, int]:
        met()
        forward = next(
            (i for i, s in enumerate(steps) if s.group is not None and s.group.phase != "forward"),
            len(steps),
        )
        return function(steps[:forward], roots, made, kept)

    return last_reads


def _no_reads(function: Any, met: Any) -> Any:
    """No reader counts: a kernel writes into memory that later steps still read."""

    def last_reads(*_: Any) -> dict[fx.Node, int]:
        met()
        return {}

    return last_reads


def _no_aliases(function: Any, met: Any) -> Any:
    def alias_roots(tg: TrainingGraph) -> dict[fx.Node, fx.Node]:
        met()
        return {node: node for node in tg.graph.nodes}

    return alias_roots


def _nothing_fixed(function: Any, met: Any) -> Any:
    """Values are made again after the update, from parameters that it has overwritten."""

    def fixed_readers(tg: TrainingGraph) -> set[fx.Node]:
        met()
        return set()

    return fixed_readers


def _seed_drawn_again(monkeypatch: Any, hits: Hits) -> None:
    """The seed counts as any cheap value, so that the backward draws another."""
    again, save = cut.CutProblem._again_cost, cut.CutProblem._save_cost

    def is_seed(node: fx.Node) -> bool:
        return node.op == "call_function" and node.target is torch.ops.trainfuse.seed.default

    def again_cost(self: Any, node: fx.Node, effort: Any) -> int:
        if is_seed(node):
            hits.append(node.name)
            return 0
        return again(self, node, effort)

    def save_cost(self: Any, node: fx.Node) -> int:
        return cut.INFINITE if is_seed(node) else save(self, node)

    monkeypatch.setattr(cut.CutProblem, "_again_cost", again_cost)
    monkeypatch.setattr(cut.CutProblem, "_save_cost", save_cost)


def _made_after_update(monkeypatch: Any, hits: Hits) -> None:
    from autodiff import duplication

    for module in (cut, duplication):
        patched(module, "fixed_readers", _nothing_fixed)(monkeypatch, hits)


def _recompute(name: str, plant: Plant, on: str, **options: Any) -> Fault:
    return Fault(name, "recompute", "step", on, plant, options)


RECOMPUTE = (
    _recompute(
        "stale saved value: a recomputed node reads a buffer's new value",
        patched(memory, "_last_reads", _forward_reads),
        "viewed",
    ),
    _recompute(
        "buffer overwritten while needed", patched(memory, "_last_reads", _no_reads), "viewed"
    ),
    _recompute("alias rule dropped", patched(memory, "alias_roots", _no_aliases), "viewed"),
    _recompute(
        "recomputed from updated parameters", _made_after_update, "stateful", memory_budget=1
    ),
    _recompute("seed drawn again", _seed_drawn_again, "residual"),
    _recompute("wrong value saved", edited(_wrong_value), "residual"),
)


# -- random numbers ------------------------------------------------------------


_kept: dict[str, torch.Tensor] = {}


def stale_seed(like: torch.Tensor) -> torch.Tensor:
    """A seed that is drawn once and kept."""
    if "seed" not in _kept:
        _kept["seed"] = torch.ops.trainfuse.seed(like)
    return _kept["seed"]


def _stale(edit: GraphEdit, node: fx.Node) -> bool:
    if node.target is not torch.ops.trainfuse.seed.default:
        return False
    _kept.clear()
    node.target = stale_seed
    return True


def _no_backward_mask(edit: GraphEdit, node: fx.Node) -> bool:
    """The backward forgets what was dropped."""
    if not _backward(edit, node, aten.mul.Tensor):
        return False
    mask: Any = node.args[1]
    if not isinstance(mask, fx.Node) or mask.meta["val"].dtype is not torch.bool:
        return False
    node.replace_all_uses_with(node.args[0])
    return True


def _same_offset(function: Any, met: Any) -> Any:
    def rewrite(edit: Any, node: Any, seed: Any, offset: int) -> None:
        met()
        function(edit, node, seed, 0)

    return rewrite


def _unpadded(function: Any, met: Any) -> Any:
    def word_shape(shape: Any) -> Any:
        met()
        return tuple(shape)

    return word_shape


def _unscaled(function: Any, met: Any) -> Any:
    def scale(p: float) -> float:
        met()
        return 1.0

    return scale


def _rng(name: str, plant: Plant, verify: Any = "step") -> Fault:
    return Fault(name, "rng", verify, "residual", plant)


RNG = (
    _rng("fresh mask in the backward", text((r"(lib\.keep\w*\(x\d+), (\d+),", r"\1, \2 + 7,")),
         "kernels"),
    _rng("wrong rate", text((rf"(lib\.keep\w*\(.*), {dropped_words(0.3)}\)",
                             rf"\1, {dropped_words(0.35)})")), "kernels"),
    _rng("rows begin within blocks", patched(tile, "word_shape", _unpadded), "kernels"),
    _rng("stale seed", edited(_stale), 1),
    _rng("neighbours share a mask", patched(rng, "_rewrite_dropout", _same_offset)),
    _rng("wrong scale", patched(rng, "_scale", _unscaled)),
    _rng("no mask in the backward", edited(_no_backward_mask)),
)  # fmt: skip


# -- optimizers ------------------------------------------------------------


def _chunks_lost(function: Any, met: Any) -> Any:
    def chunk_table(counts: Any, chunk: int) -> torch.Tensor:
        met()
        return function(counts, chunk)[:-1]

    return chunk_table


def _numbers_not_read(function: Any, met: Any) -> Any:
    """Scheduled numbers stay what they were at the first step."""

    def before_step(self: UpdateHandle) -> None:
        met()
        if self._steps and (self._steps_stale or self._steps_changed()):
            self._refresh_steps()

    return before_step


def _neighbours_gradient(function: Any, met: Any) -> Any:
    """Parameters of one shape get each other's gradients."""

    def entries(self: Any, params: Any, grads: Any) -> Any:
        if grads is not None:
            met()
            shapes = [g.shape for g in grads]
            grads = [
                grads[len(grads) - 1 - shapes[::-1].index(g.shape)] if shapes.count(g.shape) > 1
                else g
                for g in grads
            ]  # fmt: skip
        return function(self, params, grads)

    return entries


def _optimizer(name: str, *rewrite: Any, on: str = "scheduled") -> Fault:
    return Fault(name, "optimizer", "kernels", on, update_text(tuple(rewrite)))


OPTIMIZERS = (
    _optimizer("wrong beta", r"beta1 = tl\.load\(beta1_ptr\)", "beta1 = tl.load(beta2_ptr)"),
    _optimizer("no bias correction", r"(s\d+ = 1\.0 - s7)", r"\1 * 0.0"),
    _optimizer("weight decay dropped", r"(s\d+ = lr) \* 0\.5", r"\1 * 0.0"),
    _optimizer("step not counted", r"tl\.store\(step_ptr, s\d+", "tl.store(step_ptr, step"),
    _optimizer("second moment of the gradient itself", r"(t\d+ = t\d+) \* grad", r"\1"),
    _optimizer("last element left out", r"offsets < numel", "offsets < numel - 1"),
    _optimizer("momentum dropped", r"(momentum_buffer) \* (\w+)", r"\1 * 0.0 * \2", on="momentum"),
    Fault(
        "last parameter left out",
        "optimizer",
        "kernels",
        "scheduled",
        patched(foreach_launch, "chunk_table", _chunks_lost),
    ),
    Fault(
        "learning rate stale",
        "optimizer",
        1,
        "scheduled",
        patched(UpdateHandle, "before_step", _numbers_not_read),
    ),
    Fault(
        "a neighbour's gradient",
        "optimizer",
        "step",
        "square",
        patched(foreach.BucketCall, "entries", _neighbours_gradient),
    ),
)


# -- capture ------------------------------------------------------------


def _sums(graph: fx.Graph) -> list[fx.Node]:
    """The sums that go into the update."""
    return [
        node
        for node in graph.nodes
        if node.target is aten.add.Tensor and any("auto_func" in user.name for user in node.users)
    ]


def _not_added(graph: fx.Graph) -> list[str]:
    """What the second backward gives is not added to what the first gave."""
    found = _sums(graph)
    for node in found:
        node.replace_all_uses_with(node.args[0])
    return [node.name for node in found]


def _not_zeroed(graph: fx.Graph) -> list[str]:
    """Gradients are added to what they were before the step."""
    zeros = [n for n in graph.nodes if n.target is aten.full_like.default and n.args[1] == 0]
    for node in zeros:
        node.replace_all_uses_with(node.args[0])
    return [node.name for node in zeros]


def _update(tg: TrainingGraph) -> Any:
    return next(n for n in tg.nodes() if n.target is torch.ops.trainfuse.update.default)


def _gradient_lost(tg: TrainingGraph) -> TrainingGraph:
    update = _update(tg)
    params, grads, number = update.args
    update.args = (params[:-1], grads[:-1], number)
    return tg


def _exchanged(tg: TrainingGraph) -> TrainingGraph:
    """Two parameters of one shape take each other's gradient."""
    update = _update(tg)
    params, grads, number = update.args
    shapes = [p.meta["val"].shape for p in params]
    first, second = next(
        (i, j)
        for j in range(len(shapes))
        for i in range(j)
        if shapes[i] == shapes[j] and len(shapes[i]) == 2
    )
    order = list(params)
    order[first], order[second] = order[second], order[first]
    update.args = (order, grads, number)
    return tg


def _mutation_lost(tg: TrainingGraph) -> TrainingGraph:
    output = tg.graph.output_node()
    values: Any = output.args[0]
    assert tg.mutations
    output.args = (tuple(values[: tg.num_outputs]),)
    return tg.replace(mutations=())


def _one_backward(tg: TrainingGraph) -> TrainingGraph | None:
    """A forward that reads the state from before the step, twice."""
    scale = next(n for n in tg.graph.nodes if n.op == "placeholder" and n.meta["val"].shape == (8,)
                 and n.name in tg.mutations)  # fmt: skip
    new = next(n for n in scale.users if n.target is aten.mul.Tensor and n.args[1] == 1.5)
    made = next(iter(new.users))
    readers = [user for user in made.users if user.op == "call_function"]
    for user in readers:
        user.replace_input_with(made, scale)
    return tg if readers else None


def _capture(name: str, plant: Plant, on: str) -> Fault:
    return Fault(name, "capture", "step", on, plant)


CAPTURE = (
    _capture("accumulation dropped", lifted(_not_added), "stateful"),
    Fault("gradients not zeroed", "capture", 1, "zeroing", lifted(_not_zeroed)),
    _capture("gradient lost", captured(_gradient_lost), "square"),
    _capture("gradients exchanged", captured(_exchanged), "square"),
    _capture("mutation lost", captured(_mutation_lost), "viewed"),
    _capture("state read too early", captured(_one_backward), "stateful"),
)

FAULTS = (*KERNELS, *SCHEDULES, *DERIVATION, *RECOMPUTE, *RNG, *OPTIMIZERS, *CAPTURE)
