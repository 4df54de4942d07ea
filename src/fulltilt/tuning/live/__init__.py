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
from fulltilt.recorder.loaders.overrides import LOADER
from fulltilt.records import LiveRecord, Settings
from fulltilt.tuning.live.window import DEFAULT, Limits
from fulltilt.tuning.space import rid_of_none

if TYPE_CHECKING:
    from collections.abc import Callable

    from fulltilt.recorder.loaders import LoaderTap
    from fulltilt.recorder.session import Session
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

        self._session = session
        self._limits = limits
        self._exact = exact
        self._t0_s = int(os.environ.get(attached.T0_NS) or time.perf_counter_ns()) * 1e-9
        self.tuners: dict[int, LoaderTuner] = {}
        self._found_for: str | None = None  # the loader whose settings were found last

    def begin(self, loader: Any, tap: LoaderTap, iterate: Callable[[Any], Any]) -> Any:
        """The source of a pass over a loader; ``iterate`` is torch's own ``DataLoader.__iter__``."""
        if os.getpid() != self._session.recorder.pid:
            return self._session.taps.with_meters(partial(iterate, loader), tap)
        tuner = self.tuners.get(tap.loader_id) or self._new(tap)
        return tuner.begin(loader, iterate)

    def records(self) -> tuple[LiveRecord, ...]:
        """What was done to each training loader."""
        return tuple(tuner.record for tuner in list(self.tuners.values()) if tuner.tap.trains)

    def _new(self, tap: LoaderTap) -> LoaderTuner:
        from fulltilt.tuning.live import controller
        from fulltilt.tuning.live.tuner import LoaderTuner

        def measure(tuner: LoaderTuner) -> controller.Capacity:
            others = (other for other in self.tuners.values() if other is not tuner and other.tap.in_pass)
            workers = sum(other.tap.serving_workers or 0 for other in others)
            return controller.measure_capacity(self._session, tap, workers, tuner.tensors_per_batch)

        tuner = LoaderTuner(
            self._session.taps,
            tap,
            lambda: time.perf_counter() - self._t0_s,
            partial(self._write, tap.where),
            measure,
            self._limits,
            self._exact,
        )
        self.tuners[tap.loader_id] = tuner
        return tuner

    def _write(self, where: str | None, settings: Settings | None) -> None:
        """Leave what was found where `fulltilt run --settings` takes it; None: nothing is to be taken after all."""
        notes = self._session.state
        notes.learn_rank()
        if notes.rank != 0:
            return
        path = Path(self._session.recorder.folder) / store.SETTINGS_FILE
        try:
            if settings is not None:
                store.write_json(path, {**rid_of_none(settings), **({LOADER: where} if where else {})})
                self._found_for = where
            elif self._found_for == where:
                store.OwnedFolder(path.parent).remove(path.name)
        except (FulltiltError, OSError) as error:
            print(f"fulltilt: {error}", file=sys.stderr)
