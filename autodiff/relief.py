"""Forward values dropped where memory is full, and made again for those who read them later.

A minimum cut decides for each value whether it is kept or made again, once, for the whole backward.
What is held while another part is differentiated (a checkpoint, or what a checkpoint's part has
ready for its turn) can be dropped until then, and made again of what is in memory by then: any
number of times. The loop below looks at the fullest place of the backward, and drops what costs
least for the bytes, as long as that helps. Obligations: a value is made again by the same pure
operations on the same operands, never by random draws, effects, choices among equals or what is
compared bit for bit; and nothing reads a parameter after its update.

Source: the greedy choice by cost over bytes and time is that of Kirisame et al., Dynamic Tensor
Rematerialization, arXiv:2006.09616; here for a whole graph that is known beforehand.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Collection
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from . import ops
from .exact import between, exact_pairs
from .graph import NodeFacts, TrainingGraph
from .liveness import Liveness, maker_of
from .reads import fixed_readers, num_bytes
from .rewrite import GraphEdit

WORTHWHILE = 1 / 128
"""Part of the peak that a value must have to be dropped."""
KEPT = 1 / 32
"""Part of a dropped value's bytes that an operand may have which is held for making it again."""
STEPS = 64
TRIES = 8
_PRICES = {"free": 0, "cheap": 1, "moderate": 4, "expensive": 8}
"""Of a byte made again; a contraction of common width takes some eight times a copy's time."""


@dataclass(frozen=True, slots=True)
class Relieved:
    """A graph that needs less. peak: as it is estimated. again: what was copied, of this graph."""

    graph: TrainingGraph
    peak: int
    again: tuple[fx.Node, ...] = ()


@dataclass(slots=True)
class _Split:
    """Who reads a value before the fullest place, and who after it.

    doubled: what must be there twice: the value, views of it, and what kernels both before and
    after make of it inside. late: (reader, operand) after the place. since: the last reader before.
    """

    doubled: set[fx.Node]
    late: list[tuple[fx.Node, fx.Node]]
    since: int


@dataclass(frozen=True, slots=True)
class _Drop:
    """One value to be dropped at the fullest place.

    gain: bytes, times the places at which too much is alive, over the price of making it again.
    place: of its first reader afterwards, which copies stand before. copied: what is made again,
    in order. late: (reader, operand) that read copies.
    """

    gain: float
    place: int
    copied: tuple[fx.Node, ...]
    late: tuple[tuple[fx.Node, fx.Node], ...]


def relieve(tg: TrainingGraph, limit: int, gradients: Collection[str]) -> Relieved:
    """Make forward values again later until the estimated peak is within the limit, or can't fall.

    gradients: names of nodes that are no forward value, nor a copy of one: those are never dropped.
    """
    lives = Liveness(tg)
    again: list[str] = []
    for _ in range(STEPS):
        if lives.peak.num_bytes <= limit:
            break
        found = _step(lives, limit, gradients)
        if found is None:
            break
        lives, copies = found
        again += copies
    by_name = {node.name: node for node in lives.nodes}
    copied = tuple(by_name[name] for name in again if name in by_name)
    return Relieved(lives.tg, lives.peak.num_bytes, copied)


def _step(
    lives: Liveness, limit: int, gradients: Collection[str]
) -> tuple[Liveness, list[str]] | None:
    """The graph with one more value dropped, and its copies' names; None if no drop helps."""
    full, excess = lives.peak.num_bytes, _excess(lives, limit)
    for drop in _Drops(lives, limit, gradients).ranked()[:TRIES]:
        graph, copies = _dropped(lives, drop)
        after = Liveness(graph)
        if after.peak.num_bytes <= full and _excess(after, limit) < excess:
            return after, copies
    return None


def _excess(lives: Liveness, limit: int) -> int:
    """Bytes over the limit, over all places: what every step lowers."""
    return sum(max(0, size - limit) for size in lives.live)


