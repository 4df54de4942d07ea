"""Where a step's time goes: marks on the training thread, a clock on the GPU, taps on loaders and workers."""

from __future__ import annotations

from typing import Any

__all__ = ["record"]


def __getattr__(name: str) -> Any:
    # record() needs torch; the rest of this floor is also used where there is none.
    if name == "record":
        from fulltilt.recorder.manual_recording import record

        return record
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
