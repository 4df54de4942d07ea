"""What the tuners of one process share: limits, the reports of all ranks, capacity, and the settings file."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from fulltilt import store
from fulltilt.errors import FulltiltError
from fulltilt.recorder import attach as attached
from fulltilt.recorder.loaders import LoaderStats
from fulltilt.recorder.loaders.settings_file import LOADER
from fulltilt.recorder.loaders.workers import allowed_cpus
from fulltilt.recorder.session import Session
from fulltilt.records import Settings
from fulltilt.tuning.live.controller import Capacity, measure_capacity
from fulltilt.tuning.live.limits import LiveLimits
from fulltilt.tuning.live.measurement import Knobs
from fulltilt.tuning.live.rank_reports import RankReports, Report


class TunedProcess:
    """A process whose loaders are tuned."""

    def __init__(self, session: Session, limits: LiveLimits, exact: bool) -> None:
        self.session = session
        self.limits = limits
        self.exact = exact
        self._t0_s = int(os.environ.get(attached.T0_NS) or time.perf_counter_ns()) * 1e-9
        self._found_for: str | None = None  # the loader whose settings were found last
        self._lock = threading.Lock()  # the observer's thread reads them, too
        self._ranks: RankReports | None = None

    @property
    def ranks(self) -> RankReports | None:
        """The reports of all ranks; None in a job of one rank, and before the process group exists."""
        notes = self.session.state
        with self._lock:
            if self._ranks is None and notes.group is not None:
                self._ranks = RankReports(Path(self.session.recorder.folder), notes.group, notes.rank, notes.world_size)
            return self._ranks

    def is_alone(self) -> bool:
        """Whether this process is the only rank of its job, as far as torch knows."""
        self.session.state.learn_rank()
        return self.session.state.world_size == 1

    def reason_of_job(self) -> str | None:
        """Why no loader is tuned in this job; None where it may be."""
        if self.is_alone() and store.is_task(Path(self.session.recorder.folder)):
            return "this is one of several tasks, and their ranks have no torch process group"
        return None

    def report(self, stats: LoaderStats, batch: int, knobs: Knobs, capacity: Capacity, **what: Any) -> Report:
        """This rank's report on a loader, which all ranks know by its line and its number among those made there."""
        place = sum(other.where == stats.where for other in self.session.loaders.all[: stats.loader_id])
        cpus = f"{sum(1 << cpu for cpu in allowed_cpus()):x}"
        return Report(f"{stats.where} {place}", batch, socket.gethostname(), cpus, knobs, capacity, **what)

    def now_s(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._t0_s

    def capacity(self, stats: LoaderStats, tensors_per_batch: int) -> Capacity:
        """What is left for the workers of one loader."""
        others = (other for other in self.session.loaders.all if other is not stats and other.in_pass)
        workers = sum(other.serving_workers or 0 for other in others)
        return measure_capacity(self.session, stats, workers, tensors_per_batch)

    def write(self, where: str | None, settings: Settings | None) -> None:
        """Write the settings found, for `fulltilt run --settings`; None deletes that file."""
        notes = self.session.state
        notes.learn_rank()
        if notes.rank != 0:
            return
        path = Path(self.session.recorder.folder) / store.SETTINGS_FILE
        try:
            if settings is not None:
                store.write_json(path, {**store.encode(settings), **({LOADER: where} if where else {})})
                self._found_for = where
            elif self._found_for == where:
                store.OwnedFolder(path.parent).remove(path.name)
        except (FulltiltError, OSError) as error:
            print(f"fulltilt: {error}", file=sys.stderr)
