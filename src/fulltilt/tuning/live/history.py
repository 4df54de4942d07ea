"""What live tuning did to one loader, kept as the record that reports read."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

from fulltilt.records import LiveMove, LiveRecord, Settings
from fulltilt.tuning.live.controller import Try
from fulltilt.tuning.live.window import Knobs, Seen


def settings_of(knobs: Knobs, persistent: bool) -> Settings:
    """Settings as files and records have them. Whether workers persist is the script's own choice."""
    return Settings(
        num_workers=knobs.workers,
        prefetch_factor=knobs.prefetch if knobs.workers else None,
        pin_memory=knobs.pin,
        persistent_workers=persistent if knobs.workers else None,
    )


class History:
    """Notes each move. ``changed`` is told which settings come into force, and None when they are taken back."""

    def __init__(self, loader_id: int, now_s: Callable[[], float], changed: Callable[[Settings | None], None]) -> None:
        self._now_s = now_s
        self._changed = changed
        self._persistent = False
        nothing = Settings()
        self._record = LiveRecord(loader_id, "watching", "not enough was seen yet", nothing, nothing)

    def record(self) -> LiveRecord:
        """Everything noted so far."""
        return self._record

    def starts(self, user: Knobs, persistent: bool) -> None:
        """A loader was taken up with these settings of the script's own."""
        self._persistent = persistent
        settings, earlier = settings_of(user, persistent), self._record
        self._record = LiveRecord(
            earlier.loader_id, "watching", "not enough was seen yet", settings, settings, cost_s=earlier.cost_s
        )

    def saw(self, seen: Seen) -> None:
        """What the settings in force gave."""
        rate, wait = seen.batches_per_s, seen.wait_share
        if self._record.before_batches_per_s is None:
            self._record = replace(self._record, before_batches_per_s=rate, before_wait_share=wait)
        self._record = replace(self._record, batches_per_s=rate, wait_share=wait)

    def checks(self) -> None:
        """Workers are to show that they make the same batches."""
        self._note("watching", "checking that workers make the same batches")

    def draws_random_numbers(self) -> None:
        """Other workers draw other random numbers."""
        note = "the data set draws random numbers; in other workers they are others of the same distribution"
        self._record = replace(self._record, note=note)

    def tries(self, move: Try) -> None:
        """A pool is started."""
        trial = LiveMove(settings_of(move.knobs, self._persistent), self._now_s(), expected=move.expected)
        self._note("trying", f"trying {words(move.knobs)}", moves=(*self._record.moves, trial))

    def kept(self, seen: Seen) -> None:
        """What was tried is faster and stays."""
        self._end_move("kept", seen)
        self.saw(seen)
        self._note("watching", f"{words(seen.knobs)} paid", settings=settings_of(seen.knobs, self._persistent))
        self._changed(self._record.settings)

    def returned(self, seen: Seen) -> None:
        """What was tried is not faster."""
        self._end_move("returned", seen)
        self._note("watching", f"{words(seen.knobs)} did not pay")

    def failed(self, why: str) -> None:
        """What was tried broke."""
        self._end_move("failed", None, why)
        self._note("watching", why)

    def settled(self, why: str) -> None:
        """Nothing more is tried."""
        self._note("settled", why)

    def left_alone(self, why: str) -> None:
        """The loader is as the script has it, and stays so."""
        found_others = self._record.settings != self._record.before
        self._note("left_alone", why, settings=self._record.before, note=None)
        if found_others:
            self._changed(None)

    @contextlib.contextmanager
    def costs(self) -> Iterator[None]:
        """Time of the training thread that goes into tuning."""
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self._record = replace(self._record, cost_s=self._record.cost_s + time.perf_counter() - began_s)

    def _end_move(
        self, outcome: Literal["kept", "returned", "failed"], seen: Seen | None, why: str | None = None
    ) -> None:
        *earlier, last = self._record.moves
        ended = replace(
            last,
            outcome=outcome,
            batches_per_s=seen.batches_per_s if seen is not None else None,
            wait_share=seen.wait_share if seen is not None else None,
            why=why,
        )
        self._record = replace(self._record, moves=(*earlier, ended))

    def _note(self, state: str, why: str, **more: Any) -> None:
        self._record = replace(self._record, state=state, why=why, **more)  # type: ignore[arg-type]


def words(knobs: Knobs) -> str:
    """Settings in a few words."""
    workers = f"{knobs.workers} worker{'' if knobs.workers == 1 else 's'}"
    return f"{workers}, prefetch {knobs.prefetch}{', pinned' if knobs.pin else ''}" if knobs.workers else workers


def short(error: Exception) -> str:
    """The last line of what went wrong; before it stands a worker's own traceback."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else ''}".rstrip(": ")
