"""Samples that a sampler gives more than once in an epoch, to balance classes: each time is a draw of its own.

What is random about a sample follows from the number of its draw. The first time that is the sample's own number;
the next times the bits above SAMPLE_BITS count them, so that no two copies in an epoch are augmented alike.
"""

from __future__ import annotations

from typing import TypeVar

import torch

SAMPLE_BITS = 40
_SAMPLE = (1 << SAMPLE_BITS) - 1

Draws = TypeVar("Draws", torch.Tensor, int)


def numbered(batches: list[torch.Tensor]) -> list[torch.Tensor]:
    """The draws that ``batches`` of sample numbers are, in their order."""
    if not batches:
        return batches
    every = torch.cat(batches)
    if len(every) == 0 or _each_once(every):
        return batches
    # Stable, so that equal numbers stay in the order in which they are drawn.
    ordered, places = torch.sort(every, stable=True)
    begins = torch.ones_like(ordered, dtype=torch.bool)
    begins[1:] = ordered[1:] != ordered[:-1]
    positions = torch.arange(len(ordered))
    times = positions - torch.cummax(positions * begins, 0).values
    draws = every.clone()
    draws[places] += times << SAMPLE_BITS
    return list(torch.split(draws, [len(batch) for batch in batches]))


def _each_once(samples: torch.Tensor) -> bool:
    """Whether no sample is among them twice: as nearly always, and told without sorting a hundred million."""
    there = torch.zeros(int(samples.max()) + 1, dtype=torch.bool)
    there[samples] = True
    return int(there.sum()) == len(samples)


def sample_of(draws: Draws) -> Draws:
    """The sample that each draw is of."""
    return draws & _SAMPLE
