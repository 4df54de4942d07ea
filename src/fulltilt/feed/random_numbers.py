"""Counter-based random numbers: each is a function of (seed, epoch, sample index, position).

Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) in integer operations, so that
CPU, GPU and compiled code give the same bits. The numbers of a sample do not depend on batch, rank, worker or order.
"""

from __future__ import annotations

import math

import torch

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    key: tuple[torch.Tensor | int, torch.Tensor | int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four 32-bit words (held in int64) for each counter. Counters broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _product(c0, _MULTIPLIERS[0])
        high1, low1 = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def _product(word: torch.Tensor, multiplier: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The upper and lower 32 bits of a product of 32-bit words.

    In two parts of 48 bits: a product of 64 bits overflows int64, which is undefined in compiled C++.
    """
    low = (word & 0xFFFF) * multiplier
    rest = (word >> 16) * multiplier + (low >> 16)
    return rest >> 16, ((rest & 0xFFFF) << 16) | (low & 0xFFFF)


def uniform(seed: torch.Tensor | int, epoch: torch.Tensor | int, indices: torch.Tensor, count: int) -> torch.Tensor:
    """Float32 in [0, 1), [batch, count]: row i belongs to sample ``indices[i]`` in ``epoch``.

    ``seed`` and ``epoch`` may be int64 tensors, so that a compiled caller does not recompile for each value.
    """
    indices, blocks = indices[:, None], torch.arange(math.ceil(count / 4), device=indices.device)
    # Not zeros_like: the compiler would make the counter a 32-bit index, too small for philox's products
    # (torch 2.11: "Scalar 3449720151 is out of range for type int32").
    zero = indices & 0
    low, high = (indices & _MASK) + torch.zeros_like(blocks), (indices >> 32) & _MASK
    words = philox((low, high, blocks + zero, (zero + epoch) & _MASK), (seed & _MASK, (seed >> 32) & _MASK))
    # 24 bits fit a float32 exactly: no rounding, hence no 1.0 and no difference between devices.
    return (torch.stack(words, dim=-1).flatten(1)[:, :count] >> 8).to(torch.float32) * (1.0 / (1 << 24))


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """A 32-bit seed for one sample, for the generators of Python, NumPy and torch."""
    return mix(seed, epoch, index) & _MASK


def mix(*numbers: int) -> int:
    """One 63-bit seed from several numbers (SplitMix64): neighbouring numbers give unrelated streams."""
    mask = 2**64 - 1
    state = 0
    for number in numbers:
        state = (state + (number & mask) + 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return state >> 1


def as_int64(number: int) -> int:
    """The lowest 64 bits of the number, as an int64."""
    low = number & (2**64 - 1)
    return low - 2**64 if low >> 63 else low