class _Drops:
    """What can be dropped where most is alive.

    once: what is never computed again. held: that, and gradients: never dropped.
    """

    def __init__(self, lives: Liveness, limit: int, gradients: Collection[str]) -> None:
        self.lives = lives
        self.peak = max(lives.live)
        self.place = lives.live.index(self.peak)
        self.over = [0, *accumulate(size > limit for size in lives.live)]
        self.fixed = fixed_readers(lives.tg)
        self.once = _made_once(lives.tg)
        self.held = self.once | {n for n in lives.nodes if maker_of(n).name in gradients}

    def ranked(self) -> list[_Drop]:
        """Those that cost least for the bytes that they spare, and the places that they do at."""
        drops = (self._drop(value) for value in self.lives.materialized if self._may_go(value))
        return sorted((drop for drop in drops if drop is not None), key=lambda drop: -drop.gain)

    def _may_go(self, value: fx.Node) -> bool:
        lives = self.lives
        return (
            num_bytes(value) >= WORTHWHILE * self.peak
            and value not in lives.results
            and lives.position[value] < self.place < lives.last[value]
            and value not in self.held
        )

    def _drop(self, value: fx.Node) -> _Drop | None:
        """Making a value again for its readers after the fullest place; None if that can't be."""
        split = self._split(value)
        if split is None or not split.late:
            return None
        if not self.fixed.isdisjoint(reader for reader, _ in split.late):
            return None
        position = self.lives.position
        first = min((reader for reader, _ in split.late), key=position.__getitem__)
        if self.lives.tg.phase(first) == "forward":
            return None
        copied = self._chain(value, split, position[first])
        places = self.over[position[first]] - self.over[split.since + 1]
        gain = num_bytes(value) * places / max(sum(map(_price, copied)), 1)
        return _Drop(gain, position[first], tuple(copied), tuple(split.late))

    def _split(self, value: fx.Node) -> _Split | None:
        """A value's readers before and after the fullest place; None if it is needed there."""
        lives = self.lives
        split = _Split({value}, [], lives.position[value])
        pending = [value]
        while pending:
            node = pending.pop()
            for user in node.users:
                if user.op != "call_function":
                    return None
                until = lives.reads_until(user)
                shows = lives.owners[user] is not user or user.target is operator.getitem
                if not shows and lives.position[user] > self.place:
                    split.late.append((user, node))
                elif shows or until > self.place:
                    if user in self.once:
                        return None
                    if user not in split.doubled:
                        split.doubled.add(user)
                        pending.append(user)
                elif until == self.place:
                    return None
                else:
                    split.since = max(split.since, until)
        return split

    def _chain(self, value: fx.Node, split: _Split, place: int) -> list[fx.Node]:
        """What to compute again, in order, of what is in memory at a place."""
        position, small = self.lives.position, KEPT * num_bytes(value)
        seen = {operand for _, operand in split.late}
        pending = [(-position[node], i, node) for i, node in enumerate(seen)]
        heapq.heapify(pending)
        found: list[fx.Node] = []
        while pending:
            node = heapq.heappop(pending)[-1]
            if node not in split.doubled and self._stays(node, place, small, split.doubled):
                continue
            found.append(node)
            for parent in node.all_input_nodes:
                if parent in position and parent not in seen:
                    seen.add(parent)
                    heapq.heappush(pending, (-position[parent], len(seen), parent))
        return found[::-1]

    def _stays(self, node: fx.Node, place: int, small: float, doubled: set[fx.Node]) -> bool:
        """Whether a node is read where it is: in memory still, or to be held."""
        lives, owner = self.lives, self.lives.owners[node]
        if owner.op != "call_function" or owner in lives.results:
            return True
        if owner in doubled:
            return False
        if owner in lives.materialized:
            return lives.last[owner] >= place or owner in self.held or num_bytes(owner) <= small
        return owner in self.held


def _price(node: fx.Node) -> int:
    return max(num_bytes(node), 1) * _PRICES[ops.lookup(maker_of(node).target).cost]


def _made_once(tg: TrainingGraph) -> set[fx.Node]:
    """What may not be computed again."""
    found: set[fx.Node] = set()
    for compared, made in exact_pairs(tg, of_kernels=False):
        found |= {compared, *between(compared, made)}
    for node in tg.nodes():
        maker = maker_of(node)
        if (
            ops.draws_randomness(maker)
            or ops.is_effect(maker)
            or ops.lookup(maker.target).cost == "never"
            or maker.meta.get("recompute") == CheckpointPolicy.MUST_SAVE
            or isinstance(node.meta.get("val"), torch.SymInt)
        ):
            found.add(node)
    return found


def _dropped(lives: Liveness, drop: _Drop) -> tuple[TrainingGraph, list[str]]:
    """The graph in which later readers have copies of their own, and the copies' names."""
    edit = GraphEdit(lives.tg)
    anchor = edit.mapping[lives.nodes[drop.place]]
    reader = edit.facts[anchor]
    number = 1 + max(fact.again for fact in edit.facts.values())
    copies: dict[fx.Node, fx.Node] = {}
    with edit.graph.inserting_before(anchor):
        for node in drop.copied:
            old = edit.mapping[node]
            copies[old] = edit.graph.node_copy(old, lambda n: copies.get(n, n))
            where = edit.facts[old].where
            edit.facts[copies[old]] = NodeFacts(reader.phase, reader.forward_of, where, number)
    for user, operand in drop.late:
        old = edit.mapping[operand]
        if old in copies:
            edit.mapping[user].replace_input_with(old, copies[old])
    edit.eliminate_dead()
    return edit.finish(), [copy.name for copy in copies.values()]
