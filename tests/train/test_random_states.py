"""Random states: what a sample draws depends on nothing but the sample."""

from __future__ import annotations

import random

import numpy
import torch

from fulltilt.train.random_states import sample_seed


def test_draws_for_a_sample_depend_on_nothing_else() -> None:
    def draw(epoch: int, index: int) -> tuple[float, float, float]:
        with sample_seed(3, epoch, index):
            return random.random(), float(numpy.random.rand()), float(torch.rand(()))

    before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    first = draw(1, 5)
    assert draw(1, 6) != first != draw(2, 5)
    assert draw(1, 5) == first
    assert (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
