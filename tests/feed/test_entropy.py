"""Random numbers from the operating system are heard in every sample, not only in those looked at first."""

from __future__ import annotations

import os
import pickle
import random
import secrets
import threading

import numpy as np
import pytest
import torch

from fulltilt import feed
from fulltilt.errors import DataError
from fulltilt.feed import entropy

from .conftest import Drawn

RARE = 77  # of 1000: none of the eight samples that are looked at before the first epoch

SOURCES = {
    "numpy": lambda: np.random.default_rng().random(),
    "numpy's older": lambda: np.random.RandomState().rand(),
    "python": lambda: random.Random().random(),
    "os.urandom": lambda: float(int.from_bytes(os.urandom(3), "big")),
    "SystemRandom": lambda: random.SystemRandom().random(),
    "secrets": lambda: float(secrets.randbelow(1 << 24)),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("source", SOURCES)
def test_a_rare_sample_is_never_frozen(source, workers):
    draw = SOURCES[source]
    rarely = Drawn(lambda index: torch.zeros(2) + (draw() if index == RARE else index), samples=1000)
    with feed.loader(rarely, batch_size=100, num_workers=workers) as loader:
        epochs = [torch.cat(list(loader)) for _ in range(4)]
        assert any(f"sample {RARE}: it draws random numbers" in note for note in loader.notes)
    assert len({float(epoch[RARE, 0]) for epoch in epochs}) == 4
    others = torch.arange(1000) != RARE
    assert all(torch.equal(epoch[others], epochs[0][others]) for epoch in epochs)


def test_a_tier_asked_for_by_name_is_refused():
    rarely = Drawn(lambda index: torch.zeros(2) + (np.random.default_rng().random() if index == RARE else 0), 1000)
    refused = pytest.raises(DataError, match=f"sample {RARE}: it draws random numbers")
    with feed.loader(rarely, batch_size=100, num_workers=0, residency="ram") as loader, refused:
        list(loader)


def test_generators_seeded_by_the_sample_are_kept():
    def drawn(i):
        # NumPy's older one asks the operating system first and takes its seed then.
        return torch.tensor(
            [s.random() for s in (random.Random(i), np.random.default_rng(i), np.random.RandomState(i))]
        )

    seeded = Drawn(drawn, samples=40)
    with feed.loader(seeded, batch_size=10, num_workers=0) as loader:
        first = torch.cat(list(loader))
        assert torch.equal(first, torch.cat(list(loader)))
        assert loader.tier == "ram"


def test_a_seed_takes_back_only_a_question_that_nothing_was_drawn_by():
    before = entropy.asked()
    with entropy.listened():
        np.random.RandomState().seed(3)
        drawn_from = np.random.RandomState(3)
        assert entropy.asked() == before
        assert drawn_from.rand() == np.random.RandomState(3).rand()
        unseeded = np.random.RandomState()
        unseeded.rand()
        unseeded.seed(3)
        assert entropy.asked() == before + 1
        np.random.RandomState(None)
        assert entropy.asked() == before + 2
    assert pickle.loads(pickle.dumps(drawn_from)).rand() == drawn_from.rand()


def test_the_originals_are_put_back_by_whichever_thread_leaves_last():
    originals = os.urandom, random._urandom, random.Random.seed, np.random.mtrand._MT19937
    inside, leave = threading.Event(), threading.Event()

    def listen_on():
        with entropy.listened():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=listen_on)
    before = entropy.asked()
    with entropy.listened():
        thread.start()
        assert inside.wait(10)
        assert os.urandom is not originals[0]
    os.urandom(1)
    assert entropy.asked() == before + 1  # the other one still listens
    leave.set()
    thread.join()
    assert (os.urandom, random._urandom, random.Random.seed, np.random.mtrand._MT19937) == originals
    random.Random()
    assert entropy.asked() == before + 1


def test_what_another_thread_asks_for_is_not_the_samples():
    with entropy.listened():
        before = entropy.asked()
        thread = threading.Thread(target=lambda: (os.urandom(8), random.Random()))
        thread.start()
        thread.join()
        assert entropy.asked() == before
