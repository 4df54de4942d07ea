"""The parts of the page in words and tables: findings, hot lines, ranks, GPUs, checklist, notes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fulltilt import figures
from fulltilt.diagnosis.verdict import title
from fulltilt.records import CheckLine, Diagnosis, Finding, GpuSummary, HotLine, RankRecord, Run
from fulltilt.report import wording
from fulltilt.report.comparison import Row
from fulltilt.report.loaders import fetching_title, worker_lines
from fulltilt.report.markup import Child, Markup, element
from fulltilt.report.page_bars import ledger_bar
from fulltilt.report.palette import bucket_order

MOST_LINES = 8
STATES = {"ok": "passed", "warn": "warning", "fail": "failed", "skip": "skipped"}


def section(title: str, *content: Child, note: str | None = None) -> Markup | None:
    """A part of the page under its heading; None when it has no content."""
    shown = [child for child in content if child]
    if not shown:
        return None
    heading = element("h2", title, element("small", note) if note else None)
    return element("section", heading, shown)


def finding_cards(findings: Sequence[Finding]) -> Markup | None:
    """What to change, in the order of what it would win."""
    if not findings:
        return None
    return element("ol", [_finding_card(finding) for finding in findings], class_="findings")


def _finding_card(finding: Finding) -> Markup:
    gain = figures.speedup(finding.predicted_speedup)
    facts: list[Child] = [
        element("span", finding.severity, class_=f"pill {finding.severity}"),
        element("span", f"{figures.percent(finding.share)} of the wall time"),
        element("code", finding.code),
        element("code", finding.where, class_="where") if finding.where else None,
    ]
    return element(
        "li",
        element("h3", title(finding.code)),
        element("p", gain, class_="gain") if gain else None,
        element("p", facts, class_="facts"),
        element("ul", [element("li", wording.glued(line)) for line in finding.evidence]) if finding.evidence else None,
        element("p", finding.fix, class_="fix"),
        class_=f"card {finding.severity}",
    )


# --------------------------------------------------------------------------- lines of code


def hot_lines(rank: RankRecord) -> list[Markup]:
    """Tables of the lines that cost most: in the workers, in the training process, waiting, saving."""
    fetch_s = sum(work.fetch_s for work in rank.workers)
    groups = [
        (fetching_title(rank), worker_lines(rank), fetch_s),
        ("In the training process", rank.host_lines, None),
        ("Waiting for the GPU", rank.sync_lines, None),
        ("Saving", rank.checkpoint_lines, None),
    ]
    if rank.deep is not None:
        groups.append(("Synchronising calls, per step", rank.deep.sync_calls, None))
        groups.append(("Kernels, per step", rank.deep.top_kernels, None))
    return [_line_table(name, lines, total_s) for name, lines, total_s in groups if lines]


def _line_table(name: str, lines: Sequence[HotLine], total_s: float | None) -> Markup:
    costliest = sorted(lines, key=lambda line: -line.seconds)[:MOST_LINES]
    rows = [
        element(
            "tr",
            element(
                "td",
                figures.percent(line.seconds / total_s) if total_s else figures.seconds(line.seconds),
                class_="figure",
            ),
            element(
                "td",
                ["in ", line.function, ", ", element("code", line.where, class_="where")]
                if line.where
                else element("code", line.function),  # a kernel has no line of its own
                element("code", figures.brief(line.call, 100), class_="call") if line.call else None,
            ),
        )
        for line in costliest
    ]
    return element("div", element("h3", name), element("table", element("tbody", rows), class_="lines"))


# --------------------------------------------------------------------------- ranks and GPUs


def rank_bars(diagnosis: Diagnosis) -> Markup | None:
    """The ledger of each rank, with the slowest named and what the others wait for it."""
    if len(diagnosis.ranks) < 2:
        return None
    order = bucket_order(diagnosis.ledger)
    rows = [
        element(
            "div",
            element("span", f"rank {rank.rank}", class_="speed-name"),
            ledger_bar(rank.buckets, order, height=22),
            element(
                "span",
                element("b", "slowest") if rank.slowest else f"waits {figures.seconds(rank.waits_s)}",
                class_="speed-rate",
            ),
            class_="speed-row",
        )
        for rank in diagnosis.ranks
    ]
    return element("div", rows, class_="speeds")


def gpu_table(gpus: Sequence[GpuSummary]) -> Markup | None:
    """Each GPU over the training part, with utilisation beside what tells whether it is real."""
    if not gpus:
        return None
    columns: tuple[tuple[str, Callable[[GpuSummary], str]], ...] = (
        ("use", lambda g: figures.pct(g.util_pct)),
        ("SM active", lambda g: figures.pct(g.sm_active_pct)),
        ("tensor cores", lambda g: figures.pct(g.tensor_active_pct)),
        ("memory bus", lambda g: figures.pct(g.dram_active_pct)),
        ("memory, peak", lambda g: f"{figures.size(g.vram_peak_bytes)} / {figures.size(g.vram_total_bytes)}"),
        ("power", lambda g: figures.watts(g.power_w)),
        ("hottest", lambda g: figures.celsius(g.temperature_peak_c)),
        ("throttled", lambda g: figures.percent(g.throttled_share)),
    )
    head = [element("th", name, class_="figure", scope="col") for name, _ in columns]
    rows = [
        element(
            "tr",
            element("th", f"{gpu.index} {gpu.name}", scope="row"),
            [element("td", cell(gpu), class_="figure") for _, cell in columns],
        )
        for gpu in gpus
    ]
    head_row = element("tr", element("th", "GPU", scope="col"), head)
    return scrolling(element("table", element("thead", head_row), element("tbody", rows)), "GPUs")


def scrolling(table: Markup, name: str) -> Markup:
    """A wide table that scrolls in its own frame, so that the page never does."""
    return element("div", table, class_="scrolling", tabindex="0", role="region", aria_label=name)


# --------------------------------------------------------------------------- checklist, settings, machine


def checklist(lines: Sequence[CheckLine]) -> Markup | None:
    """Each check with its state, figure and remedy."""
    if not lines:
        return None
    rows = [
        element(
            "li",
            element("span", STATES[line.state], class_=f"pill {line.state}"),
            element(
                "div",
                element("span", element("b", line.name), " ", line.figure),
                element("small", line.remedy) if line.remedy and line.state != "ok" else None,
            ),
        )
        for line in lines
    ]
    return element("ul", rows, class_="checklist")


def notes(run: Run, diagnosis: Diagnosis) -> Markup | None:
    """What the recorder noticed, and which rules could not judge."""
    lines = [*run.warnings, *(note for rank in run.ranks for note in rank.notes)]
    lines += [f"{line.code} could not be judged: it lacks {line.lacks}" for line in diagnosis.abstained]
    return element("ul", [element("li", line) for line in dict.fromkeys(lines)], class_="notes") if lines else None


def comparison_table(rows: Sequence[Row], names: Sequence[str]) -> Markup:
    """Several runs side by side; rows in which they differ stand out."""
    head = [element("td"), *(element("th", name, scope="col", class_="figure") for name in names)]
    body = [
        element(
            "tr",
            element("th", row.name, scope="row"),
            [element("td", cell, class_="figure") for cell in row.cells],
            class_="differs" if row.differs else None,
        )
        for row in rows
    ]
    table = element("table", element("thead", element("tr", head)), element("tbody", body), class_="comparison")
    return scrolling(table, "Comparison of the runs")
