"""A linear layer and the row-wise loss after it, in chunks of rows: never logits of a whole batch.

For each chunk: its logits, its part of the loss, the gradient over the logits, and what the
backward makes of that: the input's gradient, and the weight's, added up in fp32. All of it runs
where the loss did, and the logits of one chunk are the most that is held at a time. Any loss that
is one row group fits: nothing here knows what a cross-entropy is.

Obligations, named as in the design. One that isn't proved is a refusal, and the step stays as it
was. P1: what is chunked is far larger than what it is computed from, and chunks save memory though
the weight's gradient is kept in fp32. P2: everything between the layer and the results is row-wise
along one axis, by the group's inferred domain; views move whole rows, by running them on row
numbers. P3: nothing else reads a value as large as the logits; results of one element a row are
joined again. P4, P5: the gradient is made in the forward (`early_gradients`), any loss scale inside
it. P6: what rows read from outside depends on no row's result. P7: sums over chunks are made in
fp32, in order, and cast where the graph casts. P8: nothing draws, writes or waits. P9: whether a
chunk's gradient is written over its logits is for memory planning. P10: gradients take the old
ones' places in the graph, so what adds to them still does. P11: a chunk's kernel is the whole's:
ignored rows, targets out of range and 64-bit offsets are its business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from autodiff.accumulation import carry_dtype
from autodiff.derive import decompose
from autodiff.formulas import softmax
from autodiff.graph import NodeFacts, Refusal, TrainingGraph
from autodiff.rewrite import GraphEdit
from trainfuse.fusion.assemble import PIECES
from trainfuse.fusion.flow import is_view, value_bytes
from trainfuse.fusion.rewrites import row_maps
from trainfuse.fusion.rewrites.heads import LAYERS, Head, NoHead, OtherLayer, feeds_loss, prove
from trainfuse.fusion.rewrites.products import Product, Unproved
from trainfuse.fusion.rewrites.row_form import NotByRows, RowForm

aten, sums = torch.ops.aten, torch.ops.trainfuse
Supports = Callable[[fx.Node], str | None]
AMPLIFIES = 2
"""Logits are at least this many times wider than what they are computed from."""
WORTHWHILE = 0.8
"""Share of the memory of logits and weight gradients that chunks may still take."""
MAX_CHUNKS = 64
EVEN_ROWS = 128
"""Rows of a chunk are a multiple of this, where they are that many: a GEMM's tile."""


def chunk_heads(
    tg: TrainingGraph, supports: Supports, budget: int
) -> tuple[TrainingGraph, tuple[Refusal, ...]]:
    """Make logits of more than `budget` bytes in chunks of rows that take no more.

    supports: why the code generator can't build a node, or None. Returns the graph, and why each
    layer that might have been chunked was not.
    """
    refusals: list[Refusal] = []
    done: set[str] = set()
    given, tg = tg, _decomposed(tg, {n.meta["val"].shape[1] for n in _candidates(tg, budget)})
    chunked = False
    while True:
        layer = next((n for n in _candidates(tg, budget) if n.name not in done), None)
        if layer is None:
            return tg if chunked else given, tuple(refusals)
        done.add(layer.name)
        try:
            head = _prove_joint(tg, supports, layer)
            tg = _Chunks(tg, head, _chunk_rows(head, budget)).rewritten()
            chunked = True
        except NoHead:
            continue
        except (Unproved, NotByRows) as failure:
            reason = f"no chunks: {failure.reason}"
            refusals.append(tg.refuse("fusion", failure.node, reason))


def heads_in_regions(tg: TrainingGraph, budget: int) -> tuple[Refusal, ...]:
    """Why losses of a region keep their logits, which a whole step might have made in chunks."""
    reason = "no chunks: P4: a region's forward doesn't know the loss's cotangent"
    layers = [layer for layer in _candidates(tg, budget) if feeds_loss(tg, layer)]
    return tuple(tg.refuse("fusion", layer, reason) for layer in layers)


