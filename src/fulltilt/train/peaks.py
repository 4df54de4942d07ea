"""The highest of each figure over some samples of the machine. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from fulltilt.records import GpuReading, Sample

Figure = TypeVar("Figure", int, float)


def higher(before: Sample | None, now: Sample) -> Sample:
    """``now`` with each figure of the status line at its highest so far; what was never measured stays None."""
    if before is None:
        return now
    host = replace(
        now.host,
        cpu_pct=_most(before.host.cpu_pct, now.host.cpu_pct),
        mem_used_bytes=_most(before.host.mem_used_bytes, now.host.mem_used_bytes),
    )
    known = {gpu.uuid: gpu for gpu in before.gpus}
    return replace(now, host=host, gpus=tuple(_higher(known.get(gpu.uuid, gpu), gpu) for gpu in now.gpus))


def _higher(before: GpuReading, now: GpuReading) -> GpuReading:
    return replace(
        now,
        util_pct=_most(before.util_pct, now.util_pct),
        vram_used_bytes=_most(before.vram_used_bytes, now.vram_used_bytes),
        temperature_c=_most(before.temperature_c, now.temperature_c),
        sm_active_pct=_most(before.sm_active_pct, now.sm_active_pct),
    )


def _most(a: Figure | None, b: Figure | None) -> Figure | None:
    return max((value for value in (a, b) if value is not None), default=None)
