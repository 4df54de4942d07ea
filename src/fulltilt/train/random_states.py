"""The random states of a run: seeded for each rank and saved in its checkpoints."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from fulltilt.feed import random_numbers
from fulltilt.train.distributed import Group


def rng_state(device: torch.device) -> dict[str, Any]:
    """The state of every generator that a training step may draw from: Python, NumPy, torch and this rank's GPU."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        states["numpy"] = (str(name), [int(key) for key in keys], int(position), int(has_gauss), float(cached))
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_rng(states: dict[str, Any], device: torch.device) -> None:
    """Restore what ``rng_state`` returned; the GPU's state only on a GPU."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        import numpy

        name, keys, position, has_gauss, cached = states["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


class RandomStates:
    """The random states of all ranks."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint: all ranks take part."""
        return {"ranks": self.group.gather(rng_state(self.group.device))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From the checkpoint. A new rank keeps the state that it was seeded with."""
        rank = self.group.info.rank
        if rank < len(state["ranks"]):
            restore_rng(state["ranks"][rank], self.group.device)


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed Python, NumPy and torch for one rank of a run."""
    mixed = random_numbers.mix(seed, rank)
    random.seed(mixed)
    torch.manual_seed(mixed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(mixed % 2**32)
