"""The report in the terminal: the verdict in one sentence, where the time went, and what to change."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fulltilt import figures
from fulltilt.diagnosis.verdict import title
from fulltilt.figures import clean, one_line
from fulltilt.records import BUCKETS, Diagnosis, Finding, Ledger, Run
from fulltilt.report import wording
from fulltilt.report.comparison import Reported, compare, told_apart
from fulltilt.report.palette import BUCKET_TINTS, bucket_order
from fulltilt.report.step import step_picture
from fulltilt.report.terminal_bars import Ink, bucket_parts, hanging, heading, ledger_bar, step_lines
from fulltilt.report.terminal_details import show_checklist, show_gpus, show_hot_lines, show_notes, show_ranks
from fulltilt.store import REPORT_FILE

SEVERITY_STYLES = {"severe": "bold red", "warn": "yellow", "info": "cyan"}


def verdict_lines(diagnosis: Diagnosis, folder: str | Path | None) -> list[str]:
    """The short form for the end of a run: the verdict, the three findings that would win most, and the page.

    Without a folder there is no page.
    """
    lines = [one_line(diagnosis.verdict.sentence)]
    for place, finding in enumerate(diagnosis.findings[:3], start=1):
        gain = figures.speedup(finding.predicted_speedup)
        # The sentence above speaks of the time after start-up.
        told = f"{figures.percent(finding.share)} of the wall time" + (f", {gain}" if gain else "")
        lines.append(f"  {place}. {title(finding.code)} ({told}): {one_line(finding.fix)}")
    return [*lines, f"  report: {clean(str(Path(folder) / REPORT_FILE))}"] if folder is not None else lines


def show(console: Console, runs: Sequence[Reported]) -> None:
    """Print one run in full, or several side by side."""
    ink = Ink.of(console)
    if len(runs) > 1:
        _show_comparison(console, runs, ink)
        return
    run, diagnosis = runs[0]
    _show_head(console, run, diagnosis)
    _show_ledger(console, diagnosis.ledger, ink)
    _show_step(console, run, diagnosis, ink)
    _show_findings(console, diagnosis.findings, ink)
    show_hot_lines(console, run)
    show_ranks(console, diagnosis, ink)
    show_gpus(console, diagnosis.gpu)
    show_checklist(console, diagnosis.checklist, ink)
    show_notes(console, run, diagnosis, ink)


# --------------------------------------------------------------------------- the answer


def _show_head(console: Console, run: Run, diagnosis: Diagnosis) -> None:
    record = run.run
    console.print()
    console.rule(Text(clean(record.name), "bold"), style="dim")
    console.print(Text(one_line(shlex.join(record.command)), "dim", no_wrap=True, overflow="ellipsis"))
    console.print(Text(f"{clean(record.started_at)} · {wording.ended(record)}", "dim"))
    if record.state == "running":
        console.print(Text(wording.NO_END_YET, "yellow"))
    if diagnosis.invalid_because is not None:
        console.print(Text(wording.not_valid(diagnosis.invalid_because), "yellow"))
    console.print()
    console.print(Text(clean(diagnosis.verdict.sentence), "bold"))
    figures = list(_figures(diagnosis))
    if figures:
        console.print()
    for line in figures:
        console.print(Text(line))


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
    settings = [f"{name}={wording.setting(value)}" for name, value in diagnosis.settings if value is not None]
    if settings:
        yield one_line(" · ".join(settings))


def _show_ledger(console: Console, ledger: Ledger, ink: Ink) -> None:
    parts = bucket_parts(ledger.buckets, bucket_order(ledger))
    if not parts or ledger.wall_s <= 0:
        return
    heading(console, "Where the time went", figures.seconds(ledger.wall_s))
    console.print(ledger_bar(parts, console.width, ink))
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    decimals = wording.decimals(ledger.wall_s)
    for place, (tint, size) in enumerate(parts):
        character, style = ink.fill(tint, place)
        label = Text(character * 2, style).append(f" {tint.label}", "default")
        row: list[Text | str] = [label, f"{size:.{decimals}f} s", figures.percent(size / ledger.wall_s)]
        if console.width >= 100:
            row.append(Text(tint.meaning, "dim"))
        table.add_row(*row)
    console.print(table)


def _show_step(console: Console, run: Run, diagnosis: Diagnosis, ink: Ink) -> None:
    picture = step_picture(run, diagnosis)
    if picture is None:
        return
    heading(console, "One step, to scale", f"{figures.seconds(picture.step_s)}, mean of {figures.whole(picture.steps)}")
    for line in step_lines(picture, console.width, ink):
        console.print(line)


def _show_findings(console: Console, findings: Sequence[Finding], ink: Ink) -> None:
    if not findings:
        return
    heading(console, "What to change", "in order of what it would win")
    for place, finding in enumerate(findings, start=1):
        head = Text(f"{place:>2}  {title(finding.code)}", "bold")
        gain = figures.speedup(finding.predicted_speedup)
        if gain:
            room = console.width - head.cell_len - len(gain)
            head.append(" " * room if room > 1 else "  ").append(gain, "bold green")
        console.print(head)
        label = Text().append(finding.severity, SEVERITY_STYLES[finding.severity])
        details = [f"{figures.percent(finding.share)} of the wall time", finding.code, finding.where]
        label.append("".join(f" {ink.bullet} {one_line(detail)}" for detail in details if detail), "dim")
        console.print(Padding(label, (0, 0, 0, 4), expand=False))
        for evidence in finding.evidence:
            console.print(hanging(ink.bullet, Text(one_line(evidence))))
        console.print(hanging(ink.arrow, Text(clean(finding.fix), "green")))


def _show_comparison(console: Console, runs: Sequence[Reported], ink: Ink) -> None:
    console.print()
    console.rule(Text(f"{len(runs)} runs side by side", "bold"), style="dim")
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("")
    names = [clean(name) for name in told_apart(runs)]
    for name in names:
        table.add_column(Text(name), justify="right", overflow="fold")
    for row in compare(runs):
        cells = [Text(one_line(cell)) for cell in (row.name, *row.cells)]
        table.add_row(*cells, style="" if row.differs else "dim")
    console.print(table)
    order = [name for name in BUCKETS if any(getattr(answer.ledger.buckets, name) > 0 for _, answer in runs)]
    for name, (_, diagnosis) in zip(names, runs, strict=True):
        heading(console, name, figures.seconds(diagnosis.ledger.wall_s))
        console.print(ledger_bar(bucket_parts(diagnosis.ledger.buckets, order), console.width, ink))
        console.print(Text(clean(diagnosis.verdict.sentence)))
        for finding in diagnosis.findings[:1]:
            console.print(hanging(ink.arrow, Text(clean(finding.fix), "green"), indent=0))
    legend = Text()
    for place, name in enumerate(order):
        character, style = ink.fill(BUCKET_TINTS[name], place)
        legend.append(character * 2, style).append(f" {BUCKET_TINTS[name].label}  ", "dim")
    console.print()
    console.print(legend)
