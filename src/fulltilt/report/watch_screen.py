"""The screen of `fulltilt watch`: GPUs, host and jobs, fitted into any window."""

from __future__ import annotations

import itertools
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
    """The newest ``width`` values as columns, ``height`` rows of text from the top down, the newest at the right.

    A value of 0 shows as the thinnest block, so that it differs from None, which stays blank.
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
    """Everything that the screen shows. ``samples`` go from the oldest to the newest; at first there are none."""

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


def series(
    label: str, values: Sequence[float | None], style: str, width: int, rows: int, note: str | None = None
) -> list[Text]:
    """A chart of per cents with its newest figure at the left, and below that a note (otherwise the mean)."""
    charts = chart_rows(values, max(0, width - LABEL_WIDTH), rows, 100.0)
    if note is None:
        known = [value for value in values[-max(1, width - LABEL_WIDTH) :] if value is not None]
        note = f"mean {sum(known) / len(known):>5.0f} %" if known else ""
    heads = [
        label_text(label, values[-1] if values else None),
        Text(note[: LABEL_WIDTH - 1].ljust(LABEL_WIDTH), DIM),
        *(Text(" " * LABEL_WIDTH) for _ in charts),
    ]
    return [head.append(chart, f"not dim {style}") for head, chart in zip(heads, charts, strict=False)]


def label_text(label: str, pct: float | None) -> Text:
    """The left margin of a chart: its name and its figure."""
    return Text(f"{label:<6}{figures.pct(pct):>6}".ljust(LABEL_WIDTH))


def spread(left: Text, right: Text, width: int) -> Text:
    """One text at the left edge, one at the right; the left one gives way where both do not fit."""
    room = width - right.cell_len - 2
    if room < 12:
        return left
    left.truncate(room, overflow="ellipsis")
    return Text.assemble(left, " " * (width - left.cell_len - right.cell_len), right)


def side_by_side(blocks: Sequence[list[Text]], width: int) -> list[Text]:
    """Blocks of lines in columns of that width."""
    lines = []
    for row in itertools.zip_longest(*blocks, fillvalue=Text()):
        line = Text()
        for text in row[:-1]:
            padded = text.copy()
            padded.truncate(width)
            padded.pad_right(width + 2 - padded.cell_len)
            line.append_text(padded)
        lines.append(line.append_text(row[-1].copy()))
    return lines


# --------------------------------------------------------------------------- jobs

_NONE = "no process is on a GPU, and no run of Fulltilt's is under way"


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
        "not Fulltilt's" if job.run_folder is None else one_line(store.run_name(Path(job.run_folder))) or "?",
        ",".join(str(index) for index, _ in held),
        figures.size(sum(sizes) if sizes else None),
        figures.pct(job.cpu_pct),
        figures.size(job.pss_bytes),
    )
    return Text(line, DIM if job.run_folder is None else "")


def _row(run_width: int, pid: str, process: str, run: str, gpu: str, vram: str, cpu: str, memory: str = "") -> str:
    """What matters most stands at the left: a narrow window cuts at the right."""
    name = f"{pid:>8}  {process[:16]:<16}  {run[:run_width]:<{run_width}}"
    return f"{name}  {gpu[:5]:<5}{vram:>9}  {cpu:>6}  {memory:>9}"


# --------------------------------------------------------------------------- gpus

BUSY, SM, VRAM = "#2b6cd4", "#0e9a78", "#9a6fd0"

_HOT_MARGIN_C = preflight.LIMITS.temperature_margin_c


def gpu_block(view: WatchView, place: int, width: int, rows: int) -> list[Text]:
    """The GPU at that place: its state, and charts of ``rows`` lines each."""
    gpu = view.now.gpus[place]
    past = [sample.gpus[place] if place < len(sample.gpus) else None for sample in view.samples]
    name = Text(f"GPU {gpu.index}", HEAD).append(f"  {clean(gpu.name)}", PLAIN)
    busy = [reading.util_pct if reading else None for reading in past]
    lines = [spread(name, _gpu_state(gpu), width), *series("busy", busy, BUSY, width, rows)]
    active = [reading.sm_active_pct if reading else None for reading in past]
    if any(value is not None for value in active):
        lines += series("SM", active, SM, width, rows)
    held = [_vram_pct(reading) if reading else None for reading in past]
    used, total = gpu.vram_used_bytes, gpu.vram_total_bytes
    note = f"{used / GIB:.1f}/{total / GIB:.0f} GiB" if used is not None and total else ""
    return lines + series("VRAM", held, VRAM, width, rows, note)


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
    return left.append(chart_rows(past, room, 1, 100.0)[0], BUSY).append_text(right)


def _vram_pct(gpu: GpuReading) -> float | None:
    if gpu.vram_used_bytes is None or not gpu.vram_total_bytes:
        return None
    return 100 * gpu.vram_used_bytes / gpu.vram_total_bytes


# --------------------------------------------------------------------------- host

CPU, RAM, DISK = "#d96a0b", "#b5596a", "#5f8f4e"


def host_block(view: WatchView, width: int, rows: int) -> list[Text]:
    """The host, with a chart of its CPU use of ``rows`` lines."""
    host, past = view.now.host, [sample.host for sample in view.samples]
    facts = []
    if host.cpu_per_core_pct is not None:
        facts.append(f"{len(host.cpu_per_core_pct)} CPUs")
    if host.load_1min is not None:
        facts.append(f"load {host.load_1min:.1f}")
    if host.iowait_pct is not None:
        facts.append(f"I/O wait {host.iowait_pct:.0f} %")
    return [
        spread(Text("host", HEAD), Text("  ".join(facts)), width),
        *series("CPU", [reading.cpu_pct for reading in past], CPU, width, rows),
        *core_lines(host.cpu_per_core_pct or (), width),
        _ram_line(view, width),
        _disk_line([reading.disk_read_bytes_per_s for reading in past], width),
    ]


def core_lines(cores: Sequence[float], width: int) -> list[Text]:
    """Each core as a character, in as many lines as that takes."""
    room = max(width - LABEL_WIDTH, 1)
    rows = [cores[start : start + room] for start in range(0, len(cores), room)]
    return [
        Text(("" if place else "cores").ljust(LABEL_WIDTH)).append(chart_rows(row, len(row), 1, 100.0)[0], CPU)
        for place, row in enumerate(rows)
    ]


def _ram_line(view: WatchView, width: int) -> Text:
    """Memory in use over time, of what the machine or the container's limit has."""
    host = view.now.host
    total = host.mem_limit_bytes or host.mem_total_bytes
    if host.mem_used_bytes is None or not total:
        return label_text("RAM", None)
    right = f" {used_of(host.mem_used_bytes, total)}" + (" (limit)" if host.mem_limit_bytes else "")
    used = [sample.host.mem_used_bytes for sample in view.samples]
    chart = chart_rows(used, max(0, width - LABEL_WIDTH - len(right)), 1, total)[0]
    return label_text("RAM", 100 * host.mem_used_bytes / total).append(chart, RAM).append(right)


