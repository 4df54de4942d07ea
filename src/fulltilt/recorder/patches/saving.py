"""Where checkpoints are written."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fulltilt.recorder.marks import Activity
from fulltilt.recorder.patches.exchange import Exchange
from fulltilt.recorder.recorder import Recorder
from fulltilt.recorder.stacks import users_line


class SavingPatches:
    """Marks torch.save and names the line that calls it."""

    def __init__(self, torch: Any, recorder: Recorder) -> None:
        self._torch, self._recorder, self._notes = torch, recorder, recorder.notes

    def install(self, exchange: Exchange) -> None:
        """Stand at torch.save."""
        exchange.swap(self._torch, "save", self._save)

    def _save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder, notes = self._recorder, self._notes

        def save(*args: Any, **kwargs: Any) -> Any:
            if not recorder.mine() or recorder.activity is Activity.SAVE:
                return original(*args, **kwargs)
            recorder.wake()
            where, function = users_line(recorder.way_in.spots)
            began = time.perf_counter()
            before = recorder.switch(Activity.SAVE)
            try:
                return original(*args, **kwargs)
            finally:
                recorder.switch(before)
                notes.checkpoint_lines.charge(where, function, time.perf_counter() - began, "torch.save")

        return save
