"""GPUs on the watch screen: charts of each, or a line of each where there are many."""

from __future__ import annotations

from rich.text import Text

from fulltilt import figures
from fulltilt.diagnosis.preflight import PreflightLimits
from fulltilt.figures import clean
from fulltilt.records import GpuReading
from fulltilt.report.blocks import chart_rows
from fulltilt.report.live.parts import GIB, HEAD, PLAIN, WatchView, series, spread

BUSY, SM, VRAM = "#2b6cd4", "#0e9a78", "#9a6fd0"

_HOT_MARGIN_C = PreflightLimits().temperature_margin_c


def gpu_block(view: WatchView, place: int, width: int, rows: int) -> list[Text]:
    """The GPU at that place: its state, and charts of ``rows`` lines each."""
    gpu = view.now.gpus[place]
    past = [sample.gpus[place] if place < len(sample.gpus) else None for sample in view.samples]
    title = spread(_gpu_title(gpu), _gpu_state(gpu), width)
    busy = [reading.util_pct if reading else None for reading in past]
    lines = [title, *series("busy", busy, BUSY, width, rows, view.blocks)]
    active = [reading.sm_active_pct if reading else None for reading in past]
    if any(value is not None for value in active):
        lines += series("SM", active, SM, width, rows, view.blocks)
    held = [_vram_pct(reading) if reading else None for reading in past]
    return lines + series("VRAM", held, VRAM, width, rows, view.blocks, note=_vram(gpu))


def _gpu_title(gpu: GpuReading) -> Text:
    return Text(f"GPU {gpu.index}", HEAD).append(f"  {clean(gpu.name)}", PLAIN)


def _gpu_state(gpu: GpuReading) -> Text:
    if gpu.lost:
        return Text("lost: the driver no longer answers for it", "bold red")
    state = Text()
    if gpu.throttle_reasons:
        state.append(f"throttled: {', '.join(gpu.throttle_reasons).replace('_', ' ')}  ", "bold yellow")
    if gpu.temperature_c is not None:
        limit = "" if gpu.temperature_limit_c is None else f" of {gpu.temperature_limit_c:.0f}"
        state.append(f"{gpu.temperature_c:.0f}{limit} °C", _heat(gpu))
    if gpu.power_w is not None:
        limit = "" if gpu.power_limit_w is None else f" of {gpu.power_limit_w:.0f}"
        state.append(f"  {gpu.power_w:.0f}{limit} W")
    if gpu.sm_clock_mhz is not None:
        state.append(f"  {gpu.sm_clock_mhz:.0f} MHz")
    return state


def _heat(gpu: GpuReading) -> str:
    if gpu.temperature_c is None or gpu.temperature_limit_c is None:
        return ""
    margin = gpu.temperature_limit_c - gpu.temperature_c
    return "bold red" if margin <= 0 else "bold yellow" if margin < _HOT_MARGIN_C else "green"


def gpu_line(view: WatchView, place: int, width: int) -> Text:
    """One GPU in one line, for many GPUs in a small window."""
    gpu = view.now.gpus[place]
    left = Text(f"GPU {gpu.index:<2}", HEAD)
    left.append(f" {figures.pct(gpu.util_pct):>5} ", "not bold " + BUSY)
    held = "VRAM " + figures.pct(_vram_pct(gpu))
    heat = Text("lost", "bold red") if gpu.lost else Text(figures.celsius(gpu.temperature_c), _heat(gpu))
    right = Text(f"  {held:>10}  ").append_text(heat)
    past = [sample.gpus[place].util_pct if place < len(sample.gpus) else None for sample in view.samples]
    room = max(0, width - left.cell_len - right.cell_len)
    return left.append(chart_rows(past, room, 1, 100.0, blocks=view.blocks)[0], BUSY).append_text(right)


def _vram_pct(gpu: GpuReading) -> float | None:
    if gpu.vram_used_bytes is None or not gpu.vram_total_bytes:
        return None
    return 100 * gpu.vram_used_bytes / gpu.vram_total_bytes


def _vram(gpu: GpuReading) -> str:
    if gpu.vram_used_bytes is None or not gpu.vram_total_bytes:
        return ""
    return f"{gpu.vram_used_bytes / GIB:.1f}/{gpu.vram_total_bytes / GIB:.0f} GiB"
