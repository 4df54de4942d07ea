"""A run, or several side by side, in the terminal."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fulltilt import figures
from fulltilt.figures import clean, one_line
from fulltilt.records import Buckets, CheckLine, Diagnosis, Finding, GpuSummary, Run
from fulltilt.report import run_view
from fulltilt.report.legend import BUCKET_LEGEND, IDLE, PHASE_LEGEND, LegendEntry, bucket_order
from fulltilt.report.run_view import Reported, StepPicture, compare, distinct_names, step_picture
from fulltilt.store import REPORT_FILE

# --------------------------------------------------------------------------- bars

BULLET, ARROW = "·", "→"


def _fill(entry: LegendEntry, colour: bool) -> tuple[str, str]:
    return ("█", entry.colour) if colour else (entry.pattern, "")


def _bucket_parts(buckets: Buckets, order: Iterable[str]) -> list[tuple[LegendEntry, float]]:
    return [(BUCKET_LEGEND[name], getattr(buckets, name)) for name in order]


def ledger_bar(parts: Sequence[tuple[LegendEntry, float]], width: int, colour: bool) -> Text:
    """One line in which each part takes its share of ``width`` characters."""
    bar = Text(no_wrap=True)
    total, reached = sum(length for _, length in parts), 0.0
    for entry, length in parts if total else ():
        character, style = _fill(entry, colour)
        reached += length
        bar.append(character * (round(reached / total * width) - bar.cell_len), style)
    return bar


def step_lines(picture: StepPicture, width: int, colour: bool) -> list[Text]:
    """One step to scale, with a line for each part."""
    parts = [part for lane in picture.lanes for part in lane.parts]
    name_width = max(len(PHASE_LEGEND[part.phase].label) for part in parts)
    length_width = max(len(figures.seconds(part.length_s)) for part in parts)
    bar_width = max(width - name_width - length_width - 6, 3)
    lines = []
    for lane in picture.lanes:
        lines.append(Text(lane.name, "bold", no_wrap=True, overflow="ellipsis"))
        for part in lane.parts:
            entry, idle = PHASE_LEGEND[part.phase], part.phase == IDLE
            start = round(part.start_s / picture.scale_s * bar_width)
            end = max(round((part.start_s + part.length_s) / picture.scale_s * bar_width), start + 1)
            if end > bar_width:
                start, end = start - (end - bar_width), bar_width
            glyph = "┄" if idle else "█"
            style = "dim" if idle else entry.colour if colour else ""
            line = Text("  ", no_wrap=True).append(entry.label.ljust(name_width + 1), "dim" if idle else "")
            line.append(" " * start).append(glyph * (end - start), style).append(" " * (bar_width - end))
            lines.append(line.append(f"  {figures.seconds(part.length_s):>{length_width}}", "dim" if idle else ""))
    return lines


def _heading(console: Console, name: str, detail: str = "") -> None:
    console.print()
    console.print(Text(name, "bold underline").append(f"  {detail}" if detail else "", "not bold not underline dim"))


def _hanging(mark: str, text: Text, indent: int = 4) -> Padding:
    """Text that wraps under itself, not under its bullet."""
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_row(mark, text)
    return Padding(table, (0, 0, 0, indent), expand=False)


# --------------------------------------------------------------------------- details

STATE_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}
MOST_LINES = 5
GPU_COLUMNS = ("use", "SM active", "memory, peak", "power", "hottest")


def _show_hot_lines(console: Console, run: Run) -> None:
    if not run.ranks:
        return
    rank = run.ranks[0]
    if rank.deep is not None:
        known = [fact for fact in run_view.deep_facts(rank.deep) if fact[1] != figures.NOT_MEASURED]
        _heading(console, "A step under the profiler")
        console.print(Text(one_line(" · ".join(f"{name} {figure}" for name, figure in known))))
    for name, lines in run_view.hot_lines(rank, MOST_LINES):
        _heading(console, name)
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(justify="right", no_wrap=True)
        table.add_column(overflow="fold")
        for figure, line in lines:
            what = Text(one_line(line.function))  # a kernel has no line of its own
            if line.where:
                what = Text(f"in {one_line(line.function)}, ").append(one_line(line.where), "bold")
            if line.call:
                what.append(f"  {figures.brief(line.call, 60)}", "dim")
            table.add_row(figure, what)
        console.print(table)


def _show_ranks(console: Console, diagnosis: Diagnosis, colour: bool) -> None:
    ranks, detail = diagnosis.ranks, ""
    if len(ranks) < 2:
        return
    slowest = next((rank for rank in ranks if rank.slowest), None)
    longest_wait_s = max(rank.waits_s for rank in ranks)
    if slowest is not None and longest_wait_s > 0:
        detail = f"rank {slowest.rank} is the slowest; the others wait for it up to {figures.seconds(longest_wait_s)}"
    _heading(console, "Ranks", detail)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    order = bucket_order(diagnosis.ledger)
    shown, remark = run_view.shown_ranks(diagnosis)
    names = [one_line(run_view.rank_name(rank, diagnosis)) for rank in shown]
    ends = [", no end" if diagnosis.job is not None and not rank.finished else "" for rank in shown]
    room = console.width - 40 - max(map(len, names), default=0) - max(map(len, ends), default=0)
    for name, rank, end in zip(names, shown, ends, strict=True):
        state = "slowest" if rank.slowest else f"waits {figures.seconds(rank.waits_s)}"
        table.add_row(
            Text(name, "bold" if rank.slowest else ""),
            ledger_bar(_bucket_parts(rank.buckets, order), max(room, 10), colour),
            f"works {figures.seconds(rank.own_work_s)}",
            Text(f"{state}{end}", "dim"),
        )
    console.print(table)
    if remark:
        console.print(Text(remark, "yellow"))


def _show_gpus(console: Console, gpus: Sequence[GpuSummary]) -> None:
    if not gpus:
        return
    _heading(console, "GPU", "use: time with any kernel running · SM active: how much of the GPU was busy")
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("", overflow="ellipsis", no_wrap=True, max_width=max(console.width - 55, 12))
    shown = {name: cell for name, cell in run_view.GPU_FIGURES.items() if name in GPU_COLUMNS}
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True)
    for gpu in gpus:
        table.add_row(Text(f"{gpu.index} {one_line(gpu.name)}"), *(cell(gpu) for cell in shown.values()))
    console.print(table)


def _show_checklist(console: Console, checklist: Sequence[CheckLine]) -> None:
    if not checklist:
        return
    _heading(console, "Checklist")
    table = Table.grid(padding=(0, 2, 0, 0))
    for line in checklist:
        text = Text(one_line(line.name)).append(f"  {one_line(line.figure)}", "dim")
        if line.remedy:
            text.append(f"\n{ARROW} {one_line(line.remedy)}", "dim")
        table.add_row(Text(line.state, STATE_STYLES[line.state]), text)
    console.print(table)


def _show_notes(console: Console, run: Run, diagnosis: Diagnosis) -> None:
    notes = run_view.notes(run, diagnosis)
    if not notes:
        return
    _heading(console, "Notes")
    for note in notes:
        console.print(_hanging(BULLET, Text(one_line(note), "dim"), indent=0))


# --------------------------------------------------------------------------- runs

SEVERITY_STYLES = {"severe": "bold red", "warn": "yellow", "info": "cyan"}


def verdict_lines(diagnosis: Diagnosis, folder: str | Path | None) -> list[str]:
    """The short form for the end of a run: verdict, the three first findings, and the page, if any."""
    lines = [one_line(diagnosis.verdict.sentence)]
    for place, finding in enumerate(diagnosis.findings[:3], start=1):
        gain = figures.speedup(finding.predicted_speedup)
        share = run_view.after_startup(finding) + (f", {gain}" if gain else "")
        lines.append(f"  {place}. {finding.title} ({share}): {one_line(finding.fix)}")
    return [*lines, f"  report: {clean(str(Path(folder) / REPORT_FILE))}"] if folder is not None else lines


def show(console: Console, runs: Sequence[Reported]) -> None:
    """Print one run in full, or several side by side."""
    colour = console.color_system is not None and not console.no_color
    if len(runs) > 1:
        _show_comparison(console, runs)
        return
    run, diagnosis = runs[0]
    _show_head(console, run, diagnosis)
    _show_ledger(console, (run, diagnosis), colour)
    _show_step(console, run, diagnosis, colour)
    _show_findings(console, diagnosis.findings)
    _show_hot_lines(console, run)
    _show_ranks(console, diagnosis, colour)
    _show_gpus(console, diagnosis.gpu)
    _show_checklist(console, diagnosis.checklist)
    _show_notes(console, run, diagnosis)


# --------------------------------------------------------------------------- the answer


def _show_head(console: Console, run: Run, diagnosis: Diagnosis) -> None:
    record = run.run
    console.print()
    console.rule(Text(clean(record.name), "bold"), style="dim")
    console.print(Text(one_line(shlex.join(record.command)), "dim", no_wrap=True, overflow="ellipsis"))
    console.print(Text(f"{clean(record.started_at)} · {run_view.ended(record)}", "dim"))
    if record.state == "running":
        console.print(Text(run_view.NO_END_YET, "yellow"))
    if diagnosis.invalid_because is not None:
        console.print(Text(run_view.not_valid(diagnosis.invalid_because), "yellow"))
    console.print()
    console.print(Text(clean(diagnosis.verdict.sentence), "bold"))
    more = (run_view.utilisation_line(diagnosis), run_view.job_line(diagnosis), run_view.compile_line(run))
    figures = [*_figures(diagnosis), *filter(None, more)]
    if figures:
        console.print()
    for line in figures:
        console.print(Text(one_line(line)))


def _figures(diagnosis: Diagnosis) -> Iterable[str]:
    speed, ceilings = diagnosis.throughput, diagnosis.ceilings
    if speed.samples_per_s is not None:
        parts = [f"{figures.number(speed.samples_per_s)} samples/s"]
        if ceilings.loader_samples_per_s is not None:
            parts.append(f"loader ceiling {figures.number(ceilings.loader_samples_per_s)}")
        if ceilings.compute_samples_per_s is not None:
            parts.append(f"compute ceiling {figures.number(ceilings.compute_samples_per_s)}")
        yield " · ".join(parts)
    if speed.steps_per_s is not None:
        rate = f"{figures.number(speed.steps_per_s)} steps/s"
        yield f"{figures.whole(speed.steps)} steps · {rate} · {figures.seconds(diagnosis.ledger.wall_s)} in all"
    settings = [f"{name}={run_view.setting(value)}" for name, value in diagnosis.settings if value is not None]
    if settings:
        yield " · ".join(settings)


def _show_ledger(console: Console, reported: Reported, colour: bool) -> None:
    ledger = reported[1].ledger
    parts = _bucket_parts(ledger.buckets, bucket_order(ledger))
    if not parts:
        return
    _heading(console, "Where the time went", f"of {figures.seconds(ledger.wall_s)} of wall time")
    console.print(ledger_bar(parts, console.width, colour))
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column()
    for base in ("", "of all", "after start-up"):
        table.add_column(base, justify="right")
    decimals = run_view.decimals(ledger.wall_s)
    for (entry, size), bucket in zip(parts, bucket_order(ledger), strict=True):
        character, style = _fill(entry, colour)
        label = Text(character * 2, style).append(f" {entry.label}", "default")
        row: list[Text | str] = [label, f"{size:.{decimals}f} s", figures.percent(size / ledger.wall_s)]
        row.append(figures.percent(run_view.bucket_after_startup(bucket, reported)))
        if console.width >= 120:
            row.append(Text(entry.meaning, "dim"))
        table.add_row(*row)
    console.print(table)


def _show_step(console: Console, run: Run, diagnosis: Diagnosis, colour: bool) -> None:
    picture = step_picture(run, diagnosis)
    if picture is None:
        return
    _heading(
        console, "One step, to scale", f"{figures.seconds(picture.step_s)}, mean of {figures.whole(picture.steps)}"
    )
    for line in step_lines(picture, console.width, colour):
        console.print(line)


def _show_findings(console: Console, findings: Sequence[Finding]) -> None:
    if not findings:
        return
    _heading(console, "What to change", "largest gain first")
    for place, finding in enumerate(findings, start=1):
        head = Text(f"{place:>2}  {finding.title}", "bold")
        gain = figures.speedup(finding.predicted_speedup)
        if gain:
            room = console.width - head.cell_len - len(gain)
            head.append(" " * room if room > 1 else "  ").append(gain, "bold green")
        console.print(head)
        label = Text().append(finding.severity, SEVERITY_STYLES[finding.severity])
        details = [run_view.after_startup(finding), finding.code, finding.where]
        label.append("".join(f" {BULLET} {one_line(detail)}" for detail in details if detail), "dim")
        console.print(Padding(label, (0, 0, 0, 4), expand=False))
        for evidence in finding.evidence:
            console.print(_hanging(BULLET, Text(one_line(evidence))))
        console.print(_hanging(ARROW, Text(clean(finding.fix), "green")))


def _show_comparison(console: Console, runs: Sequence[Reported]) -> None:
    console.print()
    console.rule(Text(f"{len(runs)} runs side by side", "bold"), style="dim")
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("")
    names = [clean(name) for name in distinct_names(runs)]
    for name in names:
        table.add_column(Text(name), justify="right", overflow="fold")
    rows = compare(runs)
    for row in rows:
        if row.differs or not row.is_setting:
            cells = [Text(one_line(cell)) for cell in (row.name, *row.cells)]
            table.add_row(*cells, style="" if row.differs else "dim")
    console.print(table)
    if alike := [f"{row.name}={one_line(row.cells[0])}" for row in rows if row.is_setting and not row.differs]:
        console.print(Text(f"The same in all: {f' {BULLET} '.join(alike)}", "dim"))
    for name, (_, diagnosis) in zip(names, runs, strict=True):
        _heading(console, name, figures.seconds(diagnosis.ledger.wall_s))
        console.print(Text(clean(diagnosis.verdict.sentence)))
        for finding in diagnosis.findings[:1]:
            console.print(_hanging(ARROW, Text(clean(finding.fix), "green"), indent=0))
