"""Jobs on the watch screen: who trains, into which run folder, on which GPU."""

from __future__ import annotations

from pathlib import PurePath

from rich.text import Text

from fulltilt import figures
from fulltilt.figures import clean
from fulltilt.records import JobProcess
from fulltilt.report.live.parts import DIM, HEAD, PLAIN, WatchView

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
        _one_line(job.name or "?") + (f" +{job.children}" if job.children else ""),
        "not Fulltilt's" if job.run_folder is None else _one_line(PurePath(job.run_folder).name or job.run_folder),
        ",".join(str(index) for index, _ in held),
        figures.size(sum(sizes) if sizes else None),
        figures.pct(job.cpu_pct),
        figures.size(job.pss_bytes),
    )
    return Text(line, DIM if job.run_folder is None else "")


def _one_line(name: str) -> str:
    """A name may hold anything, also line breaks; a row of the table may not."""
    return " ".join(clean(name).split()) or "?"


def _row(run_width: int, pid: str, process: str, run: str, gpu: str, vram: str, cpu: str, memory: str = "") -> str:
    """What matters most stands at the left: a narrow window cuts at the right."""
    name = f"{pid:>8}  {process[:16]:<16}  {run[:run_width]:<{run_width}}"
    return f"{name}  {gpu[:5]:<5}{vram:>9}  {cpu:>6}  {memory:>9}"
