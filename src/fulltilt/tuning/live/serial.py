"""Watching a loader without workers fetch: would a worker process have done the same, bit for bit?

Four things would not be the same: random numbers drawn from the training process's generators, a data set that changes
by being read, a file whose position is shared after a fork, and sums that are rounded differently with one thread. Each
is looked for around real fetches. What is made is kept for workers to compare with (`witness.py`).
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

import torch

from fulltilt.feed.generators import Generators
from fulltilt.recorder.loaders.batches import count_bytes
from fulltilt.tuning.live.anatomy import anatomy
from fulltilt.tuning.live.large_sums import LargeSums
from fulltilt.tuning.live.witness import Witnesses

LOOK_CLOSELY_FIRST = 4


class FetchWatch:
    """Stands around the fetches of torch's single-process iterator until ``remove``."""

    def __init__(self, iterator: Any) -> None:
        self._fetcher = iterator._dataset_fetcher
        self._makers = iterator._dataset, iterator._collate_fn
        self._generators = Generators(*self._makers)
        self._mark: Any = None
        self._positions: dict[str, int] | None = None
        self._fetches = 0
        self._before: Any = None
        self._problem: str | None = None
        self.tensors_per_batch = 0
        self.witnesses = Witnesses()
        self._sums = LargeSums()
        fetch = self._fetcher.fetch

        def watched(index: Any) -> Any:
            self._look(self._about_to_fetch)
            if self._fetches < LOOK_CLOSELY_FIRST:
                with self._sums:
                    batch = fetch(index)
            else:
                batch = fetch(index)
            self._look(self._fetched, index, batch)
            return batch

        self._fetcher.fetch = watched

    def _look(self, look: Callable[..., None], *facts: Any) -> None:
        """Looking at objects of the user's may go wrong; the job goes on."""
        try:
            look(*facts)
        except Exception as error:
            if os.environ.get("FULLTILT_DEBUG"):
                raise
            self._problem = f"its data set cannot be looked at ({type(error).__name__}: {error})"

    def _about_to_fetch(self) -> None:
        self._mark = self._generators.mark()
        self._positions = file_positions() if self._fetches < LOOK_CLOSELY_FIRST else None

    def _fetched(self, index: Any, batch: Any) -> None:
        if self._generators.mark() != self._mark:
            self._problem = (
                "its data set draws random numbers, which in workers would be others than in the training process"
            )
        elif self._positions is not None and _moved(self._positions, file_positions()):
            self._problem = "its data set reads from a file that stays open, whose position workers would share"
        elif self._sums.seen is not None and torch.get_num_threads() > 1:
            self._problem = (
                f"its data set adds up large tensors ({self._sums.seen}), which a worker, with one thread, may round "
                "differently"
            )
        self._fetches += 1
        if self._fetches == 1:
            self._look_at(batch)
        if self._problem is None:
            self.witnesses.keep(index, batch, count_bytes(batch))

    @property
    def has_looked(self) -> bool:
        """Whether a batch was fetched before its eyes."""
        return self._fetches > 0 or self._problem is not None

    def remove(self) -> None:
        """Leave the iterator as it was."""
        vars(self._fetcher).pop("fetch", None)

    def problem(self) -> str | None:
        """Why this loader should stay without workers, as far as seen; None when nothing speaks against them."""
        if self._problem is not None or self._before is None:
            return self._problem
        now = anatomy(*self._makers)
        if now.handle is not None:
            return f"its data set holds an open file or connection ({now.handle}), which workers must not share"
        if now.crew is not None:
            return f"its data set works with threads or processes of its own ({now.crew}), which workers would not have"
        changed = now.change_from(self._before)
        if changed is not None:
            return f"what its data set uses changes during a pass ({changed}), and workers would not see each other's"
        return None

    def _look_at(self, batch: Any) -> None:
        self._before = anatomy(*self._makers)
        probe = HandoverProbe()
        try:
            probe.dump(batch)
        except Exception as error:
            self._problem = f"its batches cannot be handed over between processes ({type(error).__name__}: {error})"
        self.tensors_per_batch = probe.tensors
        if probe.unusual is not None:
            self._problem = f"its batches hold {probe.unusual}, which a worker cannot hand over as it is"


class HandoverProbe(pickle.Pickler):
    """Pickles a batch to nowhere: everything but the tensors, which are counted and looked at."""

    def __init__(self) -> None:
        super().__init__(_Nowhere(), protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors = 0
        self.unusual: str | None = None

    def reducer_override(self, item: Any) -> Any:
        """Let a number stand for each tensor."""
        if not isinstance(item, torch.Tensor):
            return NotImplemented
        self.tensors += 1
        if item.device.type != "cpu":
            self.unusual = f"tensors on {item.device}"
        elif item.requires_grad and not item.is_leaf:
            self.unusual = "tensors with a gradient history"
        elif item.layout != torch.strided:
            self.unusual = f"tensors of layout {item.layout}"
        return int, ()


class _Nowhere:
    def write(self, data: Any) -> int:
        return len(data)


def file_positions() -> dict[str, int]:
    """The position of each file that this process has open to read; empty where there is no /proc.

    Files that are only written or appended to are no data: logs, and Fulltilt's record, grow during a fetch too.
    """
    positions = {}
    try:
        import fcntl

        descriptors = os.listdir("/proc/self/fd")  # noqa: PTH208 - every batch
    except (OSError, ImportError):
        return {}
    for descriptor in descriptors:
        try:
            path = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115
            if not path.startswith("/") or path.startswith(("/dev/", "/proc/", "/sys/")) or "(deleted)" in path:
                continue
            flags = fcntl.fcntl(int(descriptor), fcntl.F_GETFL)
            if flags & os.O_ACCMODE == os.O_WRONLY or flags & os.O_APPEND:
                continue
            positions[f"{descriptor} {path}"] = os.lseek(int(descriptor), 0, os.SEEK_CUR)
        except (OSError, ValueError):
            continue
    return positions


def _moved(before: dict[str, int], after: dict[str, int]) -> bool:
    """Whether a file that was open all the time was read on: its position would be shared by forked readers."""
    return any(after[key] != position for key, position in before.items() if key in after)