def _disk_line(read: Sequence[float | None], width: int) -> Text:
    """Reads, scaled to the highest rate on the screen."""
    room = width - LABEL_WIDTH
    top = max((value for value in read[-max(0, room) :] if value is not None), default=0.0)
    now = read[-1] if read else None
    line = Text("disk reads".ljust(LABEL_WIDTH))
    highest = f" {size(now)}/s, at most {size(top)}/s"
    line.append(chart_rows(read, max(0, room - len(highest)), 1, max(top, 1e6))[0], DISK)
    return line.append(highest)


# --------------------------------------------------------------------------- the screen

_GPU_WIDTH = 76  # below this a GPU's figures do not fit beside its name, and a chart is too short to show a trend
_JOB_ROWS = 4


# Rows of each chart, blank lines between the parts, and whether each GPU gets one line only; the roomiest first.
Layout = tuple[int, int, bool]
_LAYOUTS: tuple[Layout, ...] = (
    *((rows, 1, False) for rows in (12, 9, 7, 5, 4, 3, 2)),
    (2, 0, False),
    (1, 1, False),
    (1, 0, False),
    (1, 1, True),
    (1, 0, True),
)


def watch_lines(view: WatchView, width: int, height: int) -> list[Text]:
    """The screen as at most ``height`` lines of at most ``width`` cells, in the roomiest layout that fits."""
    jobs = 2 + min(max(1, len(view.jobs)), _JOB_ROWS)
    for layout in _LAYOUTS:
        blank = [Text()] * layout[1]
        lines = [*_machine(view, width, *layout), *blank]
        if len(lines) + jobs <= height:
            break
    lines += job_lines(view, width, max(0, height - len(lines)))
    if len(lines) > height:
        lines = [*lines[: max(0, height - 1)], Text("… enlarge the window to see the rest", DIM)]
    for line in lines:
        line.no_wrap = True
        line.truncate(width)
    return lines[:height]


def _machine(view: WatchView, width: int, rows: int, gap: int, compact: bool) -> list[Text]:
    """Everything above the jobs."""
    blank = [Text()] * gap
    gpus = range(len(view.now.gpus))
    left = Text("fulltilt watch", HEAD).append(clean(f"  {view.hostname}  {view.clock}"), PLAIN)
    recording = "" if view.recording is None else f"recording to {clean(view.recording)}, "
    lines = [spread(left, Text(f"{recording}every {view.interval_s:g} s, q quits", DIM), width)]
    if not gpus:
        lines += [*blank, Text("no GPU", HEAD).append(f"  {clean(view.why_no_gpu or 'none was found')}", PLAIN)]
    elif compact:
        lines += [*blank, *(gpu_line(view, place, width) for place in gpus)]
    else:
        columns = max(1, min(len(gpus), width // _GPU_WIDTH))
        column_width = (width - 2 * (columns - 1)) // columns
        for first in gpus[::columns]:
            blocks = [gpu_block(view, place, column_width, rows) for place in gpus[first : first + columns]]
            lines += [*blank, *side_by_side(blocks, column_width)]
    # The host's chart is the largest only where there is no GPU.
    return [*lines, *blank, *host_block(view, width, min(rows, 3) if gpus else rows)]
