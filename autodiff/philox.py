"""Philox, and the operators that draw a dropout mask from one seed with it; needs torch alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

_MASK32 = 0xFFFFFFFF
_KEY_A = 0x9E3779B9
_KEY_B = 0xBB67AE85
_ROUND_A = 0xD2511F53
_ROUND_B = 0xCD9E8D57
_ROUNDS = 7
"""The fewest that pass all of BigCrush, by the paper; flash attention's dropout has as many."""
# Counters that are computed at a time, in some 130 MB.
_PIECE = 1 << 21
KEEP_MASK = "trainfuse.keep_mask.default"
"""The mask operator's name."""
BLOCK = 4
"""Words that one counter gives."""
# Rows of fewer elements begin where the one before them ends: padding would be much of them.
_SHORT = 16

_library = torch.library.Library("trainfuse", "FRAGMENT")
_library.define("seed(Tensor like) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
_library.define("keep_mask(Tensor seed, int offset, float p, SymInt[] shape) -> Tensor")


def philox(
    seed: torch.Tensor, counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Philox4x32-7: four 32-bit words a counter, held in int64.

    seed: int64 [1], its low and high words are the key. counter: four int64 tensors below 2**32, of
    shapes that broadcast together, with one dimension at least.
    A product of two words wraps around in int64, which keeps all its 64 bits; its halves are read
    as the int32 numbers that they are in memory, so that a round is four launches.
    Bit-identical with triton's tl.philox of as many rounds. Source: Salmon et al., SC 2011.
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    factored = torch.stack([c0, c2])
    factors = torch.full((2, *[1] * c0.dim()), _ROUND_A, device=seed.device)
    factors[1] = _ROUND_B
    # a product's rows: that of c0, whose low word becomes c3, and that of c2, which gives c1
    words = torch.stack([c3, c1])
    before, after = ((p, _low(p).unbind(), _low(p), _high(p)) for p in (words, words.clone()))
    rounds = torch.arange(_ROUNDS, device=seed.device)
    keys = _low(torch.stack([seed + rounds * _KEY_A, (seed >> 32) + rounds * _KEY_B]))
    c0, c2 = _low(factored)
    for key_0, key_1 in zip(*(half.unbind() for half in keys), strict=True):
        _, (mixed_2, mixed_0), low, _ = before
        product, _, _, high = after
        torch.mul(factored, factors, out=product)
        low.bitwise_xor_(high)
        torch.bitwise_xor(mixed_0, key_0, out=c0)
        torch.bitwise_xor(mixed_2, key_1, out=c2)
        before, after = after, before
    c3, c1 = before[0] & _MASK32
    return factored[0], c1, factored[1], c3


def _low(words: torch.Tensor) -> torch.Tensor:
    """The low halves of int64 numbers, in their memory; every machine that torch has is little."""
    return words.view(torch.int32)[..., 0::2]


def _high(words: torch.Tensor) -> torch.Tensor:
    return words.view(torch.int32)[..., 1::2]


def dropped_words(p: float) -> int:
    """How many of the 2**32 words, from 0 up, drop their element with probability p."""
    return round(p * 2**32)


def word_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape whose row-major positions number a mask's words.

    Rows of 16 elements or more are padded to whole blocks of four words: so each begins a block,
    and a kernel draws four neighbours of a row at once, whatever its length.
    """
    if not shape or shape[-1] < _SHORT:
        return tuple(shape)
    return (*shape[:-1], shape[-1] + -shape[-1] % BLOCK)


def keep_mask(seed: torch.Tensor, offset: int, p: float, shape: list[int]) -> torch.Tensor:
    """Boolean mask that drops each element with probability p.

    seed: int64 [1]. offset: which draw of the program. The element at row-major position i of the
    `word_shape` takes word i % 4 of Philox at counter (low32(i // 4), offset, high32(i // 4), 0),
    and is dropped where the word is below p * 2**32.
    """
    return keep_masks(seed, [offset], p, shape)[0]


def keep_masks(
    seed: torch.Tensor, offsets: Sequence[int], p: float, shape: Sequence[int]
) -> list[torch.Tensor]:
    """`keep_mask` of several draws, small ones together: it is their launches that take time."""
    whole = word_shape(shape)
    count = math.prod(whole)
    blocks = -(-count // BLOCK)
    kept = seed.new_empty((len(offsets), blocks, BLOCK), dtype=torch.bool)
    together = max(_PIECE // max(blocks, 1), 1)
    column = _column(offsets, seed.device)
    for start in range(0, len(offsets), together):
        draws = column[start : start + together]
        for first in range(0, blocks, _PIECE):
            last = min(first + _PIECE, blocks)
            block = torch.arange(first, last, device=seed.device, dtype=torch.int64)
            words = philox(seed, (block & _MASK32, draws, block >> 32, torch.zeros_like(draws)))
            places = kept[start : start + together, first:last].unbind(-1)
            for word, place in zip(words, places, strict=True):
                torch.ge(word, dropped_words(p), out=place)
    masks = kept.view(len(offsets), -1)[:, :count].unflatten(1, whole or (1,))
    if not shape:
        return [mask.reshape(()) for mask in masks]
    return [mask[..., : shape[-1]].contiguous() for mask in masks]


def _column(offsets: Sequence[int], device: torch.device) -> torch.Tensor:
    """Offsets as words, a row each; of even steps, as they mostly are, nothing is waited for."""
    words = [offset & _MASK32 for offset in offsets]
    steps = {after - before for before, after in itertools.pairwise(words)} or {1}
    if len(steps) == 1 and (step := steps.pop()) > 0:
        end = words[-1] + step
        return torch.arange(words[0], end, step, dtype=torch.int64, device=device).unsqueeze(-1)
    return torch.tensor(words, dtype=torch.int64, device=device).unsqueeze(-1)


def _keep_mask_fake(seed: torch.Tensor, offset: int, p: float, shape: list[int]) -> torch.Tensor:
    return seed.new_empty(shape, dtype=torch.bool)


def _seed(like: torch.Tensor) -> torch.Tensor:
    """A fresh seed on like's device; randint, so that each CUDA-graph replay draws anew."""
    return torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device=like.device)


def _seed_fake(like: torch.Tensor) -> torch.Tensor:
    return like.new_empty((1,), dtype=torch.int64)


_library.impl("keep_mask", keep_mask, "CompositeExplicitAutograd")
_library.impl("seed", _seed, "CompositeExplicitAutograd")
torch.library.register_fake("trainfuse::keep_mask", _keep_mask_fake, lib=_library)
torch.library.register_fake("trainfuse::seed", _seed_fake, lib=_library)
