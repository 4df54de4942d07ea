"""Means over an epoch, kept on the device until somebody asks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from fulltilt.train.distributed import Group


class Totals:
    """Weighted sums by name. Adding to them never waits for the device; what is not finite is left out."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._sums: dict[tuple[str, ...], torch.Tensor] = {}
        self._read: dict[str, tuple[float, float]] = {}

    def add(self, means: Mapping[str, torch.Tensor], samples: int) -> None:
        """Add the means over ``samples`` samples."""
        names = tuple(means)
        values = torch.stack([mean.detach().double() for mean in means.values()])
        finite = torch.isfinite(values)
        # One row of weighted sums and one of weights.
        rows = torch.stack([torch.where(finite, values, 0.0), finite.double()]) * samples
        self._sums[names] = self._sums[names].add_(rows) if names in self._sums else rows

    def add_read(self, name: str, mean: float, samples: int) -> None:
        """Add a mean that has been read from the device already."""
        if math.isfinite(mean):
            total, weight = self._read.get(name, (0.0, 0.0))
            self._read[name] = total + mean * samples, weight + samples

    def reset(self) -> None:
        """Start a new epoch."""
        self._sums.clear()
        self._read.clear()

    def means(self, group: Group | None = None) -> dict[str, float]:
        """The means so far, over the ranks of ``group`` if given. Waits for the device. NaN: nothing was finite."""
        sums, weights = self._by_name()
        if group is not None and not group.alone:
            # A rank that got no sample does not know the names yet.
            names = list(dict.fromkeys(name for known in group.gather(list(sums)) for name in known))
            rows = [[known.get(name, 0.0) for name in names] for known in (sums, weights)]
            totals, counts = group.sum_(torch.tensor(rows, dtype=torch.float64)).tolist()
            sums, weights = dict(zip(names, totals, strict=True)), dict(zip(names, counts, strict=True))
        return {name: sums[name] / weights[name] if weights[name] else math.nan for name in sums}

    def _by_name(self) -> tuple[dict[str, float], dict[str, float]]:
        sums = {name: total for name, (total, _) in self._read.items()}
        weights = {name: weight for name, (_, weight) in self._read.items()}
        for names, rows in self._sums.items():
            for name, total, weight in zip(names, *rows.tolist(), strict=True):
                sums[name] = sums.get(name, 0.0) + total
                weights[name] = weights.get(name, 0.0) + weight
        return sums, weights

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {
            "sums": [[list(names), rows] for names, rows in self._sums.items()],
            "read": [[name, *sums] for name, sums in self._read.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From the checkpoint."""
        self._sums = {tuple(names): rows.to(self.device) for names, rows in state["sums"]}
        self._read = {name: (total, weight) for name, total, weight in state.get("read", [])}
