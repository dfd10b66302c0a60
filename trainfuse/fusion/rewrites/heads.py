"""Finding the linear layers whose results only a row-wise loss reads, and proving that it does.

The obligations P1 to P11 are those of `chunked_head`; here are the proofs of P2, P3, P4, P6 and P8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autodiff import ops
from autodiff.graph import Refusal, TrainingGraph
from trainfuse.fusion.domains import Domain, argument, infer
from trainfuse.fusion.flow import is_creation, is_view
from trainfuse.fusion.rewrites import row_maps
from trainfuse.fusion.rewrites.early_gradients import views_of_one
from trainfuse.fusion.rewrites.products import Product, Unproved, products_of
from trainfuse.fusion.rewrites.row_form import ROW_RESULTS

aten = torch.ops.aten
Supports = Callable[[fx.Node], str | None]
LAYERS = {aten.mm.default: 0, aten.addmm.default: 1}
"""Linear layers: where their input stands among the arguments; the weight follows."""
_KINDS = frozenset({"pointwise", "reduction", "gather", "view", "creation"})


class NoHead(Exception):
    """A layer whose results go to other layers, or that trains nothing: not a loss's."""


class OtherLayer(Exception):
    """A row group that reads another layer's results, too: both are made by rows, or neither."""

    def __init__(self, layer: fx.Node) -> None:
        super().__init__()
        self.layer = layer


@dataclass(frozen=True, slots=True)
class Head:
    """Linear layers whose results only one row group reads, with all that the proof found.

    leaves: for each layer, the views (or itself) that members read. chains: for each layer, the
    nodes that select its rows. members: the row group in order. results: those of one element a row
    that others read. products: what reads the gradients. late: nodes, in order, that must come
    before `first`, the earliest node that needs a result.
    """

    leaves: dict[fx.Node, tuple[fx.Node, ...]]
    chains: dict[fx.Node, tuple[fx.Node, ...]]
    members: tuple[fx.Node, ...]
    domain: Domain
    results: tuple[fx.Node, ...]
    products: tuple[Product, ...]
    late: tuple[fx.Node, ...]
    first: fx.Node

    @property
    def rows(self) -> int:
        """Rows of the loss: fewer than the layer's where some are cut off."""
        return self.domain.extent(self.domain.rows)

    @property
    def width(self) -> int:
        """Classes."""
        return self.domain.extent(self.domain.cols)


def prove(tg: TrainingGraph, supports: Supports, layers: Sequence[fx.Node]) -> Head:
    """All that is needed to make the layers' results by rows.

    Raises NoHead when they are no loss's, OtherLayer when one is missing, Unproved with the
    obligation's name and the node that is in the way.
    """
    return _Proof(tg, supports, layers).head()


def feeds_loss(tg: TrainingGraph, layer: fx.Node) -> bool:
    """Whether a layer's results end in reductions and lookups, and in no other layer."""
    width, wide, ends = layer.meta["val"].shape[-1], {layer}, False
    for node in tg.nodes("forward"):
        if wide.isdisjoint(node.all_input_nodes):
            continue
        kind = ops.lookup(node.target).kind
        if kind == "contraction":
            return False
        ends = ends or kind in ("reduction", "gather", "softmax")
        if node.meta["val"].numel() * width > layer.meta["val"].numel():
            wide.add(node)
    return ends