def _decomposed(tg: TrainingGraph, widths: set[int]) -> TrainingGraph:
    """Soft targets' softmax over as many classes in pieces, which a loss's rows can take in."""

    def pieces(x: torch.Tensor, dim: int, half: bool) -> torch.Tensor:
        return softmax(x, dim, half) if x.shape[dim] in widths else NotImplemented

    return decompose(tg, {aten._softmax.default: pieces}) if widths else tg


def _candidates(tg: TrainingGraph, budget: int) -> Iterator[fx.Node]:
    """Linear layers of the forward that amplify (P1)."""
    for node in tg.nodes("forward"):
        if node.target not in LAYERS:
            continue
        value, source = node.meta["val"], node.args[LAYERS[node.target]].meta["val"]
        static = all(type(size) is int for size in (*value.shape, *source.shape))
        if static and value_bytes(node) > budget:
            if value.shape[1] >= AMPLIFIES * source.shape[1]:
                yield node


def _prove_joint(tg: TrainingGraph, supports: Supports, layer: fx.Node) -> Head:
    """The head of a layer, with the other layers that its loss reads row by row."""
    layers = [layer]
    while True:
        try:
            return prove(tg, supports, layers)
        except OtherLayer as other:
            if other.layer in layers:
                raise Unproved(other.layer, "P2: its rows are not the loss's") from None
            layers.append(other.layer)


