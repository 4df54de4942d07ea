"""Random states: what a sample draws depends on nothing but the sample."""

from __future__ import annotations

import random

import numpy
import torch

from fulltilt.train.data_source import SeededSamples


class Drawn:
    def __getitem__(self, index: int) -> tuple[float, float, float]:
        return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def test_draws_for_a_sample_depend_on_nothing_else() -> None:
    samples = SeededSamples(Drawn(), 3)
    before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    first = samples[1, 5]
    assert samples[1, 6] != first != samples[2, 5]
    assert samples[1, 5] == first
    assert (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
