"""Live tuning: the loaders of a job get better settings while it trains, without a change to the script.

`fulltilt run --auto` names this module in the job's environment; each process of the job calls ``attach`` once torch is
there. The loader tap then asks for the source of every pass.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fulltilt import store
from fulltilt.errors import FulltiltError
from fulltilt.recorder.loaders.iterator import is_iterable
from fulltilt.recorder.loaders.overrides import LOADER
from fulltilt.records import LiveRecord, Settings
from fulltilt.tuning.live.measurement import DEFAULT, Limits
from fulltilt.tuning.space import rid_of_none

if TYPE_CHECKING:
    from collections.abc import Callable

    from fulltilt.recorder.loaders import LoaderTap
    from fulltilt.recorder.session import Session
    from fulltilt.tuning.live.controller import Capacity
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
        from fulltilt.recorder import attach as attached

        self.session = session
        self.limits = limits
        self.exact = exact
        self._t0_s = int(os.environ.get(attached.T0_NS) or time.perf_counter_ns()) * 1e-9
        self.tuners: dict[int, LoaderTuner | StreamTuner] = {}
        self._found_for: str | None = None  # the loader whose settings were found last

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
        """What was done to each training loader."""
        return tuple(tuner.record for tuner in list(self.tuners.values()) if tuner.tap.trains)

    def now_s(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._t0_s

    def capacity(self, tap: LoaderTap, tensors_per_batch: int) -> Capacity:
        """What is left for the workers of one loader, beside those of the others."""
        from fulltilt.tuning.live import controller

        others = (tuner.tap for tuner in self.tuners.values() if tuner.tap is not tap and tuner.tap.in_pass)
        workers = sum(other.serving_workers or 0 for other in others)
        return controller.measure_capacity(self.session, tap, workers, tensors_per_batch)

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
