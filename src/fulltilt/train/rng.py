"""Random states: captured and restored exactly, and derived anew for each sample from (seed, epoch, index)."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

from fulltilt.feed import draws


def capture(device: torch.device) -> dict[str, Any]:
    """The state of every generator that a training step may draw from: Python, NumPy, torch and this rank's GPU."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        states["numpy"] = (str(name), [int(key) for key in keys], int(position), int(has_gauss), float(cached))
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore(states: dict[str, Any], device: torch.device) -> None:
    """Put back what ``capture`` took. A GPU state is left out when the run now has no GPU."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        import numpy

        name, keys, position, has_gauss, cached = states["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed Python, NumPy and torch for one rank of a run."""
    mixed = draws.mix(seed, rank)
    random.seed(mixed)
    torch.manual_seed(mixed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(mixed % 2**32)


@contextlib.contextmanager
def sample_seed(seed: int, epoch: int, index: int) -> Iterator[None]:
    """Within it, random draws depend on (seed, epoch, index) only; the run's own generators then go on undisturbed."""
    # A worker process has no run of its own to protect, and putting states back costs more than seeding.
    kept = None if torch.utils.data.get_worker_info() is not None else _host_states()
    mixed = draws.sample_seed(seed, epoch, index)
    random.seed(mixed)
    torch.default_generator.manual_seed(mixed)  # not torch.manual_seed, which would also reseed the GPUs
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(mixed)
    try:
        yield
    finally:
        if kept is not None:
            random.setstate(kept[0])
            torch.default_generator.set_state(kept[1])
            if numpy is not None and kept[2] is not None:
                numpy.random.set_state(kept[2])


def _host_states() -> tuple[Any, torch.Tensor, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), torch.default_generator.get_state(), numpy.random.get_state() if numpy else None