class _Proof:
    """One attempt. wide: the layers' results and every member as large; members: the row group."""

    def __init__(self, tg: TrainingGraph, supports: Supports, layers: Sequence[fx.Node]) -> None:
        self.tg, self.supports, self.layers = tg, supports, tuple(layers)
        self.place = {node: index for index, node in enumerate(tg.graph.nodes)}
        self.width = layers[0].meta["val"].shape[-1]
        self.below = _below(layers)
        self.leaves: dict[fx.Node, list[fx.Node]] = {layer: [layer] for layer in layers}
        self.members: set[fx.Node] = set()
        self.wide: set[fx.Node] = set(layers)
        self.read_late: list[tuple[fx.Node, fx.Node]] = []  # (gradient, its reader)

    def head(self) -> Head:
        """The proof, step by step."""
        for layer in self.layers:
            if layer.target is aten.addmm.default:
                bias = layer.args[0].meta["val"]  # type: ignore[union-attr]  # a tensor
                if bias.dim() > 1 and bias.shape[0] > 1:
                    raise Unproved(layer, "P2: what is added to its rows is not the same in all")
        for node in self.tg.graph.nodes:
            if not self.wide.isdisjoint(node.all_input_nodes):
                self.take(node)
        if not self.read_late:
            raise NoHead
        self.close()
        order = tuple(sorted(self.members, key=self.place.__getitem__))
        domain = self.domain(order)
        chains = self.row_chains(domain)
        products = self.products(domain, chains)
        results = tuple(n for n in order if self.is_result(n))
        readers = [user for n in results for user in n.users if user not in self.members]
        first = min((*readers, *(p.node for p in products)), key=self.place.__getitem__)
        late = self.hoisted(first, [*self.outside(), *(p.other for p in products if p.other)])
        leaves = {layer: tuple(found) for layer, found in self.leaves.items()}
        return Head(leaves, chains, order, domain, results, products, late, first)

    # P3, P8: who reads the logits and what is as large.

    def take(self, node: fx.Node) -> None:
        """A reader of something wide: leaf, member, product of the backward, or in the way."""
        sources = [n for n in node.all_input_nodes if n in self.wide]
        if node.op == "output":
            raise Unproved(sources[0], "P3: values as large as the logits are returned")
        if self.tg.phase(node) != "forward":
            for source in sources:
                if source not in self.members:
                    raise Unproved(node, "P4: the loss's gradient is not made in the forward")
                self.read_late.append((source, node))
            return
        layer = next((x for x, found in self.leaves.items() if sources[0] in found), None)
        if layer is not None and is_view(node) and row_maps.keeps_columns(node):
            self.leaves[layer].append(node)
            self.wide.add(node)
            return
        kind = ops.lookup(node.target).kind
        if kind == "contraction":
            raise NoHead
        if kind == "softmax":
            raise Unproved(node, "P4: the loss and its gradient are not one row group")
        if ops.is_effect(node) or ops.is_random(node.target) or kind == "rng":
            raise Unproved(node, "P8: it draws or writes")
        if not self.by_rows(node):
            raise Unproved(node, "P3: it reads values as large as the logits, and not row by row")
        self.members.add(node)
        if node.meta["val"].numel() * self.width > sources[0].meta["val"].numel():
            self.wide.add(node)

    def by_rows(self, node: fx.Node) -> bool:
        """Whether an operator can be part of a row group."""
        if node.target in ROW_RESULTS:
            value = node.args[0].meta["val"]  # type: ignore[union-attr]  # its tensor
            dim = argument(node, "dim")
            return isinstance(dim, int) and dim % value.dim() == value.dim() - 1
        return ops.lookup(node.target).kind in _KINDS and self.supports(node) is None

    # P6: what the rows read from outside.

    def outside(self) -> list[fx.Node]:
        """What members and layers read and don't make."""
        made = {*self.members, *self.layers, *(n for found in self.leaves.values() for n in found)}
        readers = (*self.members, *self.layers)
        return list(dict.fromkeys(n for m in readers for n in m.all_input_nodes if n not in made))

    def close(self) -> None:
        """Take in what lies between members; find values as large that another layer makes."""
        while True:
            taken = [node for node in self.outside() if self.belongs(node)]
            if not taken:
                return
            self.members.update(taken)

    def belongs(self, node: fx.Node) -> bool:
        """Whether what a member reads must be a member: a constant, or made of rows' results."""
        top = node
        while is_view(top):
            top = top.args[0]  # type: ignore[assignment]  # a view's source
        if is_creation(top):
            return True
        if node in self.below:
            if node.meta["val"].numel() == 1 or not self.by_rows(node):
                raise Unproved(node, "P6: what the rows read depends on the rows' results")
            return True
        if node.meta["val"].numel() >= self.layers[0].meta["val"].numel() // 2:
            other = self.made_by(node)
            if other is not None:
                raise OtherLayer(other)
            # made for a chunk where it is read, not for the whole batch before
            return top.op == "call_function" and self.by_rows(node) and self.by_rows(top)
        return False

    def made_by(self, node: fx.Node) -> fx.Node | None:
        """Another layer of as many classes that a value is computed from, row by row."""
        pending, seen = [node], {node}
        while pending:
            node = pending.pop()
            if node.target in LAYERS:
                if node.meta["val"].shape[-1] == self.width:
                    return node
            elif node.op == "call_function" and self.by_rows(node):
                pending += [n for n in node.all_input_nodes if n not in seen]
                seen.update(node.all_input_nodes)
        return None

    # P2: rows, and nothing but rows.

    def domain(self, order: Sequence[fx.Node]) -> Domain:
        """Rows and columns of the group, with every layer's results walked in order."""
        read = {n for found in self.leaves.values() for n in found if self.is_read_by_rows(n)}
        nodes = {node for node in order if node.target not in ROW_RESULTS} | views_of_one(read)
        found = infer(sorted(nodes, key=self.place.__getitem__))
        if isinstance(found, Refusal):
            raise Unproved(self.layers[0], f"P2: {found.reason} ({found.node})")
        if found.kind != "row":
            raise Unproved(self.layers[0], "P2: nothing is summed along its rows")
        for node, axes in found.reduced.items():
            if axes != frozenset(found.cols):
                raise Unproved(node, "P2: it sums over a part of the classes, or over rows")
        for leaf in (n for leaves in self.leaves.values() for n in leaves):
            dims = found.axes.get(leaf)
            if dims is not None and (
                [axis for dim in dims for axis in dim] != [*found.rows, *found.cols]
                or dims[-1] != found.cols
            ):
                raise Unproved(leaf, "P2: its rows are not walked in order")
        return found

    def row_chains(self, domain: Domain) -> dict[fx.Node, tuple[fx.Node, ...]]:
        """For each layer the views that select its rows: the same for every leaf that is read."""
        chains: dict[fx.Node, tuple[fx.Node, ...]] = {}
        rows = domain.extent(domain.rows)
        for layer, leaves in self.leaves.items():
            selected: torch.Tensor | None = None
            for leaf in leaves:
                if not self.is_read_by_rows(leaf):
                    continue
                chain = row_maps.chain_to(leaf, layer)
                assert chain is not None
                found = row_maps.rows_of(chain, layer.meta["val"].shape[0])
                if selected is None:
                    selected, chains[layer] = found, tuple(chain)
                elif not row_maps.equal(found, selected):
                    raise Unproved(leaf, "P2: it is read by rows in two ways")
            if selected is None or selected.numel() != rows:
                raise Unproved(layer, "P2: its rows are not the loss's")
        return chains

    def is_read_by_rows(self, leaf: fx.Node) -> bool:
        return not self.members.isdisjoint(leaf.users)

    # What the backward makes.

    def products(
        self, domain: Domain, chains: dict[fx.Node, tuple[fx.Node, ...]]
    ) -> tuple[Product, ...]:
        """Every reader of a gradient, as a product that can be made by rows."""
        found: list[Product] = []
        for gradient, reader in self.read_late:
            dims = domain.axes[gradient]
            if [axis for dim in dims for axis in dim] != [*domain.rows, *domain.cols]:
                raise Unproved(gradient, "P2: its rows are not walked in order")
            found += products_of(gradient, reader, chains.values())
        for product in found:
            if product.other is not None and product.other in self.below:
                raise Unproved(product.node, "P6: it reads what the loss makes, too")
        return tuple(found)

    def is_result(self, node: fx.Node) -> bool:
        """Whether it depends on the logits, has one element a row and is read by others."""
        if node in self.wide or node not in self.below:
            return False
        return any(user not in self.members for user in node.users)

    def hoisted(self, first: fx.Node, wanted: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
        """What the rows read that comes after `first` and depends on none of them: moved before."""
        found: set[fx.Node] = set()
        pending = list(wanted)
        while pending:
            node = pending.pop()
            if node in found or self.place[node] < self.place[first]:
                continue
            if node.op != "call_function":
                continue
            if ops.is_effect(node) or ops.is_random(node.target):
                raise Unproved(node, "P8: it draws or writes, and would have to move")
            found.add(node)
            pending += node.all_input_nodes
        return tuple(sorted(found, key=self.place.__getitem__))


def _below(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Everything that is computed from some nodes."""
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        for user in pending.pop().users:
            if user not in found:
                found.add(user)
                pending.append(user)
    return found
