"""Live tuning: gives the loaders of a job better settings while it trains, without a change to the script.

`fulltilt run --auto` names this module in the job's environment; each process of the job calls ``attach`` once torch is
imported. From then on every pass over a loader begins with ``Live.begin``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from fulltilt.errors import FulltiltError
from fulltilt.recorder.loaders import LoaderStats
from fulltilt.recorder.session import Session
from fulltilt.records import LiveRecord
from fulltilt.tuning.live.controller import Capacity
from fulltilt.tuning.live.limits import DEFAULT, LiveLimits
from fulltilt.tuning.live.measurement import Knobs
from fulltilt.tuning.live.process import TunedProcess

if TYPE_CHECKING:
    from fulltilt.tuning.live.tuner import LoaderTuner

# In the job's environment: tune only where batches stay bit for bit the same.
EXACT = "FULLTILT_EXACT"


def attach(session: Session) -> None:
    """Tune the loaders of this process from now on."""
    live = Live(session, exact=bool(os.environ.get(EXACT)))
    session.loaders.live = live.begin
    session.state.live = live.records


class Live(TunedProcess):
    """All loaders of a process that are tuned, one tuner each."""

    def __init__(self, session: Session, limits: LiveLimits = DEFAULT, exact: bool = False) -> None:
        super().__init__(session, limits, exact)
        self.tuners: dict[int, LoaderTuner] = {}
        self._announced: set[int] = set()  # loaders that the other ranks know to be left alone

    def begin(self, loader: Any, stats: LoaderStats, iterate: Callable[[Any], Any]) -> Any:
        """The iterator of a pass over a loader; ``iterate`` is torch's own ``DataLoader.__iter__``."""
        if os.getpid() != self.session.recorder.pid:
            return self.session.loaders.start_workers(partial(iterate, loader), stats)
        from fulltilt.tuning.live.tuner import LoaderTuner

        tuner = self.tuners.get(stats.loader_id)
        if tuner is None:
            tuner = self.tuners[stats.loader_id] = LoaderTuner(self, stats)
        return tuner.begin(loader, iterate)

    def records(self) -> tuple[LiveRecord, ...]:
        """What was done to each training loader; tells the other ranks of those that are left alone."""
        trains = [tuner for tuner in list(self.tuners.values()) if tuner.stats.trains]
        for stats, record in ((tuner.stats, tuner.record) for tuner in trains):
            if record.state == "left_alone" and stats.loader_id not in self._announced:
                with contextlib.suppress(FulltiltError, OSError):
                    if (ranks := self.ranks) is not None:
                        ranks.write(self.report(stats, 0, Knobs(0), Capacity(0.0), left_alone=record.why))
                        self._announced.add(stats.loader_id)
        return tuple(tuner.record for tuner in trains)
