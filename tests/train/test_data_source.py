"""A batch of any structure goes to the device as a whole."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from fulltilt.train.config import TrainSettings
from fulltilt.train.data_source import BatchSource, MapSource, SeededSamples, to_device
from fulltilt.train.sampler import EpochPlan

META = torch.device("meta")


class Graph:
    """A batch of a class of its own that moves itself."""

    def __init__(self) -> None:
        self.nodes = torch.ones(2)

    def to(self, device: torch.device) -> Graph:
        self.nodes = self.nodes.to(device)
        return self


def test_what_moves_itself_is_moved_beside_tensors() -> None:
    graph, packed = Graph(), pack_sequence([torch.ones(3), torch.ones(2)])
    moved: Any = to_device({"inputs": [torch.ones(2, 3), packed], "graph": graph}, META)
    assert moved["inputs"][0].device == moved["inputs"][1].data.device == META
    assert moved["inputs"][1].batch_sizes.device.type == "cpu"  # torch insists on it
    assert moved["graph"] is graph
    assert graph.nodes.device == META


def test_the_sampler_of_a_loader_learns_the_epoch() -> None:
    sampler: Any = DistributedSampler(range(12), num_replicas=2, rank=0)  # type: ignore[arg-type]
    source = BatchSource(DataLoader(range(12), batch_size=6, sampler=sampler), 1, 1)  # type: ignore[arg-type]
    first, second = ([step.batches[0][0].tolist() for step in source.steps(epoch, 0)] for epoch in (0, 1))
    assert first != second


class Unsteady:
    """Sample 3 cannot be read in the first epoch, sample 4 in the second."""

    epoch = 0

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 3 + self.epoch:
            raise OSError("the network is away")
        return torch.tensor(float(index))


def test_a_sample_that_failed_once_counts_again_when_it_is_read() -> None:
    data, given = Unsteady(), []

    def augment(batch: Any, _seed: int, _epoch: int, ids: torch.Tensor) -> Any:
        given.append((batch.int().tolist(), ids.tolist()))
        return batch

    plan = EpochPlan(400, 8, shuffle=False)
    source = MapSource(data, plan, TrainSettings(on_bad_sample="skip"), augment=augment)  # type: ignore[arg-type]
    for data.epoch in (0, 1):
        taken = next(source.steps(data.epoch, 0)).batches
        read = [index for index in range(8) if index != 3 + data.epoch]
        assert given[-1] == (read, read)
        assert taken[0][1] == 7


class Noisy:
    """Draws from a generator of its own, which may be made with the first sample."""

    def __init__(self, make: Any, *, late: bool) -> None:
        self.make, self.generator = make, None if late else make()

    def __getitem__(self, index: int) -> float:
        self.generator = self.generator or self.make()
        drawn = getattr(self.generator, "random", None)
        return float(drawn() if drawn else torch.rand((), generator=self.generator))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "make", [random.Random, torch.Generator, numpy.random.default_rng, numpy.random.RandomState, None]
)
def test_a_sample_does_not_depend_on_those_read_before_it(make: Any, late: bool) -> None:
    """A resumed run reads fewer samples before it. Seen to fail: with the global generators alone."""
    make = make or (lambda: None)
    whole, resumed = (SeededSamples(Noisy(make, late=late), seed=1) for _ in range(2))
    assert [whole[0, index] for index in range(4)][2:] == [resumed[0, index] for index in (2, 3)]
    assert whole[1, 3] != resumed[0, 3]
