"""Live tuning: the loaders of a job get better settings while it trains, without a change to the script.

`fulltilt run --auto` names this module in the job's environment; each process of the job calls ``attach`` once torch is
there. The loader tap then asks for the source of every pass.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fulltilt import store
from fulltilt.errors import FulltiltError
from fulltilt.recorder import attach as attached
from fulltilt.recorder.loaders import LoaderTap
from fulltilt.recorder.loaders.iterator import is_iterable
from fulltilt.recorder.loaders.settings_file import LOADER
from fulltilt.recorder.loaders.workers import allowed_cpus
from fulltilt.recorder.session import Session
from fulltilt.records import LiveRecord, Settings
from fulltilt.tuning.live.controller import Capacity, measure_capacity
from fulltilt.tuning.live.limits import DEFAULT, Limits
from fulltilt.tuning.live.measurement import Knobs
from fulltilt.tuning.live.ranks import Ranks, Report
from fulltilt.tuning.space import rid_of_none

if TYPE_CHECKING:
    from fulltilt.tuning.live.streamed import StreamTuner
    from fulltilt.tuning.live.tuner import LoaderTuner

# In the job's environment: leave alone what would not stay bit for bit.
EXACT = "FULLTILT_EXACT"


def attach(session: Session) -> None:
    """Tune the loaders of this process from now on."""
    live = Live(session, exact=bool(os.environ.get(EXACT)))
    session.taps.live = live.begin
    session.state.live = live.records


class Live:
    """All loaders of a process that are tuned, one tuner each."""

    def __init__(self, session: Session, limits: Limits = DEFAULT, exact: bool = False) -> None:
        self.session = session
        self.limits = limits
        self.exact = exact
        self._t0_s = int(os.environ.get(attached.T0_NS) or time.perf_counter_ns()) * 1e-9
        self.tuners: dict[int, LoaderTuner | StreamTuner] = {}
        self._found_for: str | None = None  # the loader whose settings were found last
        self._lock = threading.Lock()  # the observer's thread asks for the ranks, too
        self._ranks: Ranks | None = None
        self._told: set[int] = set()  # loaders of which the other ranks know that they are left alone

    def begin(self, loader: Any, tap: LoaderTap, iterate: Callable[[Any], Any]) -> Any:
        """The source of a pass over a loader; ``iterate`` is torch's own ``DataLoader.__iter__``."""
        if os.getpid() != self.session.recorder.pid:
            return self.session.taps.with_meters(partial(iterate, loader), tap)
        from fulltilt.tuning.live.streamed import StreamTuner
        from fulltilt.tuning.live.tuner import LoaderTuner

        tuner = self.tuners.get(tap.loader_id)
        if tuner is None:
            streams = is_iterable(loader) and not loader.num_workers
            tuner = self.tuners[tap.loader_id] = (StreamTuner if streams else LoaderTuner)(self, tap)
        return tuner.begin(loader, iterate)

    def records(self) -> tuple[LiveRecord, ...]:
        """What was done to each training loader. The other ranks hear of those left alone, also before ranks met."""
        trains = [tuner for tuner in list(self.tuners.values()) if tuner.tap.trains]
        for tap, record in ((tuner.tap, tuner.record) for tuner in trains):
            if record.state == "left_alone" and tap.loader_id not in self._told:
                with contextlib.suppress(FulltiltError, OSError):
                    if (ranks := self.ranks) is not None:
                        ranks.say(self.report(tap, 0, Knobs(0), Capacity(0.0), left_alone=record.why))
                        self._told.add(tap.loader_id)
        return tuple(tuner.record for tuner in trains)

    @property
    def ranks(self) -> Ranks | None:
        """How the ranks of this job agree; None in a job of one, and before the ranks have met."""
        notes = self.session.state
        with self._lock:
            if self._ranks is None and notes.group is not None:
                self._ranks = Ranks(Path(self.session.recorder.folder), notes.group, notes.rank, notes.world_size)
            return self._ranks

    def is_alone(self) -> bool:
        """Whether this process is the only rank of its job, as far as torch knows."""
        self.session.state.learn_rank()
        return self.session.state.world_size == 1

    def reason_of_job(self, streams: bool = False) -> str | None:
        """Why no loader, or none that ``streams``, is tuned in this job; None when nothing speaks against it."""
        if not self.is_alone():
            return "a streamed data set is tuned in jobs of one rank only" if streams else None
        if store.is_task(Path(self.session.recorder.folder)):
            return "this is one of several tasks, whose ranks have not met in a process group of torch's"
        return None

    def report(self, tap: LoaderTap, batch: int, knobs: Knobs, capacity: Capacity, **what: Any) -> Report:
        """What this rank says of a loader, which all ranks know by its line and its place among those made there."""
        place = sum(other.where == tap.where for other in self.session.taps.all[: tap.loader_id])
        cpus = f"{sum(1 << cpu for cpu in allowed_cpus()):x}"
        return Report(f"{tap.where} {place}", batch, socket.gethostname(), cpus, knobs, capacity, **what)

    def now_s(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._t0_s

    def capacity(self, tap: LoaderTap, tensors_per_batch: int) -> Capacity:
        """What is left for the workers of one loader, beside those of the others."""
        others = (tuner.tap for tuner in self.tuners.values() if tuner.tap is not tap and tuner.tap.in_pass)
        workers = sum(other.serving_workers or 0 for other in others)
        return measure_capacity(self.session, tap, workers, tensors_per_batch)

    def write(self, where: str | None, settings: Settings | None) -> None:
        """Leave what was found where `fulltilt run --settings` takes it; None: nothing is to be taken after all."""
        notes = self.session.state
        notes.learn_rank()
        if notes.rank != 0:
            return
        path = Path(self.session.recorder.folder) / store.SETTINGS_FILE
        try:
            if settings is not None:
                store.write_json(path, {**rid_of_none(settings), **({LOADER: where} if where else {})})
                self._found_for = where
            elif self._found_for == where:
                store.OwnedFolder(path.parent).remove(path.name)
        except (FulltiltError, OSError) as error:
            print(f"fulltilt: {error}", file=sys.stderr)
