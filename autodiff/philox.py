"""Philox, and the operators that draw a dropout mask from one seed with it; needs torch alone."""

from __future__ import annotations

import struct

import torch

_MASK32 = 0xFFFFFFFF
_KEY_A = 0x9E3779B9
_KEY_B = 0xBB67AE85
_ROUND_A = 0xD2511F53
_ROUND_B = 0xCD9E8D57
# Largest fp32 factor with 2**31 * factor < 1, as in triton's uint_to_uniform_float.
_UNIFORM_SCALE = 4.6566127342e-10

_library = torch.library.Library("trainfuse", "FRAGMENT")
_library.define("seed(Tensor like) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
_library.define("keep_mask(Tensor seed, int offset, float p, SymInt[] shape) -> Tensor")


def _multiply_wide(factor: int, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of factor * value; value: int64 holding a uint32.

    The product doesn't fit int64, so value is split in halves of 16 bits.
    """
    low = (value & 0xFFFF) * factor
    high = (value >> 16) * factor + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(
    seed: torch.Tensor, counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Philox4x32-10: four 32-bit words a counter, held in int64.

    seed: int64, its low and high words are the key. counter: four int64 tensors below 2**32.
    Bit-identical with triton's tl.philox. Source: Salmon et al., SC 2011.
    """
    c0, c1, c2, c3 = counter
    key_0 = seed & _MASK32
    key_1 = (seed >> 32) & _MASK32
    for _ in range(10):
        high_b, low_b = _multiply_wide(_ROUND_B, c2)
        high_a, low_a = _multiply_wide(_ROUND_A, c0)
        c0, c1 = high_b ^ c1 ^ key_0, low_b
        c2, c3 = high_a ^ c3 ^ key_1, low_a
        key_0 = (key_0 + _KEY_A) & _MASK32
        key_1 = (key_1 + _KEY_B) & _MASK32
    return c0, c1, c2, c3


def uniform(word: torch.Tensor) -> torch.Tensor:
    """fp32 in [0, 1) from a 32-bit word held in int64, as triton's uint_to_uniform_float."""
    signed = torch.where(word >= 1 << 31, word - (1 << 32), word)
    magnitude = torch.where(signed < 0, -signed - 1, signed)
    return magnitude.to(torch.float32) * _UNIFORM_SCALE


def keep_mask(seed: torch.Tensor, offset: int, p: float, shape: list[int]) -> torch.Tensor:
    """Boolean mask that drops each element with probability p.

    seed: int64 [1]. offset: which draw of the program. The element with row-major index i takes
    word i % 4 of Philox at counter (low32(i // 4), offset, high32(i // 4), 0), and is kept where
    the word, as a uniform in [0, 1), is at least p (rounded to fp32).
    """
    count = 1
    for size in shape:
        count *= size
    block = torch.arange((count + 3) // 4, device=seed.device, dtype=torch.int64)
    zero = torch.zeros_like(block)
    words = philox(seed, (block & _MASK32, zero + (offset & _MASK32), block >> 32, zero))
    lanes = uniform(torch.stack(words, dim=-1)).reshape(-1)[:count]
    threshold = struct.unpack("f", struct.pack("f", p))[0]
    return (lanes >= threshold).reshape(shape)


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
