"""What a process of the feed's own is to the data set: one of several workers, with one thread."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data._utils import worker as of_torch

# Arm's library of convolutions asks for threads whatever torch was told, and a fork does not copy them: it waits for
# ever, in a DataLoader's workers as in these. torch's own convolutions do not.
_HANGS_IN_A_FORK = platform.machine() in ("aarch64", "arm64")

seeds_read = 0  # how often the data set has asked for the seed of its worker


class _WorkerInfo:
    """What ``get_worker_info()`` answers. The seed is that of the sample, and to read it is to draw from it."""

    def __init__(self, number: int, workers: int, dataset: Any) -> None:
        self.id, self.num_workers, self.dataset = number, workers, dataset
        self.seed_of_sample = number

    @property
    def seed(self) -> int:
        """A number that differs from sample to sample and from epoch to epoch."""
        global seeds_read
        seeds_read += 1
        return self.seed_of_sample


def become_worker(number: int, workers: int, dataset: Any) -> None:
    """Behave as worker ``number`` of ``workers`` of a DataLoader over ``dataset``, for the rest of this process."""
    torch.set_num_threads(1)
    if _HANGS_IN_A_FORK:
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment, unused-ignore]
    of_torch._worker_info = _WorkerInfo(number, workers, dataset)  # type: ignore[assignment]


@contextmanager
def as_a_worker(workers: int, dataset: Any) -> Iterator[None]:
    """Within the block this process draws what its ``workers`` do, to the bit; nothing changes if there are none."""
    info, convolutions = of_torch._worker_info, torch.backends.mkldnn.enabled
    threads = torch.get_num_threads()
    try:
        if workers:
            become_worker(0, workers, dataset)
        yield
    finally:
        if workers:
            torch.set_num_threads(threads)
            torch.backends.mkldnn.enabled = convolutions
            of_torch._worker_info = info


def seed_worker(seed: int) -> None:
    """Let the seed that ``get_worker_info()`` tells be this one; nothing outside a worker."""
    info: Any = of_torch._worker_info
    if isinstance(info, _WorkerInfo):
        info.seed_of_sample = seed
