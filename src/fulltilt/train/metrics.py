"""Metrics: read from the GPU without waiting for it, averaged over an epoch, written as CSV."""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from fulltilt import store
from fulltilt.errors import ForeignFiles
from fulltilt.train import checkpoint_format
from fulltilt.train.checkpoint import METRICS_FILE
from fulltilt.train.distributed import Group

Label = TypeVar("Label")


class AsyncMetrics(Generic[Label]):
    """A queue of small device vectors, each with a label from the host."""

    def __init__(self, device: torch.device) -> None:
        self.lag = 8 if device.type == "cuda" else 0
        self._queue: deque[tuple[Label, torch.Tensor, torch.cuda.Event | None]] = deque()

    def push(self, label: Label, figures: torch.Tensor) -> None:
        """Queue the figures of one step."""
        event = None
        if figures.is_cuda:
            figures = figures.to("cpu", non_blocking=True)  # into pinned memory, which torch keeps for the next
            event = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
            event.record()
        self._queue.append((label, figures, event))

    def read(self, *, everything: bool) -> Iterator[tuple[Label, list[float]]]:
        """What was queued more than ``lag`` steps ago, which the GPU has finished; ``everything`` waits for it."""
        while len(self._queue) > (0 if everything else self.lag):
            label, figures, event = self._queue.popleft()
            if event is not None:
                event.synchronize()
            yield label, figures.tolist()

    def clear(self) -> None:
        """Forget what is queued, after a rollback."""
        self._queue.clear()


# --------------------------------------------------------------------------- means over an epoch


class EpochTotals:
    """Weighted sums by name, without values that are not finite. Adding never waits for the device."""

    def __init__(self, group: Group) -> None:
        self.group = group
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

    def means(self) -> dict[str, float]:
        """The means so far, over all ranks. Waits for the device. NaN: nothing was finite."""
        own = [(name, *sums) for name, sums in self._read.items()]
        for names, rows in self._sums.items():
            own += zip(names, *rows.tolist(), strict=True)
        totals: dict[str, tuple[float, float]] = {}
        for name, total, weight in itertools.chain(*self.group.gather(own)):
            before = totals.get(name, (0.0, 0.0))
            totals[name] = before[0] + total, before[1] + weight
        return {name: total / weight if weight else math.nan for name, (total, weight) in totals.items()}

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint: the sums of each rank, and what was read, which is the same on all."""
        own = [[list(names), rows.cpu()] for names, rows in self._sums.items()]
        return {"ranks": self.group.gather(own), "read": [[name, *sums] for name, sums in self._read.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From the checkpoint. Sums of ranks that are gone go to others. Raises ValueError for another state."""
        info = self.group.info
        self._sums = {}
        for names, rows in itertools.chain(*state["ranks"][info.rank :: info.world_size]):
            key, taken = tuple(names), rows.to(self.group.device).reshape(2, len(names))
            self._sums[key] = self._sums[key] + taken if key in self._sums else taken
        self._read = {name: (float(total), float(weight)) for name, total, weight in state.get("read", [])}


# --------------------------------------------------------------------------- metrics.csv


def log_metrics(out: Path, epoch: int, metrics: dict[str, float], seconds: float) -> None:
    """Write a row per epoch to ``OUT/metrics.csv``; an epoch that is trained again has its row replaced.

    Raises MachineError when the disk refuses, ForeignFiles for a file that we did not write.
    """
    path = out / METRICS_FILE
    rows: dict[int, dict[str, str]] = {}
    try:
        if path.exists():
            with io.TextIOWrapper(store.open_plain(path), "utf-8", newline="") as file:
                rows = {int(row["epoch"]): row for row in csv.DictReader(file)}
    except OSError as error:
        raise checkpoint_format.cannot_write(path, error) from error
    except (ValueError, KeyError, TypeError, csv.Error) as error:
        raise ForeignFiles(f"{path} is not a table of epochs and is left as it is") from error
    rows[epoch] = {"epoch": str(epoch), "seconds": str(round(seconds, 3))}
    rows[epoch] |= {name: str(value) for name, value in metrics.items()}
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(dict.fromkeys(name for number in sorted(rows) for name in rows[number])))
    writer.writeheader()
    writer.writerows(rows[number] for number in sorted(rows))
    store.write_text(path, text.getvalue())
