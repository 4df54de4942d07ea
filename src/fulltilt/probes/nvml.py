"""NVML behind one guarded query, so that no missing feature and no dying GPU surprises the code above."""

from __future__ import annotations

import os
import threading
from types import ModuleType
from typing import Any

_LOST = (
    "NVML_ERROR_GPU_IS_LOST",
    "NVML_ERROR_RESET_REQUIRED",
    "NVML_ERROR_GPU_NOT_FOUND",
    "NVML_ERROR_UNINITIALIZED",
    "NVML_ERROR_DRIVER_NOT_LOADED",
)

_WHY_NO_SESSION = {
    "NVML_ERROR_LIBRARY_NOT_FOUND": "no NVIDIA driver is installed (its NVML library was not found)",
    "NVML_ERROR_DRIVER_NOT_LOADED": "the NVIDIA driver is installed but not loaded",
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH": "the NVIDIA driver was updated while it ran; reboot or reload it",
    "NVML_ERROR_NO_PERMISSION": "this user may not talk to the NVIDIA driver",
}


# One call at a time in this process: two threads in NVML's counters (GPM) at once ended in a segmentation fault. An
# engine run and a recording in one process have a sampler each.
_door = threading.Lock()


def _new_door() -> None:
    """In a forked child nobody would open a door that another thread of its parent had closed."""
    global _door
    _door = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_door)


class GpuLost(Exception):  # noqa: N818 - a state of the GPU, not an error of ours
    """The driver no longer answers for a GPU. ``by_shutdown``: somebody else ended the NVML session."""

    def __init__(self, by_shutdown: bool) -> None:
        super().__init__("the driver no longer answers for this GPU")
        self.by_shutdown = by_shutdown


class Nvml:
    """The NVML module (or a fake of it) with errors turned into None or GpuLost."""

    def __init__(self, module: ModuleType | Any) -> None:
        self.module = module
        self._lost = {code for name in _LOST if (code := getattr(module, name, None)) is not None}

    def start(self) -> str | None:
        """Begin a session; None when it began, else why it did not, in words."""
        try:
            with _door:
                self.module.nvmlInit()
        except self.module.NVMLError as error:
            for name, words in _WHY_NO_SESSION.items():
                if error.value == getattr(self.module, name, None):
                    return words
            return f"NVML failed: {error}"
        return None

    def query(self, function: str, *arguments: Any) -> Any:
        """The answer, or None where this GPU, driver, user or binding cannot give it. Raises GpuLost."""
        call = getattr(self.module, function, None)
        if call is None:
            return None
        try:
            with _door:
                return call(*arguments)
        except self.module.NVMLError as error:
            if error.value in self._lost:
                raise GpuLost(by_shutdown=error.value == self.module.NVML_ERROR_UNINITIALIZED) from error
            return None

    def stop(self) -> None:
        """End the session."""
        try:
            with _door:
                self.module.nvmlShutdown()
        except self.module.NVMLError:
            pass  # it had ended already
