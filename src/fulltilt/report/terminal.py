"""The report in the terminal: the verdict in one sentence, where the time went, and what to change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fulltilt.records import BUCKETS, Buckets, CheckLine, Diagnosis, Finding, GpuSummary, HotLine, Ledger, Run
from fulltilt.report import wording
from fulltilt.report.comparison import Reported, compare
from fulltilt.report.loaders import worker_lines
from fulltilt.report.palette import BUCKET_TINTS, Tint
from fulltilt.report.step import step_picture
from fulltilt.report.terminal_bars import Ink, ledger_bar, step_lines
from fulltilt.report.wording import clean
from fulltilt.store import REPORT_FILE

SEVERITY_STYLES = {"severe": "bold red", "warn": "yellow", "info": "cyan"}
STATE_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}
MOST_LINES = 5


def verdict_lines(diagnosis: Diagnosis, folder: str | Path) -> list[str]:
    """The short form for the end of a run: the verdict, the three findings that would win most, and the page."""
    lines = [clean(diagnosis.verdict.sentence)]
    for place, finding in enumerate(diagnosis.findings[:3], start=1):
        gain = wording.speedup(finding.predicted_speedup)
        figures = wording.share(finding.share) + (f", {gain}" if gain else "")
        lines.append(f"  {place}. {wording.title(finding.code)} ({figures}): {_one_line(finding.fix)}")
    return [*lines, f"  report: {clean(str(Path(folder) / REPORT_FILE))}"]


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
    _show_hot_lines(console, run)
    _show_ranks(console, diagnosis, ink)
    _show_gpus(console, diagnosis.gpu)
    _show_checklist(console, diagnosis.checklist, ink)
    _show_notes(console, run, diagnosis, ink)


# --------------------------------------------------------------------------- the answer


def _show_head(console: Console, run: Run, diagnosis: Diagnosis) -> None:
    record = run.run
    console.print()
    console.rule(Text(clean(record.name), "bold"), style="dim")
    state = record.state if record.exit_code in (None, 0) else f"{record.state}, exit code {record.exit_code}"
    console.print(Text(_one_line(" ".join(record.command)), "dim", no_wrap=True, overflow="ellipsis"))
    console.print(Text(f"{clean(record.started_at)} · {state}", "dim"))
    if record.state == "running":
        console.print(Text(wording.NO_END_YET, "yellow"))
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
        parts = [f"{wording.number(speed.samples_per_s)} samples/s"]
        if ceilings.loader_samples_per_s is not None:
            parts.append(f"loader ceiling {wording.number(ceilings.loader_samples_per_s)}")
        if ceilings.compute_samples_per_s is not None:
            parts.append(f"compute ceiling {wording.number(ceilings.compute_samples_per_s)}")
        yield " · ".join(parts)
    if speed.steps_per_s is not None:
        rate = f"{wording.number(speed.steps_per_s)} steps/s"
        yield f"{wording.count(speed.steps)} steps · {rate} · {wording.seconds(diagnosis.ledger.wall_s)} in all"
    settings = [f"{name}={wording.setting(value)}" for name, value in diagnosis.settings if value is not None]
    if settings:
        yield _one_line(" · ".join(settings))


def _order(ledger: Ledger) -> list[str]:
    """The buckets that occur, the largest first: the order in which every bar of a run is drawn."""
    names = [name for name in BUCKETS if getattr(ledger.buckets, name) > 0]
    return sorted(names, key=lambda name: -getattr(ledger.buckets, name))


def _parts(buckets: Buckets, order: Iterable[str]) -> list[tuple[Tint, float]]:
    return [(BUCKET_TINTS[name], getattr(buckets, name)) for name in order]


def _show_ledger(console: Console, ledger: Ledger, ink: Ink) -> None:
    parts = _parts(ledger.buckets, _order(ledger))
    if not parts or ledger.wall_s <= 0:
        return
    _heading(console, "Where the time went", wording.seconds(ledger.wall_s))
    console.print(ledger_bar(parts, console.width, ink))
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    decimals = wording.decimals(ledger.wall_s)
    for place, (tint, size) in enumerate(parts):
        character, style = ink.fill(tint, place)
        label = Text(character * 2, style).append(f" {tint.label}", "default")
        row: list[Text | str] = [label, f"{size:.{decimals}f} s", wording.share(size / ledger.wall_s)]
        if console.width >= 100:
            row.append(Text(tint.meaning, "dim"))
        table.add_row(*row)
    console.print(table)


def _show_step(console: Console, run: Run, diagnosis: Diagnosis, ink: Ink) -> None:
    picture = step_picture(run, diagnosis)
    if picture is None:
        return
    _heading(
        console, "One step, to scale", f"{wording.seconds(picture.step_s)}, mean of {wording.count(picture.steps)}"
    )
    for line in step_lines(picture, console.width, ink):
        console.print(line)


def _show_findings(console: Console, findings: Sequence[Finding], ink: Ink) -> None:
    if not findings:
        return
    _heading(console, "What to change", "in order of what it would win")
    for place, finding in enumerate(findings, start=1):
        head = Text(f"{place:>2}  {wording.title(finding.code)}", "bold")
        gain = wording.speedup(finding.predicted_speedup)
        if gain:
            room = console.width - head.cell_len - len(gain)
            head.append(" " * room if room > 1 else "  ").append(gain, "bold green")
        console.print(head)
        label = Text().append(finding.severity, SEVERITY_STYLES[finding.severity])
        details = [f"{wording.share(finding.share)} of the time", finding.code, finding.where]
        label.append("".join(f" {ink.bullet} {_one_line(detail)}" for detail in details if detail), "dim")
        console.print(Padding(label, (0, 0, 0, 4), expand=False))
        for evidence in finding.evidence:
            console.print(_hanging(ink.bullet, Text(_one_line(evidence))))
        console.print(_hanging(ink.arrow, Text(clean(finding.fix), "green")))


# --------------------------------------------------------------------------- where, who and what


def _show_hot_lines(console: Console, run: Run) -> None:
    if not run.ranks:
        return
    rank = run.ranks[0]
    fetch_s = sum(work.fetch_s for work in rank.workers)
    _show_lines(console, "Inside the workers", worker_lines(rank), fetch_s)
    _show_lines(console, "In the training process", rank.host_lines)
    _show_lines(console, "Lines that wait for the GPU", rank.sync_lines)
    _show_lines(console, "Saving", rank.checkpoint_lines)
    if rank.deep is not None:
        facts = [f"{name} {figure}" for name, figure in wording.deep_facts(rank.deep) if figure != wording.NOT_MEASURED]
        _heading(console, "A step under the profiler")
        console.print(Text(_one_line(" · ".join(facts))))
        _show_lines(console, "Synchronising calls, per step", rank.deep.sync_calls)
        _show_lines(console, "Kernels, per step", rank.deep.top_kernels)


def _show_lines(console: Console, name: str, lines: Sequence[HotLine], total_s: float | None = None) -> None:
    if not lines:
        return
    _heading(console, name)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for line in sorted(lines, key=lambda line: -line.seconds)[:MOST_LINES]:
        figure = wording.share(line.seconds / total_s) if total_s else wording.seconds(line.seconds)
        what = Text(_one_line(line.function))  # a kernel has no line of its own
        if line.where:
            what = Text(f"in {_one_line(line.function)}, ").append(_one_line(line.where), "bold")
        if line.call:
            what.append(f"  {clean(wording.brief(line.call, 60))}", "dim")
        table.add_row(figure, what)
    console.print(table)


def _show_ranks(console: Console, diagnosis: Diagnosis, ink: Ink) -> None:
    ranks = diagnosis.ranks
    if len(ranks) < 2:
        return
    slowest = next((rank for rank in ranks if rank.slowest), None)
    longest_wait_s = max(rank.waits_s for rank in ranks)
    detail = ""
    if slowest is not None and longest_wait_s > 0:
        detail = f"rank {slowest.rank} is the slowest; the others wait up to {wording.seconds(longest_wait_s)} for it"
    _heading(console, "Ranks", detail)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    order = _order(diagnosis.ledger)
    for rank in ranks:
        table.add_row(
            Text(f"rank {rank.rank}", "bold" if rank.slowest else ""),
            ledger_bar(_parts(rank.buckets, order), max(console.width - 46, 10), ink),
            f"works {wording.seconds(rank.own_work_s)}",
            Text("slowest" if rank.slowest else f"waits {wording.seconds(rank.waits_s)}", "dim"),
        )
    console.print(table)


def _show_gpus(console: Console, gpus: Sequence[GpuSummary]) -> None:
    if not gpus:
        return
    _heading(console, "GPU", "use: some kernel ran · SM active: how much of the GPU it kept busy")
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("", overflow="ellipsis", no_wrap=True, max_width=max(console.width - 55, 12))
    for name in ("use", "SM active", "memory, peak", "power", "hottest"):
        table.add_column(name, justify="right", no_wrap=True)
    for gpu in gpus:
        memory = f"{wording.size(gpu.vram_peak_bytes)} of {wording.size(gpu.vram_total_bytes)}"
        table.add_row(
            Text(f"{gpu.index} {clean(gpu.name)}"),
            wording.percent(gpu.util_pct),
            wording.percent(gpu.sm_active_pct),
            memory if gpu.vram_peak_bytes is not None else wording.NOT_MEASURED,
            wording.power(gpu.power_w),
            wording.temperature(gpu.temperature_peak_c),
        )
    console.print(table)


def _show_checklist(console: Console, checklist: Sequence[CheckLine], ink: Ink) -> None:
    if not checklist:
        return
    _heading(console, "Checklist")
    table = Table.grid(padding=(0, 2, 0, 0))
    for line in checklist:
        text = Text(_one_line(line.name)).append(f"  {_one_line(line.figure)}", "dim")
        if line.remedy and line.state != "ok":
            text.append(f"\n{ink.arrow} {_one_line(line.remedy)}", "dim")
        table.add_row(Text(line.state, STATE_STYLES[line.state]), text)
    console.print(table)


def _show_notes(console: Console, run: Run, diagnosis: Diagnosis, ink: Ink) -> None:
    notes = [*run.warnings, *(note for rank in run.ranks for note in rank.notes)]
    notes += [f"{line.code} could not be judged: it lacks {line.lacks}" for line in diagnosis.abstained]
    if not notes:
        return
    _heading(console, "Notes")
    for note in dict.fromkeys(notes):
        console.print(_hanging(ink.bullet, Text(_one_line(note), "dim"), indent=0))


def _show_comparison(console: Console, runs: Sequence[Reported], ink: Ink) -> None:
    console.print()
    console.rule(Text(f"{len(runs)} runs side by side", "bold"), style="dim")
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("")
    for run, _ in runs:
        table.add_column(Text(clean(run.run.name)), justify="right", overflow="fold")
    for row in compare(runs):
        cells = [Text(_one_line(cell)) for cell in (row.name, *row.cells)]
        table.add_row(*cells, style="" if row.differs else "dim")
    console.print(table)
    order = [name for name in BUCKETS if any(getattr(answer.ledger.buckets, name) > 0 for _, answer in runs)]
    for run, diagnosis in runs:
        _heading(console, clean(run.run.name), wording.seconds(diagnosis.ledger.wall_s))
        console.print(ledger_bar(_parts(diagnosis.ledger.buckets, order), console.width, ink))
        console.print(Text(clean(diagnosis.verdict.sentence)))
        for finding in diagnosis.findings[:1]:
            console.print(_hanging(ink.arrow, Text(clean(finding.fix), "green"), indent=0))
    legend = Text()
    for place, name in enumerate(order):
        character, style = ink.fill(BUCKET_TINTS[name], place)
        legend.append(character * 2, style).append(f" {BUCKET_TINTS[name].label}  ", "dim")
    console.print()
    console.print(legend)


# --------------------------------------------------------------------------- small parts


def _heading(console: Console, name: str, detail: str = "") -> None:
    console.print()
    console.print(Text(name, "bold underline").append(f"  {detail}" if detail else "", "not bold not underline dim"))


def _hanging(mark: str, text: Text, indent: int = 4) -> Padding:
    """Text that wraps under itself, not under its mark."""
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_row(mark, text)
    return Padding(table, (0, 0, 0, indent), expand=False)


def _one_line(text: str) -> str:
    return clean(" ".join(text.split()))
