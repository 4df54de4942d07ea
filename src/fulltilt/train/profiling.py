"""torch.profiler over a few steps of a training, on request: the trace goes into ``OUT/profile``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fulltilt import store
from fulltilt.errors import FulltiltError
from fulltilt.recorder.loop_marks import LoopMarks
from fulltilt.train.progress import Screen

# The first steps compile, allocate and fill caches; then the profiler itself needs a step or two.
PASSED_OVER = 3
WARM_UP = 2


class StepProfiler:
    """Profiles ``steps`` steps once they have settled. ``step`` is told of every one; None profiles nothing."""

    def __init__(self, steps: int | None, out: Path, rank: int, screen: Screen, marks: LoopMarks) -> None:
        self._folder, self._rank, self._screen, self._marks = out / "profile", rank, screen, marks
        self._left = None if steps is None else PASSED_OVER + WARM_UP + steps
        self._profile: Any = None
        self._number = 0
        if steps is not None:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            schedule = torch.profiler.schedule(wait=PASSED_OVER, warmup=WARM_UP, active=steps, repeat=1)
            self._profile = torch.profiler.profile(
                activities=activities, schedule=schedule, on_trace_ready=self._write, record_shapes=True
            )

    def __enter__(self) -> StepProfiler:
        if self._profile is not None:
            self._marks.mark_profiling(True)
            self._profile.start()
        return self

    def step(self, number: int) -> None:
        """Step ``number`` has ended."""
        if self._profile is None or self._left is None:
            return
        self._number = number
        self._profile.step()
        self._left -= 1
        if self._left <= 0:
            self._end()

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.stop()
            self._marks.mark_profiling(False)

    def _write(self, profile: Any) -> None:
        path = self._folder / f"step-{self._number:08d}.rank-{self._rank}.json.gz"
        try:
            folder = store.OwnedFolder.around(self._folder)
            if folder is None:  # a rank on a machine that does not share OUT
                return
            folder.make(self._folder)
            folder.announce(path)
            profile.export_chrome_trace(str(path))
            folder.record(path)
        except (OSError, RuntimeError, FulltiltError) as error:  # a look at a training must not end it
            self._screen.warn(f"the profile was not written: {error}")
            return
        self._screen.say(f"Profile: {path} (open it at https://ui.perfetto.dev)")
