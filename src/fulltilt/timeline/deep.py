"""`--deep N`: a few steps under torch.profiler, for what only it sees: kernel gaps, copies, waits and their lines."""

from __future__ import annotations

from typing import Any

from fulltilt.timeline.recorder import Recorder


class DeepLook:
    """Profiles N steps once the job has warmed up."""

    def __init__(self, torch: Any, recorder: Recorder, steps: int) -> None:
        self._torch = torch
        self._recorder = recorder
        self._steps = steps

    def install(self) -> None:
        """Wait for the warm-up's end."""

    def stop(self) -> None:
        """Summarise what was seen."""
