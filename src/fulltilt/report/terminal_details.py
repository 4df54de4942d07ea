"""What stands behind the answer, in the terminal: lines of code, ranks, GPUs, checklist, notes."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fulltilt import figures
from fulltilt.figures import one_line
from fulltilt.records import CheckLine, Diagnosis, GpuSummary, HotLine, Run
from fulltilt.report import wording
from fulltilt.report.loaders import fetching_title, worker_lines
from fulltilt.report.palette import bucket_order
from fulltilt.report.terminal_bars import Ink, bucket_parts, hanging, heading, ledger_bar

STATE_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}
MOST_LINES = 5


def show_hot_lines(console: Console, run: Run) -> None:
    """The lines that cost most: in the workers, in the training process, waiting, saving, under the profiler."""
    if not run.ranks:
        return
    rank = run.ranks[0]
    fetch_s = sum(work.fetch_s for work in rank.workers)
    _show_lines(console, fetching_title(rank), worker_lines(rank), fetch_s)
    _show_lines(console, "In the training process", rank.host_lines)
    _show_lines(console, "Lines that wait for the GPU", rank.sync_lines)
    _show_lines(console, "Saving", rank.checkpoint_lines)
    if rank.deep is not None:
        facts = [f"{name} {figure}" for name, figure in wording.deep_facts(rank.deep) if figure != figures.NOT_MEASURED]
        heading(console, "A step under the profiler")
        console.print(Text(one_line(" · ".join(facts))))
        _show_lines(console, "Synchronising calls, per step", rank.deep.sync_calls)
        _show_lines(console, "Kernels, per step", rank.deep.top_kernels)


def _show_lines(console: Console, name: str, lines: Sequence[HotLine], total_s: float | None = None) -> None:
    if not lines:
        return
    heading(console, name)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for line in sorted(lines, key=lambda line: -line.seconds)[:MOST_LINES]:
        figure = figures.percent(line.seconds / total_s) if total_s else figures.seconds(line.seconds)
        what = Text(one_line(line.function))  # a kernel has no line of its own
        if line.where:
            what = Text(f"in {one_line(line.function)}, ").append(one_line(line.where), "bold")
        if line.call:
            what.append(f"  {figures.brief(line.call, 60)}", "dim")
        table.add_row(figure, what)
    console.print(table)


def show_ranks(console: Console, diagnosis: Diagnosis, ink: Ink) -> None:
    """The ledger of each rank, the slowest named, and what the others wait for it."""
    ranks = diagnosis.ranks
    if len(ranks) < 2:
        return
    slowest = next((rank for rank in ranks if rank.slowest), None)
    longest_wait_s = max(rank.waits_s for rank in ranks)
    detail = ""
    if slowest is not None and longest_wait_s > 0:
        detail = f"rank {slowest.rank} is the slowest; the others wait up to {figures.seconds(longest_wait_s)} for it"
    heading(console, "Ranks", detail)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    order = bucket_order(diagnosis.ledger)
    for rank in ranks:
        table.add_row(
            Text(f"rank {rank.rank}", "bold" if rank.slowest else ""),
            ledger_bar(bucket_parts(rank.buckets, order), max(console.width - 46, 10), ink),
            f"works {figures.seconds(rank.own_work_s)}",
            Text("slowest" if rank.slowest else f"waits {figures.seconds(rank.waits_s)}", "dim"),
        )
    console.print(table)


def show_gpus(console: Console, gpus: Sequence[GpuSummary]) -> None:
    """Each GPU over the training part, with utilisation beside what tells whether it is real."""
    if not gpus:
        return
    heading(console, "GPU", "use: some kernel ran · SM active: how much of the GPU it kept busy")
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("", overflow="ellipsis", no_wrap=True, max_width=max(console.width - 55, 12))
    for name in ("use", "SM active", "memory, peak", "power", "hottest"):
        table.add_column(name, justify="right", no_wrap=True)
    for gpu in gpus:
        memory = f"{figures.size(gpu.vram_peak_bytes)} of {figures.size(gpu.vram_total_bytes)}"
        table.add_row(
            Text(f"{gpu.index} {one_line(gpu.name)}"),
            figures.pct(gpu.util_pct),
            figures.pct(gpu.sm_active_pct),
            memory if gpu.vram_peak_bytes is not None else figures.NOT_MEASURED,
            figures.watts(gpu.power_w),
            figures.celsius(gpu.temperature_peak_c),
        )
    console.print(table)


def show_checklist(console: Console, checklist: Sequence[CheckLine], ink: Ink) -> None:
    """Each check with its state, figure and remedy."""
    if not checklist:
        return
    heading(console, "Checklist")
    table = Table.grid(padding=(0, 2, 0, 0))
    for line in checklist:
        text = Text(one_line(line.name)).append(f"  {one_line(line.figure)}", "dim")
        if line.remedy and line.state != "ok":
            text.append(f"\n{ink.arrow} {one_line(line.remedy)}", "dim")
        table.add_row(Text(line.state, STATE_STYLES[line.state]), text)
    console.print(table)


def show_notes(console: Console, run: Run, diagnosis: Diagnosis, ink: Ink) -> None:
    """What the recorder noticed, and which rules could not judge."""
    notes = [*run.warnings, *(note for rank in run.ranks for note in rank.notes)]
    notes += [f"{line.code} could not be judged: it lacks {line.lacks}" for line in diagnosis.abstained]
    if not notes:
        return
    heading(console, "Notes")
    for note in dict.fromkeys(notes):
        console.print(hanging(ink.bullet, Text(one_line(note), "dim"), indent=0))