def _chunk_rows(head: Head, budget: int) -> int:
    """Rows of a chunk: few, large chunks, of equal size; Unproved when they don't pay (P1, P7)."""
    logits = sum(head.width * layer.meta["val"].dtype.itemsize for layer in head.leaves)
    most = max(1, budget // logits)
    if most >= EVEN_ROWS:
        most = most // EVEN_ROWS * EVEN_ROWS
    count = min(MAX_CHUNKS, -(-head.rows // most))
    if count < 2:
        raise NoHead
    rows = -(-head.rows // count)
    if rows > EVEN_ROWS:
        rows = -(-rows // EVEN_ROWS) * EVEN_ROWS
    weights = [p.node.meta["val"] for p in head.products if p.kind == "weight"]
    before = head.rows * logits + sum(w.numel() * w.dtype.itemsize for w in weights)
    carried = sum(w.numel() * carry_dtype(w.dtype).itemsize for w in weights)
    if rows * logits + carried > WORTHWHILE * before:
        node = next(iter(head.leaves))
        raise Unproved(node, "P1: its weight's gradient in fp32 takes what chunks would save")
    return rows


class _Chunks:
    """The rewriting of one head. Everything new is kept from recomputation: it was made once."""

    def __init__(self, tg: TrainingGraph, head: Head, rows: int) -> None:
        self.head, self.rows = head, rows
        self.edit = GraphEdit(tg)
        self.copy = self.edit.mapping
        where = next(filter(None, map(tg.where, head.members)), None)
        self.form = RowForm(self.edit, head.domain, NodeFacts("forward", None, where), _keep)
        self.emit = self.form.emit

    def rewritten(self) -> TrainingGraph:
        """The graph with the head in chunks."""
        head, graph = self.head, self.edit.graph
        for node in head.results:
            if node in head.domain.axes and self.form.spans(node) != (True, False):
                raise NotByRows(node, "it is not one element for each row, in their order")
        anchor = self.copy[head.first]
        for node in head.late:
            anchor.prepend(self.copy[node])
        pieces: dict[fx.Node, list[fx.Node]] = {node: [] for node in head.results}
        carries: dict[Product, Any] = {}
        with graph.inserting_before(anchor):
            inputs = {layer: self.input_of(layer) for layer in head.leaves}
            others = {p: self.other_of(p) for p in head.products}
            for start in range(0, head.rows, self.rows):
                stop = min(start + self.rows, head.rows)
                env = self.members(inputs, start, stop)
                for node in head.results:
                    pieces[node].append(self.thin(env[node], stop - start))
                for product in head.products:
                    self.add(carries, product, env, others[product], (start, stop))
            made = {node: self.joined(node, parts) for node, parts in pieces.items()}
            made |= {p.node: self.finished(p, carries[p]) for p in head.products}
        for old, new in made.items():
            self.edit.replace(self.copy[old], new)
        self.edit.eliminate_dead()
        return self.edit.finish()

    # Before the chunks.

    def input_of(self, layer: fx.Node) -> fx.Node:
        """What a layer multiplies, in the loss's rows."""
        source = layer.args[LAYERS[layer.target]]
        return self.select(self.copy[source], self.head.chains[layer])

    def other_of(self, product: Product) -> fx.Node | None:
        """What a product multiplies the gradient with, in the loss's rows where it has rows."""
        if product.other is None:
            return None
        other = self.copy[product.other]
        return self.select(other, product.selected) if product.kind == "weight" else other

    def select(self, value: fx.Node, chain: tuple[fx.Node, ...]) -> fx.Node:
        """Rows of a matrix that a chain selects, dense again."""
        if not chain:
            return value
        width = value.meta["val"].shape[1]
        made = row_maps.run_chain(chain, value, width, self.emit)
        return self.emit(aten.reshape.default, made, [-1, width])

    # One chunk.

    def members(self, inputs: dict[fx.Node, fx.Node], start: int, stop: int) -> dict[fx.Node, Any]:
        """The layers' results and every member, for a range of rows."""
        given: dict[fx.Node, fx.Node] = {}
        for layer, leaves in self.head.leaves.items():
            place = LAYERS[layer.target]
            args = [self.copy[n] for n in layer.args]
            args[place] = self.emit(aten.slice.Tensor, inputs[layer], 0, start, stop)
            logits = self.emit(layer.target, *args, **layer.kwargs)
            given |= dict.fromkeys((layer, *leaves), logits)
        return self.form.members(self.head.members, given, start, stop)

    def thin(self, value: fx.Node, rows: int) -> fx.Node:
        """One element for each row of a range."""
        if tuple(value.meta["val"].shape) == (rows, 1):
            return value
        return self.emit(aten.expand.default, value, [rows, 1])

    def add(
        self,
        carries: dict[Product, Any],
        product: Product,
        env: dict[fx.Node, fx.Node],
        other: fx.Node | None,
        rows: tuple[int, int],
    ) -> None:
        """A chunk's part of a product: a piece of an input's gradient, or added to a carry."""
        gradient = self.form.full(product.gradient, env)
        carry = carries.get(product)
        if product.kind == "input":
            piece = self.emit(aten.mm.default, gradient, other)
            carries[product] = [*(carry or ()), piece]
            return
        if product.kind == "bias":
            carries[product] = self.emit(sums.accumulate_sum.default, carry, gradient, like=carry)
            return
        mine = self.emit(aten.slice.Tensor, other, 0, *rows)
        first, second = (mine, gradient) if product.swapped else (gradient, mine)
        turned = self.emit(aten.permute.default, first, [1, 0])
        carries[product] = self.emit(sums.accumulate.default, carry, turned, second, like=carry)

    # After them.

    def joined(self, node: fx.Node, parts: list[fx.Node]) -> fx.Node:
        """A result of one element a row, of all rows, in its own shape."""
        whole = self.cat(parts)
        return self.emit(aten.view.default, whole, list(node.meta["val"].shape))

    def cat(self, parts: list[fx.Node]) -> fx.Node:
        """Pieces of all chunks, which are made one after the other."""
        whole = self.emit(aten.cat.default, parts)
        whole.meta[PIECES] = True
        return whole

    def finished(self, product: Product, carry: Any) -> fx.Node:
        """A product of all rows, as the graph had it."""
        wanted = product.node.meta["val"]
        if product.kind == "input":
            carry = self.cat(carry)
            if product.selected:
                shape = [*product.gradient.meta["val"].shape[:-1], wanted.shape[-1]]
                carry = self.emit(aten.view.default, carry, shape)
                carry = row_maps.run_chain(product.chain, carry, wanted.shape[-1], self.emit)
        if tuple(carry.meta["val"].shape) != tuple(wanted.shape):
            carry = self.emit(aten.reshape.default, carry, list(wanted.shape))
        if carry.meta["val"].dtype != wanted.dtype:
            carry = self.emit(aten._to_copy.default, carry, dtype=wanted.dtype)
        return carry


def _keep(node: fx.Node) -> None:
    """Recompute may not make a chunk again: its logits would come back."""
    if not is_view(node):  # which is never saved: what it shows is
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
