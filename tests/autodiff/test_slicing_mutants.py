"""Faults of structure, planted by name: no number is wrong, so the slicer's own tests must fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import test_slicing
import test_slicing_rules
from slicing_graphs import cut, o, opaque
from torch import fx
from training_graphs import Builder

from autodiff import inlining, slicing
from autodiff.subgraphs import producers

Patch = pytest.MonkeyPatch


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault, and a test that must fail with it."""

    name: str
    plant: Callable[[Patch], None]
    caught_by: Callable[[], None]


def _barrier_ignored(patch: Patch) -> None:
    blocks = slicing._blocks
    patch.setattr(slicing, "_blocks", lambda tg, forward, _: blocks(tg, forward, frozenset()))


def _threshold(by: int) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        own = inlining.large_enough
        patch.setattr(
            slicing,
            "large_enough",
            lambda groups, threshold, **more: own(groups, threshold + by, **more),
        )

    return plant


def _views_leave(patch: Patch) -> None:
    """Alias rule: what leaves a subgraph is the view itself, not its base."""

    def leaves(members: list[fx.Node], backward: list[fx.Node]) -> tuple[fx.Node, ...]:
        own = {*members, *backward}
        return tuple(n for n in members if any(user not in own for user in n.users))

    patch.setattr(slicing, "_leaves", leaves)


def _no_rescan(patch: Patch) -> None:
    """One walk over the block: a subgraph takes in one producer, and isn't looked at again."""

    def merge(self: Any) -> list[list[fx.Node]]:
        for consumer in reversed(list(self.order)):
            if consumer in self.order and self.mergeable[consumer]:
                self._absorb_one(consumer)
        return [self.members[unit] for unit in self.order if self.mergeable[unit]]

    patch.setattr(slicing._Block, "merge", merge)


def _siblings_merged(patch: Patch) -> None:
    """Two readers of one value count as producer and consumer."""
    build = slicing._Block.__init__

    def wrong(self: Any, nodes: list[fx.Node], candidates: set[fx.Node]) -> None:
        build(self, nodes, candidates)
        for later, node in enumerate(nodes):
            for earlier, other in enumerate(nodes[:later]):
                if producers(node) & producers(other):
                    self.reads[later].add(earlier)
                    self.read_by[earlier].add(later)

    patch.setattr(slicing._Block, "__init__", wrong)


def _wrong_owner(patch: Patch) -> None:
    """A sum of cotangents goes to nobody."""
    follow = slicing._follow

    def wrong(tg: Any, owner: Any, backward: list[fx.Node]) -> Any:
        return follow(tg, owner, [n for n in backward if tg.facts[n].forward_of is not None])

    patch.setattr(slicing, "_follow", wrong)


def _draws_unordered(patch: Patch) -> None:
    patch.setattr(slicing.ops, "draws_randomness", lambda node: False)


def _cycles(patch: Patch) -> None:
    """A consumer takes in a producer that it also depends on through another unit."""

    def absorb(self: Any, consumer: int, producer: int) -> bool:
        self.members[consumer] = self.members[producer] + self.members[consumer]
        self._redirect(producer, consumer)
        return True

    patch.setattr(slicing._Block, "_absorb", absorb)


def _skips_ignored(patch: Patch) -> None:
    patch.setattr(slicing.Rules, "_skipped", lambda *_: False)


def _unfused_kept(patch: Patch) -> None:
    patch.setattr(test_slicing_rules, "dissolve_unfused", lambda slices, _: slices)


def _random_graphs() -> None:
    for seed in range(60):
        test_slicing.test_random_graphs_are_merged_to_a_fixpoint_without_cycles(seed)


def _chains() -> None:
    for length in range(1, 7):
        for threshold in (1, 2, 5):
            test_slicing.test_13_chain_lengths_and_thresholds(length, threshold, False)


def _parted() -> None:
    """Two in a block, yet each alone."""
    b = Builder()
    last = o(b, opaque(b, o(b, b.input())))
    assert cut(b, last, threshold=2).subgraphs == ()


rules = test_slicing_rules
MUTANTS = (
    Mutant(
        "barrier ignored", _barrier_ignored, test_slicing.test_09_nothing_merges_across_a_barrier
    ),
    Mutant("threshold too high", _threshold(1), _chains),
    Mutant("threshold too low", _threshold(-1), _parted),
    Mutant("alias rule dropped", _views_leave, rules.test_view_is_never_an_output_but_its_base_is),
    Mutant("no rescan", _no_rescan, _chains),
    Mutant(
        "siblings merged",
        _siblings_merged,
        test_slicing.test_03_unrelated_pair_and_pair_sharing_an_input,
    ),
    Mutant(
        "wrong owner", _wrong_owner, rules.test_sum_of_cotangents_goes_to_the_maker_of_the_value
    ),
    Mutant(
        "draws unordered",
        _draws_unordered,
        rules.test_random_nodes_are_members_and_keep_their_order,
    ),
    Mutant("cycles", _cycles, _random_graphs),
    Mutant(
        "skip_ops ignored", _skips_ignored, rules.test_skip_ops_and_what_was_decomposed_from_them
    ),
    Mutant("unfused kept", _unfused_kept, rules.test_second_inlining_drops_what_was_not_fused),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_test_fails(mutant: Mutant, monkeypatch: Patch) -> None:
    mutant.caught_by()
    mutant.plant(monkeypatch)
    with pytest.raises((AssertionError, IndexError, KeyError, StopIteration)):
        mutant.caught_by()
