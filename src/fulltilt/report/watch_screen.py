"""The screen of `fulltilt watch`: GPUs, host and jobs, for any window size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from fulltilt import figures, store
from fulltilt.diagnosis import preflight
from fulltilt.figures import clean, one_line, size, used_of
from fulltilt.records import GpuReading, HostReading, JobProcess, Sample

# --------------------------------------------------------------------------- blocks

UPWARD = " ▁▂▃▄▅▆▇█"


def chart_rows(values: Sequence[float | None], width: int, height: int, top: float) -> list[str]:
    """The newest ``width`` values as columns of ``height`` rows, the newest at the right.

    A value of 0 shows as the thinnest block, None stays blank.
    """
    levels = []
    for value in values[-width:] if width > 0 else ():
        share = min(max(value / top, 0.0), 1.0) if value is not None and top > 0 else 0.0
        levels.append(0 if value is None else max(1, round(share * height * 8)))
    rows = ("".join(UPWARD[min(max(level - 8 * row, 0), 8)] for level in levels) for row in reversed(range(height)))
    return [row.rjust(width) for row in rows]


# --------------------------------------------------------------------------- parts

GIB = 1024**3

HEAD, PLAIN, DIM = "bold", "not bold", "dim"
LABEL_WIDTH = 14


@dataclass(frozen=True, slots=True)
class WatchView:
    """Everything that the screen shows. ``samples`` are sorted by time, and empty at first."""

    hostname: str
    clock: str
    interval_s: float
    samples: Sequence[Sample]
    jobs: tuple[JobProcess, ...] = ()
    why_no_gpu: str | None = None
    recording: str | None = None

    @property
    def now(self) -> Sample:
        """The newest sample."""
        return self.samples[-1] if self.samples else Sample(0.0, HostReading())


def chart(
    label: str,
    figure: str,
    values: Sequence[float | None],
    style: str,
    width: int,
    note: str | Text = "",
    rows: int = 1,
    top: float = 100.0,
) -> list[Text]:
    """A chart of ``rows`` lines after its name and newest figure, with a note at the right."""
    note = Text(note) if isinstance(note, str) else note
    drawn = chart_rows(values, max(0, width - LABEL_WIDTH - note.cell_len), rows, top)
    heads = [label.ljust(12 - len(figure)) + figure, *[""] * (rows - 1)]
    lines = [Text(head.ljust(LABEL_WIDTH)).append(row, style) for head, row in zip(heads, drawn, strict=True)]
    lines[0].append_text(note)
    return lines


def spread(left: Text, right: Text, width: int) -> Text:
    """One text at the left edge, one at the right; the left one is cut where both do not fit."""
    room = width - right.cell_len - 2
    if room < 12:
        return left
    left.truncate(room, overflow="ellipsis")
    return Text.assemble(left, " " * (width - left.cell_len - right.cell_len), right)


# --------------------------------------------------------------------------- jobs

_NONE = "no process uses a GPU, and Fulltilt records no run"


def job_lines(view: WatchView, width: int, room: int) -> list[Text]:
    """At most ``room`` lines, two of them headings."""
    if not view.jobs:
        return [Text("jobs", HEAD).append(f"  {_NONE}", f"{PLAIN} {DIM}")]
    run_width = min(max(12, width - len(_row(0, *[""] * 6))), 40)
    lines = [Text("jobs", HEAD), Text(_row(run_width, "pid", "process", "run", "GPU", "VRAM", "CPU", "memory"), DIM)]
    fitting = max(0, room - len(lines))
    shown = view.jobs if len(view.jobs) <= fitting else view.jobs[: max(0, fitting - 1)]
    lines += [_job_line(view, job, run_width) for job in shown]
    if len(shown) < len(view.jobs):
        lines.append(Text(f"{len(view.jobs) - len(shown)} more", DIM))
    return lines


def _job_line(view: WatchView, job: JobProcess, run_width: int) -> Text:
    held = [
        (gpu.index, process.vram_used_bytes)
        for gpu in view.now.gpus
        for process in gpu.processes or ()
        if process.pid == job.pid
    ]
    sizes = [size for _, size in held if size is not None]
    line = _row(
        run_width,
        str(job.pid),
        (one_line(job.name or "") or "?") + (f" +{job.children}" if job.children else ""),
        "not recorded" if job.run_folder is None else one_line(store.run_name(Path(job.run_folder))) or "?",
        ",".join(str(index) for index, _ in held),
        figures.size(sum(sizes) if sizes else None),
        figures.pct(job.cpu_pct),
        figures.size(job.pss_bytes),
    )
    return Text(line, DIM if job.run_folder is None else "")


def _row(run_width: int, pid: str, process: str, run: str, gpu: str, vram: str, cpu: str, memory: str = "") -> str:
    """The most important columns come first: a narrow window cuts at the right."""
    name = f"{pid:>8}  {process[:16]:<16}  {run[:run_width]:<{run_width}}"
    return f"{name}  {gpu[:5]:<5}{vram:>9}  {cpu:>6}  {memory:>9}"


# --------------------------------------------------------------------------- gpus

BUSY, SM, VRAM = "#2b6cd4", "#0e9a78", "#9a6fd0"

_HOT_MARGIN_C = preflight.THRESHOLDS.temperature_margin_c


def gpu_lines(view: WatchView, place: int, width: int, rows: int) -> list[Text]:
    """The state of a GPU and its charts of ``rows`` lines each; with 0 everything in one line, for many GPUs."""
    gpu = view.now.gpus[place]
    past = [sample.gpus[place] if place < len(sample.gpus) else None for sample in view.samples]
    busy = [reading.util_pct if reading else None for reading in past]
    held = [_vram_pct(reading) if reading else None for reading in past]
    if not rows:
        note = Text(f"  VRAM {figures.pct(held[-1]):>5}  ")
        note.append_text(Text("lost", "bold red") if gpu.lost else Text(figures.celsius(gpu.temperature_c), _heat(gpu)))
        return chart(f"GPU {gpu.index}", figures.pct(gpu.util_pct), busy, BUSY, width, note)
    used, total = gpu.vram_used_bytes, gpu.vram_total_bytes
    vram = f"  {used / GIB:.1f}/{total / GIB:.0f} GiB" if used is not None and total else ""
    name = Text(f"GPU {gpu.index}", HEAD).append(f"  {clean(gpu.name)}{vram}", PLAIN)
    lines = [spread(name, _gpu_state(gpu), width)]
    lines += chart("busy", figures.pct(gpu.util_pct), busy, BUSY, width, rows=rows)
    active = [reading.sm_active_pct if reading else None for reading in past]
    if any(value is not None for value in active):
        lines += chart("SM", figures.pct(gpu.sm_active_pct), active, SM, width, rows=rows)
    return lines + chart("VRAM", figures.pct(held[-1]), held, VRAM, width, rows=rows)


def _gpu_state(gpu: GpuReading) -> Text:
    if gpu.lost:
        return Text("lost: the driver no longer sees it", "bold red")
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


def _vram_pct(gpu: GpuReading) -> float | None:
    if gpu.vram_used_bytes is None or not gpu.vram_total_bytes:
        return None
    return 100 * gpu.vram_used_bytes / gpu.vram_total_bytes


# --------------------------------------------------------------------------- host

CPU, RAM, DISK = "#d96a0b", "#b5596a", "#5f8f4e"


def host_lines(view: WatchView, width: int, rows: int) -> list[Text]:
    """The host, with a chart of its CPU use of ``rows`` lines."""
    host, past = view.now.host, [sample.host for sample in view.samples]
    facts = []
    if host.cpu_per_core_pct is not None:
        facts.append(f"{len(host.cpu_per_core_pct)} CPUs")
    if host.load_1min is not None:
        facts.append(f"load {host.load_1min:.1f}")
    if host.iowait_pct is not None:
        facts.append(f"I/O wait {host.iowait_pct:.0f} %")
    lines = [spread(Text("host", HEAD), Text("  ".join(facts)), width)]
    lines += chart("CPU", figures.pct(host.cpu_pct), [reading.cpu_pct for reading in past], CPU, width, rows=rows)
    cores, room = host.cpu_per_core_pct or (), max(width - LABEL_WIDTH, 1)
    for start in range(0, len(cores), room):
        row = cores[start : start + room]
        lines += chart("" if start else "cores", "", row, CPU, LABEL_WIDTH + len(row))
    total = host.mem_limit_bytes or host.mem_total_bytes
    if host.mem_used_bytes is None or not total:
        lines.append(Text("RAM"))
    else:
        note = f" {used_of(host.mem_used_bytes, total)}" + (" (limit)" if host.mem_limit_bytes else "")
        used = [reading.mem_used_bytes for reading in past]
        lines += chart("RAM", figures.pct(100 * host.mem_used_bytes / total), used, RAM, width, note, top=total)
    read = [reading.disk_read_bytes_per_s for reading in past]
    top = max((value for value in read[-max(0, width - LABEL_WIDTH) :] if value is not None), default=0.0)
    note = f" {size(read[-1] if read else None)}/s, at most {size(top)}/s"
    return lines + chart("disk reads", "", read, DISK, width, note, top=max(top, 1e6))


# --------------------------------------------------------------------------- the screen

_JOB_ROWS = 4
# Rows of each chart, from large to small; 0: a line for each GPU.
_ROWS = (12, 9, 7, 5, 4, 3, 2, 1, 0)


def watch_lines(view: WatchView, width: int, height: int) -> list[Text]:
    """The screen as at most ``height`` lines of at most ``width`` cells, with the largest charts that fit."""
    jobs = 2 + min(max(1, len(view.jobs)), _JOB_ROWS)
    for rows in _ROWS:
        lines = [*_machine(view, width, rows), Text()]
        if len(lines) + jobs <= height:
            break
    lines += job_lines(view, width, max(0, height - len(lines)))
    if len(lines) > height:
        lines = [*lines[: max(0, height - 1)], Text("… enlarge the window to see the rest", DIM)]
    for line in lines:
        line.no_wrap = True
        line.truncate(width)
    return lines[:height]


def _machine(view: WatchView, width: int, rows: int) -> list[Text]:
    """Everything above the jobs."""
    left = Text("fulltilt watch", HEAD).append(clean(f"  {view.hostname}  {view.clock}"), PLAIN)
    recording = "" if view.recording is None else f"recording to {clean(view.recording)}, "
    lines = [spread(left, Text(f"{recording}every {view.interval_s:g} s, q quits", DIM), width), Text()]
    gpus = range(len(view.now.gpus))
    if not gpus:
        lines.append(Text("no GPU", HEAD).append(f"  {clean(view.why_no_gpu or 'none was found')}", PLAIN))
    for place in gpus:
        lines += gpu_lines(view, place, width, rows)
    # The host's chart is the largest only where there is no GPU.
    return [*lines, Text(), *host_lines(view, width, max(min(rows, 3) if gpus else rows, 1))]
